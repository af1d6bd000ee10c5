"""Datasets in folders of .npz files: their arrays one after another, and files that take turns in memory."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sb3_flow.data.columns import Column, Parts, observation_dtype, under


def npz_files(folder: Path) -> list[Path]:
    """List the .npz files of a folder by name, without those for validation (``-val.npz``), as the reference (QC) does."""
    return [path for path in sorted(folder.glob("*.npz")) if not path.name.endswith("-val.npz")]


def missing_numbers(files: Sequence[Path]) -> list[str]:
    """List the numbers that are left out of names which end in numbers (``name-000.npz``, ``name-002.npz``: 001)."""
    found = [re.fullmatch(r".*?(\d+)", path.stem) for path in files]
    texts = [match[1] for match in found if match is not None]
    if len(texts) < len(files):
        return []
    numbers = sorted(map(int, texts))
    left_out = sorted(set(range(numbers[0], numbers[-1])) - set(numbers)) if numbers[-1] - numbers[0] < 10 * len(files) else []
    return [str(number).zfill(len(texts[0])) for number in left_out]


def _chain(columns: Sequence[Column], rows: int) -> Iterator[np.ndarray]:
    for column in columns:
        yield from column.read(rows)


def joined(files: Sequence[Path], of_files: Sequence[dict[str, Column]]) -> dict[str, Column]:
    """
    Put the columns of files one after another.

    :param files: their places, for messages
    :param of_files: the columns of each
    :raises ValueError: naming two files that hold other arrays, or arrays of another dtype or another shape per row
    """
    first = of_files[0]
    for path, columns in zip(files, of_files, strict=True):
        if columns.keys() != first.keys():
            raise ValueError(f"{path} holds the arrays {sorted(columns)}, {files[0]} holds {sorted(first)}")
        for name, column in columns.items():
            given, wanted = ((each.dtype, each.shape[1:]) for each in (column, first[name]))
            if given != wanted:
                raise ValueError(
                    f"{name} has dtype {given[0]} and shape {given[1]} per row in {path}, but {wanted[0]} and {wanted[1]} in "
                    f"{files[0]}: the files are of different datasets"
                )
    if len(of_files) == 1:
        return first
    together = {}
    for name, column in first.items():
        parts = [columns[name] for columns in of_files]
        shape = (sum(part.shape[0] for part in parts), *column.shape[1:])
        together[name] = Column(name, shape, column.dtype, partial(_chain, parts))
    return together


def inner_borders(of_files: Sequence[dict[str, Column]]) -> np.ndarray:
    """Number the last row of each file but the last, among the rows of all: a file ends a trajectory, as in the reference."""
    lengths = [next(iter(columns.values())).shape[0] for columns in of_files]
    return np.cumsum(lengths, dtype=np.int64)[:-1] - 1


def bytes_in_memory(columns: dict[str, Column]) -> int:
    """Count the bytes of a file's rows as a dataset keeps them in memory (but for final observations, which are few)."""
    observations = under(columns, "observations").values()
    row_bytes = sum(math.prod(column.shape[1:]) * observation_dtype(column).itemsize for column in observations)
    row_bytes += 4 * math.prod(columns["actions"].shape[1:]) + 4 + 2  # rewards, and two arrays of flags
    return columns["actions"].shape[0] * row_bytes


def stamp(path: Path) -> tuple[int, int]:
    """Give the size of a file and when it changed last."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class Rotation:
    """
    Files that take turns in memory: the rows of a few files for some gradient steps, then the rows of the next few.

    :param files: all files, in order
    :param stamps: their sizes and times when the dataset was opened
    :param files_per_turn: how many are in memory
    :param steps_per_file: gradient steps that a turn lasts, per file
    :param read: reads the rows of some files
    :param turn: the number of the present turn
    :param changes: what was applied to the dataset of the first turn, and is to be applied to those of all turns
    """

    files: list[Path]
    stamps: list[tuple[int, int]]
    files_per_turn: int
    steps_per_file: int
    read: Callable[[list[Path]], Parts]
    turn: int = 0
    changes: tuple[Callable[[Any], Any], ...] = ()

    def __str__(self) -> str:
        """Say which files are in memory."""
        return f"files {self._present.start + 1} to {self._present.stop} of {len(self.files)}"

    @property
    def _present(self) -> slice:
        first = self.turn * self.files_per_turn
        return slice(first, min(first + self.files_per_turn, len(self.files)))

    def after(self, gradient_steps: int) -> "Rotation | None":
        """Give the turn that is due after so many gradient steps, None if it is the present one."""
        turn = gradient_steps // self.steps_per_file % len(self.files) // self.files_per_turn
        return None if turn == self.turn else replace(self, turn=turn)

    def is_turn_of(self, other: "Rotation | None") -> bool:
        """Say whether two turns belong to the same rotation."""
        return other is not None and replace(other, turn=self.turn) == self

    def rows(self) -> Parts:
        """
        Read the rows of the present turn.

        :raises FileNotFoundError: if a file is gone
        :raises ValueError: if a file is damaged, or has changed since the dataset was opened
        """
        self._check_unchanged()
        parts = self.read(self.files[self._present])
        self._check_unchanged()
        return parts

    def _check_unchanged(self) -> None:
        for path, before in zip(self.files[self._present], self.stamps[self._present], strict=True):
            if stamp(path) != before:
                raise ValueError(f"{path} has changed since the dataset was opened: load the dataset again")
