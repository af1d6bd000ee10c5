"""Reading the rows of SB3's replay buffers."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.preprocessing import get_action_dim, get_obs_shape

from sb3_flow.common.observations import map_arrays
from sb3_flow.data.columns import Allocate, Column, Parts, entries, flags
from sb3_flow.data.transitions import assemble, breaks
from sb3_flow.data.validation import check_action_space, check_observation_space


def read_replay_buffer(buffer: ReplayBuffer, allocate: Allocate) -> Parts:
    """
    Read the rows of an SB3 replay buffer, one environment after the other, each in the order of time. Actions, which the
    buffer holds scaled to [-1, 1], are returned in the units of the action space.

    :param allocate: makes the arrays
    :raises TypeError: if it is not a ``ReplayBuffer``
    :raises ValueError: if it is empty or damaged, or its actions are not continuous
    """
    if not isinstance(buffer, ReplayBuffer):
        raise TypeError(f"a ReplayBuffer of Stable-Baselines3 is needed, got {type(buffer).__name__}")
    if buffer.optimize_memory_usage and hasattr(buffer, "cut_trajectories"):
        raise ValueError("a TrajectoryReplayBuffer with optimize_memory_usage=True keeps no next observations to read")
    _check_buffer(buffer)
    low, high = buffer.action_space.low, buffer.action_space.high  # type: ignore[attr-defined]
    size, n_envs = buffer.buffer_size, buffer.n_envs
    steps = (buffer.pos + np.arange(size)) % size if buffer.full else np.arange(buffer.pos)
    if buffer.full and buffer.optimize_memory_usage:
        steps = steps[1:]  # the observation there is already the successor of the newest row
    if not len(steps):
        raise ValueError("the replay buffer is empty")
    step, env = np.tile(steps, n_envs), np.repeat(np.arange(n_envs), len(steps))

    def column(name: str, array: np.ndarray, shape: tuple[int, ...] | None, shift: int = 0) -> Column:
        def read(rows: int) -> Iterator[np.ndarray]:
            for first in range(0, len(step), rows):
                here = slice(first, first + rows)
                block = array[(step[here] + shift) % size, env[here]].reshape(-1, *(shape or ()))
                yield low + 0.5 * (block + 1.0) * (high - low) if name == "actions" else block

        return Column(name, (len(step), *(shape or ())), array.dtype, read)

    space = buffer.observation_space
    successors, shift = (buffer.observations, 1) if buffer.optimize_memory_usage else (buffer.next_observations, 0)
    columns = {}
    for key, sub in entries(space).items():
        suffix = f"/{key}" if key else ""
        for name, stored, later in (("observations", buffer.observations, 0), ("next_observations", successors, shift)):
            columns[name + suffix] = column(name + suffix, entries(stored)[key], sub.shape, later)
    dones = flags(column("dones", buffer.dones, ()))
    timeouts = flags(column("timeouts", buffer.timeouts, ()))
    ends = dones | breaks(columns)
    ends[len(steps) - 1 :: len(steps)] = True
    columns["actions"] = column("actions", buffer.actions, buffer.action_space.shape)
    columns["rewards"] = column("rewards", buffer.rewards, ())
    parts = assemble(columns, dones & ~timeouts, ends, allocate, space)
    parts.action_space = buffer.action_space
    return parts


NUMBERS = {"buffer_size": 1, "n_envs": 1, "pos": 0}
"""Attributes of a buffer that are whole numbers, and the least value of each."""


def _check_buffer(buffer: ReplayBuffer) -> None:
    """Check that a buffer, which may come from a file, has all that is read, in the shapes of its spaces."""
    arrays = ["observations", *([] if getattr(buffer, "optimize_memory_usage", False) else ["next_observations"])]
    arrays += ["actions", "rewards", "dones", "timeouts"]
    for name in ("observation_space", "action_space", "optimize_memory_usage", "full", *NUMBERS, *arrays):
        if not hasattr(buffer, name):
            raise ValueError(f"the replay buffer lacks '{name}'")
    check_observation_space(buffer.observation_space)
    check_action_space(buffer.action_space)
    for name, least in NUMBERS.items():
        value = getattr(buffer, name)
        if not isinstance(value, int | np.integer) or value < least:
            raise ValueError(f"the replay buffer's {name} must be a whole number of at least {least}, got {value!r}")
    if buffer.pos > buffer.buffer_size:
        raise ValueError(f"the replay buffer's pos is {buffer.pos} although its buffer_size is {buffer.buffer_size}")
    of_observations = map_arrays(get_obs_shape, buffer.observation_space)
    expected: dict[str, Any] = {name: of_observations if name.endswith("observations") else () for name in arrays}
    expected["actions"] = (get_action_dim(buffer.action_space),)
    for name in arrays:
        value = getattr(buffer, name)
        if entries(value).keys() != entries(expected[name]).keys():
            given, wanted = list(entries(value)), list(entries(expected[name]))
            raise ValueError(f"the replay buffer's {name} have the keys {given}, {wanted} expected")
        for key, row_shape in entries(expected[name]).items():
            array, shape = entries(value)[key], (buffer.buffer_size, buffer.n_envs, *row_shape)
            if not isinstance(array, np.ndarray) or array.shape != shape:
                where = f"{name}/{key}" if key else name
                raise ValueError(f"the replay buffer's {where} have shape {np.shape(array)}, {shape} expected")
