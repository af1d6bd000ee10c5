"""From transitions, one per row, to the arrays of a dataset: where trajectories end, and which observations follow."""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from sb3_flow.data.columns import (
    Allocate,
    Column,
    Parts,
    array_column,
    check_lengths,
    check_numbers,
    entries,
    gather,
    lockstep,
    nest,
    observation_dtype,
    under,
)
from sb3_flow.data.validation import check_action_space

OTHER_NAMES = ("terminals", "terminations", "timeouts", "truncated", "truncations", "dones")
"""Other libraries' names of arrays that ``terminated`` and ``trajectory_ends`` follow from."""


def translation(given: Collection[str]) -> str:
    """
    Explain how to make ``terminated`` and ``trajectory_ends`` of other arrays.

    :param given: names of arrays, some of ``OTHER_NAMES``
    :return: a sentence with the expressions to pass as both arguments; empty if the given arrays do not tell
    """
    stop = next((name for name in ("terminated", "terminals", "terminations") if name in given), None)
    limit = next((name for name in ("timeouts", "truncated", "truncations") if name in given), None)
    if "dones" in given and (stop or limit):
        return f"pass terminated={stop or f'dones & ~{limit}'}, trajectory_ends=dones (arrays of bool)"
    if "dones" in given:
        return (
            "`dones` alone does not say which of them are time limits, after which bootstrapping goes on: pass "
            "terminated=dones & ~timeouts, trajectory_ends=dones (arrays of bool), where timeouts is True at a time limit"
        )
    if stop and limit:
        return f"pass terminated={stop}, trajectory_ends={stop} | {limit} (arrays of bool)"
    if stop:
        return (
            f"pass terminated={stop}, trajectory_ends={stop} | timeouts, where timeouts is True in the last row of each "
            "trajectory that was cut off (arrays of bool)"
        )
    return f"`{limit}` alone does not say where bootstrapping stops" if limit else ""


def check_names(terminated: Any, trajectory_ends: Any, others: Mapping[str, Any]) -> None:
    """
    Refuse other names than ``terminated`` and ``trajectory_ends``, saying how these follow from them.

    :param terminated: the argument, None if it was not given
    :param trajectory_ends: likewise
    :param others: further arguments by name
    :raises ValueError: for a name of ``OTHER_NAMES``, and if an argument is missing
    :raises TypeError: for other names
    """
    given = {"terminated": terminated, "trajectory_ends": trajectory_ends}
    for name in others:
        if name not in OTHER_NAMES:
            raise TypeError(f"OfflineDataset.from_arrays() got an unexpected keyword argument '{name}'")
    missing = [name for name, value in given.items() if value is None]
    names = ", ".join(f"`{name}`" for name in others)
    if others and not missing:
        raise ValueError(f"{names} must be left out beside `terminated` and `trajectory_ends`, which say the same")
    if others:
        rule = translation([*(name for name in given if name not in missing), *others])
        raise ValueError(f"from_arrays takes terminated and trajectory_ends, but {names} were given: {rule}")
    if missing:
        raise ValueError(
            f"`{missing[0]}` is missing: terminated is True where bootstrapping stops, trajectory_ends in the last row of "
            "each trajectory, whether terminated or cut off"
        )


def columns_of_arrays(observations: Any, next_observations: Any, actions: Any, rewards: Any) -> dict[str, Column]:
    """
    Make columns by name of the arrays that a user gives; an entry of a dictionary is named ``name/key``.

    :param observations: an array, or a dict of arrays
    :param next_observations: likewise, or None
    :raises ValueError: for a dict that is empty, or whose keys are no text
    """
    columns = {}
    for name, value in (("observations", observations), ("next_observations", next_observations)):
        if isinstance(value, Mapping):
            if not value:
                raise ValueError(f"{name} is an empty dict")
            for key, part in value.items():
                if not isinstance(key, str) or not key:
                    raise ValueError(f"the keys of {name} must be text that is not empty, got {key!r}")
                columns[f"{name}/{key}"] = array_column(f"{name}/{key}", part)
        elif value is not None or name == "observations":
            columns[name] = array_column(name, value)
    return columns | {"actions": array_column("actions", actions), "rewards": array_column("rewards", rewards)}


def breaks(columns: Mapping[str, Column]) -> np.ndarray:
    """Mark, as (rows,) bool, rows whose next observation is not the observation of the row below, and the last row."""
    observations, successors = under(columns, "observations"), _successors(columns)
    out = np.zeros(next(iter(observations.values())).shape[0], bool)
    out[-1] = True
    for key, column in observations.items():
        first, pending = 0, None  # pending: the successor of the last row of the block before
        for block, following in lockstep(column, successors[key]):
            if pending is not None:
                out[first - 1] |= bool(np.any(pending != block[0]))
            out[first : first + len(block) - 1] |= _rows_differ(following[:-1], block[1:])
            pending = following[-1]
            first += len(block)
    return out


def _rows_differ(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    differ = left != right
    if differ.any():  # two NaN count as equal: they are reported as NaN, not as a missing trajectory end
        differ &= (left == left) | (right == right)
    rows: np.ndarray = differ.any(axis=tuple(range(1, differ.ndim)))
    return rows


def _successors(columns: Mapping[str, Column]) -> dict[str, Column]:
    """
    Find the columns of next observations, if there are any.

    :raises ValueError: if their keys or shapes differ from the observations', or they hold no numbers
    """
    observations, successors = under(columns, "observations"), under(columns, "next_observations")
    if successors and successors.keys() != observations.keys():
        raise ValueError(f"next_observations has the keys {sorted(successors)}, observations has {sorted(observations)}")
    for key, column in successors.items():
        check_numbers(column.name, column.dtype)
        check_numbers(observations[key].name, observations[key].dtype)
        if column.shape[1:] != observations[key].shape[1:]:
            raise ValueError(f"{column.name} must have the observations' shape {observations[key].shape}, got {column.shape}")
    return successors


def _check_successors(column: Column, observations: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Check that ``next_observations`` repeats ``observations`` a row later within trajectories; return it at their ends."""
    finals, first = [], 0
    for block in column.blocks():
        given, block = block, block.astype(observations.dtype, copy=False)
        if block.dtype.kind in "iu" and (given != block).any():
            raise ValueError(f"{column.name} must be whole numbers of {block.dtype}, as observations are, got {given.dtype}")
        end = ends[first : first + len(block)]
        following = observations[first + 1 : first + 1 + len(block)]  # one row short at the end of the data, where end is True
        wrong = np.flatnonzero(_rows_differ(block[: len(following)], following) & ~end[: len(following)])
        if len(wrong):
            row = first + int(wrong[0])
            raise ValueError(
                f"{column.name}[{row}] differs from observations[{row + 1}] although trajectory_ends[{row}] is False: "
                "a trajectory end is probably missing there"
            )
        finals.append(block[end])
        first += len(block)
    return np.concatenate(finals)


def assemble(
    columns: Mapping[str, Column],
    terminated: np.ndarray,
    trajectory_ends: np.ndarray,
    allocate: Allocate,
    observation_space: spaces.Space[Any] | None = None,
    action_space: spaces.Space[Any] | None = None,
) -> Parts:
    """
    Make the arrays of a dataset from transitions, one per row.

    :param columns: observations, actions, rewards and optionally next_observations (both as one column or as ``name/key``)
    :param terminated: (N,) bool
    :param trajectory_ends: (N,) bool, the last row counts as True
    :param allocate: where the arrays go
    :param observation_space: the space, where known
    :param action_space: the space, where known; whole numbers are actions of a Box of floats only
    :return: all N rows with ``next_observations``; without, the truncated rows are left out, which a warning tells
    """
    given_flags = {"terminated": terminated, "trajectory_ends": trajectory_ends}
    if action_space is not None:
        check_action_space(action_space)
    if columns["actions"].dtype.kind in ("b" if action_space is not None else "biu"):
        raise ValueError(
            f"actions have dtype {columns['actions'].dtype}: flow policies need continuous (float) actions; for discrete "
            "actions use DQN or PPO of Stable-Baselines3 or QR-DQN of sb3-contrib"
        )
    check_lengths({**columns, **{name: array_column(name, array) for name, array in given_flags.items()}})
    if not trajectory_ends.any():
        warnings.warn(
            f"no row ends a trajectory: all {len(trajectory_ends)} rows are taken for one trajectory, although resets in "
            "between would make wrong transitions",
            stacklevel=3,
        )
    ends = trajectory_ends.copy()
    ends[-1] = True
    successors = _successors(columns)
    keep: np.ndarray | None = None
    final_rows: np.ndarray | None = None
    if not successors:
        # Nobody knows the observation after a truncated row. Without that row, its observation follows the row above.
        keep = terminated | ~ends
        before_dropped = np.append(~keep[1:], False)
        end_rows = np.flatnonzero(keep & (ends | before_dropped))
        final_rows = np.where(ends[end_rows], end_rows, end_rows + 1)
        if not len(end_rows):
            raise ValueError(
                "no transition is left: every trajectory is one truncated row whose next observation is unknown; "
                "pass next_observations"
            )
        vanished = int(np.count_nonzero(ends) - len(end_rows))
        ends = (ends | before_dropped)[keep]
        terminated = terminated[keep]
        if keep.all():
            keep = None
        else:
            warnings.warn(
                f"{np.count_nonzero(~keep)} of {len(keep)} rows are left out: they end a trajectory without being terminated, "
                "and without `next_observations` nobody knows the observations after them"
                + (f"; {vanished} trajectories of a single row vanish" if vanished else ""),
                stacklevel=3,
            )
    sub_spaces = entries(observation_space)
    observations, finals = {}, {}
    for key, column in under(columns, "observations").items():
        dtype = observation_dtype(column, sub_spaces.get(key))
        observations[key], finals[key] = gather(column, dtype, allocate, keep, final_rows)
    if successors:
        finals = {key: _check_successors(column, observations[key], ends) for key, column in successors.items()}
    actions, _ = gather(columns["actions"], np.float32, allocate, keep)
    rewards, _ = gather(columns["rewards"].flat(), np.float32, allocate, keep)
    return Parts(nest(observations), actions, rewards, terminated, ends, nest(finals), observation_space, action_space)
