"""Rows of a CSV that several commands may add to, and that a killed command leaves whole."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sb3_flow.common.checkpoints import write_atomically
from sb3_flow.zoo.bench.results import as_csv


def read(file: Path) -> list[dict[str, str]]:
    """:return: the rows; none, if the file is not there"""
    if not file.exists():
        return []
    with open(file, newline="") as lines:
        return list(csv.DictReader(lines))


def add(file: Path, columns: Sequence[str], row: Mapping[str, Any]) -> None:
    def write(path: Path) -> None:  # which has the file to itself
        path.write_text(as_csv(columns, [*read(file), row]))

    write_atomically(file, "csv", write)
