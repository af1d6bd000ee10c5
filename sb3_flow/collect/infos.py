"""
Infos of a rollout on their way to the learner: numbers that all steps have travel as arrays.

An environment gives a dictionary of a few numbers at each step, and to pickle these one by one takes as long as some
environments take to step.
"""

from itertools import chain
from typing import Any, NamedTuple

import numpy as np

# their values are exact in an array, and come back with the same type
KINDS = (float, bool, np.float64, np.float32, np.bool_)
Infos = list[list[dict[str, Any]]]


class PackedInfos(NamedTuple):
    """
    Hold the infos of ``n_steps`` steps of ``n_envs`` environments.

    :param shape: ``(n_steps, n_envs)``
    :param columns: by key, the type and the values of a number that all infos have, flat, step by step
    :param rest: the other items of each info that has others, by its flat index
    """

    shape: tuple[int, int]
    columns: dict[str, tuple[type, np.ndarray]]
    rest: dict[int, dict[str, Any]]


def pack_infos(infos: Infos) -> PackedInfos:
    """Pack infos, a list of each environment's for each step."""
    flat = list(chain.from_iterable(infos))
    columns: dict[str, tuple[type, np.ndarray]] = {}
    for key, first in flat[0].items():
        kind = type(first)
        if kind in KINDS and all(type(info.get(key)) is kind for info in flat):
            columns[key] = kind, np.array([info[key] for info in flat])
    others = ({key: value for key, value in info.items() if key not in columns} for info in flat)
    rest = {index: found for index, found in enumerate(others) if found}
    return PackedInfos((len(infos), len(infos[0])), columns, rest)


def unpack_infos(packed: PackedInfos) -> Infos:
    """Make the infos that :func:`pack_infos` packed, with new dictionaries."""
    n_steps, n_envs = packed.shape
    values = [column.tolist() if kind in (float, bool) else list(column) for kind, column in packed.columns.values()]
    keys = list(packed.columns)
    rows = zip(*values, strict=True) if keys else [()] * (n_steps * n_envs)
    flat: list[dict[str, Any]] = [dict(zip(keys, row, strict=True)) for row in rows]
    for index, found in packed.rest.items():
        flat[index].update(found)
    return [flat[step * n_envs : (step + 1) * n_envs] for step in range(n_steps)]
