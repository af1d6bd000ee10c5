"""Histograms of importance ratios."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sb3_flow.plotting.figures import COLOURS, GRAY, finish, new_figure, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def importance_ratios(
    source: Any,
    clip_range: float | None = None,
    clip_range_high: float | None = None,
    title: str | None = None,
    path: str | Path | None = None,
) -> "Figure":
    """
    Draw a histogram of the importance ratios pi(a|s) / mu(a|s) in a model's last rollout. The present policy is pi, mu is the
    policy that acted: after an update the histogram shows how far the policy has moved and how much the clipping left behind.
    For GSPO it shows the ratios of episodes.

    :param source: a model of ``PPO``, ``MaskablePPO``, ``RecurrentPPO``, ``MaskableRecurrentPPO``, ``GRPO``, ``GSPO`` or
        ``AsyncPPO`` after ``learn``, or log-ratios, shape ``(n,)``
    :param clip_range: epsilon of the surrogate, drawn as 1 - epsilon and 1 + epsilon; by default the model's
    :param clip_range_high: epsilon of the upper side, if it differs
    :param title: of the figure
    :param path: save it there, too
    :return: the figure
    :raises TypeError: for other kinds of models
    :raises ValueError: if there are no ratios, or some are not finite
    """
    unit = "action"
    if hasattr(source, "rollout_buffer"):
        if not hasattr(source, "log_importance_ratios"):
            raise TypeError(f"`source` must be an on-policy algorithm of sb3_flow, but a {type(source).__name__} was given.")
        log_ratios, episodes = source.log_importance_ratios()
        if source.policy_loss in ("gspo", "gspo_token"):
            unit = "episode"
            _, numbers = np.unique(episodes, return_inverse=True)
            log_ratios = np.bincount(numbers, log_ratios) / np.bincount(numbers)
        # "decoupled" clips the ratio to another policy
        if clip_range is None and source.policy_loss != "decoupled":
            ranges = source._clip_ranges()
            clip_range, clip_range_high = ranges["clip_range"], ranges["clip_range_high"]
    else:
        log_ratios = np.asarray(source, dtype=np.float64).ravel()
    if not len(log_ratios) or not np.isfinite(log_ratios).all():
        raise ValueError(f"`source` must be a model or finite log-ratios, but {len(log_ratios)} log-ratios were given.")
    figure = new_figure(6, 3.6)
    axis = plain(figure.add_subplot())
    ratios = np.exp(log_ratios.clip(-50, 50))  # further away there is nothing to see, and no float32
    edges = [] if clip_range is None else [1 - clip_range, 1 + (clip_range if clip_range_high is None else clip_range_high)]
    shown = [edge for edge in edges if edge > 0]
    low, high = (pick([*shown, 0.999, 1.001, pick(ratios)]) for pick in (np.min, np.max))
    wide = low < 0.25 or high > 4
    bins = np.geomspace(low / 1.1, 1.1 * high, 62) if wide else np.linspace(low, high, 62)
    counts, _, _ = axis.hist(ratios, bins=list(bins), color=COLOURS[0])
    axis.set(xlabel=f"importance ratio of an {unit}", ylabel=f"{unit}s")
    axis.set(xscale="log" if wide else "linear", yscale="log" if np.max(counts) > 50 else "linear")
    text = f"{len(ratios)} {unit}s: mean {ratios.mean():.3f}, largest {ratios.max():.3g}"
    if edges:
        for edge in edges:
            axis.axvline(edge, color=COLOURS[1], linestyle="--", linewidth=1.2)
        outside = np.mean((ratios < edges[0]) | (ratios > edges[1]))
        text += f"; {100 * outside:.1f} % outside [{edges[0]:.3g}, {edges[1]:.3g}] (dashed)"
    figure.supxlabel(text, fontsize=8, color=GRAY)
    if title:
        axis.set_title(title)
    return finish(figure, path)
