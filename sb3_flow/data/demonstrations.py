"""Trajectories of T steps and T + 1 observations, with the names that the package imitation gives them."""

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sb3_flow.common.checks import check_number, check_whole
from sb3_flow.data.columns import array_column, entries, nest

FLATTENED = (
    "transitions without their order are given: give the trajectories that `flatten_trajectories` was called with. Where only "
    "transitions are left, call OfflineDataset.from_arrays(obs, acts, rews, terminated=dones, trajectory_ends=..., "
    "next_observations=next_obs), with trajectory_ends True in each row whose next_obs is not the obs of the row below"
)


class _Trajectory(NamedTuple):
    """
    One trajectory's arrays.

    :param observations: by key, "" for a single array; T + 1 rows
    :param actions: T rows
    :param rewards: T rows
    :param stops: whether the last step is terminal and no time limit
    :param is_told: whether that is known
    """

    observations: dict[str, np.ndarray]
    actions: np.ndarray
    rewards: np.ndarray
    stops: bool
    is_told: bool

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Give the shape of a row of each array, by name."""
        parts = {f"obs{key and '/'}{key}": array for key, array in self.observations.items()}
        return {name: array.shape[1:] for name, array in (parts | {"acts": self.actions, "rews": self.rewards}).items()}


def read_trajectories(trajectories: Iterable[Any], rewards: float | None, time_limit: int | None) -> dict[str, Any]:
    """
    Put trajectories one behind the other, see ``OfflineDataset.from_trajectories``.

    :param trajectories: objects or mappings with obs, acts, terminal and perhaps rews and infos
    :param rewards: the reward of steps that have none
    :param time_limit: steps after which terminal trajectories were cut off
    :return: arguments of ``OfflineDataset.from_arrays`` by name
    :raises ValueError: naming the trajectory and what is wrong with it
    """
    check_number(rewards=rewards)
    if time_limit is not None:
        check_whole(1, time_limit=time_limit)
    if _field(trajectories, "obs") is not None:
        whole = _field(trajectories, "terminal") is not None
        raise ValueError("`trajectories` must be a list, but a single trajectory was given" if whole else FLATTENED)
    if isinstance(trajectories, str | bytes | Mapping) or not isinstance(trajectories, Iterable):
        raise TypeError(f"`trajectories` must be a list of trajectories, but a {type(trajectories).__name__} was given")
    read = [_read(f"trajectory {i}", each, rewards, time_limit) for i, each in enumerate(trajectories)]
    numbered = [(i, each) for i, each in enumerate(read) if len(each.actions)]
    if not numbered:
        raise ValueError("`trajectories` holds no steps")
    first, steps = numbered[0][1], [each for _, each in numbered]
    for i, each in numbered:
        if each.observations.keys() != first.observations.keys():
            keys = sorted(each.observations), sorted(first.observations)
            raise ValueError(f"trajectory {i}: obs has the keys {keys[0]}, {keys[1]} expected, as before")
        for name, shape in each.shapes().items():
            if shape != (before := first.shapes()[name]):
                raise ValueError(f"trajectory {i}: {name} has rows of shape {shape}, {before} expected, as before")
    lengths = np.array([len(each.actions) for each in steps])
    if time_limit is None:
        _warn_of_time_limit(lengths[[not each.is_told for each in steps]])
    ends, terminated = np.zeros((2, lengths.sum()), bool)
    ends[np.cumsum(lengths) - 1] = True
    terminated[ends] = [each.stops for each in steps]

    def observations(rows: slice) -> Any:
        keys = first.observations
        return nest({key: np.concatenate([each.observations[key][rows] for each in steps]) for key in keys})

    return {
        "observations": observations(slice(-1)),
        "actions": np.concatenate([each.actions for each in steps]),
        "rewards": np.concatenate([each.rewards for each in steps]),
        "terminated": terminated,
        "trajectory_ends": ends,
        "next_observations": observations(slice(1, None)),
    }


def _read(where: str, trajectory: Any, rewards: float | None, time_limit: int | None) -> _Trajectory:
    obs, acts, terminal, rews, infos = (_field(trajectory, name) for name in ("obs", "acts", "terminal", "rews", "infos"))
    missing = [name for name, value in (("obs", obs), ("acts", acts), ("terminal", terminal)) if value is None]
    if missing:
        raise ValueError(f"{where}, a {type(trajectory).__name__}, must have obs, acts and terminal, but lacks {missing}")
    if rews is None and rewards is None:
        raise ValueError(
            f"{where} has no rews: give `rewards=0.0` for data that are imitated alone, by RQL(objective='bc') or "
            "FlowMapPolicy; all other training needs the rewards of the task"
        )
    actions = _array(f"{where}: acts", acts)
    length = len(actions)
    parts = entries(obs.unwrap() if hasattr(obs, "unwrap") else obs)  # imitation's DictObs
    observations = {key: _array(f"{where}: obs{key and '/'}{key}", part) for key, part in parts.items()}
    values = np.full(length, rewards, np.float32) if rews is None else _array(f"{where}: rews", rews)
    counts = {f"obs{key and '/'}{key}": (len(array), length + 1) for key, array in observations.items()}
    for name, (given, expected) in {**counts, "rews": (len(values), length)}.items():
        if given != expected:
            raise ValueError(f"{where}: {name} has {given} rows for {length} acts, {expected} expected")
    if time_limit is not None and length > time_limit:
        raise ValueError(f"{where} has {length} steps, but `time_limit` is {time_limit}")
    terminal, cut_off = _is_terminal(where, terminal), _cut_off(where, infos, length)
    stops = terminal and (length != time_limit if cut_off is None else not cut_off)
    return _Trajectory(observations, actions, values, stops, cut_off is not None or not terminal)


def _field(trajectory: Any, name: str) -> Any:
    return trajectory.get(name) if isinstance(trajectory, Mapping) else getattr(trajectory, name, None)


def _array(name: str, values: Any) -> np.ndarray:
    array = array_column(name, values).array
    assert array is not None
    return array


def _is_terminal(where: str, terminal: Any) -> bool:
    if isinstance(terminal, bool | np.bool_) or (
        isinstance(terminal, np.ndarray) and (terminal.shape, terminal.dtype) == ((), bool)
    ):
        return bool(terminal)
    raise ValueError(f"{where}: terminal must be True or False, got {terminal!r}")


def _cut_off(where: str, infos: Any, length: int) -> bool | None:
    """Read SB3's ``TimeLimit.truncated`` in the last info, which imitation's files hold as JSON; None: it is not there."""
    if infos is None:
        return None
    is_list = isinstance(infos, Sequence) and not isinstance(infos, str | bytes)
    if not is_list and not (isinstance(infos, np.ndarray) and infos.ndim):
        raise ValueError(f"{where}: infos must be a list of as many infos as acts, but a {type(infos).__name__} was given")
    if len(infos) != length:
        raise ValueError(f"{where}: infos has {len(infos)} entries for {length} acts, {length} expected")
    last = infos[-1] if length else {}
    if isinstance(last, str):
        try:
            last = json.loads(last)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: the last info is no JSON: {error}") from error
    found = last.get("TimeLimit.truncated") if isinstance(last, Mapping) else None
    if found is None or isinstance(found, bool | np.bool_):
        return None if found is None else bool(found)
    raise ValueError(
        f"{where}: TimeLimit.truncated in the last info must be True or False, got {found!r}; leave out the infos"
    )


def _warn_of_time_limit(lengths: np.ndarray) -> None:
    """Warn if trajectories of which nothing but ``terminal`` is known look as if a time limit had cut them off."""
    at_most = int(lengths.max(initial=0))
    longest = int(np.count_nonzero(lengths == at_most))
    if longest > 1:
        warnings.warn(
            f"{longest} terminal trajectories have {at_most} steps, and no terminal trajectory has more: perhaps a time limit "
            f"cut them off, which imitation calls terminal, too. Then give `time_limit={at_most}`, so that values are "
            "bootstrapped there; a larger number says that no limit was met",
            stacklevel=4,
        )
