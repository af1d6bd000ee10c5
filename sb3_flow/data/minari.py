"""Minari's datasets: episodes of T + 1 observations for T steps, so that nothing is lost."""

import difflib
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from sb3_flow.data.columns import Allocate, Column, Parts, array_column, entries, flags, nest, observation_dtype, put
from sb3_flow.data.files import DAMAGED, reading
from sb3_flow.data.validation import check_action_space

if TYPE_CHECKING:
    import minari


def find_minari(where: str) -> "minari.MinariDataset":
    """
    Open a dataset on this machine, without reading its episodes.

    :param where: its id
    :raises FileNotFoundError: if it is not on this machine
    :raises ValueError: if its metadata are damaged
    """
    minari = importlib.import_module("minari")
    try:
        with reading(Path(where), "Minari"):
            return minari.load_dataset(where, download=False)
    except FileNotFoundError as error:
        near = _near(where, minari)
        advice = f"Perhaps 'minari:{near}'" if near else f"Nothing is downloaded here; to get it: minari download {where}"
        raise FileNotFoundError(f"'minari:{where}': {error} {advice}") from error


def _near(where: str, minari: ModuleType) -> str | None:
    """Find the dataset on this machine that may be meant by an id without version or namespace, or with a slip; None: none."""
    try:
        known = list(minari.list_local_datasets())
    except (ValueError, *DAMAGED):  # of another dataset
        return None
    versions = [name for name in known if name.startswith(f"{where}-v")]  # in the order of their numbers
    inside = [name for name in known if name.endswith(f"/{where}")]
    found = versions[-1:] or inside or difflib.get_close_matches(where, known, 1, 0.8)
    return found[0] if found else None


def read_minari(dataset: "minari.MinariDataset", allocate: Allocate) -> Parts:
    """
    Read all episodes of a Minari dataset. Bootstrapping stops where an episode is terminated. If its infos have ``mask`` (as
    OGBench's single tasks do), bootstrapping stops where that is 0 instead.

    :param allocate: makes the arrays
    :raises ValueError: for nested Dict and Tuple observations, and damaged files
    """
    space = dataset.observation_space
    parts_of = entries(space)
    if any(isinstance(sub, spaces.Dict | spaces.Tuple) for sub in parts_of.values()):
        raise ValueError(f"observations must be an array or a flat dict of arrays, nested or tuple space given: {space}")
    check_action_space(dataset.action_space)
    try:
        total = dataset.total_steps
    except (TypeError, ValueError, LookupError) as error:
        raise ValueError(f"the Minari dataset {dataset.id} does not say how many steps it has: {error!r}") from error
    if total <= 0:
        raise ValueError(f"the Minari dataset {dataset.id} is empty: it says {total} steps")
    observations: dict[str, np.ndarray] = {}
    finals: dict[str, list[np.ndarray]] = {key: [] for key in parts_of}
    actions = allocate("actions", (total, *(dataset.action_space.shape or ())), np.float32)
    rewards = allocate("rewards", (total,), np.float32)
    terminated, ends = np.empty(total, bool), np.zeros(total, bool)
    first = 0
    for episode in _minari_episodes(dataset):
        columns = _columns(episode)
        length = max(columns[name].shape[0] for name in ("actions", "rewards", "terminations"))
        given = entries(episode.observations)
        if not length:
            continue
        if first + length > total:
            raise ValueError(f"the Minari dataset {dataset.id} says {total} steps, its episodes have more")
        rows = slice(first, first + length)
        for key, sub in parts_of.items():
            name = f"observations/{key}" if key else "observations"
            where = f"episode {episode.id}: {name}"
            if key not in given:
                raise ValueError(f"{where} are missing")
            column = _steps(array_column(where, given[key]), length, 1)
            values = np.asarray(column.array)
            if key not in observations:
                observations[key] = allocate(name, (total, *column.shape[1:]), observation_dtype(column, sub))
            put(observations[key], rows, values[:-1], where)
            finals[key].append(np.empty((1, *observations[key].shape[1:]), observations[key].dtype))
            put(finals[key][-1], slice(0, 1), values[-1:], where)
        put(actions, rows, np.asarray(_steps(columns["actions"], length).array), columns["actions"].name)
        put(rewards, rows, np.asarray(_steps(columns["rewards"], length).flat().array), columns["rewards"].name)
        if "mask" in columns:
            mask = columns["mask"]  # recorded infos start with the info of reset()
            terminated[rows] = ~flags(_steps(mask, length, int(mask.shape[0] > length)))[-length:]
        else:
            terminated[rows] = flags(_steps(columns["terminations"], length))
        first += length
        ends[first - 1] = True
    if first != total:
        raise ValueError(f"the Minari dataset {dataset.id} says {total} steps, its episodes have {first}")
    last = {key: np.concatenate(values) for key, values in finals.items()}
    return Parts(nest(observations), actions, rewards, terminated, ends, nest(last), space, dataset.action_space)


def _columns(episode: "minari.EpisodeData") -> dict[str, Column]:
    """Collect the arrays of an episode with a row per step, and the mask in its infos, where there is a mask."""
    arrays = {name: getattr(episode, name) for name in ("actions", "rewards", "terminations")}
    if episode.infos and episode.infos.get("mask") is not None:
        arrays["mask"] = episode.infos["mask"]
    return {name: array_column(f"episode {episode.id}: {name}", array) for name, array in arrays.items()}


def _steps(column: Column, length: int, more: int = 0) -> Column:
    """Check that a column has a row per step and ``more`` rows; return the column."""
    if column.shape[0] != length + more:
        expected = ", 1 more expected" if more else ""
        raise ValueError(f"{column.name} has {column.shape[0]} rows for {length} steps{expected}")
    return column


def _minari_episodes(dataset: "minari.MinariDataset") -> Iterator[Any]:
    with reading(Path(dataset.storage.data_path), "Minari"):
        yield from dataset.iterate_episodes()
