"""RoboMimic's files of demonstrations (``low_dim_v15.hdf5``), as flat observations with rewards of -1 until success."""

import importlib
from pathlib import Path

import numpy as np
from gymnasium import spaces

from sb3_flow.data.columns import Allocate, Parts, reading

KEYS = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "object")
"""What is concatenated to an observation, in this order."""


def read_robomimic(path: Path, allocate: Allocate) -> Parts:
    """
    All demonstrations, in the order of their numbers. Where the file's reward is positive the task is solved: reward 0 and
    terminated there, reward -1 elsewhere.

    :param path: the file
    :param allocate: makes the arrays
    :return: the transitions
    :raises ValueError: if it holds no demonstrations, or they lack one of ``KEYS``
    """
    h5py = importlib.import_module("h5py")
    with reading(path, "HDF5"), h5py.File(path, "r") as file:
        groups = file.get("data", {})
        demos = [groups[name] for name in sorted(groups, key=lambda name: int(name.removeprefix("demo_")))]
        if not demos:
            raise ValueError(f"{path} holds no demonstrations (groups data/demo_0, data/demo_1, ...)")
        missing = [f"{group}/{key}" for group in ("obs", "next_obs") for key in KEYS if key not in demos[0].get(group, {})]
        if missing:
            raise ValueError(f"{path} lacks {missing} in its demonstrations; a low-dimensional file of RoboMimic is needed")
        lengths = [len(demo["actions"]) for demo in demos]
        total, dim = sum(lengths), sum(demos[0]["obs"][key].shape[1] for key in KEYS)
        observations = allocate("observations", (total, dim), np.float32)
        actions = allocate("actions", (total, *demos[0]["actions"].shape[1:]), np.float32)
        rewards = allocate("rewards", (total,), np.float32)
        finals = np.empty((len(demos), dim), np.float32)
        ends = np.zeros(total, bool)
        ends[np.cumsum(lengths) - 1] = True
        first = 0
        for number, (demo, length) in enumerate(zip(demos, lengths, strict=True)):
            rows = slice(first, first + length)
            observations[rows] = np.concatenate([demo["obs"][key][:] for key in KEYS], axis=1)
            finals[number] = np.concatenate([demo["next_obs"][key][-1] for key in KEYS])
            actions[rows] = demo["actions"][:]
            rewards[rows] = np.where(demo["rewards"][:] > 0, 0, -1)
            first += length
    return Parts(
        observations,
        actions,
        rewards,
        rewards == 0,
        ends,
        finals,
        spaces.Box(-np.inf, np.inf, (dim,), np.float32),
        spaces.Box(-1.0, 1.0, actions.shape[1:], np.float32),
    )
