"""
PPO's update of an MLP policy, a whole pass over the rollout in one call: forward, gradient by hand, norm clip, Adam. On small
networks torch spends most of its time on preparing operations, which these loops need not do.
"""

from collections import namedtuple
from typing import NamedTuple

import numpy as np

from sb3_flow.compiled import compiled
from sb3_flow.kernels.array_arguments import float_rows, whole
from sb3_flow.native.adam import adam_step, clip_norm
from sb3_flow.native.distributions import bernoulli_scores, categorical_scores, gaussian_scores
from sb3_flow.native.layers import aligned, backward, forward, gather, padded, total_outputs, widest_output
from sb3_flow.native.matrices import BLOCK, STRIDE
from sb3_flow.native.network_layout import BERNOULLI, CATEGORICAL, GAUSSIAN, INPUTS, OUTPUTS, Network, check_inputs
from sb3_flow.native.objectives import DECOUPLED, GSPO, GSPO_TOKEN, Adam, Objective, check_settings
from sb3_flow.native.rollout_arrays import Rollout, check_actions, check_minibatches, check_state, make_rollout
from sb3_flow.native.surrogate_loops import SEQUENCE_SUMS, normalise, ratio_metrics, rowwise_loss, sequence_loss, squared_error

Metrics = namedtuple(
    "Metrics",
    "policy_gradient_loss entropy_loss value_loss kl_reference loss approx_kl clip_fraction ratio_mean ratio_max "
    "sequence_ratio_mean sequence_ratio_max",
)
"""Columns of :func:`ppo_epoch`'s metrics."""
METRICS = Metrics._fields
"""Names of the columns. A metric that the loss does not have is NaN."""
_column = Metrics(*range(len(METRICS)))


def ppo_epoch(
    network: Network,
    objective: Objective,
    adam: Adam,
    params: np.ndarray,
    grad: np.ndarray,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
    step: int,
    order: np.ndarray,
    starts: np.ndarray,
    *,
    observations: np.ndarray,
    actions: np.ndarray,
    old_log_probs: np.ndarray,
    advantages: np.ndarray,
    returns: np.ndarray | None = None,
    old_values: np.ndarray | None = None,
    segments: np.ndarray | None = None,
    proximal_log_probs: np.ndarray | None = None,
    reference: np.ndarray | None = None,
    reference_log_std: np.ndarray | None = None,
) -> tuple[np.ndarray, int, bool]:
    """
    Pass over a rollout of N rows once, minibatch by minibatch, without the GIL. Arrays that are not C-contiguous, or not of
    the parameters' dtype, are converted at each call.

    :param network: made by :func:`describe_network`
    :param objective: made by :func:`describe_objective`
    :param adam: arguments of the optimiser
    :param params: flat, float32 or float64, changed in place; like ``grad``, ``exp_avg`` and ``exp_avg_sq`` C-contiguous
    :param grad: receives the clipped gradient of the last step; the numbers that it holds before are not read
    :param exp_avg: Adam's first moment
    :param exp_avg_sq: Adam's second moment
    :param step: steps that Adam has done before
    :param order: rows in the order of the pass, int64; rows that are left out are not learned from
    :param starts: start of each minibatch in ``order``, and the end of the last minibatch, int64, shape ``(M + 1,)``
    :param observations: shape ``(N, features)``
    :param actions: shape ``(N, parts)``, numbers of choices as floats
    :param old_log_probs: shape ``(N,)``
    :param advantages: shape ``(N,)``
    :param returns: shape ``(N,)``, with a critic
    :param old_values: shape ``(N,)``, if values are clipped
    :param segments: sequence of each entry of ``order``, numbered from 0 in every minibatch, int64; for GSPO
    :param proximal_log_probs: shape ``(N,)``, for the decoupled loss
    :param reference: logits, or means, of the reference policy, shape ``(N, outputs)``; with ``kl_coef``
    :param reference_log_std: the reference's ``log_std``, shape ``(parts,)``; with ``kl_coef``, for Gaussians
    :return: metrics, float64, shape ``(minibatches, len(METRICS))``; steps that Adam has done now; True if the last of these
        minibatches exceeded 1.5 ``target_kl``, ended the pass and was not learned from
    :raises ValueError: if shapes do not fit, or an array that is needed is missing
    """
    given = locals()
    objective, adam = check_settings(objective, adam)
    state = check_state(network, params=params, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    step = whole("step", step, 0)
    rollout = make_rollout(network, objective, params.dtype, **{name: given[name] for name in Rollout._fields})
    in_sequences = objective.policy_loss in (GSPO, GSPO_TOKEN)
    order, starts, segments = check_minibatches(len(rollout.observations), order, starts, segments, in_sequences)
    metrics = np.full((len(starts) - 1, len(METRICS)), np.nan)
    done, step, stopped = _epoch(network, objective, adam, *state, step, order, starts, segments, rollout, metrics)
    return metrics[:done], step, stopped


def policy_evaluate(
    network: Network, params: np.ndarray, observations: np.ndarray, actions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """
    Compute values, and log-probabilities of given actions; the other arguments are explained at :func:`policy_forward`.

    :param actions: shape ``(n, parts)``, converted to the dtype of ``params``
    :return: values, 0 without a critic, and log-probabilities of the actions, both of shape ``(n,)``
    :raises ValueError: if shapes do not fit
    """
    params, observations = check_inputs(network, params, observations)
    n, dtype = len(observations), params.dtype
    actions = float_rows("actions", actions, (n, len(network.components)), dtype)
    check_actions(network, actions)
    row, rows = np.empty(0, dtype), np.empty((0, 0), dtype)
    rollout = Rollout(observations, actions, row, row, row, row, row, rows, row)
    values, log_probs = np.zeros(n, dtype), np.empty(n, dtype)
    _evaluate(network, params, rollout, values, log_probs)
    return values, log_probs


class Workspace(NamedTuple):
    """
    Hold the scratch memory of a pass. A block of ``x`` holds the observations, from its start, and from the given places on
    the outputs of the actor's layers, the outputs of the critic's layers, scores, and the part of the gradient that does not
    depend on the surrogate. ``d`` holds gradients of layers in turn, at its start and at ``other_at``. Each row of ``rows``
    holds a number for each row of the minibatch.
    """

    x: np.ndarray
    d: np.ndarray
    rows: np.ndarray
    block: int
    actor_at: int
    critic_at: int
    score_at: int
    extra_at: int
    other_at: int


# Rows of ``Workspace.rows``; the losses use the rows from _SCRATCH on in turn
_LOG_PROBS, _SLOPES, _VALUES, _VALUE_SLOPES, _OLD_LOG_PROBS, _ADVANTAGES, _SCRATCH = range(7)
_PROXIMAL, _RETURNS, _OLD_VALUES = _SCRATCH, _SCRATCH, _SCRATCH + 1


@compiled()
def _workspace(network, params, starts):
    actor, critic = network.actor, network.critic
    n_outputs, largest = actor[-1, OUTPUTS], 0
    for i in range(len(starts) - 1):
        largest = max(largest, starts[i + 1] - starts[i])
    actor_at = actor[0, INPUTS] * STRIDE
    critic_at = actor_at + total_outputs(actor) * STRIDE
    score_at = critic_at + total_outputs(critic) * STRIDE
    extra_at = score_at + (2 if network.distribution == GAUSSIAN else 1) * n_outputs * STRIDE
    block = extra_at + n_outputs * STRIDE
    other_at = max(widest_output(actor), widest_output(critic)) * STRIDE
    x = aligned(block * ((largest + BLOCK - 1) // BLOCK), params)
    d = aligned(2 * other_at, params)
    rows = np.empty((_SCRATCH + SEQUENCE_SUMS, largest), params.dtype)
    return Workspace(x, d, rows, block, actor_at, critic_at, score_at, extra_at, other_at)


@compiled()
def _gather(table, order, start, out, n):
    for i in range(n):
        out[i] = table[order[start + i]]


@compiled()
def _evaluate_minibatch(network, params, rollout, order, start, n, ent, kl, work, std_grad):
    """Run the forward pass; return sums of entropies and of divergences, and places of the actor's and critic's outputs."""
    entropy, divergence, last_of_actor, last_of_critic = 0.0, 0.0, 0, 0
    log_std = params[max(network.log_std, 0) :]
    for b in range(0, n, BLOCK):
        at, count, first = work.block * (b // BLOCK), min(BLOCK, n - b), start + b
        columns = padded(count)
        x, log_probs = work.x[at:], work.rows[_LOG_PROBS, b:]
        gather(rollout.observations, order, first, count, x)
        last_of_actor = forward(params, network.actor, network.activation, x, 0, work.actor_at, columns)
        workspace = (x, last_of_actor, count, work.score_at, work.extra_at)
        of = (rollout.actions, order, first, ent, kl, rollout.reference, log_probs)
        if network.distribution == CATEGORICAL:
            h, k = categorical_scores(network.components, *workspace, *of)
        elif network.distribution == BERNOULLI:
            h, k = bernoulli_scores(len(network.components), *workspace, *of)
        else:
            others = (log_std, rollout.reference_log_std, std_grad)
            h, k = gaussian_scores(len(network.components), *workspace, *of, *others)
        entropy += h
        divergence += k
        if len(network.critic):
            last_of_critic = forward(params, network.critic, network.activation, x, 0, work.critic_at, columns)
            for c in range(count):
                work.rows[_VALUES, b + c] = x[last_of_critic + c]
    return entropy, divergence, last_of_actor, last_of_critic


@compiled()
def _losses(objective, has_critic, rollout, segments, order, start, n, rows, row):
    """Compute losses and metrics of a minibatch, and the slopes by log-probabilities and values."""
    kind = objective.policy_loss
    log_probs, old, slopes = rows[_LOG_PROBS, :n], rows[_OLD_LOG_PROBS, :n], rows[_SLOPES, :n]
    values, old_values, value_slopes = rows[_VALUES, :n], rows[_OLD_VALUES, :n], rows[_VALUE_SLOPES, :n]
    advantages, proximal, returns = rows[_ADVANTAGES, :n], rows[_PROXIMAL, :n], rows[_RETURNS, :n]
    _gather(rollout.old_log_probs, order, start, old, n)
    _gather(rollout.advantages, order, start, advantages, n)
    if objective.normalize_advantage:
        normalise(advantages)
    given = (kind, log_probs, old)
    bounds = (objective.clip_range, objective.clip_range_high)
    if kind == GSPO or kind == GSPO_TOKEN:
        loss, ratio_mean, ratio_max, outside = sequence_loss(
            *given, advantages, segments[start : start + n], rows[_SCRATCH:], *bounds, slopes
        )
        row[_column.sequence_ratio_mean], row[_column.sequence_ratio_max] = ratio_mean, ratio_max
    else:
        if kind == DECOUPLED:
            _gather(rollout.proximal_log_probs, order, start, proximal, n)
        loss, outside = rowwise_loss(*given, proximal, advantages, *bounds, objective.dual_clip, objective.rho_bar, slopes)
    row[_column.policy_gradient_loss], row[_column.clip_fraction] = loss, outside
    row[_column.loss] = loss + objective.ent_coef * row[_column.entropy_loss]
    if has_critic:
        _gather(rollout.returns, order, start, returns, n)
        if objective.clip_range_vf >= 0:
            _gather(rollout.old_values, order, start, old_values, n)
        row[_column.value_loss] = squared_error(values, returns, old_values, objective.clip_range_vf, value_slopes)
        row[_column.loss] += objective.vf_coef * row[_column.value_loss]
    if objective.kl_coef > 0:
        row[_column.loss] += objective.kl_coef * row[_column.kl_reference]
    row[_column.approx_kl], row[_column.ratio_mean], row[_column.ratio_max] = ratio_metrics(log_probs, old)


@compiled()
def _add_gradients(network, params, grad, n, vf_coef, work, std_grad, last_of_actor, last_of_critic):
    """Run the backward pass of a minibatch."""
    x_all, d, rows, n_outputs = work.x, work.d, work.rows, network.actor[-1, OUTPUTS]
    zero, factor = d.dtype.type(0), d.dtype.type(vf_coef)
    gaussian = network.distribution == GAUSSIAN
    for b in range(0, n, BLOCK):
        count = min(BLOCK, n - b)
        columns, x = padded(count), x_all[work.block * (b // BLOCK) :]
        for j in range(n_outputs):
            to, score, extra = j * STRIDE, work.score_at + j * STRIDE, work.extra_at + j * STRIDE
            for c in range(count):
                d[to + c] = rows[_SLOPES, b + c] * x[score + c] + x[extra + c]
            for c in range(count, columns):
                d[to + c] = zero
            if gaussian:
                score += n_outputs * STRIDE
                of_std = zero
                for c in range(count):
                    of_std += rows[_SLOPES, b + c] * x[score + c]
                std_grad[j] += of_std
        backward(params, network.actor, network.activation, x, 0, last_of_actor, columns, grad, d, 0, work.other_at)
        if len(network.critic):
            for c in range(count):
                d[c] = factor * rows[_VALUE_SLOPES, b + c]
            for c in range(count, columns):
                d[c] = zero
            backward(params, network.critic, network.activation, x, 0, last_of_critic, columns, grad, d, 0, work.other_at)


@compiled()
def _evaluate(network, params, rollout, values, log_probs):
    n = len(rollout.observations)
    order, work = np.arange(n), _workspace(network, params, np.array([0, min(n, BLOCK)]))
    unused = np.zeros_like(params)
    for start in range(0, n, BLOCK):
        count = min(BLOCK, n - start)
        _evaluate_minibatch(network, params, rollout, order, start, count, 0.0, 0.0, work, unused)
        log_probs[start : start + count] = work.rows[_LOG_PROBS, :count]
        if len(network.critic):
            values[start : start + count] = work.rows[_VALUES, :count]


@compiled()
def _epoch(network, objective, adam, params, grad, exp_avg, exp_avg_sq, step, order, starts, segments, rollout, metrics):
    work = _workspace(network, params, starts)
    std_grad = grad[max(network.log_std, 0) :]
    for m in range(len(starts) - 1):
        start, n, row = starts[m], starts[m + 1] - starts[m], metrics[m]
        for i in range(grad.size):
            grad[i] = 0
        minibatch = (rollout, order, start, n)
        weights = (-objective.ent_coef / n, objective.kl_coef / n)
        entropy, divergence, actor_at, critic_at = _evaluate_minibatch(network, params, *minibatch, *weights, work, std_grad)
        row[_column.entropy_loss] = -entropy / n
        if objective.kl_coef > 0:
            row[_column.kl_reference] = divergence / n
        _losses(objective, len(network.critic) > 0, rollout, segments, order, start, n, work.rows, row)
        if row[_column.approx_kl] > 1.5 * objective.target_kl:
            return m + 1, step, True
        _add_gradients(network, params, grad, n, objective.vf_coef, work, std_grad, actor_at, critic_at)
        clip_norm(grad, adam.max_grad_norm)
        step += 1
        adam_step(params, grad, exp_avg, exp_avg_sq, step, adam.learning_rate, adam.beta1, adam.beta2, adam.eps)
    return len(starts) - 1, step, False
