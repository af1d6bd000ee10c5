"""A video of a model that acts."""

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from sb3_contrib.common.maskable.utils import get_action_masks
from stable_baselines3.common.vec_env import VecEnv, VecVideoRecorder

from sb3_flow.common.episodes import takes_masks


def record(model: Any, env: VecEnv, length: int, deterministic: bool, path: Path) -> bool:
    """
    Record a video where the environment renders to arrays, and warn where this fails.

    :param model: an algorithm
    :param env: its environment, which stays open
    :param length: steps
    :param deterministic: see ``predict``
    :param path: of the video
    :return: whether there is a video
    """
    if length < 1 or env.render_mode != "rgb_array":
        return False
    try:
        with tempfile.TemporaryDirectory() as folder:
            recorder = VecVideoRecorder(env, folder, lambda step: step == 0, length, "replay")
            observation: Any = recorder.reset()
            state, starts = None, np.ones(env.num_envs, dtype=bool)
            for _ in range(length + 1):  # the recorder writes the file at the step after the last
                masks = {"action_masks": get_action_masks(recorder)} if takes_masks(model) else {}
                action, state = model.predict(observation, state, starts, deterministic, **masks)
                observation, _, starts, _ = recorder.step(action)
            (video,) = Path(folder).glob("*.mp4")
            shutil.move(video, path)
    except Exception as error:  # of a display, a driver, an encoder: none is worth the push
        warnings.warn(f"The model is pushed without a video, which could not be recorded: {error!r}")
        return False
    return True
