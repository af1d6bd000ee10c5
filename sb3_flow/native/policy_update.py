"""
PPO's update of an MLP policy, a whole pass over the rollout in one call: forward, gradient by hand, norm clip, Adam. What
torch spends on such networks is overhead per operation; here there is none.
"""

from typing import NamedTuple

import numpy as np

from sb3_flow.compiled import compiled
from sb3_flow.kernels.array_arguments import float_array, float_rows, whole
from sb3_flow.native.adam import adam_step, clip_norm
from sb3_flow.native.distributions import bernoulli_scores, categorical_scores, gaussian_scores
from sb3_flow.native.layers import aligned, backward, forward, gather, padded, total_outputs, widest_output
from sb3_flow.native.matrices import BLOCK, STRIDE
from sb3_flow.native.network_layout import BERNOULLI, CATEGORICAL, GAUSSIAN, Network, check_network
from sb3_flow.native.objectives import DECOUPLED, GSPO, GSPO_TOKEN, Adam, Objective, check_settings
from sb3_flow.native.rollout_arrays import Rollout, check_choices, check_minibatches, check_state, make_rollout
from sb3_flow.native.surrogate_loops import normalise, ratio_metrics, rowwise_loss, sequence_loss, squared_error

METRICS = (
    *("policy_gradient_loss", "entropy_loss", "value_loss", "kl_reference", "loss"),
    *("approx_kl", "clip_fraction", "ratio_mean", "ratio_max", "sequence_ratio_mean", "sequence_ratio_max"),
)
"""Columns of :func:`ppo_epoch`'s metrics; NaN where there is none."""


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
    One pass over a rollout of N rows, minibatch by minibatch, without the GIL. Arrays of another dtype than the parameters',
    or not C-contiguous, are converted at each call.

    :param network: of :func:`describe_network`
    :param objective: of :func:`describe_objective`
    :param adam: arguments of the optimiser
    :param params: flat, float32 (or float64), changed in place; as ``grad``, ``exp_avg`` and ``exp_avg_sq`` C-contiguous
    :param grad: receives the clipped gradient of the last step; what it holds does not matter
    :param exp_avg: Adam's first moment
    :param exp_avg_sq: Adam's second moment
    :param step: steps that Adam has done before
    :param order: rows in the order of the pass, int64; fewer than N for some of them
    :param starts: where in ``order`` each minibatch starts, and where the last one ends, int64, shape ``(M + 1,)``
    :param observations: shape ``(N, features)``
    :param actions: shape ``(N, parts)``, numbers of choices as floats
    :param old_log_probs: shape ``(N,)``
    :param advantages: shape ``(N,)``
    :param returns: shape ``(N,)``, with a critic
    :param old_values: shape ``(N,)``, if values are clipped
    :param segments: for GSPO: sequence of each entry of ``order``, numbered from 0 in every minibatch, int64
    :param proximal_log_probs: shape ``(N,)``, for the decoupled loss
    :param reference: with ``kl_coef``: logits, or means, of the reference policy, shape ``(N, features)``
    :param reference_log_std: of Gaussians, shape ``(parts,)``
    :return: metrics, float64, shape ``(minibatches looked at, len(METRICS))``; steps that Adam has done now; whether the last
        of the minibatches exceeded 1.5 ``target_kl`` and was not learned from
    :raises ValueError: if shapes do not fit or something that is needed is missing
    """
    check_network(network)
    objective, adam = check_settings(objective, adam)
    state = check_state(network, params=params, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    step = whole("step", step, 0)
    rollout = make_rollout(
        network,
        objective,
        params.dtype,
        observations=observations,
        actions=actions,
        old_log_probs=old_log_probs,
        advantages=advantages,
        returns=returns,
        old_values=old_values,
        proximal_log_probs=proximal_log_probs,
        reference=reference,
        reference_log_std=reference_log_std,
    )
    in_sequences = objective.policy_loss in (GSPO, GSPO_TOKEN)
    order, starts, segments = check_minibatches(len(rollout.observations), order, starts, segments, in_sequences)
    metrics = np.full((len(starts) - 1, len(METRICS)), np.nan)
    done, step, stopped = _epoch(network, objective, adam, *state, step, order, starts, segments, rollout, metrics)
    return metrics[:done], step, stopped


def policy_evaluate(
    network: Network, params: np.ndarray, observations: np.ndarray, actions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """
    :param network: of :func:`describe_network`
    :param params: flat, float32 or float64
    :param observations: shape ``(n, features)``, converted to the dtype of ``params`` if of another one
    :param actions: shape ``(n, parts)``, likewise
    :return: values, 0 without a critic, and log-probabilities of the actions, both of shape ``(n,)``
    :raises ValueError: if shapes do not fit
    """
    check_network(network)
    params = float_array("params", params, (network.size,))
    dtype = params.dtype
    observations = float_rows("observations", observations, (None, int(network.actor[0, 2])), dtype)
    n = len(observations)
    actions = float_rows("actions", actions, (n, len(network.components)), dtype)
    check_choices(network, actions)
    row, rows = np.empty(0, dtype), np.empty((0, 0), dtype)
    rollout = Rollout(observations, actions, row, row, row, row, row, rows, row)
    values, log_probs = np.zeros(n, dtype), np.empty(n, dtype)
    _evaluate(network, params, rollout, values, log_probs)
    return values, log_probs


class Workspace(NamedTuple):
    """
    Scratch of a pass. Each block of ``x`` holds, from its start and from the places given: observations, outputs of all the
    actor's layers, of the critic's, scores, and the part of the gradient that does not depend on the surrogate. ``d`` holds
    gradients of layers in turn, at its start and at ``other_at``; ``rows`` has one number a row of the minibatch.
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


# Rows of ``rows``; those from SCRATCH on are free for the losses of sequences
_LOG_PROBS, _SLOPES, _VALUES, _VALUE_SLOPES, _OLD, _ADVANTAGES, _SCRATCH = range(7)


@compiled()
def _workspace(network, params, starts):  # type: ignore[no-untyped-def]
    actor, critic = network.actor, network.critic
    n_outputs, largest = actor[-1, 3], 0
    for i in range(len(starts) - 1):
        largest = max(largest, starts[i + 1] - starts[i])
    actor_at = actor[0, 2] * STRIDE
    critic_at = actor_at + total_outputs(actor) * STRIDE
    score_at = critic_at + total_outputs(critic) * STRIDE
    extra_at = score_at + (2 if network.distribution == GAUSSIAN else 1) * n_outputs * STRIDE
    block = extra_at + n_outputs * STRIDE
    other_at = max(widest_output(actor), widest_output(critic)) * STRIDE
    x = aligned(block * ((largest + BLOCK - 1) // BLOCK), params)
    d = aligned(2 * other_at, params)
    rows = np.empty((_SCRATCH + 4, largest), params.dtype)
    return Workspace(x, d, rows, block, actor_at, critic_at, score_at, extra_at, other_at)


@compiled()
def _take(table, order, start, out, n):  # type: ignore[no-untyped-def]
    for i in range(n):
        out[i] = table[order[start + i]]


@compiled()
def _look(network, params, rollout, order, start, n, ent, kl, work, std_grad):  # type: ignore[no-untyped-def]
    """Forward pass of a minibatch, with scores; :return: sums of the entropies and of the divergences, last layers' places"""
    entropy, divergence, last_of_actor, last_of_critic = 0.0, 0.0, 0, 0
    log_std = params[max(network.log_std, 0) :]
    for b in range(0, n, BLOCK):
        at, count, first = work.block * (b // BLOCK), min(BLOCK, n - b), start + b
        columns = padded(count)
        x, log_probs = work.x[at:], work.rows[_LOG_PROBS, b:]
        gather(rollout.observations, order, first, count, x)
        last_of_actor = forward(params, network.actor, network.activation, x, 0, work.actor_at, columns)
        places = (x, last_of_actor, count, work.score_at, work.extra_at)
        of = (rollout.actions, order, first, ent, kl, rollout.reference, log_probs)
        if network.distribution == CATEGORICAL:
            h, k = categorical_scores(network.components, *places, *of)
        elif network.distribution == BERNOULLI:
            h, k = bernoulli_scores(len(network.components), *places, *of)
        else:
            others = (log_std, rollout.reference_log_std, std_grad)
            h, k = gaussian_scores(len(network.components), *places, *of, *others)
        entropy += h
        divergence += k
        if len(network.critic):
            last_of_critic = forward(params, network.critic, network.activation, x, 0, work.critic_at, columns)
            for c in range(count):
                work.rows[_VALUES, b + c] = x[last_of_critic + c]
    return entropy, divergence, last_of_actor, last_of_critic


@compiled()
def _losses(objective, has_critic, rollout, segments, order, start, n, rows, row):  # type: ignore[no-untyped-def]
    """Losses and metrics of a minibatch, and the slopes by log-probabilities and values."""
    kind = objective.policy_loss
    log_probs, slopes, values, value_slopes = rows[0, :n], rows[1, :n], rows[2, :n], rows[3, :n]
    old, advantages, others, more = rows[4, :n], rows[5, :n], rows[6, :n], rows[7, :n]
    _take(rollout.old_log_probs, order, start, old, n)
    _take(rollout.advantages, order, start, advantages, n)
    if objective.normalize_advantage:
        normalise(advantages)
    given = (kind, log_probs, old)
    bounds = (objective.clip_range, objective.clip_range_high)
    if kind == GSPO or kind == GSPO_TOKEN:
        scratch = rows[_SCRATCH:]
        row[0], row[9], row[10], row[6] = sequence_loss(
            *given, advantages, segments[start : start + n], scratch, *bounds, slopes
        )
    else:
        if kind == DECOUPLED:
            _take(rollout.proximal_log_probs, order, start, others, n)
        row[0], row[6] = rowwise_loss(*given, others, advantages, *bounds, objective.dual_clip, objective.rho_bar, slopes)
    row[4] = row[0] + objective.ent_coef * row[1]
    if has_critic:
        _take(rollout.returns, order, start, others, n)
        if objective.clip_range_vf >= 0:
            _take(rollout.old_values, order, start, more, n)
        row[2] = squared_error(values, others, more, objective.clip_range_vf, value_slopes)
        row[4] += objective.vf_coef * row[2]
    if objective.kl_coef > 0:
        row[4] += objective.kl_coef * row[3]
    ratio_metrics(log_probs, old, row)


@compiled()
def _learn(network, params, grad, n, vf_coef, work, std_grad, last_of_actor, last_of_critic):  # type: ignore[no-untyped-def]
    """Backward pass of a minibatch."""
    x_all, d, rows, n_outputs = work.x, work.d, work.rows, network.actor[-1, 3]
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
def _evaluate(network, params, rollout, values, log_probs):  # type: ignore[no-untyped-def]
    n = len(rollout.observations)
    order, work = np.arange(n), _workspace(network, params, np.array([0, min(n, BLOCK)]))
    unused = np.zeros_like(params)
    for start in range(0, n, BLOCK):
        count = min(BLOCK, n - start)
        _look(network, params, rollout, order, start, count, 0.0, 0.0, work, unused)
        log_probs[start : start + count] = work.rows[_LOG_PROBS, :count]
        if len(network.critic):
            values[start : start + count] = work.rows[_VALUES, :count]


@compiled()
def _epoch(network, objective, adam, params, grad, exp_avg, exp_avg_sq, step, order, starts, segments, rollout, metrics):  # type: ignore[no-untyped-def]
    work = _workspace(network, params, starts)
    std_grad = grad[max(network.log_std, 0) :]
    for m in range(len(starts) - 1):
        start, n, row = starts[m], starts[m + 1] - starts[m], metrics[m]
        for i in range(grad.size):
            grad[i] = 0
        minibatch = (rollout, order, start, n)
        weights = (-objective.ent_coef / n, objective.kl_coef / n)
        entropy, divergence, actor_at, critic_at = _look(network, params, *minibatch, *weights, work, std_grad)
        row[1] = -entropy / n
        if objective.kl_coef > 0:
            row[3] = divergence / n
        _losses(objective, len(network.critic) > 0, rollout, segments, order, start, n, work.rows, row)
        if row[5] > 1.5 * objective.target_kl:
            return m + 1, step, True
        _learn(network, params, grad, n, objective.vf_coef, work, std_grad, actor_at, critic_at)
        clip_norm(grad, adam.max_grad_norm)
        step += 1
        adam_step(params, grad, exp_avg, exp_avg_sq, step, adam.learning_rate, adam.beta1, adam.beta2, adam.eps)
    return len(starts) - 1, step, False
