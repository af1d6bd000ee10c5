"""
Policy and value losses of a minibatch, with gradients with respect to log-probabilities and values: the losses of
``losses.surrogates``, with autograd's gradients where two terms are equal.
"""

import numpy as np

from sb3_flow.compiled import compiled
from sb3_flow.compiled.ratio_limit import MAX_LOG_RATIO
from sb3_flow.native.matrices import outlined
from sb3_flow.native.objectives import DECOUPLED, DUAL_CLIP, GSPO

SEQUENCE_SUMS = 4
"""Numbers that :func:`sequence_loss` keeps of each sequence."""


@compiled()
def normalise(advantages):
    """Subtract the mean and divide by the standard deviation, in place, where there is more than one row."""
    outlined()
    n = len(advantages)
    if n < 2:
        return
    mean, squares = 0.0, 0.0
    for i in range(n):
        mean += advantages[i]
    mean /= n
    for i in range(n):
        squares += (advantages[i] - mean) ** 2
    real = advantages.dtype.type
    center, scale = real(mean), real(np.sqrt(squares / (n - 1))) + real(1e-8)
    for i in range(n):
        advantages[i] = (advantages[i] - center) / scale


@compiled()
def clipped_objective(ratio, advantage, low, high, dual_clip):
    """Compute a row's objective and its derivative by the ratio; a ``dual_clip`` of 0 stands for none."""
    zero, one, half = np.float32(0), np.float32(1), np.float32(0.5)  # float32 keeps the other operand's precision
    bounded = low if ratio < low else ratio
    bounded = high if bounded > high else bounded
    inside = zero if ratio < low or ratio > high else one
    a, b = advantage * ratio, advantage * bounded
    share = half if a == b else one  # autograd gives each of two equal terms its half
    slope = zero
    if not a > b:
        slope += share * advantage
    if not a < b:
        slope += share * advantage * inside
    objective = b if b < a else a
    if dual_clip > zero and advantage < zero:
        floor = dual_clip * advantage
        if objective < floor:
            objective, slope = floor, zero
        elif objective == floor:
            slope *= half
    return objective, slope


@compiled()
def _is_outside(change, below, above):
    """Say whether a ratio, given by its difference to 1, is out of bounds."""
    return change > above or -change > below


@compiled()
def rowwise_loss(kind, log_probs, old, proximal, advantages, below, above, dual_clip, rho_bar, slopes):
    """
    Compute a loss with a ratio for each row; all arrays have shape ``(n,)``.

    :param kind: ``CLIP``, ``DUAL_CLIP``, which reads ``dual_clip``, or ``DECOUPLED``, which reads ``proximal`` and ``rho_bar``
    :param old: log-probabilities of the policy that acted
    :param proximal: log-probabilities of the policy to stay close to
    :param below: distance of the ratio's lower bound from 1
    :param above: distance of the upper bound from 1
    :param slopes: receives the derivatives of the loss by ``log_probs``
    :return: the loss, and the share of ratios out of bounds
    """
    outlined()
    n = len(log_probs)
    real = log_probs.dtype.type
    low, high, limit, cap = real(1.0 - below), real(1.0 + above), real(MAX_LOG_RATIO), real(rho_bar)
    dual = real(dual_clip) if kind == DUAL_CLIP else real(0)
    count, one, loss, outside = real(n), real(1), 0.0, 0
    for i in range(n):
        if kind == DECOUPLED:
            shift, age = log_probs[i] - proximal[i], proximal[i] - old[i]
            ratio = np.exp(limit if shift > limit else shift)
            weight = np.exp(limit if age > limit else age)
            weight = cap if weight > cap else weight
            objective, slope = clipped_objective(ratio, advantages[i], low, high, dual)
            slope = real(0) if shift > limit else slope * weight
            objective *= weight
        else:
            ratio = np.exp(log_probs[i] - old[i])
            objective, slope = clipped_objective(ratio, advantages[i], low, high, dual)
        slopes[i] = -slope * ratio / count
        loss -= objective
        outside += _is_outside(ratio - one, real(below), real(above))
    return loss / n, outside / n


@compiled()
def sequence_loss(kind, log_probs, old, advantages, segments, sums, below, above, slopes):
    """
    Compute a loss with a ratio for each sequence, with arguments as :func:`rowwise_loss`: ``GSPO`` or ``GSPO_TOKEN``.

    :param segments: sequence of every row, numbered from 0 on
    :param sums: scratch, shape ``(SEQUENCE_SUMS, at least n)``
    :return: the loss; mean and maximum of the sequences' ratios; the share of these ratios out of bounds
    """
    outlined()
    n, n_segments = len(log_probs), 0
    real = log_probs.dtype.type
    low, high, limit, zero, one = real(1.0 - below), real(1.0 + above), real(MAX_LOG_RATIO), real(0), real(1)
    for i in range(n):
        n_segments = max(n_segments, segments[i] + 1)
    counts, log_ratios, means, slope_of = sums[0], sums[1], sums[2], sums[3]
    for s in range(n_segments):
        counts[s] = log_ratios[s] = means[s] = zero
    for i in range(n):
        s = segments[i]
        counts[s] += one
        log_ratios[s] += log_probs[i] - old[i]
        means[s] += advantages[i]
    loss, ratio_sum, ratio_max, outside = 0.0, 0.0, -np.inf, 0
    for s in range(n_segments):
        size = max(counts[s], one)
        log_ratios[s] /= size
        means[s] /= size
        ratio = np.exp(log_ratios[s])
        ratio_sum += ratio
        ratio_max = ratio if not ratio <= ratio_max else ratio_max
        outside += _is_outside(ratio - one, real(below), real(above))
        counts[s] = size * real(n_segments)
        if kind == GSPO:
            cut = log_ratios[s] > limit
            ratio = np.exp(limit) if cut else ratio
            objective, slope = clipped_objective(ratio, means[s], low, high, zero)
            slope_of[s] = zero if cut else -slope * ratio / counts[s]
            loss -= objective / n_segments
    for i in range(n):
        s = segments[i]
        if kind == GSPO:
            slopes[i] = slope_of[s]
        else:
            ratio = np.exp(limit if log_ratios[s] > limit else log_ratios[s])
            objective, slope = clipped_objective(ratio, advantages[i], low, high, zero)
            slopes[i] = -slope * ratio / counts[s]
            loss -= objective / counts[s]
    return loss, ratio_sum / n_segments, ratio_max, outside / n_segments


@compiled()
def squared_error(values, returns, old, clip, slopes):
    """
    Compute the mean squared error of values that may be clipped; all arrays have shape ``(n,)``.

    :param old: values to stay close to, read if values are clipped
    :param clip: largest distance from ``old``; a negative number: values are not clipped
    :param slopes: receives the derivatives by ``values``
    """
    outlined()
    n = len(values)
    real = values.dtype.type
    limit, factor, loss = real(clip), real(2) / real(n), 0.0
    for i in range(n):
        value, inside = values[i], real(1)
        if clip >= 0:
            change = value - old[i]
            if change > limit:
                change, inside = limit, real(0)
            elif change < -limit:
                change, inside = -limit, real(0)
            value = old[i] + change
        error = value - returns[i]
        loss += error * error
        slopes[i] = factor * error * inside
    return loss / n


@compiled()
def ratio_metrics(log_probs, old):
    """Compute approx_kl, and mean and maximum of the ratios."""
    outlined()
    n = len(log_probs)
    real = log_probs.dtype.type
    one, highest, divergence, mean = real(1), real(-np.inf), 0.0, 0.0
    for i in range(n):
        change = log_probs[i] - old[i]
        ratio = np.exp(change)
        divergence += (ratio - one) - change
        mean += ratio
        highest = ratio if not ratio <= highest else highest
    return divergence / n, mean / n, highest
