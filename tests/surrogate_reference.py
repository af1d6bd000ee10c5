"""
The surrogates of policy gradients once more, in float64 and loops, with their gradients; a table of cases; and the mistakes
that a comparison must notice. Torch's losses, the NumPy functions and the compiled update are tested against this module.
"""

import math
from typing import NamedTuple

import numpy as np

LIMIT = 20.0


class Case(NamedTuple):
    """Rows of a minibatch, and the options of a surrogate."""

    kind: str
    log_probs: np.ndarray
    old: np.ndarray
    advantages: np.ndarray
    below: float = 0.2
    above: float = 0.2
    dual_clip: float = 3.0
    proximal: np.ndarray | None = None
    rho_bar: float = math.inf
    segments: np.ndarray | None = None
    n_segments: int = 0


def _rows(seed, spread=0.4, n=60):
    log_probs, proximal, old, advantages = np.random.default_rng(seed).standard_normal((4, n))
    return {"log_probs": old + spread * log_probs, "proximal": old + spread * proximal, "old": old, "advantages": advantages}


def _rowwise(kind, seed, **options):
    rows = _rows(seed, **({"spread": 1.0} if kind == "dual_clip" else {}))
    return Case(kind, **rows | {"proximal": rows["proximal"] if kind == "decoupled" else None}, **options)


def _in_sequences(kind, seed, **options):
    segments = np.random.default_rng(seed).permutation([0] + [1] * 2 + [2] * 5 + [3] * 12 + [5] * 20 + [6] * 20)
    return Case(kind, **_rows(seed) | {"proximal": None}, segments=segments, n_segments=7, **options)


FAR = np.array([25.0, 3.0, -30.0, 1.0, 30.0, 22.0])
SIGNS = np.array([-1.0, 1.0, 1.0, -1.0, -2.0, 1.0])
CASES = {
    "clip": _rowwise("clip", 0),
    "clip narrow": _rowwise("clip", 1, below=0.02, above=0.02),
    "clip higher": _rowwise("clip", 2, above=0.28),
    "dual clip": _rowwise("dual_clip", 3),
    "dual clip higher": _rowwise("dual_clip", 4, above=0.4, dual_clip=1.5),
    "decoupled": _rowwise("decoupled", 5),
    "decoupled capped": _rowwise("decoupled", 6, above=0.3, rho_bar=1.0),
    "decoupled far": Case("decoupled", FAR, 0 * FAR, SIGNS, proximal=np.array([0.0, 2.0, -1.0, 25.0, 30.0, 0.0])),
    "gspo": _in_sequences("gspo", 7, below=0.05, above=0.05),
    "gspo higher": _in_sequences("gspo", 8, below=0.02, above=0.1),
    "gspo far": Case("gspo", FAR, 0 * FAR, SIGNS, segments=np.array([0, 1, 2, 3, 0, 4]), n_segments=5),
    "gspo token": _in_sequences("gspo_token", 9, below=0.05, above=0.05),
    "gspo token higher": _in_sequences("gspo_token", 10, below=0.02, above=0.1),
    "gspo token far": Case("gspo_token", FAR, 0 * FAR, SIGNS, segments=np.array([0, 1, 2, 3, 0, 4]), n_segments=5),
}
"""Minibatches whose ratios lie on both sides of all bounds; segment 4 of the sequences has no rows."""

WRONG = {
    "maximum": tuple(CASES),
    "gradient of clipped rows": tuple(name for name in CASES if name != "decoupled far"),  # other rows are far larger there
    "one bound for both": ("clip higher", "dual clip higher", "decoupled capped", "gspo higher", "gspo token higher"),
    "no dual clip": ("dual clip", "dual clip higher"),
    "dual clip of good actions": ("dual clip", "dual clip higher"),
    "no weight": ("decoupled", "decoupled capped", "decoupled far"),
    "ratio to the old policy": ("decoupled", "decoupled capped", "decoupled far"),
    "sum over the steps": ("gspo", "gspo higher", "gspo token", "gspo token higher"),
    "mean over the rows": ("gspo", "gspo higher", "gspo token", "gspo token higher"),
    "one advantage for a sequence": ("gspo token", "gspo token higher"),
    "no limit": ("decoupled far", "gspo far", "gspo token far"),
}
"""Mistakes, and the cases in which they matter."""


def _clipped(ratio, advantage, case, wrong):
    """:return: the objective of a row or of a sequence, and its derivative by the ratio"""
    low, high = 1 - case.below, 1 + (case.below if wrong == "one bound for both" else case.above)
    free, bounded = advantage * ratio, advantage * min(max(ratio, low), high)
    objective = max(free, bounded) if wrong == "maximum" else min(free, bounded)
    slope = advantage if objective == free or wrong == "gradient of clipped rows" else 0.0
    dual = case.kind == "dual_clip" and wrong != "no dual clip"
    if dual and (advantage < 0 or wrong == "dual clip of good actions") and objective < case.dual_clip * advantage:
        return case.dual_clip * advantage, 0.0
    return objective, slope


def surrogate(case, wrong=None):
    """
    :param case: one of the cases
    :param wrong: a mistake to make
    :return: losses of the rows, or of the sequences; and the gradient of their mean by the log-probabilities
    """
    limit = math.inf if wrong == "no limit" else LIMIT
    gradient = np.zeros(len(case.log_probs))
    if case.segments is None:
        losses = np.zeros(len(gradient))
        for i, (log_prob, old, advantage) in enumerate(zip(case.log_probs, case.old, case.advantages, strict=True)):
            near, weight = old, 1.0
            if case.kind == "decoupled":
                near = old if wrong == "ratio to the old policy" else case.proximal[i]
                weight = min(case.rho_bar, math.exp(min(case.proximal[i] - old, limit)))
                weight = 1.0 if wrong == "no weight" else weight
            ratio = math.exp(min(log_prob - near, limit))
            objective, slope = _clipped(ratio, advantage, case, wrong)
            losses[i] = -weight * objective
            gradient[i] = -weight * slope * ratio * (log_prob - near <= limit) / len(losses)
        return losses, gradient
    losses = np.zeros(case.n_segments)
    for s in range(case.n_segments):
        rows = np.flatnonzero(case.segments == s)
        if not len(rows):
            continue
        change = (case.log_probs - case.old)[rows]
        log_ratio = change.sum() if wrong == "sum over the steps" else change.mean()
        ratio, mean = math.exp(min(log_ratio, limit)), case.advantages[rows].mean()
        share = 1 / len(gradient) if wrong == "mean over the rows" else 1 / (case.n_segments * len(rows))
        for i in rows:
            single = case.kind == "gspo_token" and wrong != "one advantage for a sequence"
            objective, slope = _clipped(ratio, case.advantages[i] if single else mean, case, wrong)
            losses[s] -= objective / len(rows)
            # the ratio of a step is the cut ratio of the sequence times pi / sg[pi]
            passes = case.kind == "gspo_token" or log_ratio <= limit
            gradient[i] = -slope * ratio * passes * share
    return losses, gradient
