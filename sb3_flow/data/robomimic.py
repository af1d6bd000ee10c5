"""RoboMimic's files of demonstrations (``low_dim_v15.hdf5``), as flat observations with rewards of -1 until success."""

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from sb3_flow.data.columns import Allocate, Parts, array_column, check_numbers, flags, put
from sb3_flow.data.files import reading

KEYS = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "object")
"""Arrays that are concatenated to an observation, in this order."""
OBSERVATIONS = [f"{group}/{key}" for group in ("obs", "next_obs") for key in KEYS]


def read_robomimic(path: Path, allocate: Allocate) -> Parts:
    """
    Read all demonstrations, in the order of their numbers. Where the file's reward is 1 the task is solved: the transition
    gets reward 0 and is terminated. All others get reward -1.

    :param path: the file
    :param allocate: makes the arrays
    :raises ValueError: if it holds no demonstrations, they lack an array of ``KEYS``, or an array has another length, shape or
        kind than the others
    """
    h5py = importlib.import_module("h5py")
    with reading(path, "HDF5"), h5py.File(path, "r") as file:
        demos = _demonstrations(file, path)
        lengths = [_check_demonstration(demo, demos[0]) for demo in demos]
        total, dim = sum(lengths), sum(demos[0][f"obs/{key}"].shape[1] for key in KEYS)
        observations = allocate("observations", (total, dim), np.float32)
        actions = allocate("actions", (total, *demos[0]["actions"].shape[1:]), np.float32)
        rewards = allocate("rewards", (total,), np.float32)
        finals = np.empty((len(demos), dim), np.float32)
        ends = np.zeros(total, bool)
        ends[np.cumsum(lengths) - 1] = True
        first = 0
        for number, (demo, length) in enumerate(zip(demos, lengths, strict=True)):
            rows = slice(first, first + length)
            put(observations, rows, np.concatenate([demo[f"obs/{key}"][:] for key in KEYS], axis=1), f"{demo.name}/obs")
            last = np.concatenate([demo[f"next_obs/{key}"][-1:] for key in KEYS], axis=1)
            put(finals, slice(number, number + 1), last, f"{demo.name}/next_obs")
            put(actions, rows, demo["actions"][:], f"{demo.name}/actions")
            solved = flags(array_column(f"{demo.name}/rewards".removeprefix("/"), demo["rewards"][:]))
            rewards[rows] = np.where(solved, 0, -1)
            first += length
    observation_space = spaces.Box(-np.inf, np.inf, (dim,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, actions.shape[1:], np.float32)
    return Parts(observations, actions, rewards, rewards == 0, ends, finals, observation_space, action_space)


def _demonstrations(file: Any, path: Path) -> list[Any]:
    """List the groups of an open file that hold demonstrations, in the order of their numbers."""
    h5py = importlib.import_module("h5py")
    data = file.get("data")
    names = list(data) if isinstance(data, h5py.Group) else []
    if not names:
        raise ValueError(f"{path} holds no demonstrations (groups data/demo_0, data/demo_1, ...)")
    for name in names:
        if not re.fullmatch(r"demo_[0-9]+", name) or not isinstance(data.get(name), h5py.Group):
            raise ValueError(f"{path}: data/{name} is no demonstration (groups data/demo_0, data/demo_1, ...)")
    demos = [data[name] for name in sorted(names, key=lambda name: int(name.removeprefix("demo_")))]
    for demo in demos:
        missing = [name for name in OBSERVATIONS if not isinstance(demo.get(name), h5py.Dataset)]
        if missing:
            raise ValueError(
                f"{path} lacks {missing} in its demonstrations; a low-dimensional file of RoboMimic is needed (first without: "
                f"{demo.name[1:]})"
            )
        for name in ("actions", "rewards"):
            if not isinstance(demo.get(name), h5py.Dataset):
                raise ValueError(f"{path} lacks {demo.name[1:]}/{name}")
    return demos


def _check_demonstration(demo: Any, first: Any) -> int:
    """Check that a demonstration's arrays have a row per action and the first demonstration's shapes; return its length."""
    where = demo.name[1:]
    for name in ("actions", *OBSERVATIONS):
        array, alike = demo[name], first[name.replace("next_obs", "obs")]
        check_numbers(f"{where}/{name}", array.dtype)
        if array.shape is None or len(array.shape) != 2 or array.shape[1:] != alike.shape[1:]:
            raise ValueError(
                f"{where}/{name} has shape {array.shape}, but {alike.name[1:]} {alike.shape}: two dimensions are needed, rows "
                "of the same length"
            )
    length = len(demo["actions"])
    if not length:
        raise ValueError(f"{where}/actions has no row: an empty demonstration must be left out of the file")
    for name in ("rewards", *OBSERVATIONS):
        rows = len(demo[name]) if demo[name].shape else 0
        if rows != length:
            raise ValueError(f"{where}/{name} has {rows} rows, but {where}/actions has {length}")
    return length
