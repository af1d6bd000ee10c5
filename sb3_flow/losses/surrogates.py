"""
Surrogates of policy gradients: PPO's, its decoupled form for stale data, and GSPO's per trajectory; and PPO's value loss.

The surrogates return one loss per row or per segment, which the caller averages, weights or masks. pi is the policy that is
optimised, mu the policy that acted.
"""

from typing import Literal

import torch as th
from torch.nn import functional as F

from sb3_flow.compiled.choices import check_choice
from sb3_flow.losses.tensors import importance_ratio, require_same_shape


def clipped_surrogate(
    ratio: th.Tensor,
    advantages: th.Tensor,
    clip_range: float,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
) -> th.Tensor:
    """
    Compute PPO's objective (arXiv 1707.06347, Eq. 7), as a loss: -min(A w, A clip(w, 1 - clip_range, 1 + clip_range_high)).
    The mean and its gradients equal SB3's PPO to the last bit.

    The gradient is -A w d(log pi) where A >= 0 and w <= 1 + clip_range_high, or A < 0 and w >= 1 - clip_range; else zero.

    :param ratio: w = pi(a|s) / mu(a|s), shape ``(B,)``
    :param advantages: A, shape ``(B,)``
    :param clip_range: distance of the lower bound from 1, of both bounds without ``clip_range_high``
    :param clip_range_high: distance of the upper bound from 1 ("clip higher", DAPO, arXiv 2503.14476, Eq. 10)
    :param dual_clip: c > 1; the objective of a bad action (A < 0) is at least c A, so that a ratio that has grown large on
        stale data does not dominate the batch (dual clip, arXiv 1912.09729). None: unbounded, as in PPO
    :return: loss of every row, shape ``(B,)``
    :raises ValueError: if the shapes differ or ``dual_clip`` is not above 1
    """
    require_same_shape(ratio=ratio, advantages=advantages)
    high = clip_range if clip_range_high is None else clip_range_high
    objective = th.min(advantages * ratio, advantages * th.clamp(ratio, 1 - clip_range, 1 + high))
    if dual_clip is not None:
        if not dual_clip > 1:
            raise ValueError(f"`dual_clip` must be above 1, but {dual_clip} was given.")
        objective = th.where(advantages < 0, th.max(objective, dual_clip * advantages), objective)
    return -objective


def decoupled_surrogate(
    log_prob: th.Tensor,
    proximal_log_prob: th.Tensor,
    old_log_prob: th.Tensor,
    advantages: th.Tensor,
    clip_range: float,
    clip_range_high: float | None = None,
    rho_bar: float = 1.0,
) -> th.Tensor:
    """
    Compute the loss of decoupled PPO (arXiv 2110.00641): the policy that acted and the policy that the update must stay close
    to differ, as asynchronous collection needs:

        sg[min(pi_prox / mu, rho_bar)] * clipped_surrogate(pi / pi_prox, A)

    With pi_prox = mu it is :func:`clipped_surrogate`.

    :param log_prob: log pi(a|s), the only argument that gets a gradient, shape ``(B,)``
    :param proximal_log_prob: log pi_prox(a|s), of the learner's weights when the batch arrived, shape ``(B,)``
    :param old_log_prob: log mu(a|s), as recorded by the collector, shape ``(B,)``
    :param advantages: A, shape ``(B,)``
    :param clip_range: see :func:`clipped_surrogate`
    :param clip_range_high: see :func:`clipped_surrogate`
    :param rho_bar: cap of the weight pi_prox / mu, at most exp(20), also with ``math.inf``
    :return: loss of every row, shape ``(B,)``
    :raises ValueError: if the shapes differ
    """
    require_same_shape(
        log_prob=log_prob, proximal_log_prob=proximal_log_prob, old_log_prob=old_log_prob, advantages=advantages
    )
    proximal = proximal_log_prob.detach()
    weight = importance_ratio(proximal - old_log_prob.detach(), rho_bar)
    return weight * clipped_surrogate(importance_ratio(log_prob - proximal), advantages, clip_range, clip_range_high)


def segment_mean(x: th.Tensor, segments: th.Tensor, n_segments: int) -> th.Tensor:
    """
    Compute the mean of the rows of every segment. The caller can give rows that shall not count to a further segment and drop
    its mean. On CUDA the order of summation, and with it the last bit, varies unless torch's deterministic algorithms are on.

    :param x: shape ``(B,)``
    :param segments: segment of every row, in ``[0, n_segments)``, in any order, int64, shape ``(B,)``
    :param n_segments: number of segments
    :return: shape ``(n_segments,)``; zero for a segment without rows
    :raises ValueError: if the shapes differ
    """
    require_same_shape(x=x, segments=segments)
    sums = x.new_zeros(n_segments).index_add(0, segments, x)
    counts = x.new_zeros(n_segments).index_add(0, segments, th.ones_like(x))
    return sums / counts.clamp(min=1.0)


def sequence_log_ratio(log_prob: th.Tensor, old_log_prob: th.Tensor, segments: th.Tensor, n_segments: int) -> th.Tensor:
    """
    Compute the logarithm of GSPO's ratio, normalised by the length (arXiv 2507.18071, Eq. 7): the mean of log pi - log mu over
    the steps of a trajectory.

    :param log_prob: log pi(a|s), shape ``(B,)``
    :param old_log_prob: log mu(a|s), shape ``(B,)``
    :param segments: trajectory of every row, int64, shape ``(B,)``
    :param n_segments: number of trajectories
    :return: shape ``(n_segments,)``
    :raises ValueError: if the shapes differ
    """
    require_same_shape(log_prob=log_prob, old_log_prob=old_log_prob)
    return segment_mean(log_prob - old_log_prob, segments, n_segments)


def gspo_loss(
    log_prob: th.Tensor,
    old_log_prob: th.Tensor,
    advantages: th.Tensor,
    segments: th.Tensor,
    n_segments: int,
    clip_range: float,
    clip_range_high: float | None = None,
) -> th.Tensor:
    """
    Compute the loss of GSPO (arXiv 2507.18071, Eq. 5): the clipped surrogate with one ratio s = exp(mean_t log w_t) and one
    advantage (the mean of its rows') for a whole trajectory. Trajectories must be complete in the batch.

    Mean log-ratios are smaller than the log-ratios of single steps, by about the root of the length, so ``clip_range`` has to
    be smaller, too: the published 3e-4 and 4e-4 belong to texts of thousands of tokens.

    :param log_prob: log pi(a|s), shape ``(B,)``
    :param old_log_prob: log mu(a|s), shape ``(B,)``
    :param advantages: A, shape ``(B,)``
    :param segments: trajectory of every row, int64, shape ``(B,)``
    :param n_segments: number of trajectories
    :param clip_range: see :func:`clipped_surrogate`
    :param clip_range_high: see :func:`clipped_surrogate`
    :return: loss of every trajectory, zero for one without rows, shape ``(n_segments,)``
    :raises ValueError: if the shapes differ
    """
    ratio = importance_ratio(sequence_log_ratio(log_prob, old_log_prob, segments, n_segments))
    return clipped_surrogate(ratio, segment_mean(advantages, segments, n_segments), clip_range, clip_range_high)


def gspo_token_loss(
    log_prob: th.Tensor,
    old_log_prob: th.Tensor,
    advantages: th.Tensor,
    segments: th.Tensor,
    n_segments: int,
    clip_range: float,
    clip_range_high: float | None = None,
) -> th.Tensor:
    """
    Compute the loss of GSPO-token (arXiv 2507.18071, Eqs. 13-14): every step has its own advantage, and its ratio is
    sg[s] pi / sg[pi] with the trajectory's s. Value and gradient equal :func:`gspo_loss` where advantages are constant in a
    trajectory.

    :param log_prob: log pi(a|s), shape ``(B,)``
    :param old_log_prob: log mu(a|s), shape ``(B,)``
    :param advantages: A, shape ``(B,)``
    :param segments: trajectory of every row, int64, shape ``(B,)``
    :param n_segments: number of trajectories
    :param clip_range: see :func:`clipped_surrogate`
    :param clip_range_high: see :func:`clipped_surrogate`
    :return: mean loss of the steps of every trajectory, zero for one without rows, shape ``(n_segments,)``
    :raises ValueError: if the shapes differ
    """
    constant = log_prob.detach()
    ratio = importance_ratio(sequence_log_ratio(constant, old_log_prob.detach(), segments, n_segments))
    token_ratio = ratio[segments] * th.exp(log_prob - constant)
    return segment_mean(clipped_surrogate(token_ratio, advantages, clip_range, clip_range_high), segments, n_segments)


def value_loss(
    values: th.Tensor,
    returns: th.Tensor,
    old_values: th.Tensor | None = None,
    clip_range_vf: float | None = None,
    clipping: Literal["sb3", "max"] = "sb3",
) -> th.Tensor:
    """
    Compute the mean squared error, without the factor 1/2, of values that are clipped around ``old_values`` if
    ``clip_range_vf`` is given. With ``clipping="sb3"`` value and gradients equal SB3's PPO to the last bit.

    :param values: shape ``(B,)``
    :param returns: shape ``(B,)``
    :param old_values: values at the time of collection, shape ``(B,)``; needed for clipping only
    :param clip_range_vf: largest distance from ``old_values``; depends on the scale of the rewards. None: no clipping
    :param clipping: ``"sb3"``: the error of the clipped values, where a clipped row learns nothing, even if its value has
        moved away from the return. ``"max"``: the larger of both errors (OpenAI's PPO2), with which such a row still learns
    :return: scalar
    :raises ValueError: if the shapes differ, ``clip_range_vf`` comes without ``old_values``, or ``clipping`` is unknown
    """
    check_choice(("sb3", "max"), clipping=clipping)
    require_same_shape(values=values, returns=returns)
    if clip_range_vf is None:
        return F.mse_loss(returns, values)
    if old_values is None:
        raise ValueError("`clip_range_vf` needs `old_values`.")
    require_same_shape(values=values, old_values=old_values)
    clipped = old_values + th.clamp(values - old_values, -clip_range_vf, clip_range_vf)
    if clipping == "sb3":
        return F.mse_loss(returns, clipped)
    return th.max((returns - values).square(), (returns - clipped).square()).mean()
