"""Spaces of EnvPool in the form that SB3 can use."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces


def leaves(space: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], spaces.Space[Any]]]:
    """
    Walk through nested dictionaries: yield the keys that lead to each entry, and the entry.

    :param space: of EnvPool, or a dictionary of anything
    :param path: keys that lead to ``space``
    """
    if isinstance(space, (spaces.Dict, dict)):
        for key, inner in space.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path, space


def plain_space(space: Any) -> Any:
    """Translate a space of EnvPool to the form that SB3 can use: counted from zero, and with at least one dimension."""
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n))
    if isinstance(space, spaces.Box):
        low, high = np.atleast_1d(space.low), np.atleast_1d(space.high)
        if np.issubdtype(space.dtype, np.floating):
            # C++'s numeric limits, the lower of which is the least positive number, mean that there is no bound
            limits = np.finfo(space.dtype)
            low = np.where((low == limits.tiny) | (low == limits.min), -np.inf, low).astype(space.dtype)
            high = np.where(high == limits.max, np.inf, high).astype(space.dtype)
        return spaces.Box(low, high, dtype=space.dtype.type)
    return space


def plain_action_space(space: Any) -> tuple[spaces.Space[Any], Any]:
    """
    Translate a space of actions of EnvPool to the form that SB3 can use.

    :return: the space, and the numbers that are added to its integers
    :raises ValueError: if SB3 has no such space
    """
    if isinstance(space, spaces.Discrete):
        return plain_space(space), int(space.start)
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.integer) and len(space.shape) == 1:
        low = space.low.astype(np.int64)
        return spaces.MultiDiscrete(space.high.astype(np.int64) - low + 1), low
    if isinstance(space, (spaces.Box, spaces.MultiBinary)):
        return plain_space(space), 0
    raise ValueError(f"`task` must have one array of actions, but its space is {space}.")
