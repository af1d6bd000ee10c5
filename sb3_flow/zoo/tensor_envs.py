"""The zoo's environments of tensors, which a configuration chooses by its entry ``vec_env_class``."""

import importlib
from collections.abc import Sequence
from typing import Any

from sb3_flow.envs import TorchVecEnv

LEARNERS = ("flow_ppo", "grpo", "gspo")
"""Algorithms that step environments by tensors."""
SINGLE = ("env_wrapper", "monitor_kwargs")
"""Entries that wrap single environments."""


def take_vec_env_class(algo: str, hyperparams: dict[str, Any]) -> type[TorchVecEnv] | None:
    """
    Take the entry ``vec_env_class`` out of a configuration.

    :param algo: key of the algorithm
    :param hyperparams: the configuration, without the entry afterwards
    :return: the class; None if there is no such entry
    :raises ValueError: if the entry does not name such a class, or does not go with the algorithm or another entry
    """
    name = hyperparams.pop("vec_env_class", None)
    if name is None:
        return None
    if algo not in LEARNERS:
        raise ValueError(
            f"vec_env_class is {name!r}: environments of tensors are for {', '.join(LEARNERS)}, but --algo {algo} was given; "
            '-params "vec_env_class:None" makes environments one by one.'
        )
    for entry in SINGLE:
        if hyperparams.get(entry):
            raise ValueError(
                f"{entry} wraps single environments, but those of vec_env_class {name!r} are one object: leave one out."
            )
    module, _, last = str(name).rpartition(".")
    found = getattr(importlib.import_module(module), last, None) if module else None
    if not (isinstance(found, type) and issubclass(found, TorchVecEnv)):
        raise ValueError(
            "vec_env_class must name a subclass of sb3_flow.envs.TorchVecEnv and its module, as sb3_flow.envs.JaxVecEnv does, "
            f"but {name!r} was given."
        )
    return found


def make_together(
    made_by: type[Any], task: str, eval_env: bool, options: dict[str, Any], functions: Sequence[Any], **_: Any
) -> TorchVecEnv:
    """
    Make environments of tensors where SB3's ``make_vec_env`` expects the class of a ``VecEnv``.

    :param made_by: class of the environments, which takes the task, ``num_envs`` and ``env_kwargs``
    :param task: id of the environment
    :param eval_env: whether they are for evaluation, which counts episodes rightly where environments reset late
    :param options: ``env_kwargs``
    :param functions: make an environment each, and are not called
    """
    env: TorchVecEnv = made_by(task, num_envs=len(functions), **options)
    env.warns_of_late_resets = not eval_env
    return env
