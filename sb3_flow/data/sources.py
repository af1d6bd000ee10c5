"""
The dataset sources: what ``OfflineDataset.load("prefix:where")`` understands.

What each source means by "done" (a classic silent bug):

=========  ==========================  ====================================================
prefix     bootstrapping stops         end of a trajectory
=========  ==========================  ====================================================
ogbench    task solved in this row     last row of the episode, solved or not
minari     terminations (mask == 0)    last row of the episode
d4rl       terminals                   terminals or timeouts
sb3        dones * (1 - timeouts)      dones, and wherever the next row is not the successor
robomimic  task solved in this row     last row of the demonstration
npz        terminated                  trajectory_ends
=========  ==========================  ====================================================
"""

import importlib
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.save_util import load_from_pkl

from sb3_flow.data.columns import (
    Allocate,
    Column,
    Parts,
    array_column,
    assemble,
    breaks,
    check_lengths,
    entries,
    flags,
    nest,
    npz_columns,
    observation_dtype,
    pick,
    reading,
)
from sb3_flow.data.ogbench import SingleTask, read_ogbench, single_task
from sb3_flow.data.oracles import EXPERT_FAMILIES
from sb3_flow.data.robomimic import read_robomimic
from sb3_flow.data.validation import check_action_space

if TYPE_CHECKING:
    import minari

OGBENCH_DATA = Path("~/.ogbench/data")


@dataclass(frozen=True)
class Source:
    """
    A resolved location.

    :param files: everything the arrays are read from
    :param read: reads them
    """

    files: list[Path]
    read: Callable[[Allocate], Parts]


def require_extra(package: str, extra: str, prefix: str) -> ModuleType:
    """
    Import an optional package.

    :raises ImportError: naming the extra that installs it
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"loading '{prefix}:...' needs the package {package}: pip install 'sb3-flow[{extra}]' ({error})"
        ) from error


def _existing_file(where: str, prefix: str) -> Path:
    path = Path(where).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"'{prefix}:{where}': there is no file {path}")
    if not path.is_file():
        raise ValueError(f"'{prefix}:{where}': {path} is not a file")
    return path


def _with_successors(names: list[str], columns: dict[str, Column]) -> list[str]:
    present = any(key.split("/")[0] == "next_observations" for key in columns)
    return ["observations", *(["next_observations"] if present else []), *names]


# ---------------------------------------------------------------------------------------------------------------- ogbench


def ogbench_source(where: str) -> Source:
    """
    OGBench's raw file, labelled for one task: ``<single-task dataset name>[@<file.npz>]``, for example
    ``cube-single-play-singletask-task1-v0@data/cube-single-play-v0.npz``; without a file, the dataset's file in OGBench's
    default folder. With ``-sparse`` after the kind of data (``scene-play-sparse-singletask-v0``) rewards are -1 until the
    task is solved. The file holds one row more than transitions for each episode, whose observation becomes the final one.
    Nothing is ever downloaded.

    :raises FileNotFoundError: saying how to make the file
    :raises ValueError: without a single-task name, and for damaged or unsuitable files
    """
    name, _, file = where.partition("@")
    task = single_task(name)
    path = Path(file).expanduser() if file else OGBENCH_DATA.expanduser() / f"{task.dataset}.npz"
    if not path.is_file():
        make = f"Make one with 'python -m sb3_flow.data.generate {task.dataset} --out DIR', or download"
        raise FileNotFoundError(
            f"'ogbench:{where}': there is no file {path}. "
            f"{'Download' if task.dataset.startswith(EXPERT_FAMILIES) else make} OGBench's own with "
            f"""'python -c "import ogbench; ogbench.download_datasets(['{task.dataset}'], 'DIR')"'; """
            f"then load 'ogbench:{name}@DIR/{task.dataset}.npz'"
        )
    return Source([path], partial(_read_ogbench, path, task))


def _read_ogbench(path: Path, task: SingleTask, allocate: Allocate) -> Parts:
    require_extra("ogbench", "ogbench", "ogbench")
    return read_ogbench(path, task, allocate)


# ----------------------------------------------------------------------------------------------------------------- minari


def minari_source(where: str) -> Source:
    """
    A Minari dataset on this machine, by its id.

    :raises FileNotFoundError: if it is not on this machine
    """
    require_extra("minari", "minari", "minari")
    load_dataset = importlib.import_module("minari").load_dataset
    try:
        dataset = load_dataset(where, download=False)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"'minari:{where}': {error} Nothing is downloaded here; to get it: minari download {where}"
        ) from error
    files = [path for path in sorted(Path(dataset.spec.data_path).rglob("*")) if path.is_file()]
    return Source(files, partial(read_minari, dataset))


def read_minari(dataset: "minari.MinariDataset", allocate: Allocate) -> Parts:
    """
    All episodes of a Minari dataset. Episodes hold T + 1 observations for T steps, so nothing is lost. Bootstrapping stops
    where an episode is terminated, or where its infos have ``mask`` (as OGBench's single tasks do) where that is 0.

    :raises ValueError: for nested Dict and Tuple observations, and damaged files
    """
    space = dataset.observation_space
    parts_of = entries(space)
    if any(isinstance(sub, spaces.Dict | spaces.Tuple) for sub in parts_of.values()):
        raise ValueError(f"observations must be an array or a flat dict of arrays, nested or tuple space given: {space}")
    check_action_space(dataset.action_space)
    total = dataset.total_steps
    if total == 0:
        raise ValueError(f"the Minari dataset {dataset.spec.dataset_id} is empty")
    observations: dict[str, np.ndarray] = {}
    finals: dict[str, list[np.ndarray]] = {key: [] for key in parts_of}
    actions = allocate("actions", (total, *(dataset.action_space.shape or ())), np.float32)
    rewards = allocate("rewards", (total,), np.float32)
    terminated, ends = np.empty(total, bool), np.zeros(total, bool)
    first = 0
    for episode in _minari_episodes(dataset):
        if not len(episode):
            continue
        rows = slice(first, first + len(episode))
        given = entries(episode.observations)
        for key, sub in parts_of.items():
            values = np.asarray(given[key])
            name = f"observations/{key}" if key else "observations"
            if len(values) != len(episode) + 1:
                raise ValueError(
                    f"episode {episode.id} has {len(values)} rows of {name} for {len(episode)} steps, one more expected"
                )
            if key not in observations:
                dtype = observation_dtype(array_column(name, values), sub)
                observations[key] = allocate(name, (total, *values.shape[1:]), dtype)
            observations[key][rows] = values[:-1]
            finals[key].append(values[-1:].astype(observations[key].dtype))
        actions[rows] = episode.actions
        rewards[rows] = np.asarray(episode.rewards).reshape(-1)
        mask = episode.infos.get("mask") if episode.infos else None
        # recorded infos start with the one of reset()
        terminated[rows] = episode.terminations if mask is None else np.asarray(mask).reshape(-1)[-len(episode) :] == 0
        first += len(episode)
        ends[first - 1] = True
    if first != total:
        raise ValueError(f"the Minari dataset {dataset.spec.dataset_id} says {total} steps, its episodes have {first}")
    last = {key: np.concatenate(values) for key, values in finals.items()}
    return Parts(nest(observations), actions, rewards, terminated, ends, nest(last), space, dataset.action_space)


def _minari_episodes(dataset: "minari.MinariDataset") -> Iterator[Any]:
    with reading(Path(dataset.spec.data_path), "Minari"):
        yield from dataset.iterate_episodes()


# ------------------------------------------------------------------------------------------------------------------- d4rl


def d4rl_source(where: str) -> Source:
    """
    A D4RL file (HDF5): observations, actions, rewards, terminals, timeouts and optionally next_observations. Without the
    latter, truncated rows are left out because nobody knows what they led to; with them, a trajectory also ends wherever
    the next row is not the successor, and timeouts may be missing.
    """
    path = _existing_file(where, "d4rl")
    require_extra("h5py", "d4rl", "d4rl")
    return Source([path], partial(_read_d4rl, path))


def _hdf5_blocks(path: Path, name: str, rows: int) -> Iterator[np.ndarray]:
    h5py = importlib.import_module("h5py")
    with reading(path, "HDF5"), h5py.File(path, "r") as file:
        for first in range(0, file[name].shape[0], rows):
            yield file[name][first : first + rows]


def _hdf5_columns(path: Path) -> dict[str, Column]:
    h5py = importlib.import_module("h5py")
    with reading(path, "HDF5"), h5py.File(path, "r") as file:
        return {
            name: Column(name, item.shape, item.dtype, partial(_hdf5_blocks, path, name))
            for name, item in file.items()
            if isinstance(item, h5py.Dataset) and item.shape
        }


def _read_d4rl(path: Path, allocate: Allocate) -> Parts:
    columns = _hdf5_columns(path)
    picked = pick(columns, _with_successors(["actions", "rewards", "terminals"], columns), path)
    check_lengths(picked)
    terminated = flags(columns["terminals"])
    ends = terminated
    if "timeouts" in columns:
        timeouts = columns["timeouts"]
        check_lengths({**picked, "timeouts": timeouts})
        ends = terminated | flags(timeouts)
    elif "next_observations" not in picked:
        raise ValueError(
            f"{path} has neither timeouts nor next_observations, so nothing says where its trajectories end; add an array "
            "'timeouts' (True in the last row of each trajectory that was cut off)"
        )
    if "next_observations" in picked:
        ends = ends | breaks(picked)
    del picked["terminals"]
    return assemble(picked, terminated, ends, allocate)


# -------------------------------------------------------------------------------------------------------------- robomimic


def robomimic_source(where: str) -> Source:
    """
    A low-dimensional file of RoboMimic (HDF5), for example ``~/.robomimic/can/mh/low_dim_v15.hdf5``; rewards are -1 until
    the task is solved.
    """
    path = _existing_file(where, "robomimic")
    require_extra("h5py", "d4rl", "robomimic")
    return Source([path], partial(read_robomimic, path))


# -------------------------------------------------------------------------------------------------------------------- sb3


def sb3_source(where: str) -> Source:
    """
    A pickled SB3 replay buffer (``model.save_replay_buffer``). Unpickling runs code: only load files that you trust.
    """
    path = _existing_file(where, "sb3")

    def read(allocate: Allocate) -> Parts:
        try:
            with reading(path, "pickle"):
                buffer = load_from_pkl(path)
        except (pickle.UnpicklingError, AttributeError, IndexError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a complete pickle file (truncated or corrupt): {error}") from error
        return read_replay_buffer(buffer, allocate)

    return Source([path], read)


def read_replay_buffer(buffer: ReplayBuffer, allocate: Allocate) -> Parts:
    """
    The rows of an SB3 replay buffer, one environment after the other, each in the order of time. Actions, which the buffer
    holds scaled to [-1, 1], are returned in the units of the action space.

    :raises TypeError: if it is not a ``ReplayBuffer``
    :raises ValueError: if it is empty, or its actions are not continuous
    """
    if not isinstance(buffer, ReplayBuffer):
        raise TypeError(f"a ReplayBuffer of Stable-Baselines3 is needed, got {type(buffer).__name__}")
    if buffer.optimize_memory_usage and hasattr(buffer, "cut_trajectories"):
        raise ValueError("a TrajectoryReplayBuffer with optimize_memory_usage=True keeps no next observations to read")
    check_action_space(buffer.action_space)
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
    columns = {}
    for key, sub in entries(space).items():
        suffix = f"/{key}" if key else ""
        stored = entries(buffer.observations)[key]
        columns["observations" + suffix] = column("observations" + suffix, stored, sub.shape)
        name = "next_observations" + suffix
        if buffer.optimize_memory_usage:
            columns[name] = column(name, stored, sub.shape, shift=1)
        else:
            columns[name] = column(name, entries(buffer.next_observations)[key], sub.shape)
    dones = buffer.dones[step, env] != 0
    ends = dones | breaks(columns)
    ends[len(steps) - 1 :: len(steps)] = True
    columns["actions"] = column("actions", buffer.actions, buffer.action_space.shape)
    columns["rewards"] = column("rewards", buffer.rewards, ())
    parts = assemble(columns, dones & (buffer.timeouts[step, env] == 0), ends, allocate, space)
    parts.action_space = buffer.action_space
    return parts


# -------------------------------------------------------------------------------------------------------------------- npz


def npz_source(where: str) -> Source:
    """
    Plain arrays in one .npz file, named as the arguments of ``OfflineDataset.from_arrays``: observations, actions, rewards,
    terminated, trajectory_ends and optionally next_observations; dict observations as ``observations/<key>``.
    """
    path = _existing_file(where, "npz")

    def read(allocate: Allocate) -> Parts:
        columns = npz_columns(path)
        names = _with_successors(["actions", "rewards", "terminated", "trajectory_ends"], columns)
        picked = pick(columns, names, path)
        check_lengths(picked)
        terminated, ends = flags(picked.pop("terminated")), flags(picked.pop("trajectory_ends"))
        return assemble(picked, terminated, ends, allocate)

    return Source([path], read)


SOURCES: dict[str, Callable[[str], Source]] = {
    "ogbench": ogbench_source,
    "minari": minari_source,
    "d4rl": d4rl_source,
    "sb3": sb3_source,
    "npz": npz_source,
    "robomimic": robomimic_source,
}
