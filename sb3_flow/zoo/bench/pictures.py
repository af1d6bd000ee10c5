"""Pictures of the bench's results: learning curves and performance profiles."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sb3_flow.common.statistics import Estimate, bootstrap_interval
from sb3_flow.plotting.figures import COLOURS, GRAY, STYLES, finish, new_figure, plain
from sb3_flow.zoo.bench.results import (
    RESAMPLES,
    SCALED,
    Row,
    are_shares,
    common_scores,
    comparable_scores,
    scale_needed,
    scores_of,
    short_name,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_curves(rows: Sequence[Row], path: Path | None, shown: Sequence[str] | None = None) -> "Figure":
    """
    Draw the learning curves of all algorithms, a panel for each task: interquartile mean over seeds, and its 95 % bootstrap
    band.

    :param rows: of the CSV
    :param path: of the picture; None to save none
    :param shown: algorithms to draw in colour, before the others in gray; None for all
    """
    tasks = sorted({row["task"] for row in rows})
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))
    shown = algorithms if shown is None else shown
    algorithms = [*shown, *(name for name in algorithms if name not in shown)]
    shares = are_shares(rows)
    columns = min(3, len(tasks))
    lines = -(-len(tasks) // columns)
    figure = new_figure(4.2 * columns, 3.2 * lines + 0.6)
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    for axis in axes[len(tasks) :]:
        axis.remove()
    for axis, task in zip(axes, tasks, strict=False):
        plain(axis)
        for i, algorithm in enumerate(algorithms):
            runs = [row for row in rows if row["task"] == task and row["algorithm"] == algorithm]
            if not runs:
                continue
            steps = np.array(runs[0]["steps"].split(), dtype=int)
            scores = np.array([row["scores"].split() for row in runs if row["steps"] == runs[0]["steps"]], dtype=float)
            shift = _offline_end(rows, task) - _offline_end(runs, task)  # a run without an offline phase begins online
            middle, low, high = np.reshape([_estimate(column) for column in scores.T], (-1, 3)).T
            if algorithm not in shown:
                axis.plot(steps + shift, middle, color="0.8", linewidth=1, zorder=1, label="others")
                continue
            colour, style = COLOURS[i % len(COLOURS)], STYLES[i % len(STYLES)]
            axis.plot(steps + shift, middle, style, color=colour, marker="o", ms=3, label=algorithm)
            axis.fill_between(steps + shift, low, high, color=colour, alpha=0.15, linewidth=0)
        if _offline_end(rows, task):
            axis.axvline(_offline_end(rows, task), color=GRAY, linewidth=0.8)
        axis.set_title(short_name(task), fontsize=10)
        if shares:
            axis.set_ylim(-0.03, 1.03)
    handles = {label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), frameon=False, loc="outside upper center", ncols=5, fontsize=8)
    offline = any(_offline_end(rows, task) for task in tasks)
    steps_are = "gradient steps offline; right of the line environment steps" if offline else "environment steps"
    figure.supxlabel(steps_are, fontsize=8, color=GRAY)
    figure.supylabel("score", fontsize=8, color=GRAY)
    return finish(figure, path)


def _offline_end(rows: Sequence[Row], task: str) -> int:
    """Find where the online phase begins, in steps of the curves."""
    plans = [json.loads(row["plan"]) for row in rows if row["task"] == task]
    return max((plan["offline_steps"] if plan["offline"] else 0 for plan in plans), default=0)


def _estimate(scores: np.ndarray) -> Estimate:
    if len(scores) == 1:
        return Estimate(*[float(scores[0])] * 3)
    return bootstrap_interval(scores, resamples=RESAMPLES)


def draw_profile(rows: Sequence[Row], path: Path, phase: str) -> "Figure":
    """
    Draw the performance profile: for each threshold the share of runs (of all tasks) whose score exceeds the threshold, with
    its stratified 95 % bootstrap band (Agarwal et al., arXiv 2108.13264). See ``comparable_scores`` for returns of several
    tasks.

    :param rows: of the CSV
    :param path: of the picture
    :param phase: ``"offline"`` or ``"online"``, whose end is drawn
    """
    scores = comparable_scores(rows, phase)
    tasks = sorted({row["task"] for row in rows})
    figure = new_figure(6, 4)
    axis = plain(figure.add_subplot())
    values = [value for by_task in scores.values() for by_seed in by_task.values() for value in by_seed.values()]
    bounds = [0.0, 1.0] if are_shares(rows) else []
    thresholds = np.linspace(min([*bounds, *values]), max([*bounds, *values]), 101)
    for i, (algorithm, by_task) in enumerate(scores.items()):
        matrix = common_scores(by_task, tasks)
        if len(matrix) == 0:
            continue
        above = (matrix.ravel()[:, None] > thresholds).mean(axis=0)
        colour, style = COLOURS[i % len(COLOURS)], STYLES[i % len(STYLES)]
        axis.plot(thresholds, above, style, color=colour, label=f"{algorithm} ({len(matrix)} seeds)")
        if len(matrix) > 1:
            low, high = _profile_band(matrix, thresholds)
            axis.fill_between(thresholds, low, high, color=colour, alpha=0.15, linewidth=0)
    axis.set(xlabel=f"score ({SCALED})" if scale_needed(rows) else "score", ylabel="share of runs above it")
    end = f"end of the {phase} phase" if scores_of(rows, "offline") else "end of training"
    axis.set_title(f"{end}, {len(tasks)} tasks")
    axis.set_ylim(-0.03, 1.03)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8)
    return finish(figure, path)


def _profile_band(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Draw the seeds of each task again with replacement; shape ``(2, n_thresholds)``."""
    drawn = np.random.default_rng(0).integers(len(scores), size=(RESAMPLES, *scores.shape))
    resampled = scores[drawn, np.arange(scores.shape[1])].reshape(RESAMPLES, -1)
    above = np.stack([(resampled > threshold).mean(axis=1) for threshold in thresholds])
    band: np.ndarray = np.quantile(above, [0.025, 0.975], axis=1)
    return band
