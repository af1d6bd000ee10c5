"""
Pictures of training: learning curves from folders of runs, and histograms of importance ratios.

Each function returns a Matplotlib ``Figure`` (``figure.savefig("file.png")``; notebooks show it). Matplotlib comes with the
extra ``plots``. Pictures of flows are in :mod:`sb3_flow.common.visualisation`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sb3_flow.common.checks import check_choice
from sb3_flow.common.evaluate import Estimate, bootstrap_interval
from sb3_flow.common.on_policy import PolicyGradient
from sb3_flow.common.runs import QUANTITIES, SOURCES, Run, read_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Paths = str | Path | Sequence[str | Path]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's: told apart by colour-blind readers; line styles differ as well."""
STYLES = ("-", "--", "-.", ":")
GRAY = "0.45"
RESAMPLES = 2_000
LABELS = {"return": "return", "success": "success rate", "length": "episode length (steps)"}


def new_figure(width: float, height: float) -> "Figure":
    """
    :param width: in inches
    :param height: in inches
    :return: an empty figure that no window or backend knows of
    :raises ImportError: without matplotlib
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Pictures need matplotlib: pip install 'sb3-flow[plots]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def finish(figure: "Figure", path: str | Path | None) -> "Figure":
    """:return: the figure, saved if there is a path"""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    return figure


def plain(axis: Any) -> None:
    """Frame on two sides only, and a light grid."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="0.9", linewidth=0.8)
    axis.set_axisbelow(True)


# ------------------------------------------------------------------ learning curves


def learning_curves(
    runs: Paths | Mapping[str, Paths],
    quantity: str = "return",
    source: str = "auto",
    window: int = 100,
    title: str | None = None,
    path: str | Path | None = None,
) -> "Figure":
    """
    Learning curves with 95 % bands. Several runs of a curve (seeds) are summed up by their interquartile mean and its
    bootstrap interval over the runs; of a single run the band is that of the mean over the episodes of a point.

    A folder of a run is what SB3 and the zoo write: ``evaluations.npz`` of an ``EvalCallback`` or the ``*monitor.csv`` of
    ``Monitor``. Where one ``EvalCallback`` evaluated an offline phase and the online phase after it, the latter is drawn
    behind the former. The dataset's own mean return is a horizontal line with its 95 % interval as a band.

    :param runs: a folder; several folders, the seeds of one curve; or either by name for several curves
    :param quantity: ``"return"``, ``"success"`` or ``"length"`` of episodes
    :param source: ``"evaluations"``, ``"monitor"``, or ``"auto"``: evaluations if all folders have them
    :param window: training episodes that a point of a ``"monitor"`` curve is the mean of (fewer, if the runs are short)
    :param title: of the figure
    :param path: save it there, too
    :return: the figure
    :raises ValueError: if a folder lacks the file or the quantity
    """
    check_choice(QUANTITIES, quantity=quantity)
    check_choice(SOURCES, source=source)
    figure = new_figure(7, 4.2)
    groups: dict[str, Paths] = dict(runs) if isinstance(runs, Mapping) else {"": runs}
    if not groups:
        raise ValueError("`runs` is empty, but at least one folder was expected.")
    folders = {name: [own] if isinstance(own, str | Path) else list(own) for name, own in groups.items()}
    curves, source, window = read_runs(folders, quantity, source, window)

    axis = figure.add_subplot()
    plain(axis)
    for i, (name, own) in enumerate(curves.items()):
        steps, estimates = _summary(own)
        count = f"{len(own)} runs"
        label = name if len(own) == 1 else f"{name} ({count})" if name else count
        colour, style = COLOURS[i % len(COLOURS)], STYLES[i % len(STYLES)]
        marker = "o" if len(steps) <= 25 else None
        axis.plot(steps, [one.value for one in estimates], color=colour, linestyle=style, marker=marker, ms=4, label=label)
        axis.fill_between(
            steps, [one.low for one in estimates], [one.high for one in estimates], color=colour, alpha=0.2, linewidth=0
        )
    every = [run for own in curves.values() for run in own]
    known = _draw_behaviour(axis, curves) if quantity == "return" else False
    _label_steps(axis, every)
    axis.set_ylabel(LABELS[quantity])
    if quantity == "success":
        axis.set_ylim(-0.03, 1.03)
    if title:
        axis.set_title(title)
    if known or any(label for label in curves) or len(curves) > 1:
        axis.legend(frameon=False)
    several = any(len(own) > 1 for own in curves.values())
    episodes = (
        f"a point is the mean of {window} training episodes"
        if source == "monitor"
        else f"{every[0].episodes.shape[1]} episodes a point"
    )
    episodes += "; dataset: mean and normal 95 % interval" if known else ""
    how = "interquartile mean over runs" if several else "mean over episodes"
    figure.supxlabel(f"{how}, band: 95 % bootstrap interval; {episodes}", fontsize=8, color=GRAY)
    return finish(figure, path)


def _draw_behaviour(axis: Any, curves: Mapping[str, list[Run]]) -> bool:
    """:return: whether the return of a dataset is known; each is drawn once"""
    first: dict[tuple[tuple[float, ...], str], int] = {}  # number of the first curve with it
    for number, own in enumerate(curves.values()):
        for run in own:
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
    """:return: steps, and the estimate at each"""
    if len(runs) == 1:
        steps, scores, statistic = runs[0].steps, runs[0].episodes, {"statistic": np.mean}
    else:
        steps = np.unique(np.concatenate([run.steps for run in runs]))
        # where all runs are: none is continued beyond its end
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


# ---------------------------------------------------------------- importance ratios


def log_importance_ratios(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """
    How far the policy has moved from the one that collected the last rollout.

    :param model: ``PPO``, ``MaskablePPO``, ``RecurrentPPO``, ``GRPO``, ``GSPO`` or ``AsyncPPO`` after ``learn``
    :return: log pi(a|s) - log mu(a|s) of every action that was learned from, shape ``(n,)``, and the number of its episode
    :raises TypeError: if it is another kind of model
    :raises ValueError: if the model has no rollout
    """
    if not isinstance(model, PolicyGradient):
        raise TypeError(f"An on-policy algorithm of sb3_flow was expected as `model`, but a {type(model).__name__} was given.")
    buffer = model.rollout_buffer
    if not buffer.full:
        raise ValueError("`model` has no rollout, which is not saved with it: call `learn` first.")
    training = model.policy.training
    present = model._look_again()[1]
    model.policy.set_training_mode(training)
    starts = buffer.episode_starts if buffer.is_recurrent else buffer.swap_and_flatten(buffer.episode_starts)
    starts = starts.astype(bool).ravel()
    starts[:: buffer.buffer_size] = True  # a row of `n_steps` for each environment
    rows = slice(None) if buffer.rows is None else buffer.rows
    return (present - buffer.log_probs.ravel())[rows], np.cumsum(starts)[rows]


def importance_ratios(
    source: Any,
    clip_range: float | None = None,
    clip_range_high: float | None = None,
    title: str | None = None,
    path: str | Path | None = None,
) -> "Figure":
    """
    Histogram of the importance ratios pi(a|s) / mu(a|s) of the present policy to the one that acted, of a model's last
    rollout: after an update it shows how far the policy has moved and what the clipping left behind. For GSPO it shows the
    ratios of episodes.

    :param source: a model (see :func:`log_importance_ratios`), or log-ratios, shape ``(n,)``
    :param clip_range: epsilon of the surrogate, drawn as 1 - epsilon and 1 + epsilon; by default the model's
    :param clip_range_high: epsilon of the upper side, if it differs
    :param title: of the figure
    :param path: save it there, too
    :return: the figure
    :raises ValueError: if there are no ratios, or some are not finite
    """
    what = "action"
    if hasattr(source, "rollout_buffer"):
        log_ratios, episodes = log_importance_ratios(source)
        if source.policy_loss in ("gspo", "gspo_token"):
            what = "episode"
            _, numbers = np.unique(episodes, return_inverse=True)
            log_ratios = np.bincount(numbers, log_ratios) / np.bincount(numbers)
        # decoupled: clipped is the ratio to another policy
        if clip_range is None and source.policy_loss != "decoupled":
            ranges = source._clip_ranges()
            clip_range, clip_range_high = ranges["clip_range"], ranges["clip_range_high"]
    else:
        log_ratios = np.asarray(source, dtype=np.float64).ravel()
    if not len(log_ratios) or not np.isfinite(log_ratios).all():
        raise ValueError(f"`source` must be a model or finite log-ratios, but {len(log_ratios)} log-ratios were given.")
    figure = new_figure(6, 3.6)
    axis = figure.add_subplot()
    plain(axis)
    ratios = np.exp(log_ratios.clip(-50, 50))  # further away there is nothing to see, and no float32
    edges = [] if clip_range is None else [1 - clip_range, 1 + (clip_range if clip_range_high is None else clip_range_high)]
    shown = [one for one in edges if one > 0]
    low, high = (pick([*shown, 0.999, 1.001, pick(ratios)]) for pick in (np.min, np.max))
    wide = low < 0.25 or high > 4
    bins = np.geomspace(low / 1.1, 1.1 * high, 62) if wide else np.linspace(low, high, 62)
    counts, _, _ = axis.hist(ratios, bins=list(bins), color=COLOURS[0])
    axis.set(xlabel=f"importance ratio of an {what}", ylabel=f"{what}s")
    axis.set(xscale="log" if wide else "linear", yscale="log" if np.max(counts) > 50 else "linear")
    text = f"{len(ratios)} {what}s: mean {ratios.mean():.3f}, largest {ratios.max():.3g}"
    if edges:
        for edge in edges:
            axis.axvline(edge, color=COLOURS[1], linestyle="--", linewidth=1.2)
        outside = np.mean((ratios < edges[0]) | (ratios > edges[1]))
        text += f"; {100 * outside:.1f} % outside [{edges[0]:.3g}, {edges[1]:.3g}] (dashed)"
    figure.supxlabel(text, fontsize=8, color=GRAY)
    if title:
        axis.set_title(title)
    return finish(figure, path)
