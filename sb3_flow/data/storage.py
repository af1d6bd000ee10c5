"""
The folder that a dataset is saved in: an .npy file per array, opened memory-mapped, and dataset.json with the rest.

A folder is written beside its place and renamed into it when complete, so a folder with its final name is whole. A killed
process leaves a hidden folder ``.<name>.partial-...`` behind, which nothing reads and which may be deleted.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from sb3_flow.data.columns import Allocate, Parts, entries, row_slices
from sb3_flow.data.files import reading
from sb3_flow.data.validation import checked

INDEX = "dataset.json"
FORMAT = "sb3_flow.OfflineDataset"
VERSION = 1
ARRAYS = ("observations", "actions", "rewards", "terminated", "trajectory_ends", "final_observations")
SPACES = ("observation_space", "action_space")


def space_to_json(space: spaces.Space[Any]) -> dict[str, Any]:
    """
    Describe a space in JSON.

    :param space: Box, Discrete, MultiDiscrete, MultiBinary, or a Dict of these
    :raises ValueError: for other spaces
    """
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "spaces": [[key, space_to_json(sub)] for key, sub in space.spaces.items()]}
    if isinstance(space, spaces.Box):
        # as text: exact, and JSON has no infinity
        low, high = (
            [str(bound.flat[0])] if bound.size and (bound == bound.flat[0]).all() else [str(value) for value in bound.flat]
            for bound in (space.low, space.high)
        )
        return {"type": "Box", "shape": list(space.shape), "dtype": str(space.dtype), "low": low, "high": high}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"type": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": list(space.shape)}
    raise ValueError(f"a space of type {type(space).__name__} cannot be saved: {space}")


def space_from_json(data: dict[str, Any]) -> spaces.Space[Any]:
    """
    Make the space that :func:`space_to_json` described.

    :raises ValueError: if :func:`space_to_json` did not make the data
    """
    kind = data["type"]
    if kind == "Dict":
        return spaces.Dict({key: space_from_json(sub) for key, sub in data["spaces"]})
    if kind == "Box":
        shape, dtype = tuple(data["shape"]), np.dtype(data["dtype"])
        for bound in ("low", "high"):
            if len(data[bound]) not in (1, math.prod(shape)):
                raise ValueError(f"{len(data[bound])} values of {bound} for shape {shape}")
            if not all(isinstance(text, str) for text in (data["dtype"], *data[bound])):
                raise ValueError(f"dtype and {bound} must be texts, got {data['dtype']!r} and {data[bound]!r}")
        low, high = (np.resize(np.array(data[bound]).astype(dtype), shape) for bound in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(data["n"], start=data["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(data["nvec"], start=data.get("start"))  # files of earlier versions have no start
    if kind == "MultiBinary":
        return spaces.MultiBinary(data["n"])
    raise ValueError(f"unknown type {kind!r}")


def named_arrays(parts: Parts) -> Iterator[tuple[str, np.ndarray]]:
    """List the arrays of a dataset under the names that files use: dict entries as ``name/key``."""
    for name in ARRAYS:
        yield from ((f"{name}/{key}" if key else name, array) for key, array in entries(getattr(parts, name)).items())


def is_taken(path: Path) -> bool:
    """Say whether a path holds something else than an empty folder."""
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))


def write_folder(
    path: Path, fill: Callable[[Allocate], Parts], source: str, origin: dict[str, Any] | None, replace: bool = False
) -> None:
    """
    Write a dataset folder.

    :param path: the folder; must not exist or be empty, except with ``replace``
    :param fill: gets an ``Allocate`` for memory-mapped arrays in the folder, returns all arrays; arrays from elsewhere are
        copied
    :param source: names the data in messages
    :param origin: sources of the folder (see :func:`read_index`)
    :param replace: whether the folder at ``path`` is replaced
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=path.parent))
    files: dict[str, str] = {}
    arrays: dict[str, np.memmap] = {}

    def allocate(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        files[name] = f"{len(files)}-{name.split('/')[0]}.npy"
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        free = shutil.disk_usage(partial).free
        if size > free:  # writing to a mapped file on a full disk would kill the process
            raise OSError(f"{name} needs {size / 1e9:.1f} GB in {path.parent}, where {free / 1e9:.1f} GB are free")
        arrays[name] = np.lib.format.open_memmap(partial / files[name], "w+", dtype, shape)
        return arrays[name]

    try:
        parts = fill(allocate)
        for name, array in named_arrays(parts):
            if array is not arrays.get(name):
                target = allocate(name, array.shape, array.dtype)
                for rows in row_slices(array):
                    target[rows] = array[rows]
            arrays.pop(name).flush()
        index: dict[str, Any] = {"format": FORMAT, "version": VERSION, "source": source, "origin": origin}
        index |= {name: space_to_json(getattr(parts, name)) for name in SPACES}
        index["arrays"] = {name: files[name] for name, _ in named_arrays(parts)}
        (partial / INDEX).write_text(json.dumps(index, indent=1))
        if replace and path.exists():
            os.rename(path, partial / "replaced")
        os.rename(partial, path)  # fails if the folder is there and not empty
        shutil.rmtree(path / "replaced", ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read_index(path: Path) -> dict[str, Any] | None:
    """
    Read dataset.json in a folder; None if the folder is not a finished dataset folder.

    :raises ValueError: if the file was written by ``OfflineDataset.save`` and lacks an entry, or has another version
    """
    try:
        index = json.loads((path / INDEX).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        return None
    if index.get("version", VERSION) != VERSION:
        raise ValueError(f"{path} has dataset format {index['version']}, this version of sb3_flow reads {VERSION}")
    for key in ("version", "origin", *SPACES, "arrays"):
        if key not in index:
            raise ValueError(f"{path / INDEX} lacks '{key}'")
        if key != "version" and not isinstance(index[key], dict) and (key, index[key]) != ("origin", None):
            raise ValueError(f"{path / INDEX}: '{key}' must be an object, got {index[key]!r}")
    return index


def open_folder(
    path: Path, observation_space: spaces.Space[Any] | None = None, action_space: spaces.Space[Any] | None = None
) -> Parts:
    """
    Open a folder memory-mapped and read-only, and check it as any source, block by block.

    :param path: a folder that :func:`write_folder` made
    :param observation_space: replaces the recorded space
    :param action_space: replaces the recorded space
    :raises FileNotFoundError: if there is no such folder
    :raises ValueError: if it is not a complete dataset folder, or holds data that cannot be trained on
    """
    if not path.is_dir():
        raise FileNotFoundError(f"no dataset folder at {path}")
    index = read_index(path)
    if index is None:
        raise ValueError(
            f"{path} is not a folder written by OfflineDataset.save (it has no complete {INDEX}), and holds no .npz file"
        )
    return checked(_mapped(path, index), observation_space, action_space, in_place=False)


def _mapped(path: Path, index: dict[str, Any]) -> Parts:
    """Map the arrays of a folder into memory, unchecked, and make its spaces."""
    arrays: dict[str, Any] = {}
    for name, file in index["arrays"].items():
        if not isinstance(file, str) or Path(file).name != file or not (path / file).is_file():
            raise ValueError(f"{path / INDEX}: {name}: {file!r} is no file of the folder")
        try:
            with reading(path / file, ".npy"):
                array = np.lib.format.open_memmap(path / file, mode="r")
        except (ValueError, SyntaxError, OverflowError) as error:
            raise ValueError(f"{path / file} is not a complete .npy file (truncated or corrupt): {error}") from error
        first, _, key = name.partition("/")
        if key and isinstance(arrays.setdefault(first, {}), dict):
            arrays[first][key] = array
        elif key or first in arrays:
            raise ValueError(f"{path / INDEX}: {first} is given as one array and as several")
        else:
            arrays[first] = array
    if missing := [name for name in ARRAYS if name not in arrays]:
        raise ValueError(f"{path / INDEX} names no file for {missing}")
    if unknown := [name for name in arrays if name not in ARRAYS]:
        raise ValueError(f"{path / INDEX} names unknown arrays {unknown}")
    found: dict[str, Any] = {}
    for name in SPACES:
        try:
            found[name] = space_from_json(index[name])
        except Exception as error:  # Gymnasium raises errors of several types
            raise ValueError(f"{path / INDEX}: {name} is no space that was saved: {error!r}") from error
    return Parts(**arrays, **found)


def convert(path: Path, fill: Callable[[Allocate], Parts], source: str, origin: dict[str, Any]) -> Parts:
    """
    Open the folder if it is a finished conversion of the same origin, else make it.

    :param path: the folder
    :param fill: as for :func:`write_folder`
    :param source: names the data in messages
    :param origin: location, files with sizes and times, spaces; they are equal for equal conversions
    :raises ValueError: if the folder holds something else
    """
    index = read_index(path)
    if index is None:
        if is_taken(path):
            raise ValueError(f"mmap_dir {path} exists and is not a dataset folder: choose a new folder")
    elif index["origin"] == origin:
        return open_folder(path)
    elif not index["origin"] or index["origin"].get("location") != origin["location"]:
        raise ValueError(f"mmap_dir {path} holds another dataset, {index.get('source')}: choose a new folder")
    try:
        write_folder(path, fill, source, origin, replace=index is not None)
    except OSError:
        index = read_index(path)  # another process may have finished the same conversion meanwhile
        if index is None or index["origin"] != origin:
            raise
        return open_folder(path)
    return _mapped(path, json.loads((path / INDEX).read_text()))  # the data were checked when they were written
