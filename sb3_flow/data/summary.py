"""A dataset in a few lines of text."""

from typing import Any

import numpy as np
from gymnasium import spaces

from sb3_flow.data.columns import Parts, entries, row_slices
from sb3_flow.data.returns import BehaviourReturn
from sb3_flow.data.validation import ACTION_TOLERANCE


def describe(parts: Parts, source: str, trajectories: np.ndarray, returns: np.ndarray, mean: BehaviourReturn) -> str:
    """
    Sum up a dataset; all actions and rewards are read once.

    :param parts: of the dataset
    :param source: names the data
    :param trajectories: first and last row of each trajectory
    :param returns: of each trajectory
    :param mean: of the returns
    """
    first, last = trajectories.T
    lengths = last - first + 1
    terminated = np.flatnonzero(parts.terminated)
    reached = len(np.unique(np.searchsorted(last, terminated)))
    space: Any = parts.action_space
    low, high = space.low, space.high
    margin = ACTION_TOLERANCE * (high - low)
    saturated = 0
    for rows in row_slices(parts.actions):
        saturated += int(np.sum((parts.actions[rows] <= low + margin) | (parts.actions[rows] >= high - margin)))
    observations = entries(parts.observations)
    arrays = [*observations.values(), *entries(parts.final_observations).values(), parts.actions, parts.rewards]
    size = sum(array.nbytes for array in arrays) + 2 * len(parts.rewards)
    lines = [
        f"OfflineDataset {source}",
        f"rows            {len(parts.rewards)} in {len(trajectories)} trajectories",
        f"lengths         min {lengths.min()}, mean {lengths.mean():.1f}, max {lengths.max()}",
        f"returns         min {returns.min():.6g}, mean {mean.value:.6g}, max {returns.max():.6g}",
        f"mean return     {mean}",
        f"terminated      {len(terminated)} rows ({len(terminated) / len(parts.rewards):.2%}), in {reached} trajectories "
        f"({reached / len(first):.1%})",
        f"saturation      {saturated / parts.actions.size:.1%} of action components at the bounds",
        *(f"{f'observations {key}':15} {array.shape[1:]} {array.dtype}" for key, array in observations.items()),
        f"actions         {parts.actions.shape[1:]} {parts.actions.dtype}, {_bounds(space)}",
        f"size            {size / 1e6:.1f} MB" + (" (memory-mapped)" if isinstance(parts.rewards, np.memmap) else ""),
    ]
    return "\n".join(lines)


def _bounds(space: spaces.Box) -> str:
    low, high = np.unique(space.low), np.unique(space.high)
    return f"bounds [{low[0]:g}, {high[0]:g}]" if len(low) == len(high) == 1 else f"bounds {space.low} to {space.high}"
