"""Which algorithm saved a file, so that another one can refuse it by name."""

import json
import zipfile
from typing import Any

from stable_baselines3.common.save_util import open_path

# Files do not say which algorithm saved them. What only its models have: the first of these that is among the saved attributes
MARKS = {
    "expectile": "RQL",
    "guidance_at": "FMQ",
    "max_policy_lag": "AsyncPPO",
    "length_scaled_clip": "GSPO",
    "group_size": "GRPO",
    "cg_max_steps": "TRPO",
    "top_quantiles_to_drop_per_net": "TQC",
    "target_entropy": "SAC",
    "policy_delay": "TD3",
    "exploration_fraction": "DQN",
    "n_delta": "ARS",
    "clip_range": "PPO",
    "gae_lambda": "A2C",
}
# These have the attributes of PPO, SAC or DQN, and policies or rollout buffers of their own
MODULES = {"maskable": "MaskablePPO", "recurrent": "RecurrentPPO", "qrdqn": "QRDQN", "crossq": "CrossQ"}
ALIKE = ({"PPO", "AsyncPPO"},)
"""Algorithms that open each other's files."""


def saved_by(path: Any) -> str | None:
    """
    :param path: of a saved model, or an open file, which is left where it is
    :return: name of the algorithm, None if this does not tell
    """
    is_open = hasattr(path, "seek")
    position = path.tell() if is_open else 0
    try:
        file = open_path(path, "r", suffix="zip")
        try:
            with zipfile.ZipFile(file) as archive:
                data = json.loads(archive.read("data"))
        finally:
            if not is_open:
                file.close()
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return None  # what is wrong with it, SB3 says
    finally:
        if is_open:
            path.seek(position)
    classes = [data.get(name) or {} for name in ("policy_class", "rollout_buffer_class")]
    modules = [str(one.get("__module__", "")).split(".") for one in classes if isinstance(one, dict)]
    by_module = [name for part, name in MODULES.items() if any(part in one for one in modules)]
    by_attribute = [name for mark, name in MARKS.items() if mark in data]
    found = next(iter([*by_module, *by_attribute]), None)
    users_own = not any(one[0] in ("stable_baselines3", "sb3_flow") for one in modules)
    return None if found == "PPO" and users_own else found  # or one of its kin


def check_saved_by(algorithm: type, path: Any) -> None:
    """
    :param algorithm: a class of ours, or a subclass
    :param path: of a saved model, or an open file
    :raises ValueError: naming both, if another algorithm saved it
    """
    known = {*MARKS.values(), *MODULES.values()}
    ours = [one.__name__ for one in algorithm.__mro__ if one.__module__.startswith("sb3_flow.") and one.__name__ in known]
    other = saved_by(path)
    if not ours or other in (None, ours[0]) or any({ours[0], other} <= alike for alike in ALIKE):
        return
    raise ValueError(f"`{algorithm.__name__}.load` was given a file that {other} saved: {path}; `{other}.load` opens it.")
