"""Loads a location: into memory, into a folder of mapped files, or, of files that are too many for that, a few at a time."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gymnasium import spaces

from sb3_flow.common.checks import check_whole
from sb3_flow.data import storage
from sb3_flow.data.columns import Allocate, Parts, in_memory
from sb3_flow.data.locations import resolve
from sb3_flow.data.shards import Rotation, bytes_in_memory, joined, npz_files, stamp
from sb3_flow.data.sources import SOURCES, Source
from sb3_flow.data.validation import check_space, checked


class Loaded(NamedTuple):
    """Rows, a name for messages, and the rotation that the rows are the first turn of, if there is any."""

    parts: Parts
    source: str
    rotation: Rotation | None = None


def load(
    location: str,
    mmap_dir: str | Path | None,
    observation_space: spaces.Space[Any] | None,
    action_space: spaces.Space[Any] | None,
    max_memory: int,
    steps_per_file: int,
) -> Loaded:
    """Load a location, see ``OfflineDataset.load``."""
    if not isinstance(location, str):
        raise TypeError(f"location must be a string 'prefix:where', got {type(location).__name__}")
    check_space("observation_space", observation_space)
    check_space("action_space", action_space)
    check_whole(1, max_memory=max_memory, steps_per_file=steps_per_file)
    prefix, where = resolve(location)
    folder = Path(where).expanduser()
    if prefix == "npz" and folder.is_dir() and (storage.read_index(folder) is not None or not npz_files(folder)):
        if mmap_dir is not None:
            raise ValueError(f"`mmap_dir` is for files; the folder {folder} is opened memory-mapped where it is")
        return Loaded(storage.open_folder(folder, observation_space, action_space), f"{prefix}:{where}")
    source = SOURCES[prefix](where)
    try:
        if mmap_dir is not None:
            origin = {
                "location": location,
                "files": [[str(path.resolve()), *stamp(path)] for path in source.files],
                "spaces": [space and storage.space_to_json(space) for space in (observation_space, action_space)],
            }

            def fill(allocate: Allocate) -> Parts:
                return _read(source, source.files, allocate, observation_space, action_space)

            return Loaded(storage.convert(Path(mmap_dir).expanduser(), fill, location, origin), location)
        if source.columns is not None:
            return _load_files(source, location, observation_space, action_space, max_memory, steps_per_file)
        return Loaded(_read(source, source.files, in_memory, observation_space, action_space), location)
    except (ValueError, TypeError) as error:
        error.add_note(f"while loading '{location}'")
        raise


def _load_files(
    source: Source,
    location: str,
    observation_space: spaces.Space[Any] | None,
    action_space: spaces.Space[Any] | None,
    max_memory: int,
    steps_per_file: int,
) -> Loaded:
    """Load a folder's files into memory, all of them if ``max_memory`` has room, else those of the first turn."""
    assert source.columns is not None
    stamps = [stamp(path) for path in source.files]
    of_files = [source.columns(path) for path in source.files]
    joined(source.files, of_files)  # finds files of different datasets before any is read
    sizes = [bytes_in_memory(columns) for columns in of_files]
    if sum(sizes) <= max_memory:
        return Loaded(_read(source, source.files, in_memory, observation_space, action_space), location)
    largest = max(sizes)
    if 2 * largest > max_memory:
        raise ValueError(
            f"`max_memory={max_memory}` is too little: two turns are in memory while files take turns, and "
            f"{source.files[sizes.index(largest)]} alone needs {largest} bytes. Give at least {2 * largest}, or `mmap_dir`"
        )
    files_per_turn = int(max_memory) // 2 // largest
    parts = _read(source, source.files[:files_per_turn], in_memory, observation_space, action_space)
    read = partial(_read_of, location, parts.observation_space, parts.action_space)  # later turns have the spaces of the first
    return Loaded(parts, location, Rotation(source.files, stamps, files_per_turn, int(steps_per_file), read))


def _read_of(
    location: str,
    observation_space: spaces.Space[Any] | None,
    action_space: spaces.Space[Any] | None,
    files: list[Path],
) -> Parts:
    """Read and check the rows of some files of a location."""
    prefix, where = resolve(location)
    return _read(SOURCES[prefix](where), files, in_memory, observation_space, action_space)


def _read(
    source: Source,
    files: list[Path],
    allocate: Allocate,
    observation_space: spaces.Space[Any] | None,
    action_space: spaces.Space[Any] | None,
) -> Parts:
    """Read and check the rows of some files; an error names the file that it comes from."""
    try:
        parts = source.read(files, allocate, observation_space, action_space)
        return checked(parts, observation_space, action_space)
    except (ValueError, TypeError):
        if len(files) > 1:
            for path in files:
                _check_alone(source, path, observation_space, action_space)
        raise


def _check_alone(
    source: Source, path: Path, observation_space: spaces.Space[Any] | None, action_space: spaces.Space[Any] | None
) -> None:
    """Raise what is wrong with one of several files, whose rows have other numbers among the rows of all."""
    try:
        parts = source.read([path], in_memory, observation_space, action_space)
        checked(parts, observation_space, action_space)
    except (ValueError, TypeError) as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: {error}") from error
