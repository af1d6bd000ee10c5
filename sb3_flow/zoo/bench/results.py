"""The results of ``bench`` and ``sweep``: a CSV with a row for each run, and the table over them."""

import csv
import dataclasses
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sb3_flow.common.checkpoints import write_atomically
from sb3_flow.common.statistics import bootstrap_interval, interquartile_mean

Row = dict[str, str]

COLUMNS = ("task", "algorithm", "seed", "offline", "online", "steps", "scores", "rows", "minutes", "version", "plan")
"""
``offline`` and ``online`` are the scores at the ends of the phases, ``steps`` and ``scores`` those of all evaluations,
``rows`` is the size of the dataset, and ``plan`` all that decided the numbers besides task, algorithm and seed. A run without
an offline phase has its score in ``online``.
"""
KEY = COLUMNS[:3]
PHASES = ("offline", "online")
RESAMPLES = 2_000
SCALED = "0 is the worst and 1 the best run of a task"


@dataclass(frozen=True)
class Run:
    """A run and all that decides its numbers; task, algorithm and seed, which no two rows of a table share, come first."""

    task: str
    algorithm: str
    seed: int

    @property
    def key(self) -> tuple[str, str, int]:
        """Task, algorithm and seed."""
        return self.task, self.algorithm, self.seed

    @property
    def decided(self) -> str:
        """Everything but the key, as text, by which a finished run is known again."""
        rest = {name: value for name, value in dataclasses.asdict(self).items() if name not in KEY}
        return json.dumps(rest, sort_keys=True, default=str)


AnyRun = TypeVar("AnyRun", bound=Run)


def read_rows(file: Path, columns: Sequence[str] = COLUMNS) -> list[Row]:
    """
    Read the rows of finished runs.

    :param file: the CSV; no rows, if it is not there
    :param columns: that it must have
    :raises ValueError: if it is another kind of file
    """
    if not file.exists():
        return []
    with open(file, newline="") as lines:
        reader = csv.DictReader(lines)
        if tuple(reader.fieldnames or ()) != tuple(columns):
            raise ValueError(f"{file} is no result of the bench: its columns are {reader.fieldnames}, not {list(columns)}.")
        return list(reader)


def add_row(file: Path, row: dict[str, Any], columns: Sequence[str] = COLUMNS, key: Sequence[str] = KEY) -> None:
    """
    Add a row to the CSV; a row of the same key is replaced. The file is whole at any time, and several processes may add rows.

    :param file: the CSV
    :param row: by column
    :param columns: of the CSV
    :param key: columns that no two rows share
    """

    def write(path: Path) -> None:  # which has the file to itself
        others = [found for found in read_rows(file, columns) if any(found[name] != str(row[name]) for name in key)]
        path.write_text(as_csv(columns, [*others, row]))

    write_atomically(file, "csv", write)


def as_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Write rows as the text of a CSV."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_text(file: Path, text: str) -> None:
    """Write a file that is whole at any time."""

    def write(path: str) -> None:
        Path(path).write_text(text)

    write_atomically(file, file.suffix[1:], write)


def key_of(row: Row) -> tuple[str, str, int]:
    """Task, algorithm and seed of a row."""
    return row["task"], row["algorithm"], int(row["seed"])


def unfinished(todo: Sequence[AnyRun], rows: Sequence[Row]) -> list[AnyRun]:
    """
    List the runs that have no row yet.

    :raises ValueError: if a row of the same name was made with other settings
    """
    found = {key_of(row): row["plan"] for row in rows}
    for plan in todo:
        if found.get(plan.key, plan.decided) != plan.decided:
            raise ValueError(
                f"The results have a row of {plan.algorithm} on {plan.task}, seed {plan.seed}, which was made with other "
                f"settings ({found[plan.key]} there, {plan.decided} now): give another --out."
            )
    return [plan for plan in todo if plan.key not in found]


def scores_of(rows: Sequence[Row], phase: str) -> dict[str, dict[str, dict[int, float]]]:
    """
    Sort the scores at the end of a phase.

    :param phase: ``"offline"`` or ``"online"``
    :return: by algorithm, task and seed
    """
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        if row[phase] != "":
            found.setdefault(row["algorithm"], {}).setdefault(row["task"], {})[int(row["seed"])] = float(row[phase])
    return found


def are_shares(rows: Sequence[Row]) -> bool:
    """Say whether all scores lie between 0 and 1, as shares of episodes do."""
    return all(0 <= float(score) <= 1 for row in rows for score in row["scores"].split())


def scale_needed(rows: Sequence[Row]) -> bool:
    """Say whether tasks can only be compared on a scale, since there are several and their scores are returns."""
    return len({row["task"] for row in rows}) > 1 and not are_shares(rows)


def comparable_scores(rows: Sequence[Row], phase: str) -> dict[str, dict[str, dict[int, float]]]:
    """
    Sort the scores at the end of a phase, as ``scores_of``, for statements over all tasks: returns of several tasks are
    scaled, so that in each task the worst run of all algorithms and phases has 0 and the best 1 (0.5, if all are equal).

    :param phase: ``"offline"`` or ``"online"``
    """
    found = scores_of(rows, phase)
    if not scale_needed(rows):
        return found
    ends: dict[str, list[float]] = {}
    for row in rows:
        ends.setdefault(row["task"], []).extend(float(row[name]) for name in PHASES if row[name] != "")

    def scaled(task: str, score: float) -> float:
        low, high = min(ends[task]), max(ends[task])
        return (score - low) / (high - low) if high > low else 0.5

    return {
        algorithm: {task: {seed: scaled(task, score) for seed, score in by_seed.items()} for task, by_seed in by_task.items()}
        for algorithm, by_task in found.items()
    }


def common_scores(by_task: dict[str, dict[int, float]], tasks: Sequence[str]) -> np.ndarray:
    """
    Take the scores of the seeds that all tasks have.

    :return: shape ``(n_seeds, n_tasks)``; no rows, if a task is missing
    """
    seeds = set.intersection(*(set(by_task.get(task, {})) for task in tasks)) if tasks else set()
    return np.array([[by_task[task][seed] for task in tasks] for seed in sorted(seeds)]).reshape(len(seeds), len(tasks))


def table(rows: Sequence[Row]) -> str:
    """
    Write the table: a line for each algorithm, with its score on each task (mean over seeds) and over all tasks together
    (interquartile mean over runs with its stratified 95 % bootstrap interval, which needs two seeds; see
    ``comparable_scores``).

    :param rows: of the CSV
    """
    tasks = sorted({row["task"] for row in rows})
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    hours = sum(float(row["minutes"] or 0) for row in rows) / 60
    raw = {phase: scores_of(rows, phase) for phase in PHASES}
    phases = PHASES if raw["offline"] else ("online",)
    ends_of = "the end of the offline phase -> of the online phase" if raw["offline"] else "the end"
    scale = f"; all tasks: {SCALED}" if scale_needed(rows) else ""
    lines = [f"{len(rows)} runs, {hours:.1f} hours together; score at {ends_of} (a number in brackets: seeds){scale}"]
    together = {phase: comparable_scores(rows, phase) for phase in phases}
    headings = [f"all tasks, {phase}" for phase in phases] if raw["offline"] else ["all tasks"]
    cells = [["", *(short_name(task) for task in tasks), *headings]]
    for algorithm in algorithms:
        cell = [algorithm]
        for task in tasks:
            ends = [list(raw[phase].get(algorithm, {}).get(task, {}).values()) for phase in phases]
            count = max(map(len, ends))
            cell.append(f"{' -> '.join(map(_mean, ends))} ({count})" if count else "")
        for phase in phases:
            cell.append(_together(common_scores(together[phase].get(algorithm, {}), tasks)))
        cells.append(cell)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * width for width in widths]
    for cell in (cells[0], rule, *cells[1:]):
        lines.append("| " + " | ".join(text.ljust(width) for text, width in zip(cell, widths, strict=True)) + " |")
    return "\n".join(lines)


def short_name(task: str) -> str:
    """Shorten an environment id for headings."""
    return task.removesuffix("-v0").replace("-singletask", "").replace("-navigate", "").replace("-play", "")


def _mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):.2f}" if values else "-"


def _together(scores: np.ndarray) -> str:
    if len(scores) == 0:
        return "-"
    if len(scores) == 1:  # no interval
        return f"{interquartile_mean(scores):.2f}"
    value, low, high = bootstrap_interval(scores, resamples=RESAMPLES)
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"
