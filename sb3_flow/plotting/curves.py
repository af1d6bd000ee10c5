"""Learning curves from folders of runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from sb3_flow.common.checks import check_choice
from sb3_flow.common.statistics import Estimate, bootstrap_interval
from sb3_flow.plotting.figures import COLOURS, GRAY, STYLES, finish, new_figure, plain
from sb3_flow.plotting.runs import Quantity, Run, Source, read_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Paths = str | Path | Sequence[str | Path]

RESAMPLES = 2_000
LABELS = {"return": "return", "success": "success rate", "length": "episode length (steps)"}


def learning_curves(
    runs: Paths | Mapping[str, Paths],
    quantity: Quantity = "return",
    source: Source = "auto",
    window: int = 100,
    title: str | None = None,
    path: str | Path | None = None,
) -> "Figure":
    """
    Draw learning curves with 95 % bands. Several runs of a curve (seeds) are summed up by their interquartile mean and its
    bootstrap interval over the runs; with a single run the band belongs to the mean over the episodes of a point.

    A run's folder holds the files that SB3 and the zoo write: ``evaluations.npz`` of an ``EvalCallback`` or the
    ``*monitor.csv`` of ``Monitor``. Where an ``EvalCallback`` evaluated an offline phase and the online phase after it, the
    online phase is drawn behind the offline phase. The dataset's own mean return is a horizontal line with its 95 % interval
    as a band.

    :param runs: a folder; several folders, the seeds of a single curve; or either by name for several curves
    :param quantity: ``"return"``, ``"success"`` or ``"length"`` of episodes
    :param source: ``"evaluations"``, ``"monitor"``, or ``"auto"``: evaluations if all folders have them
    :param window: training episodes over which a point of a ``"monitor"`` curve is the mean (fewer, if the runs are short)
    :param title: of the figure
    :param path: save it there, too
    :return: the figure
    :raises ValueError: if a folder lacks the file or the quantity
    """
    check_choice(get_args(Quantity), quantity=quantity)
    check_choice(get_args(Source), source=source)
    figure = new_figure(7, 4.2)
    groups: dict[str, Paths] = dict(runs) if isinstance(runs, Mapping) else {"": runs}
    if not groups:
        raise ValueError("`runs` is empty, but at least one folder was expected.")
    folders = {name: [seeds] if isinstance(seeds, str | Path) else list(seeds) for name, seeds in groups.items()}
    curves, source, window = read_runs(folders, quantity, source, window)

    axis = plain(figure.add_subplot())
    for i, (name, seeds) in enumerate(curves.items()):
        steps, estimates = _summary(seeds)
        count = f"{len(seeds)} runs"
        label = name if len(seeds) == 1 else f"{name} ({count})" if name else count
        colour, style = COLOURS[i % len(COLOURS)], STYLES[i % len(STYLES)]
        marker = "o" if len(steps) <= 25 else None
        middle, low, high = np.reshape(estimates, (-1, 3)).T
        axis.plot(steps, middle, color=colour, linestyle=style, marker=marker, ms=4, label=label)
        axis.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
    every = [run for seeds in curves.values() for run in seeds]
    known = quantity == "return" and _draw_behaviour(axis, curves)
    _label_steps(axis, every)
    axis.set_ylabel(LABELS[quantity])
    if quantity == "success":
        axis.set_ylim(-0.03, 1.03)
    if title:
        axis.set_title(title)
    if known or any(curves) or len(curves) > 1:
        axis.legend(frameon=False)
    several = any(len(seeds) > 1 for seeds in curves.values())
    episodes = f"{every[0].episodes.shape[1]} episodes a point"
    if source == "monitor":
        episodes = f"a point is the mean of {window} training episodes"
    episodes += "; dataset: mean and normal 95 % interval" if known else ""
    how = "interquartile mean over runs" if several else "mean over episodes"
    figure.supxlabel(f"{how}, band: 95 % bootstrap interval; {episodes}", fontsize=8, color=GRAY)
    return finish(figure, path)


def _draw_behaviour(axis: Any, curves: Mapping[str, list[Run]]) -> bool:
    """Draw each known return of a dataset once, and say whether there is any."""
    first: dict[tuple[tuple[float, ...], str], int] = {}  # number of the first curve with it
    for number, seeds in enumerate(curves.values()):
        for run in seeds:
            if run.behaviour is not None:
                first.setdefault((run.behaviour, run.caveat), number)
    for ((value, low, high), caveat), number in first.items():
        colour = GRAY if len(first) == 1 else COLOURS[number % len(COLOURS)]
        name = "dataset's own return" + (f" ({list(curves)[number]})" if len(first) > 1 else "")
        label = name + (", not of the task's episodes" if caveat else "")
        axis.axhline(value, color=colour, linestyle=(0, (1, 2)), linewidth=1.2, label=label)
        axis.axhspan(low, high, color=colour, alpha=0.15, linewidth=0)
    return bool(first)


def _summary(runs: list[Run]) -> tuple[np.ndarray, list[Estimate]]:
    """Compute the steps of a curve, and the estimate at each step."""
    if len(runs) == 1:
        steps, scores, statistic = runs[0].steps, runs[0].episodes, {"statistic": np.mean}
    else:
        steps = np.unique(np.concatenate([run.steps for run in runs]))
        # the steps that all runs cover: no run is continued beyond its end
        steps = steps[(steps >= max(run.steps[0] for run in runs)) & (steps <= min(run.steps[-1] for run in runs))]
        scores = np.stack([np.interp(steps, run.steps, run.episodes.mean(axis=1)) for run in runs], axis=1)
        statistic = {}
    if scores.shape[1] == 1:
        return steps, [Estimate(*[float(score)] * 3) for (score,) in scores]
    return steps, [bootstrap_interval(score, resamples=RESAMPLES, **statistic) for score in scores]  # type: ignore[arg-type]


def _label_steps(axis: Any, runs: list[Run]) -> None:
    from matplotlib.ticker import EngFormatter

    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    switches = {run.offline_until for run in runs}
    if None in switches:
        axis.set_xlabel("time steps")
    elif switches == {0}:
        axis.set_xlabel("environment steps")
    elif all(run.offline_until == run.steps[-1] for run in runs):
        axis.set_xlabel("gradient steps (offline)")
    else:
        axis.set_xlabel("gradient steps (offline); right of the line environment steps (online)")
        for switch in switches - {0}:
            axis.axvline(switch, color=GRAY, linewidth=0.8)
