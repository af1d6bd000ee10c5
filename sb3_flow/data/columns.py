"""
Arrays read in order, a block of rows at a time.

Every dataset source (file or arrays in memory) is described by columns, and one pass over a column puts its rows where they
belong. So loading needs little more memory than the arrays that result, and the result may lie in memory or on disk.
"""

import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

BLOCK_ROWS = 65_536
BLOCK_BYTES = 1 << 24

# allocate(name, shape, dtype) gives the writeable array that an assembled column goes into
Allocate = Callable[[str, tuple[int, ...], Any], np.ndarray]


def in_memory(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Allocate an array of a dataset that is kept in memory."""
    return np.empty(shape, dtype)


def block_rows(shape: tuple[int, ...], dtype: Any) -> int:
    """Count the rows of an array to handle at once: few enough that temporaries stay small, for images too."""
    row_bytes = max(1, math.prod(shape[1:]) * np.dtype(dtype).itemsize)
    return max(1, min(BLOCK_ROWS, BLOCK_BYTES // int(row_bytes)))


def row_slices(array: np.ndarray) -> Iterator[slice]:
    """Yield slices of rows that cover an array, in order."""
    rows = block_rows(array.shape, array.dtype)
    for first in range(0, len(array), rows):
        yield slice(first, min(first + rows, len(array)))


def expect_random_reads(array: np.ndarray) -> None:
    """
    Let the system read no more than the pages that are asked for, of an array in a mapped file. Otherwise each row that is
    drawn brings many neighbours, which push out other rows where the file is larger than memory.
    """
    mapped: Any = getattr(array, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)


@dataclass
class Parts:
    """The data that a source yields: the arrays of ``OfflineDataset`` and, where the source records them, the spaces."""

    observations: np.ndarray | dict[str, np.ndarray]
    actions: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    trajectory_ends: np.ndarray
    final_observations: np.ndarray | dict[str, np.ndarray]
    observation_space: spaces.Space[Any] | None = None
    action_space: spaces.Space[Any] | None = None


@dataclass(frozen=True)
class Column:
    """
    An array with a row per time step, which is read block by block.

    :param name: as in messages, e.g. ``observations/camera``
    :param shape: (rows, ...)
    :param dtype: as it is read
    :param read: ``read(n)`` starts a pass over the rows, in blocks of n rows (the last block shorter)
    :param array: the same rows, where they are in memory already
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[int], Iterator[np.ndarray]]
    array: np.ndarray | None = None

    def blocks(self, rows: int | None = None) -> Iterator[np.ndarray]:
        return self.read(rows or block_rows(self.shape, self.dtype))

    def flat(self) -> "Column":
        """Give the column the shape (rows,), from (rows,) or (rows, 1)."""
        if len(self.shape) == 1:
            return self
        if self.shape[1:] != (1,):
            raise ValueError(f"{self.name} must have shape (N,) or (N, 1), got {self.shape}")

        def read(rows: int) -> Iterator[np.ndarray]:
            return (block.reshape(-1) for block in self.read(rows))

        return Column(self.name, self.shape[:1], self.dtype, read, None if self.array is None else self.array.reshape(-1))


def lockstep(*columns: Column) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield blocks of the same rows of several columns."""
    rows = min(block_rows(column.shape, column.dtype) for column in columns)
    return zip(*(column.blocks(rows) for column in columns), strict=True)


def array_column(name: str, values: Any) -> Column:
    """
    Make a column of an array in memory, or of anything that NumPy turns into an array.

    :raises ValueError: if NumPy cannot make an array of the values, or some are masked: the mask would be lost
    """
    for part in values if isinstance(values, list | tuple) else (values,):
        if isinstance(part, np.ma.MaskedArray) and np.ma.is_masked(part):
            raise ValueError(
                f"{name} is a masked array with {np.ma.getmaskarray(part).sum()} masked values: leave out their rows, or fill "
                "them (numpy.ma.MaskedArray.filled)"
            )
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # of ragged lists, tensors on a GPU or with gradients
        raise ValueError(f"{name} cannot be made an array: {error}") from error
    if array.ndim == 0:
        raise ValueError(f"{name} must be an array with one row per transition, got {type(values).__name__}")

    def read(rows: int) -> Iterator[np.ndarray]:
        return (array[first : first + rows] for first in range(0, len(array), rows))

    return Column(name, array.shape, array.dtype, read, array)


def flags(column: Column) -> np.ndarray:
    """
    Read all rows of a column of flags.

    :param column: bool, or numbers that are 0 or 1
    :return: (rows,) bool, a fresh array
    """
    column = column.flat()
    if column.dtype.kind not in "biuf":
        raise ValueError(f"{column.name} must hold bool or 0/1, got dtype {column.dtype}")
    out = np.empty(column.shape, bool)
    first = 0
    for block in column.blocks():
        wrong = np.flatnonzero((block != 0) & (block != 1))
        if len(wrong):
            raise ValueError(f"{column.name} must hold bool or 0/1, got {block[wrong[0]]} in row {first + wrong[0]}")
        out[first : first + len(block)] = block
        first += len(block)
    return out


def check_numbers(name: str, dtype: np.dtype) -> None:
    """Refuse an array that does not hold real numbers (but objects, strings, complex numbers) with a ValueError."""
    if dtype.kind not in "biuf":
        raise ValueError(f"{name} must hold real numbers, got dtype {dtype}")


def observation_dtype(column: Column, space: spaces.Space[Any] | None = None) -> np.dtype:
    """
    Choose the type that observations are stored as: integers as they are (unless the space has floats), others as float32.

    :raises ValueError: for objects, strings, complex numbers
    """
    check_numbers(column.name, column.dtype)
    to_float = isinstance(space, spaces.Box) and space.dtype is not None and np.dtype(space.dtype).kind == "f"
    if column.dtype == np.uint8 or (column.dtype.kind in "iu" and not to_float):
        return column.dtype.newbyteorder("=")
    return np.dtype(np.float32)


def put(target: np.ndarray, rows: slice, values: np.ndarray, name: str) -> None:
    """
    Write some rows of an array: all of them, and of the array's kind. NumPy would repeat a single row and round fractions.

    :param target: float32, or integers as :func:`observation_dtype` says
    :param rows: the rows to write
    :param values: their new values
    :param name: of the values in messages, with the place in the file as its format calls it
    """
    expected = (rows.stop - rows.start, *target.shape[1:])
    if values.shape != expected:
        raise ValueError(f"{name} has shape {values.shape}, {expected} expected")
    check_numbers(name, values.dtype)
    if target.dtype.kind != "f" and values.dtype != target.dtype:
        raise ValueError(f"{name} has dtype {values.dtype}, {target.dtype} expected, as before")
    with np.errstate(over="ignore"):  # a float64 too large for float32 becomes inf, which validation reports
        target[rows] = values


def gather(
    column: Column, dtype: Any, allocate: Allocate, keep: np.ndarray | None = None, final_rows: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """
    Put a column where it belongs, in one pass. An array in memory that is right already is not copied.

    :param dtype: of the results
    :param allocate: where the kept rows go
    :param keep: (rows,) bool, None for all rows
    :param final_rows: increasing rows whose values go into an array of their own, None for none
    :return: the kept rows and the values at ``final_rows``
    """
    check_numbers(column.name, column.dtype)
    if final_rows is None:
        final_rows = np.empty(0, np.int64)
    if column.array is not None and keep is None and column.dtype == dtype and allocate is in_memory:
        return column.array, column.array[final_rows]
    n_rows = column.shape[0] if keep is None else int(np.count_nonzero(keep))
    kept = allocate(column.name, (n_rows, *column.shape[1:]), dtype)
    finals = np.empty((len(final_rows), *column.shape[1:]), dtype)
    first = filled = 0
    with np.errstate(over="ignore"):  # a float64 too large for float32 becomes inf, which validation reports
        for block in column.blocks():
            here = slice(*np.searchsorted(final_rows, [first, first + len(block)]))
            finals[here] = block[final_rows[here] - first]
            rows = block if keep is None else block[keep[first : first + len(block)]]
            kept[filled : filled + len(rows)] = rows
            first += len(block)
            filled += len(rows)
    return kept, finals


def check_lengths(columns: Mapping[str, Column], where: str = "") -> None:
    """
    Check that all columns have the same number of rows, and not 0.

    :param where: begins the message, with a colon and a space
    """
    reference = next(iter(columns.values()))
    for column in columns.values():
        if column.shape[0] != reference.shape[0]:
            raise ValueError(
                f"{where}{column.name} has {column.shape[0]} rows but {reference.name} has {reference.shape[0]}: "
                "every array needs a row per transition"
            )
    if reference.shape[0] == 0:
        raise ValueError(f"{where}the dataset is empty: {reference.name} has 0 rows")


def under(columns: Mapping[str, Column], name: str) -> dict[str, Column]:
    """
    Find the columns called ``name`` (key "") or ``name/<key>``.

    :raises ValueError: if there are both
    """
    found = {key.removeprefix(name + "/"): column for key, column in columns.items() if key.startswith(name + "/")}
    if found and name in columns:
        raise ValueError(f"{name} is given as one array and as {name}/{next(iter(found))}: which is meant?")
    return found or ({"": columns[name]} if name in columns else {})


def nest(arrays: dict[str, Any]) -> Any:
    """Undo ``entries``: one array if its key is empty, else the dict."""
    return arrays[""] if "" in arrays else arrays


def entries(value: Any) -> Mapping[str, Any]:
    """Give the arrays of a dict or the spaces of a Dict space by key; anything else has the key ""."""
    return value.spaces if isinstance(value, spaces.Dict) else value if isinstance(value, dict) else {"": value}
