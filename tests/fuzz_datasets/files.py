"""A file as its arrays and what else it holds, and the plain meaning of transitions that every kind is compared with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from gymnasium import spaces

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)


@dataclass
class Field:
    """
    An array of a file.

    :param role: "observations", "actions", "rewards", "flags" or "states"
    :param row: one whose values are used
    :param fixed: whether another shape of its rows is wrong
    :param optional: whether the file is right without it
    :param column: whether (N, 1) means the same as (N,)
    :param stored: whether it must have the very dtype that it has
    :param members: the numbers that are right where only some are, see ``wrong_members``
    :param whole: whether whole numbers of type int are right
    :param alone: whether no other array says how many rows there are
    :param tolerant: whether actions are clipped that rounding put outside their bounds
    """

    role: str
    row: int = 0
    fixed: bool = True
    optional: bool = False
    column: bool = False
    stored: bool = False
    members: int | None = None
    whole: bool = True
    alone: bool = False
    tolerant: bool = True


@dataclass
class File:
    """
    :param arrays: by their names in the file; None for what is left out
    :param options: arguments of ``load``
    :param about: all else that is written
    :param notes: what was done to it
    """

    arrays: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Kind:
    """
    A kind of file.

    :param make: of a generator, a file that is right
    :param fields: of a file, its arrays that mean something
    :param write: writes it into an empty folder and returns the location
    :param meaning: what the loaded dataset must hold
    :param special: mutations of this kind alone; each returns whether the file is right then, or None if it does not apply
    """

    make: Callable[[np.random.Generator], File]
    fields: Callable[[File], dict[str, Field]]
    write: Callable[[File, Path], str]
    meaning: Callable[[File], dict[str, np.ndarray]]
    special: tuple[Callable[[File, np.random.Generator], bool | None], ...]


def eighths(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Numbers in [-1, 1] that every type of floats holds exactly."""
    return (rng.integers(-8, 9, shape) / 8).astype(np.float32)


def episodes(rng: np.random.Generator, least: int = 1) -> list[dict[str, np.ndarray]]:
    """A few trajectories; the first has three steps at least. No state comes twice."""
    made, count = [], 0
    for number in range(int(rng.integers(least, 5))):
        length = int(rng.integers(3, 6)) if number == 0 else int(rng.integers(1, 5))
        states = np.stack([np.arange(count, count + length + 1) / 8, eighths(rng, length + 1)], axis=1).astype(np.float32)
        count += length + 1
        last = np.arange(length) == length - 1
        made.append(
            {
                "states": states,
                "actions": eighths(rng, length, 2),
                "rewards": eighths(rng, length),
                "stop": last & bool(rng.integers(2)),
                "last": last,
            }
        )
    return made


def joined(made: list[dict[str, np.ndarray]], name: str) -> np.ndarray:
    """One array of all trajectories; of the states those that actions were taken in."""
    return np.concatenate([part["states"][:-1] if name == "states" else part[name] for part in made])


def following(made: list[dict[str, np.ndarray]]) -> np.ndarray:
    """The states that actions led to."""
    return np.concatenate([part["states"][1:] for part in made])


def plain(array: Any) -> np.ndarray:
    """(N, ...) float64."""
    return np.asarray(array).astype(np.float64)


def flat(array: Any) -> np.ndarray:
    """(N,) float64."""
    return plain(array).reshape(-1)


def dataset_of(
    observations: dict[str, np.ndarray],
    actions: Any,
    rewards: Any,
    stop: Any,
    ends: Any,
    successors: dict[str, np.ndarray] | None,
    bounds: tuple[Any, Any] = (-1.0, 1.0),
) -> dict[str, np.ndarray]:
    """
    The arrays of a dataset, trajectory after trajectory. Without successors a truncated last row only says what the row
    before led to.

    :param observations: by key, "" if there is one array
    """
    stop, ends = flat(stop) != 0, flat(ends) != 0
    ends[-1] = True
    rows: list[int] = []
    last: list[int] = []
    finals: dict[str, list[np.ndarray]] = {key: [] for key in observations}
    first = 0
    for end in np.flatnonzero(ends):
        whole = successors is not None or stop[end]
        kept = list(range(first, end + 1 if whole else end))
        first = end + 1
        if not kept:
            continue
        rows += kept
        last.append(len(rows) - 1)
        for key, array in (observations if successors is None else successors).items():
            finals[key].append(plain(array)[end])
    trajectory_ends = np.zeros(len(rows), bool)
    trajectory_ends[last] = True
    meant = {"actions": np.clip(plain(actions)[rows], *bounds), "rewards": flat(rewards)[rows]}
    meant |= {"terminated": stop[rows], "trajectory_ends": trajectory_ends}
    for key, array in observations.items():
        suffix = f"/{key}" if key else ""
        meant[f"observations{suffix}"], meant[f"final_observations{suffix}"] = plain(array)[rows], np.array(finals[key])
    return meant


def under(arrays: dict[str, Any], name: str) -> dict[str, Any]:
    """The arrays called ``name``, or ``name/<key>`` by key."""
    if arrays.get(name) is not None:
        return {"": arrays[name]}
    found = {key.removeprefix(name + "/"): array for key, array in arrays.items() if key.startswith(name + "/")}
    return {key: array for key, array in found.items() if array is not None}


def write_hdf5(path: Path, arrays: dict[str, Any]) -> None:
    """All arrays, by their paths."""
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            if array is not None:
                file[name] = array.astype("S") if getattr(array, "dtype", np.dtype(int)).kind == "U" else array


def pick(rng: np.random.Generator, values: Any) -> Any:
    """One of some things."""
    values = list(values)
    return values[int(rng.integers(len(values)))]
