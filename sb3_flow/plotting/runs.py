"""Reading of the files that SB3 and the zoo leave in the folder of a run: ``evaluations.npz`` and ``*monitor.csv``."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

Quantity = Literal["return", "success", "length"]
Source = Literal["auto", "evaluations", "monitor"]
IN_EVALUATIONS = {"return": "results", "success": "successes", "length": "ep_lengths"}
IN_MONITOR = {"return": "r", "success": "is_success", "length": "l"}
MONITOR_POINTS = 100
"""Points of a curve of training episodes."""


@dataclass
class Run:
    """
    The points of a run's curve.

    :param steps: of the points, shape ``(T,)``
    :param episodes: the episodes of each point, which is their mean, shape ``(T, n)``
    :param offline_until: steps of the offline phase, which come first; 0 without an offline phase, None if it is not known
    :param behaviour: mean return of the dataset and the ends of its interval, if known
    :param caveat: why ``behaviour`` is not the return of the task's episodes, "" if it may be
    """

    steps: np.ndarray
    episodes: np.ndarray
    offline_until: int | None = 0
    behaviour: tuple[float, ...] | None = None
    caveat: str = ""


def read_runs(
    folders: Mapping[str, Sequence[str | Path]], quantity: Quantity, source: Source, window: int
) -> tuple[dict[str, list[Run]], Source, int]:
    """
    Read the runs of all curves.

    :param folders: by curve
    :param quantity: the numbers of the episodes to read
    :param source: the files to read
    :param window: training episodes of a point, at most
    :return: the runs by curve, the source that was read, and the window that was used
    """
    every = [Path(folder) for seeds in folders.values() for folder in seeds]
    if not every:
        raise ValueError("`runs` names a curve without a folder.")
    if source == "auto":
        source = "evaluations" if all((folder / "evaluations.npz").is_file() for folder in every) else "monitor"
    if source == "evaluations":
        found = {folder: read_evaluations(folder, quantity) for folder in every}
    else:
        logs = {folder: read_monitor(folder, quantity) for folder in every}
        window = max(1, min(window, *(len(values) // 5 for _, values in logs.values())))
        found = {folder: _smoothed(*log, window) for folder, log in logs.items()}
    return {name: [found[Path(folder)] for folder in seeds] for name, seeds in folders.items()}, source, window


def read_evaluations(folder: str | Path, quantity: Quantity = "return") -> Run:
    """
    Read the evaluations of a run.

    :param folder: with the file ``evaluations.npz`` of ``EvalCallback``
    :param quantity: the numbers of the episodes to read
    :return: the run; online steps after an offline phase in the same file are counted on from its end
    :raises ValueError: if the file or the quantity is not there
    """
    file, column = Path(folder) / "evaluations.npz", IN_EVALUATIONS[quantity]
    if not file.is_file():
        raise ValueError(f"`runs`: {folder} has no evaluations.npz (EvalCallback(..., log_path=...) writes it).")
    with np.load(file) as log:
        if column not in log:
            raise ValueError(
                f"`runs`: {file} has no {column!r}: the environment does not put `is_success` into its infos "
                "(for OGBench wrap it in sb3_flow.envs.SuccessInfo)."
            )
        steps, episodes = log["timesteps"].astype(np.int64), log[column].astype(np.float64)
        offline = log["offline"] if "offline" in log else None
        behaviour, caveat = None, ""
        if "behaviour_return" in log and (known := np.isfinite(log["behaviour_return"][:, 0])).any():
            last = np.flatnonzero(known)[-1]
            behaviour, caveat = tuple(log["behaviour_return"][last].tolist()), str(log["behaviour_caveat"][last])
    episodes = episodes.reshape(len(steps), -1)
    if offline is None:
        return Run(steps, episodes, None)
    until = int(steps[offline].max()) if offline.any() else 0
    return Run(np.where(offline, steps, steps + until), episodes, until, behaviour, caveat)


def read_monitor(folder: str | Path, quantity: Quantity = "return") -> tuple[np.ndarray, np.ndarray]:
    """
    Read the training episodes of a run.

    :param folder: with the files of ``Monitor``, a file for each environment
    :param quantity: the numbers of the episodes to read
    :return: environment steps at the ends of the episodes, and the quantity, both of shape ``(n_episodes,)``
    :raises ValueError: if there is no episode, or the quantity is not there
    """
    column = IN_MONITOR[quantity]
    rows: list[tuple[float, int, float]] = []
    for file in sorted(Path(folder).glob("*monitor.csv")):
        with open(file, newline="") as lines:
            start = json.loads(lines.readline().lstrip("#"))["t_start"]
            for row in csv.DictReader(lines):
                if column not in row:
                    raise ValueError(f"`runs`: {file} has no {column!r}: Monitor(env, info_keywords=('is_success',)) logs it.")
                if None not in row.values():  # a line that was cut off
                    value = row[column]
                    number = float(value == "True") if value in ("True", "False") else float(value)
                    rows.append((start + float(row["t"]), int(row["l"]), number))
    if not rows:
        raise ValueError(f"`runs`: {folder} has no evaluations.npz and no *monitor.csv with an episode.")
    rows.sort()
    _, lengths, values = zip(*rows, strict=True)
    return np.cumsum(lengths), np.array(values)


def _smoothed(steps: np.ndarray, values: np.ndarray, window: int) -> Run:
    """Make a curve whose points are means of the last ``window`` episodes."""
    windows = np.lib.stride_tricks.sliding_window_view(values, window)
    chosen = np.unique(np.linspace(0, len(windows) - 1, MONITOR_POINTS).astype(int))
    return Run(steps[chosen + window - 1], windows[chosen])
