"""
The dataset sources that ``OfflineDataset.load("prefix:where")`` reads.

The meaning of "done" in each source (a classic silent bug):

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
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from gymnasium import spaces
from stable_baselines3.common.save_util import load_from_pkl

from sb3_flow.common.older_files import finding_moved_modules
from sb3_flow.data.columns import Allocate, Column, Parts, flags
from sb3_flow.data.files import hdf5_columns, npz_columns, pick
from sb3_flow.data.minari import find_minari, read_minari
from sb3_flow.data.ogbench import ogbench_columns, read_ogbench, single_task
from sb3_flow.data.oracles import EXPERT_FAMILIES
from sb3_flow.data.replay_buffers import read_replay_buffer
from sb3_flow.data.robomimic import read_robomimic
from sb3_flow.data.shards import inner_borders, joined, missing_numbers, npz_files
from sb3_flow.data.transitions import OTHER_NAMES, assemble, breaks, translation

OGBENCH_DATA = Path("~/.ogbench/data")


@dataclass(frozen=True)
class Source:
    """
    A location's files and the function that reads them.

    :param files: all files that the arrays are read from
    :param read: ``read(files, allocate, observation_space, action_space)`` reads them, or, of a folder, some of them. The
        spaces, where given, tell the meaning of whole numbers; sources that record their own spaces do not look at them
    :param columns: the columns of one file, where the files are a folder's, each with rows of its own; else None
    """

    files: list[Path]
    read: Callable[[list[Path], Allocate, spaces.Space[Any] | None, spaces.Space[Any] | None], Parts]
    columns: Callable[[Path], dict[str, Column]] | None = None


def require_extra(package: str, extra: str, prefix: str) -> ModuleType:
    """
    Import an optional package.

    :raises ImportError: naming the extra that installs it
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"'{prefix}:...' needs the package {package}: pip install 'sb3-flow[{extra}]' ({error})") from error


def _existing_file(where: str, prefix: str) -> Path:
    path = Path(where).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"'{prefix}:{where}': there is no file {path}")
    if not path.is_file():
        raise ValueError(f"'{prefix}:{where}': {path} is not a file")
    return path


def _files_of(folder: Path, location: str) -> list[Path]:
    files = npz_files(folder)
    if not files:
        raise ValueError(f"'{location}': the folder {folder} holds no .npz file (-val.npz files do not count)")
    if missing := missing_numbers(files):
        warnings.warn(f"'{location}': files of the numbers {', '.join(missing)} are missing in {folder}", stacklevel=2)
    return files


def ogbench_source(where: str) -> Source:
    """
    Find OGBench's raw file, to be labelled for one task: ``<single-task dataset name>[@<file.npz>]``, for example
    ``cube-single-play-singletask-task1-v0@data/cube-single-play-v0.npz``; without a file, the dataset's file in OGBench's
    default folder. A folder stands for all of its files, as of a set of 100M rows
    (``cube-quadruple-play-singletask-v0@data/cube-quadruple-play-100m-v0``); each file ends a trajectory. With ``-sparse``
    after the kind of data (``scene-play-sparse-singletask-v0``) rewards are -1 until the task is solved. Nothing is ever
    downloaded.

    :raises FileNotFoundError: saying how to make the file
    :raises ValueError: without a single-task name, and for damaged or unsuitable files
    """
    name, _, file = where.partition("@")
    task = single_task(name)
    path = Path(file).expanduser() if file else OGBENCH_DATA.expanduser() / f"{task.dataset}.npz"
    if not path.exists():
        make = f"Make the file with 'python -m sb3_flow.data.generate {task.dataset} --out DIR', or download"
        raise FileNotFoundError(
            f"'ogbench:{where}': there is no file {path}. "
            f"{'Download' if task.dataset.startswith(EXPERT_FAMILIES) else make} OGBench's own with "
            f"""'python -c "import ogbench; ogbench.download_datasets(['{task.dataset}'], 'DIR')"'; """
            f"then load 'ogbench:{name}@DIR/{task.dataset}.npz'"
        )

    def read(files: list[Path], allocate: Allocate, *given: spaces.Space[Any] | None) -> Parts:
        require_extra("ogbench", "ogbench", "ogbench")
        return read_ogbench(files, task, allocate)

    if path.is_dir():
        return Source(_files_of(path, f"ogbench:{where}"), read, partial(ogbench_columns, task=task))
    return Source([path], read)


def minari_source(where: str) -> Source:
    """
    Find a Minari dataset on this machine by its id.

    :raises FileNotFoundError: if it is not on this machine
    """
    require_extra("minari", "minari", "minari")
    dataset = find_minari(where)
    files = [path for path in sorted(Path(dataset.storage.data_path).rglob("*")) if path.is_file()]
    return Source(files, lambda _, allocate, *__: read_minari(dataset, allocate))


def d4rl_source(where: str) -> Source:
    """
    Find a D4RL file (HDF5): observations, actions, rewards, terminals, timeouts and optionally next_observations. Without the
    latter, truncated rows are left out, as the observations after them are unknown; with them, a trajectory also ends wherever
    the next row is not the successor, and timeouts may be missing.
    """
    path = _existing_file(where, "d4rl")
    require_extra("h5py", "d4rl", "d4rl")

    def read(_: list[Path], allocate: Allocate, *given: spaces.Space[Any] | None) -> Parts:
        names = ["observations", "actions", "rewards", "terminals"]
        picked = pick(hdf5_columns(path), names, path, optional=("timeouts", "next_observations"))
        ends = terminated = flags(picked.pop("terminals"))
        if "timeouts" in picked:
            ends = terminated | flags(picked.pop("timeouts"))
        elif "next_observations" not in picked:
            raise ValueError(
                f"{path} has neither timeouts nor next_observations, so nothing says where its trajectories end; add an array "
                "'timeouts' (True in the last row of each trajectory that was cut off)"
            )
        if "next_observations" in picked:
            ends = ends | breaks(picked)
        return assemble(picked, terminated, ends, allocate, *given)

    return Source([path], read)


def robomimic_source(where: str) -> Source:
    """
    Find a low-dimensional file of RoboMimic (HDF5), for example ``~/.robomimic/can/mh/low_dim_v15.hdf5``; rewards are -1 until
    the task is solved.
    """
    path = _existing_file(where, "robomimic")
    require_extra("h5py", "d4rl", "robomimic")
    return Source([path], lambda _, allocate, *__: read_robomimic(path, allocate))


@contextmanager
def naming_damaged_pickles(path: Any) -> Iterator[None]:
    """
    Name the file in the error if a pickle cannot be read.

    :param path: of the file, or an open file
    :raises ValueError: in place of what came out of the pickle
    """
    try:
        yield
    except (OSError, ImportError, MemoryError, AssertionError):
        raise
    except Exception as error:  # anything may come out of a pickle
        raise ValueError(f"{path} is not a complete pickle file (truncated or corrupt): {error!r}") from error


def sb3_source(where: str) -> Source:
    """Find a pickled replay buffer (``model.save_replay_buffer``). Unpickling runs code: only load files that you trust."""
    path = _existing_file(where, "sb3")

    def read(_: list[Path], allocate: Allocate, *given: spaces.Space[Any] | None) -> Parts:
        with finding_moved_modules(), naming_damaged_pickles(path):
            buffer = load_from_pkl(path)
        return read_replay_buffer(buffer, allocate)

    return Source([path], read)


def npz_columns_of_dataset(path: Path) -> dict[str, Column]:
    """
    List the columns of an .npz file that is named as :func:`npz_source` says.

    :raises ValueError: if an array is missing, or the names are those of another library
    """
    columns = npz_columns(path)
    others = [name for name in ("terminated", *OTHER_NAMES) if name in columns]
    if others and not {"terminated", "trajectory_ends"} <= columns.keys():
        raise ValueError(
            f"{path} must hold terminated and trajectory_ends, it has {others} instead; read it with numpy.load and call "
            f"OfflineDataset.from_arrays: {translation(others)}"
        )
    names = ["observations", "actions", "rewards", "terminated", "trajectory_ends"]
    return pick(columns, names, path, optional=("next_observations",))


def npz_source(where: str) -> Source:
    """
    Find arrays in one .npz file, named as the arguments of ``OfflineDataset.from_arrays``: observations, actions, rewards,
    terminated, trajectory_ends and optionally next_observations; dict observations as ``observations/<key>``. A folder stands
    for all of its files; each file ends a trajectory.
    """

    def read(files: list[Path], allocate: Allocate, *given: spaces.Space[Any] | None) -> Parts:
        of_files = [npz_columns_of_dataset(path) for path in files]
        picked = joined(files, of_files)
        ends = flags(picked.pop("trajectory_ends"))
        ends[inner_borders(of_files)] = True
        return assemble(picked, flags(picked.pop("terminated")), ends, allocate, *given)

    if (folder := Path(where).expanduser()).is_dir():
        return Source(_files_of(folder, f"npz:{where}"), read, npz_columns_of_dataset)
    return Source([_existing_file(where, "npz")], read)


SOURCES: dict[str, Callable[[str], Source]] = {
    "ogbench": ogbench_source,
    "minari": minari_source,
    "d4rl": d4rl_source,
    "sb3": sb3_source,
    "npz": npz_source,
    "robomimic": robomimic_source,
}
