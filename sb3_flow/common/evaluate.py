"""
Evaluation that can be trusted: scores of several runs summed up with their uncertainty, and evaluations that say how they came
about.

The aggregates are those of R. Agarwal et al., "Deep RL at the edge of the statistical precipice" (arXiv 2108.13264).
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ConvertCallback, EvalCallback
from stable_baselines3.common.type_aliases import MaybeCallback

from sb3_flow.common.checkpoints import write_atomically
from sb3_flow.common.checks import check_minimum
from sb3_flow.data.returns import BehaviourReturn

AT_ONCE = 1_000
"""Resamples that are in memory together."""

NOTED = ("modes", "deterministic", "offline", "behaviour_return", "behaviour_caveat")
"""What ``evaluations.npz`` has besides SB3's arrays."""
NO_BEHAVIOUR = BehaviourReturn(np.nan, np.nan, np.nan, 0, "")

Statistic = Callable[..., np.ndarray]
"""``statistic(values, axis=...)``, such as ``interquartile_mean``, ``np.mean`` or ``np.median``."""


class Estimate(NamedTuple):
    """
    :param value: of the scores themselves
    :param low: lower end of the confidence interval
    :param high: upper end
    """

    value: float
    low: float
    high: float


def interquartile_mean(scores: ArrayLike, axis: int | None = None) -> np.ndarray:
    """
    Mean of the middle half: a quarter of the scores (rounded down) is left out at either end. With fewer than 4 scores it is
    their mean.

    :param scores: of any shape
    :param axis: over which to average, None for all scores together
    :return: of the shape of ``scores`` without ``axis``
    """
    values = np.asarray(scores, dtype=np.float64)
    if axis is None:
        values, axis = values.ravel(), 0
    cut = values.shape[axis] // 4
    middle = np.arange(cut, values.shape[axis] - cut)
    return np.sort(values, axis=axis).take(middle, axis=axis).mean(axis=axis)


def bootstrap_interval(
    scores: ArrayLike,
    statistic: Statistic = interquartile_mean,
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Estimate:
    """
    A statistic of all scores together and its stratified bootstrap percentile interval: the runs of each task are drawn again
    with replacement, the tasks stay as they are. It tells how far the statistic may move if the same tasks were run with other
    seeds. With few runs (3 to 5) bootstrap intervals are too narrow.

    :param scores: one score of each run, shape ``(n_runs,)``, or of each run on each task, shape ``(n_runs, n_tasks)``
    :param statistic: ``interquartile_mean``, ``np.mean``, ...
    :param level: share of the resamples that the interval covers
    :param resamples: number of resamples
    :param seed: of the resampling
    :return: the statistic and the ends of its interval
    :raises ValueError: if there are fewer than 2 runs, or scores that are not finite
    """
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim not in (1, 2) or len(values) < 2 or values.size == 0:
        raise ValueError(
            f"`scores` must have the shape (n_runs,) or (n_runs, n_tasks) with 2 runs or more, not {values.shape}."
        )
    if not np.isfinite(values).all():
        raise ValueError("`scores` must be finite, but some are NaN or infinite: were runs cut short?")
    if not 0.0 < level < 1.0:
        raise ValueError(f"`level` must be between 0 and 1, but {level} was given.")
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


def as_list(callback: MaybeCallback) -> list[BaseCallback]:
    """:return: what SB3 takes as ``callback``, as a list"""
    if callback is None:
        return []
    if isinstance(callback, list):
        return callback
    return [callback if isinstance(callback, BaseCallback) else ConvertCallback(callback)]


def find_evaluations(callbacks: Sequence[object]) -> list[EvalCallback]:
    """:return: every ``EvalCallback``, also those that other callbacks trigger"""
    found = []
    for one in callbacks:
        if isinstance(one, EvalCallback):
            found.append(one)
        if isinstance(one, BaseCallback):
            inner = one.callbacks if isinstance(one, CallbackList) else []
            found += find_evaluations([*inner, getattr(one, "callback", None), getattr(one, "callback_on_new_best", None)])
    return found


class NoteEvaluationModes(BaseCallback):
    """
    Makes SB3's ``EvalCallback`` say how the policy acted. ``OfflineToOnlineAlgorithm`` adds it by itself, after the callbacks
    it watches.

    Printed with each evaluation (if the ``EvalCallback`` is verbose), and added to its ``evaluations.npz``, one entry for each
    evaluation beside SB3's ``timesteps``:

    - ``modes``: the policy's ``acting_mode`` (``"zero"``, ``"best_of_n"``, ...)
    - ``deterministic``: the ``EvalCallback``'s
    - ``offline``: whether ``timesteps`` counts gradient steps of an offline phase, not environment steps
    - ``behaviour_return``: in an offline phase the dataset's own mean return and the ends of its 95 % interval, else NaN;
      ``behaviour_caveat``: why that is not the return of the task's episodes, "" if it may be

    :param evaluations: the callbacks to watch
    """

    def __init__(self, evaluations: list[EvalCallback]):
        super().__init__()
        self.evaluations = evaluations
        self._seen = [one.n_calls for one in evaluations]

    def _on_step(self) -> bool:
        for i, one in enumerate(self.evaluations):
            if one.n_calls != self._seen[i]:
                self._seen[i] = one.n_calls
                if one.eval_freq > 0 and one.n_calls % one.eval_freq == 0:
                    self._note(one)
        return True

    def _note(self, evaluation: EvalCallback) -> None:
        model: Any = self.model
        mode, offline = model.policy.acting_mode, model.is_offline
        behaviour = model.replay_buffer.offline_dataset.behaviour_return if offline else NO_BEHAVIOUR
        if evaluation.verbose >= 1:
            print(f"Evaluation mode: {mode}, deterministic={evaluation.deterministic}")
            if offline:
                print(f"Dataset's own mean return: {behaviour}")
        if evaluation.log_path is None:
            return
        # kept with the lists of the evaluation itself, which may go on in another phase
        notes: list[tuple[Any, ...]] = vars(evaluation).setdefault("evaluations_notes", [])
        unseen = len(evaluation.evaluations_timesteps) - len(notes) - 1  # evaluations of another algorithm
        notes += [("unknown", evaluation.deterministic, False, NO_BEHAVIOUR[:3], "")] * unseen
        notes.append((mode, evaluation.deterministic, offline, behaviour[:3], behaviour.caveat))
        file = Path(f"{evaluation.log_path}.npz")
        with np.load(file) as stored:
            arrays = dict(stored)
        arrays |= dict(zip(NOTED, map(np.array, zip(*notes, strict=True)), strict=True))

        def write(path: Path) -> None:
            with open(path, "wb") as target:
                np.savez(target, **arrays)

        write_atomically(file, "npz", write)
