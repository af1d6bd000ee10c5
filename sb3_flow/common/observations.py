"""Observations of vectorised environments."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs


def joined(parts: Sequence[VecEnvObs]) -> VecEnvObs:
    """Put the observations of several vectorised environments together in new arrays."""
    first = parts[0]
    if isinstance(first, dict):
        return {key: np.concatenate([part[key] for part in parts]) for key in first}  # type: ignore[call-overload]
    if isinstance(first, tuple):
        return tuple(np.concatenate(column) for column in zip(*parts, strict=True))
    return np.concatenate(parts)  # type: ignore[arg-type]


def map_arrays(function: Callable[..., Any], *values: Any) -> Any:
    """
    Apply a function to arrays, or to the entries of the same key in dicts (nested dicts and Dict spaces, too).

    :param function: takes one array of each of the values
    :param values: an array or a dict each, all of the same structure; None beside dicts is None for every key
    :return: its result, or its results in a dict if the first value is a dict
    """
    if not isinstance(values[0], dict | spaces.Dict):
        return function(*values)
    return {key: map_arrays(function, *(value if value is None else value[key] for value in values)) for key in values[0]}
