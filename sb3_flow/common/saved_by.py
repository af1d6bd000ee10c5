"""Telling which algorithm and which version saved a file: other algorithms refuse the file, and older versions warn."""

import json
import warnings
import zipfile
from typing import Any

from stable_baselines3.common.save_util import open_path

from sb3_flow.version import __version__, numbers

SAVED_VERSION = "sb3_flow_version"
"""Where a file has the version of sb3_flow that saved it. Files from before version 0.1.0 have none."""

# Files do not name their algorithm. The first of these attributes that a file has tells the algorithm
MARKS = {
    "expectile": "RQL",
    "guidance_at": "FMQ",
    "normalize_q_loss": "FQL",
    "n_min_critics": "RLPD",
    "noise_scale": "DSRL",
    "inv_temp": "QAM",
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
MODULES = {
    "masked_policies": "MaskableRecurrentPPO",
    "maskable": "MaskablePPO",
    "recurrent": "RecurrentPPO",
    "gru_policies": "RecurrentPPO",
    "qrdqn": "QRDQN",
    "crossq": "CrossQ",
}
ALIKE = {"PPO", "AsyncPPO"}
"""Algorithms that open each other's files."""
DERIVED = {"PPO": {"GSPO", "GRPO", "MaskablePPO", "RecurrentPPO", "MaskableRecurrentPPO"}, "GRPO": {"GSPO"}}
"""Algorithms that have all attributes of another algorithm."""


def warn_of_newer(version: Any, what: Any) -> None:
    """
    Warn of a file from a newer version of sb3_flow than the installed one.

    :param version: that saved the file; None if the file does not tell
    :param what: the file, for the warning
    """
    if isinstance(version, str) and numbers(version) > numbers(__version__):
        warnings.warn(
            f"{what} was saved by sb3_flow {version}, but {__version__} is installed, which may refuse the file or leave out "
            f"what it does not know: pip install --upgrade 'sb3-flow>={version}'"
        )


def saved_data(path: Any) -> dict[str, Any]:
    """
    Read the attributes in the file of a model, as they are written there.

    :param path: of a saved model, or an open file, which is left where it is
    :return: the attributes by name; empty if this is no such file
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
        return {}  # SB3's own error describes the damage
    finally:
        if is_open:
            path.seek(position)
    return data if isinstance(data, dict) else {}


def saved_by(data: dict[str, Any]) -> list[str]:
    """
    Guess from the attributes in a file which algorithm saved it.

    :param data: as :func:`saved_data` reads it
    :return: names of the algorithms that may have saved it, the likeliest first; empty if the file does not tell
    """
    classes = [data.get(name) or {} for name in ("policy_class", "rollout_buffer_class")]
    modules = [str(saved.get("__module__", "")).split(".") for saved in classes if isinstance(saved, dict)]
    by_module = [name for part, name in MODULES.items() if any(part in module for module in modules)]
    by_attribute = [name for mark, name in MARKS.items() if mark in data]
    users_own = not any(module[0] in ("stable_baselines3", "sb3_flow") for module in modules)
    # a user's own policy and buffer may belong to any kin of PPO
    return by_module + [name for name in by_attribute if not (users_own and name in ("PPO", "A2C"))]


def check_saved_by(algorithm: type, path: Any) -> None:
    """
    Refuse a file that another algorithm saved, and warn of a file that a newer version saved.

    :param algorithm: a class of sb3_flow, or a subclass, which may have attributes of others
    :param path: of a saved model, or an open file
    :raises ValueError: naming both, if another algorithm saved it
    """
    data = saved_data(path)
    warn_of_newer(data.get(SAVED_VERSION), path)
    known = {*MARKS.values(), *MODULES.values()}
    ours = [base.__name__ for base in algorithm.__mro__ if base.__module__.startswith("sb3_flow.") and base.__name__ in known]
    found = saved_by(data)
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
