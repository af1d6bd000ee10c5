"""RoboMimic's tasks as Gymnasium environments: ``can-mh-low_dim`` and ``square-mh-low_dim``, as the FMQ paper uses them."""

import importlib
import json
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from sb3_flow.data.robomimic import KEYS

TASKS = {"can-mh-low_dim": ("can", 300), "square-mh-low_dim": ("square", 400)}  # folder, time limit


class RobomimicTask(gym.Env[np.ndarray, np.ndarray]):
    """
    The environment of a dataset of RoboMimic: observations as ``OfflineDataset.load("robomimic:...")`` has them, reward -1
    until the task is solved, which ends the episode.

    robomimic and robosuite belong to no extra of sb3-flow, since they pin old versions of other packages. This follows the
    interface of robomimic 0.3 to 0.5 and is tested with a stand-in for them.

    :param file: the dataset, which contains robosuite's settings
    :param render_mode: "rgb_array" or None
    :raises ImportError: without robomimic
    :raises FileNotFoundError: without the file
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 (declared so by Gymnasium)

    def __init__(self, file: str, render_mode: Literal["rgb_array"] | None = None) -> None:
        try:
            packages = ("robomimic.utils.env_utils", "robomimic.utils.obs_utils", "h5py")
            env_utils, obs_utils, h5py = map(importlib.import_module, packages)
        except ImportError as error:
            raise ImportError(
                "RoboMimic's tasks need the packages robomimic, robosuite and h5py: pip install robomimic robosuite h5py "
                f"({error})"
            ) from error
        path = Path(file).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no file {path}: download RoboMimic's low_dim_v15.hdf5 of this task to there, or name it: "
                "gymnasium.make(..., file=...)"
            )
        with h5py.File(path, "r") as data:
            settings = json.loads(data["data"].attrs["env_args"])
        obs_utils.initialize_obs_utils_with_obs_specs({"obs": {"low_dim": list(KEYS), "rgb": []}})
        self.env = env_utils.create_env_from_metadata(settings, render_offscreen=render_mode is not None)
        self.render_mode = render_mode
        size = self._flat(self.env.reset()).shape
        self.observation_space = spaces.Box(-np.inf, np.inf, size, np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (self.env.action_dimension,), np.float32)

    @staticmethod
    def _flat(observation: dict[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([observation[key] for key in KEYS]).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            np.random.seed(seed)  # where robosuite draws from
        return self._flat(self.env.reset()), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation, *_ = self.env.step(action)
        success = bool(self.env.is_success()["task"])
        return self._flat(observation), float(success) - 1.0, success, False, {"is_success": success}

    def render(self) -> np.ndarray:
        picture: np.ndarray = self.env.render(mode="rgb_array", height=256, width=256)
        return picture


for _name, (_folder, _limit) in TASKS.items():
    gym.registry[_name] = gym.envs.registration.EnvSpec(
        id=_name,
        entry_point="sb3_flow.envs.robomimic_task:RobomimicTask",
        max_episode_steps=_limit,
        disable_env_checker=True,
        kwargs={"file": f"~/.robomimic/{_folder}/mh/low_dim_v15.hdf5"},
    )
