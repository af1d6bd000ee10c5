"""Columns of .npz and HDF5 files. Nothing but headers is read before a pass over a column; nothing is unpickled."""

import errno
import importlib
import json
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sb3_flow.data.columns import Column, check_lengths

UNDECODABLE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, UnicodeDecodeError, json.JSONDecodeError)
DAMAGED = (*UNDECODABLE, LookupError, RuntimeError, OSError, TypeError, AttributeError, AssertionError)
"""Errors that zipfile, h5py and Minari raise on damaged files."""


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Turn the errors of a library on a damaged file into a ValueError that names the file."""
    try:
        yield
    except DAMAGED as error:
        if isinstance(error, FileNotFoundError | PermissionError) or getattr(error, "errno", None) == errno.ENOSPC:
            raise
        raise ValueError(f"{path} is not a complete {kind} file (truncated or corrupt): {error}") from error


def _npy_header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read shape, Fortran order and dtype of the .npy data that starts here."""
    try:
        first = np.lib.format.read_magic(stream) == (1, 0)
        read_header = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = read_header(stream)
        if min(shape, default=0) < 0 or dtype.subdtype is not None:
            raise ValueError(f"shape {shape}, dtype {dtype}")
        return shape, fortran_order, dtype
    except (ValueError, SyntaxError, tokenize.TokenError) as error:
        raise EOFError(f"bad array header: {error}") from error


def _npz_blocks(path: Path, member: str, rows: int) -> Iterator[np.ndarray]:
    with reading(path, ".npz"), zipfile.ZipFile(path) as archive, archive.open(member) as stream:
        shape, fortran_order, dtype = _npy_header(stream)
        if fortran_order:  # rows are scattered over such a member, so there is no way around reading all of it
            stream.seek(0)
            array = np.lib.format.read_array(stream, allow_pickle=False)
            yield from (array[first : first + rows] for first in range(0, len(array), rows))
            return
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        for first in range(0, shape[0], rows):
            count = min(rows, shape[0] - first)
            data = stream.read(count * row_bytes)
            if len(data) != count * row_bytes:
                raise EOFError(f"{member} ends before row {shape[0]}")
            yield np.frombuffer(data, dtype).reshape(count, *shape[1:])


def npz_columns(path: Path) -> dict[str, Column]:
    """List the arrays of an .npz file by name; nothing but the headers is read here."""
    columns: dict[str, Column] = {}
    with reading(path, ".npz"), zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            member = entry.filename
            if not member.endswith(".npy"):
                continue
            name = member.removesuffix(".npy")
            if name in columns:
                raise ValueError(f"{path} holds two arrays of the name {name}")
            with archive.open(member) as stream:
                shape, _, dtype = _npy_header(stream)
                if not dtype.hasobject and entry.file_size - stream.tell() != math.prod(shape) * dtype.itemsize:
                    raise EOFError(f"{member} has another size than its header says, {shape} of {dtype}")
            columns[name] = Column(name, shape, dtype, partial(_npz_blocks, path, member))
    return columns


def _hdf5_blocks(path: Path, name: str, rows: int) -> Iterator[np.ndarray]:
    h5py = importlib.import_module("h5py")
    with reading(path, "HDF5"), h5py.File(path, "r") as file:
        for first in range(0, file[name].shape[0], rows):
            yield file[name][first : first + rows]


def hdf5_columns(path: Path) -> dict[str, Column]:
    """List the top level of an HDF5 file by name; a group is an object without rows."""
    h5py = importlib.import_module("h5py")
    columns = {}
    with reading(path, "HDF5"), h5py.File(path, "r") as file:
        for name, item in file.items():
            shape, dtype = (item.shape, item.dtype) if isinstance(item, h5py.Dataset) else ((), np.dtype(object))
            columns[name] = Column(name, shape or (), dtype, partial(_hdf5_blocks, path, name))
    return columns


def pick(columns: dict[str, Column], names: list[str], path: Path, optional: tuple[str, ...] = ()) -> dict[str, Column]:
    """
    Choose the columns of some names; a name of observations also stands for all of ``name/key``.

    :param columns: of the file at ``path``
    :param names: columns that the file must have
    :param optional: columns that the file may have
    :raises ValueError: if a column is missing or has no rows, or columns differ in length
    """

    def named(key: str) -> str:
        first = key.split("/")[0]
        return first if first.endswith("observations") else key

    picked = {key: column for key, column in columns.items() if named(key) in (*names, *optional)}
    found = {named(key) for key in picked}
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{path} lacks the arrays {missing}; it has {sorted(columns)}")
    for name, column in picked.items():
        if not column.shape:
            raise ValueError(f"{path}: {name} must be an array with one row per transition, got a group or a single value")
    check_lengths(picked, f"{path}: ")
    return picked
