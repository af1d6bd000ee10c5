"""
Summaries of the scores of several runs with their uncertainty, as R. Agarwal et al., "Deep RL at the edge of the statistical
precipice" (arXiv 2108.13264), recommend.
"""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from sb3_flow.common.checks import check_minimum

AT_ONCE = 1_000
"""Resamples that are in memory together."""

Statistic = Callable[..., np.ndarray]
"""``statistic(values, axis=...)``, such as ``interquartile_mean``, ``np.mean`` or ``np.median``."""


class Estimate(NamedTuple):
    """
    A statistic and its confidence interval.

    :param value: the statistic of the scores
    :param low: lower end of the confidence interval
    :param high: upper end
    """

    value: float
    low: float
    high: float


def interquartile_mean(scores: ArrayLike, axis: int | None = None) -> np.ndarray:
    """
    Average the middle half: a quarter of the scores (rounded down) is left out at either end. With fewer than 4 scores the
    result is their mean.

    :param scores: of any shape
    :param axis: over which to average, None for all scores together
    :return: of the shape of ``scores`` without ``axis``
    """
    values = np.asarray(scores, dtype=np.float64)
    if axis is None:
        values, axis = values.ravel(), 0
    cut = values.shape[axis] // 4
    middle = np.arange(cut, values.shape[axis] - cut)
    mean: np.ndarray = np.sort(values, axis=axis).take(middle, axis=axis).mean(axis=axis)
    return mean


def bootstrap_interval(
    scores: ArrayLike, statistic: Statistic = interquartile_mean, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Estimate:
    """
    Compute a statistic of all scores together and its stratified bootstrap percentile interval: the runs of each task are
    drawn again with replacement, the tasks stay as they are. The interval tells how far the statistic may move if the same
    tasks were run with other seeds. With few runs (3 to 5) bootstrap intervals are too narrow.

    :param scores: a score of each run, shape ``(n_runs,)``, or of each run on each task, shape ``(n_runs, n_tasks)``
    :param statistic: ``interquartile_mean``, ``np.mean``, ...
    :param level: share of the resamples that the interval covers
    :param resamples: number of resamples
    :param seed: of the resampling
    :raises ValueError: if there are fewer than 2 runs, or scores that are not finite
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim not in (1, 2) or len(values) < 2 or values.size == 0:
        raise ValueError(f"`scores` must have shape (n_runs,) or (n_runs, n_tasks) with 2 runs or more, not {values.shape}.")
    if not np.isfinite(values).all():
        raise ValueError("`scores` must be finite, but some are NaN or infinite: were runs cut short?")
    _check_level(level)
    check_minimum(1, resamples=resamples)
    values = values.reshape(len(values), -1)
    generator = np.random.default_rng(seed)
    found: list[np.ndarray] = []
    for start in range(0, resamples, AT_ONCE):
        runs = generator.integers(len(values), size=(min(AT_ONCE, resamples - start), *values.shape))
        drawn = values[runs, np.arange(values.shape[1])]
        found.append(statistic(drawn.reshape(len(drawn), -1), axis=1))
    low, high = np.quantile(np.concatenate(found), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(statistic(values.ravel(), axis=0)), float(low), float(high))


def success_interval(share: float, n_episodes: int, level: float = 0.95) -> Estimate:
    """
    Compute Wilson's interval of a success rate: where the rate of very many episodes of the same policy may lie.

    :param share: of the episodes that succeeded, from 0 to 1
    :param n_episodes: how many episodes there were
    :param level: share of such intervals that contain the rate of very many episodes
    :raises ValueError: if an argument is out of its range
    """
    check_minimum(1, n_episodes=n_episodes)
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"`share` must be from 0 to 1, but {share} was given.")
    _check_level(level)
    z, n = NormalDist().inv_cdf((1 + level) / 2), n_episodes
    centre, half = share + z**2 / (2 * n), z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    low, high = (centre - half) / (1 + z**2 / n), (centre + half) / (1 + z**2 / n)
    return Estimate(float(share), max(0.0, low), min(1.0, high))


def _check_level(level: float) -> None:
    if not 0.0 < level < 1.0:
        raise ValueError(f"`level` must be between 0 and 1, but {level} was given.")
