"""Telling which algorithm saved a file, so that another algorithm can refuse the file and name it."""

import json
import zipfile
from typing import Any

from stable_baselines3.common.save_util import open_path

# Files do not name their algorithm. The first of these attributes that a file has tells the algorithm
MARKS = {
    "expectile": "RQL",
    "guidance_at": "FMQ",
    "normalize_q_loss": "FQL",
    "n_min_critics": "RLPD",
    "noise_scale": "DSRL",
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
# Algorithms with the attributes of PPO, SAC or DQN, and with policies or rollout buffers of their own
MODULES = {"maskable": "MaskablePPO", "recurrent": "RecurrentPPO", "qrdqn": "QRDQN", "crossq": "CrossQ"}
ALIKE = {"PPO", "AsyncPPO"}
"""Algorithms that open each other's files."""
DERIVED = {"PPO": {"GSPO", "GRPO", "MaskablePPO", "RecurrentPPO"}, "GRPO": {"GSPO"}}
"""Algorithms that have all attributes of another algorithm."""


def saved_by(path: Any) -> list[str]:
    """
    Guess from the attributes in a file which algorithm saved it.

    :param path: of a saved model, or an open file, which is left where it is
    :return: names of the algorithms that may have saved it, the likeliest first; empty if the file does not tell
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
        return []  # SB3's own error describes the damage
    finally:
        if is_open:
            path.seek(position)
    classes = [data.get(name) or {} for name in ("policy_class", "rollout_buffer_class")]
    modules = [str(saved.get("__module__", "")).split(".") for saved in classes if isinstance(saved, dict)]
    by_module = [name for part, name in MODULES.items() if any(part in module for module in modules)]
    by_attribute = [name for mark, name in MARKS.items() if mark in data]
    users_own = not any(module[0] in ("stable_baselines3", "sb3_flow") for module in modules)
    # a user's own policy and buffer may belong to any kin of PPO
    return by_module + [name for name in by_attribute if not (users_own and name in ("PPO", "A2C"))]


def check_saved_by(algorithm: type, path: Any) -> None:
    """
    Refuse a file that another algorithm saved.

    :param algorithm: a class of sb3_flow, or a subclass, which may have attributes of others
    :param path: of a saved model, or an open file
    :raises ValueError: naming both, if another algorithm saved it
    """
    known = {*MARKS.values(), *MODULES.values()}
    ours = [base.__name__ for base in algorithm.__mro__ if base.__module__.startswith("sb3_flow.") and base.__name__ in known]
    found = saved_by(path)
    if not ours or not found:
        return
    own, others = ours[0], found
    if own in found:
        others = [name for name in found if name in DERIVED.get(own, ())]
    if others and not {own, others[0]} <= ALIKE:
        refuse(algorithm, others[0], path)


def refuse(called: type, saver: str, path: Any) -> None:
    """Raise the ValueError that names the class whose ``load`` was called and the algorithm that saved the file."""
    raise ValueError(f"`{called.__name__}.load` was given a file that {saver} saved: {path}; `{saver}.load` opens it.")
