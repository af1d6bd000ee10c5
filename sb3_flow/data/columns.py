"""
Arrays read in order, a block of rows at a time.

Every dataset source (file or arrays in memory) is described by columns, and one pass over a column puts its rows where they
belong. So loading needs little more memory than the arrays that result, and the result may lie in memory or on disk.
"""

import errno
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

BLOCK_ROWS = 65_536
BLOCK_BYTES = 1 << 24

# allocate(name, shape, dtype) gives the writeable array that an assembled column goes into
Allocate = Callable[[str, tuple[int, ...], Any], np.ndarray]


def in_memory(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The ``Allocate`` of a dataset that is kept in memory."""
    return np.empty(shape, dtype)


def block_rows(shape: tuple[int, ...], dtype: Any) -> int:
    """How many rows of an array are handled at once: few enough that temporaries stay small, for images too."""
    row_bytes = max(1, int(np.prod(shape[1:], dtype=np.int64)) * np.dtype(dtype).itemsize)
    return max(1, min(BLOCK_ROWS, BLOCK_BYTES // row_bytes))


def row_slices(array: np.ndarray) -> Iterator[slice]:
    """Slices of rows that cover an array, in order."""
    rows = block_rows(array.shape, array.dtype)
    for first in range(0, len(array), rows):
        yield slice(first, min(first + rows, len(array)))


@dataclass
class Parts:
    """What a source yields: the arrays of ``OfflineDataset`` and, where the source records them, the spaces."""

    observations: np.ndarray | dict[str, np.ndarray]
    actions: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    trajectory_ends: np.ndarray
    final_observations: np.ndarray | dict[str, np.ndarray]
    observation_space: spaces.Space | None = None
    action_space: spaces.Space | None = None


@dataclass(frozen=True)
class Column:
    """
    One array with a row per time step.

    :param name: as in messages, e.g. ``observations/camera``
    :param shape: (rows, ...)
    :param dtype: as it is read
    :param read: ``read(n)`` starts a pass over the rows, in blocks of n rows (the last one shorter)
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
        """The column with shape (rows,), from (rows,) or (rows, 1)."""
        if len(self.shape) == 1:
            return self
        if self.shape[1:] != (1,):
            raise ValueError(f"{self.name} must have shape (N,) or (N, 1), got {self.shape}")
        array = None if self.array is None else self.array.reshape(-1)
        return replace(
            self, shape=self.shape[:1], read=lambda rows: (block.reshape(-1) for block in self.read(rows)), array=array
        )


def lockstep(*columns: Column) -> Iterator[tuple[np.ndarray, ...]]:
    """Blocks of the same rows of several columns."""
    rows = min(block_rows(column.shape, column.dtype) for column in columns)
    return zip(*(column.blocks(rows) for column in columns), strict=True)


def array_column(name: str, values: Any) -> Column:
    """A column of an array in memory (or of anything that NumPy makes one of)."""
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} cannot be made an array: {error}") from error
    if array.ndim == 0:
        raise ValueError(f"{name} must be an array with one row per transition, got {type(values).__name__}")

    def read(rows: int) -> Iterator[np.ndarray]:
        return (array[first : first + rows] for first in range(0, len(array), rows))

    return Column(name, array.shape, array.dtype, read, array)


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Turn what the libraries raise on a damaged file into one ValueError that names the file."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, RuntimeError, OSError) as error:
        if isinstance(error, FileNotFoundError | PermissionError) or getattr(error, "errno", None) == errno.ENOSPC:
            raise
        raise ValueError(f"{path} is not a complete {kind} file (truncated or corrupt): {error}") from error


def _npy_header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, Fortran order and dtype of the .npy data that starts here."""
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            return np.lib.format.read_array_header_1_0(stream)
        return np.lib.format.read_array_header_2_0(stream)
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
        row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        for first in range(0, shape[0], rows):
            count = min(rows, shape[0] - first)
            data = stream.read(count * row_bytes)
            if len(data) != count * row_bytes:
                raise EOFError(f"{member} ends before row {shape[0]}")
            yield np.frombuffer(data, dtype).reshape(count, *shape[1:])


def npz_columns(path: Path) -> dict[str, Column]:
    """The arrays of an .npz file that have rows, by name; nothing but the headers is read here."""
    columns = {}
    with reading(path, ".npz"), zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            with archive.open(member) as stream:
                shape, _, dtype = _npy_header(stream)
            name = member.removesuffix(".npy")
            if shape and not dtype.hasobject:  # objects would need unpickling
                columns[name] = Column(
                    name,
                    shape,
                    dtype,
                    lambda rows, member=member: _npz_blocks(path, member, rows),  # type: ignore[misc]
                )
    return columns


def pick(columns: dict[str, Column], names: list[str], path: Path) -> dict[str, Column]:
    """
    :param columns: of the file at ``path``
    :return: those of the names; a name also stands for all of ``name/key``
    :raises ValueError: if one is missing
    """
    picked = {key: column for key, column in columns.items() if key in names or key.split("/")[0] in names}
    found = {key.split("/")[0] for key in picked}
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{path} lacks the arrays {missing}; it has {sorted(columns)}")
    return picked


def flags(column: Column) -> np.ndarray:
    """
    All rows of a column of flags.

    :param column: bool, or numbers that are 0 or 1
    :return: (rows,) bool, a fresh array
    """
    column = column.flat()
    out = np.empty(column.shape, bool)
    first = 0
    for block in column.blocks():
        if block.dtype.kind not in "biuf":
            raise ValueError(f"{column.name} must hold bool or 0/1, got dtype {block.dtype}")
        wrong = np.flatnonzero((block != 0) & (block != 1))
        if len(wrong):
            raise ValueError(f"{column.name} must hold bool or 0/1, got {block[wrong[0]]} in row {first + wrong[0]}")
        out[first : first + len(block)] = block
        first += len(block)
    return out


def _check_numbers(column: Column) -> None:
    if column.dtype.kind not in "biuf":
        raise ValueError(f"{column.name} must hold real numbers, got dtype {column.dtype}")


def observation_dtype(column: Column, space: spaces.Space | None = None) -> np.dtype:
    """
    What observations are stored as: integers as they are (unless the space is one of floats), the rest as float32.

    :raises ValueError: for objects, strings, complex numbers
    """
    _check_numbers(column)
    to_float = isinstance(space, spaces.Box) and space.dtype is not None and np.dtype(space.dtype).kind == "f"
    if column.dtype == np.uint8 or (column.dtype.kind in "iu" and not to_float):
        return column.dtype
    return np.dtype(np.float32)


def gather(
    column: Column,
    dtype: Any,
    allocate: Allocate,
    keep: np.ndarray | None = None,
    final_rows: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """
    Put a column where it belongs, in one pass. An array in memory that is right already is not copied.

    :param column: the column
    :param dtype: of the results
    :param allocate: where the kept rows go
    :param keep: (rows,) bool, None for all rows
    :param final_rows: increasing rows whose values are wanted apart, None for none
    :return: the kept rows and the values at ``final_rows``
    """
    _check_numbers(column)
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


def check_lengths(columns: Mapping[str, Column]) -> None:
    """All columns describe the same rows."""
    reference = next(iter(columns.values()))
    for column in columns.values():
        if column.shape[0] != reference.shape[0]:
            raise ValueError(
                f"{column.name} has {column.shape[0]} rows but {reference.name} has {reference.shape[0]}: "
                "every array needs one row per transition"
            )
    if reference.shape[0] == 0:
        raise ValueError(f"the dataset is empty: {reference.name} has 0 rows")


def under(columns: Mapping[str, Column], name: str) -> dict[str, Column]:
    """The columns called ``name`` (key "") or ``name/<key>``."""
    found = {key.removeprefix(name + "/"): column for key, column in columns.items() if key.startswith(name + "/")}
    return found or ({"": columns[name]} if name in columns else {})


def nest(arrays: dict[str, Any]) -> Any:
    """Undo ``entries``: one array if its key is empty, else the dict."""
    return arrays[""] if "" in arrays else arrays


def entries(value: Any) -> Mapping[str, Any]:
    """The arrays of a dict or the spaces of a Dict space by key; anything else has the key ""."""
    return value.spaces if isinstance(value, spaces.Dict) else value if isinstance(value, dict) else {"": value}


def map_arrays(function: Callable[..., Any], *values: Any) -> Any:
    """
    Apply a function to arrays, or to what has the same key in dicts (also nested ones and Dict spaces).

    :param function: takes one array of each of the values
    :param values: an array or a dict each, all of one structure; None beside dicts is None for every key
    :return: what it returns, in a dict with the first value's keys if that is one
    """
    if not isinstance(values[0], dict | spaces.Dict):
        return function(*values)
    return {key: map_arrays(function, *(value if value is None else value[key] for value in values)) for key in values[0]}


def breaks(columns: Mapping[str, Column]) -> np.ndarray:
    """(rows,) bool: rows whose next observation is not the observation of the row below, and the last row."""
    observations, successors = under(columns, "observations"), under(columns, "next_observations")
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
    return differ.any(axis=tuple(range(1, differ.ndim)))


def _check_successors(column: Column, observations: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """
    Check that ``next_observations`` repeats ``observations`` one row later within trajectories.

    :return: its values at the ends of trajectories
    :raises ValueError: naming the first row where it does not
    """
    if column.shape != observations.shape:
        raise ValueError(f"{column.name} must have the shape of the observations {observations.shape}, got {column.shape}")
    finals = []
    first = 0
    for block in column.blocks():
        block = block.astype(observations.dtype, copy=False)
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
    observation_space: spaces.Space | None = None,
) -> Parts:
    """
    Make the arrays of a dataset from transitions, one per row.

    :param columns: observations, actions, rewards and optionally next_observations (both as one column or as ``name/key``)
    :param terminated: (N,) bool
    :param trajectory_ends: (N,) bool, the last row counts as True
    :param allocate: where the arrays go
    :param observation_space: the space, where known
    :return: all N rows with ``next_observations``; without, the truncated rows are left out
    """
    given_flags = {"terminated": terminated, "trajectory_ends": trajectory_ends}
    if columns["actions"].dtype.kind in "biu":
        raise ValueError(
            f"actions have dtype {columns['actions'].dtype}: flow policies need continuous (float) actions; for discrete "
            "actions use DQN or PPO of Stable-Baselines3 or QR-DQN of sb3-contrib"
        )
    check_lengths({**columns, **{name: array_column(name, array) for name, array in given_flags.items()}})
    ends = trajectory_ends.copy()
    ends[-1] = True
    successors = under(columns, "next_observations")
    keep: np.ndarray | None = None
    final_rows = np.empty(0, np.int64)
    if not successors:
        # Nobody knows what a truncated row led to. Without it, its own observation is what the row above led to.
        keep = terminated | ~ends
        before_dropped = np.append(~keep[1:], False)
        end_rows = np.flatnonzero(keep & (ends | before_dropped))
        final_rows = np.where(ends[end_rows], end_rows, end_rows + 1)
        if not len(end_rows):
            raise ValueError(
                "no transition is left: every trajectory is one truncated row whose next observation is unknown; "
                "pass next_observations"
            )
        ends = (ends | before_dropped)[keep]
        terminated = terminated[keep]
        if keep.all():
            keep = None
    sub_spaces = entries(observation_space)
    observations, finals = {}, {}
    for key, column in under(columns, "observations").items():
        dtype = observation_dtype(column, sub_spaces.get(key))
        observations[key], finals[key] = gather(column, dtype, allocate, keep, final_rows)
    if successors:
        if successors.keys() != observations.keys():
            raise ValueError(f"next_observations has the keys {sorted(successors)}, observations has {sorted(observations)}")
        finals = {key: _check_successors(column, observations[key], ends) for key, column in successors.items()}
    return Parts(
        nest(observations),
        gather(columns["actions"], np.float32, allocate, keep)[0],
        gather(columns["rewards"].flat(), np.float32, allocate, keep)[0],
        terminated,
        ends,
        nest(finals),
        observation_space,
    )
