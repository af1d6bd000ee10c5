"""Importance ratios of whole sequences (GSPO, arXiv 2507.18071) and clipped objectives; plain NumPy, which vectorises them."""

import numpy as np
from numpy.typing import ArrayLike

from sb3_flow.compiled.ratio_limit import MAX_LOG_RATIO
from sb3_flow.kernels.array_arguments import check_positive, check_shape, finite_result, numbers


def compute_gspo_importance_ratios(new_log_probs: ArrayLike, old_log_probs: ArrayLike, lengths: ArrayLike) -> np.ndarray:
    """
    Compute s_i = exp((sum_t log pi(a_t) - sum_t log mu(a_t)) / length_i), the geometric mean of the steps' ratios, at most
    e^20.

    :param new_log_probs: sum of each sequence's log-probabilities under the policy that learns, shape ``(n,)``
    :param old_log_probs: sums under the policy that acted, shape ``(n,)``
    :param lengths: numbers of steps, shape ``(n,)``, each at least 1
    :return: shape ``(n,)``, dtype of the log-probabilities
    :raises ValueError: if shapes differ, a number is not finite, or a length is below 1
    """
    new, old = numbers("new_log_probs", new_log_probs), numbers("old_log_probs", old_log_probs)
    steps = numbers("lengths", lengths)
    check_shape("old_log_probs", old.shape, new.shape)
    check_shape("lengths", steps.shape, new.shape)
    if (steps < 1).any():
        raise ValueError(f"`lengths` must be at least 1, but {steps.min():g} was given.")
    dtype = np.result_type(new, old)
    return np.exp(np.minimum((new - old) / steps.astype(dtype), MAX_LOG_RATIO))


def apply_gspo_clipping(ratios: ArrayLike, advantages: ArrayLike, left: float = 0.02, right: float = 0.03) -> np.ndarray:
    """
    Compute min(s A, clip(s, 1 - left, 1 + right) A): an objective to be maximised, per sequence.

    The paper's 3e-4 and 4e-4 suit texts of thousands of tokens. A sequence's ratio spreads as one over the root of its length,
    so the episodes of control tasks need wider bounds.

    :param ratios: ratios of sequences, shape ``(n,)``
    :param advantages: shape ``(n,)``
    :param left: distance of the lower bound from 1
    :param right: distance of the upper bound from 1
    :return: shape ``(n,)``
    :raises ValueError: if shapes differ, a number is not finite, or a range is not positive
    """
    check_positive(left=left, right=right)
    return _clipped_objective(ratios, advantages, 1.0 - left, 1.0 + right)


def compute_ppo_surrogate(ratios: ArrayLike, advantages: ArrayLike, clip_range: float = 0.2) -> np.ndarray:
    """
    Compute min(w A, clip(w, 1 - clip_range, 1 + clip_range) A), PPO's objective (Schulman et al. 2017, eq. 7), per step.

    :param ratios: pi(a_t) / mu(a_t), shape ``(n,)``
    :param advantages: shape ``(n,)``
    :param clip_range: distance of both bounds from 1
    :return: shape ``(n,)``, to be maximised
    :raises ValueError: if shapes differ, a number is not finite, or the range is not positive
    """
    check_positive(clip_range=clip_range)
    return _clipped_objective(ratios, advantages, 1.0 - clip_range, 1.0 + clip_range)


def _clipped_objective(ratios: ArrayLike, advantages: ArrayLike, low: float, high: float) -> np.ndarray:
    w, a = numbers("ratios", ratios), numbers("advantages", advantages)
    check_shape("advantages", a.shape, w.shape)
    return finite_result(np.minimum(w * a, np.clip(w, low, high) * a), ratios=w, advantages=a)
