"""
Action distributions on a block of a minibatch: sampling; log-probabilities, entropies, divergences and their gradients with
respect to the actor's outputs. The formulas are the formulas of torch and of ``losses.kl``.

Numbers lie feature by feature (see ``matrices``). A row's gradient is ``g * score + extra``, where g is the gradient of the
loss with respect to the row's log-probability. The second half of a Gaussian's scores belongs to log_std.
"""

import math

import numpy as np

from sb3_flow.compiled import compiled
from sb3_flow.native.matrices import STRIDE, outlined
from sb3_flow.native.network_layout import BERNOULLI, CATEGORICAL

_ZERO, _ONE = np.float32(0), np.float32(1)  # an operand of float32 keeps the other operand's precision
_LOG_SQRT_2_PI = 0.5 * math.log(2 * math.pi)


@compiled()
def normalise_logits(x, at, c, size):
    """Subtract the logarithm of the sum of the exponentials from ``size`` features of row c."""
    at += c
    end = at + size * STRIDE
    highest = x[at]
    for j in range(at + STRIDE, end, STRIDE):
        highest = x[j] if x[j] > highest else highest
    exponentials = x.dtype.type(0)
    for j in range(at, end, STRIDE):
        exponentials += np.exp(x[j] - highest)
    shift = highest + np.log(exponentials)
    for j in range(at, end, STRIDE):
        x[j] -= shift


# Binary numbers are scored without fused multiply-add: a process that compiles would fuse others than the processes that load
@compiled(fastmath=False)
def softplus(x):
    """Compute log(1 + exp(x)) of a number."""
    return (_ZERO if x < _ZERO else x) + np.log1p(np.exp(-abs(x)))


@compiled(fastmath=False)
def _sigmoid(x):
    return _ONE / (_ONE + np.exp(-x))


@compiled()
def categorical_scores(components, x, at, count, score_at, extra_at, actions, order, first, ent, kl, reference, log_probs):
    """
    Score (multi-)discrete actions: log-probabilities, their derivatives by the logits, entropies and divergences.

    :param components: number of choices of each part of the action
    :param x: workspace, with the logits at ``at`` and room for as many features at ``score_at`` and at ``extra_at``
    :param count: number of the block's rows; padded rows are left alone
    :param actions: actions of all rows, shape ``(N, parts)``
    :param order: numbers of rows; the block's rows are ``order[first : first + count]``
    :param ent: factor of the gradient of a row's entropy
    :param kl: factor of the gradient of a row's divergence
    :param reference: logits of the reference, shape ``(N, features)``, or without rows
    :param log_probs: receives the log-probabilities of the block
    :return: sums of the entropies and of the divergences
    """
    outlined()
    real = x.dtype.type
    zero, ent, kl = real(0), real(ent), real(kl)
    entropies, divergences = 0.0, 0.0
    for c in range(count):
        row = order[first + c]
        log_prob, feature = zero, 0
        for part in range(len(components)):
            size = components[part]
            logits = at + feature * STRIDE
            normalise_logits(x, logits, c, size)
            action = np.int64(actions[row, part])
            log_prob += x[logits + action * STRIDE + c]
            entropy, divergence, shift = zero, zero, zero
            if len(reference):
                highest = reference[row, feature]
                for j in range(1, size):
                    highest = max(highest, reference[row, feature + j])
                for j in range(size):
                    shift += np.exp(reference[row, feature + j] - highest)
                shift = highest + np.log(shift)
            for j in range(size):
                offset = (feature + j) * STRIDE + c
                log_p = x[at + offset]
                p = np.exp(log_p)
                x[score_at + offset] = -p
                entropy -= zero if p == zero else p * log_p
                if len(reference) and p != zero:
                    divergence += p * (log_p - (reference[row, feature + j] - shift))
            for j in range(size):
                offset = (feature + j) * STRIDE + c
                log_p, p = x[at + offset], -x[score_at + offset]
                slope = zero if p == zero else -ent * p * (log_p + entropy)
                if len(reference) and p != zero:
                    slope += kl * p * (log_p - (reference[row, feature + j] - shift) - divergence)
                x[extra_at + offset] = slope
            x[score_at + (feature + action) * STRIDE + c] += real(1)
            entropies += entropy
            divergences += divergence
            feature += size
        log_probs[c] = log_prob
    return entropies, divergences


@compiled(fastmath=False)
def bernoulli_scores(n, x, at, count, score_at, extra_at, actions, order, first, ent, kl, reference, log_probs):
    """Score n independent binary numbers, as :func:`categorical_scores`."""
    outlined()
    real = x.dtype.type
    one, ent, kl = real(1), real(ent), real(kl)
    entropies, divergences = 0.0, 0.0
    for c in range(count):
        log_probs[c] = real(0)
    for j in range(n):
        for c in range(count):
            row, offset = order[first + c], j * STRIDE + c
            logit, action = x[at + offset], actions[row, j]
            p, above, below = _sigmoid(logit), softplus(logit), softplus(-logit)
            log_probs[c] -= (one - action) * above + action * below
            x[score_at + offset] = action - p
            # p log(1/p) + (1 - p) log(1/(1 - p))
            entropies += (one - p) * above + p * below
            slope = p * (one - p)
            x[extra_at + offset] = -ent * slope * logit
            if len(reference):
                other = reference[row, j]
                divergences += p * (softplus(-other) - below) + (one - p) * (softplus(other) - above)
                x[extra_at + offset] += kl * slope * (logit - other)
    return entropies, divergences


@compiled()
def gaussian_scores(
    n, x, at, count, score_at, extra_at, actions, order, first, ent, kl, reference, log_probs, log_std, reference_log_std, grad
):
    """
    Score n independent normal numbers, as :func:`categorical_scores`, with places for 2 n scores.

    :param reference: means of the reference
    :param log_std: shape ``(n,)``; the reference's is ``reference_log_std``, which may be empty
    :param grad: the gradient of entropies and divergences with respect to ``log_std`` is added to this array
    """
    outlined()
    real = x.dtype.type
    zero, one, ent, kl = real(0), real(1), real(ent), real(kl)
    entropies, divergences = 0.0, 0.0
    for c in range(count):
        log_probs[c] = zero
    for j in range(n):
        precision = np.exp(real(-2) * log_std[j])
        constant = log_std[j] + real(_LOG_SQRT_2_PI)
        entropies += count * (0.5 + constant)
        grad[j] += real(count) * ent
        for c in range(count):
            offset = j * STRIDE + c
            distance = actions[order[first + c], j] - x[at + offset]
            score = distance * precision
            log_probs[c] -= real(0.5) * distance * score + constant
            x[score_at + offset] = score
            x[score_at + n * STRIDE + offset] = distance * score - one
            x[extra_at + offset] = zero
        if len(reference):
            ratio = np.exp(real(2) * (log_std[j] - reference_log_std[j]))
            other = np.exp(real(-2) * reference_log_std[j])
            constant = ratio - one - real(2) * (log_std[j] - reference_log_std[j])
            grad[j] += real(count) * kl * (ratio - one)
            for c in range(count):
                offset = j * STRIDE + c
                distance = x[at + offset] - reference[order[first + c], j]
                x[extra_at + offset] = kl * distance * other
                divergences += real(0.5) * (distance * distance * other + constant)
    return entropies, divergences


@compiled()
def act(distribution, components, x, at, count, log_std, noise, first, actions, log_probs):
    """
    Draw actions and compute their log-probabilities.

    :param components: number of choices of each part of the action
    :param x: workspace, with the actor's outputs of ``count`` rows at ``at``
    :param log_std: shape ``(n,)``, read by Gaussians
    :param noise: standard normal (Gaussians) or uniform in [0, 1), shape ``(N, parts)``; without rows: the likeliest action
    :param first: number of the block's first row in the arrays
    :param actions: receives the actions, shape ``(N, parts)``
    :param log_probs: receives the log-probabilities, shape ``(N,)``
    """
    outlined()
    real = x.dtype.type
    zero, one = real(0), real(1)
    for c in range(count):
        row, at_c = first + c, at + c
        log_prob = zero
        if distribution == CATEGORICAL:
            for part in range(len(components)):
                size = components[part]
                normalise_logits(x, at_c, 0, size)
                chosen = 0
                if len(noise):
                    below = zero
                    for j in range(size):
                        p = np.exp(x[at_c + j * STRIDE])
                        below += p
                        chosen = j if p > zero else chosen
                        if noise[row, part] < below:
                            break
                else:
                    for j in range(1, size):
                        chosen = j if x[at_c + j * STRIDE] > x[at_c + chosen * STRIDE] else chosen
                actions[row, part] = chosen
                log_prob += x[at_c + chosen * STRIDE]
                at_c += size * STRIDE
        elif distribution == BERNOULLI:
            for j in range(len(components)):
                logit = x[at_c + j * STRIDE]
                p = _sigmoid(logit)
                success = noise[row, j] < p if len(noise) else p > real(0.5)
                actions[row, j] = one if success else zero
                log_prob -= softplus(-logit) if success else softplus(logit)
        else:
            for j in range(len(components)):
                mean, distance = x[at_c + j * STRIDE], zero
                if len(noise):
                    distance = np.exp(log_std[j]) * noise[row, j]
                actions[row, j] = mean + distance
                # from the rounded action, from which later evaluations start, too
                distance = (actions[row, j] - mean) * np.exp(-log_std[j])
                log_prob -= real(0.5) * distance * distance + log_std[j] + real(_LOG_SQRT_2_PI)
        log_probs[row] = log_prob
