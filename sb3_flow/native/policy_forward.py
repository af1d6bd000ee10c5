"""Forward pass of an MLP policy on NumPy observations, for collection: actions, values and log-probabilities."""

import numpy as np

from sb3_flow.compiled import compiled
from sb3_flow.compiled.choices import shown
from sb3_flow.native.distributions import act
from sb3_flow.native.layers import FEW, aligned, forward, forward_few, gather_rows, padded, total_outputs
from sb3_flow.native.matrices import BLOCK, STRIDE
from sb3_flow.native.network_layout import GAUSSIAN, INPUTS, OUTPUTS, Network, check_inputs


def policy_forward(
    network: Network, params: np.ndarray, observations: np.ndarray, rng: np.random.Generator | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Draw actions, and compute values and log-probabilities.

    :param network: made by :func:`describe_network`
    :param params: flat, float32 or float64
    :param observations: shape ``(n, features)``, converted to the dtype of ``params``
    :param rng: generator of the actions, which draws a number for each part of an action; None: the likeliest actions
    :return: actions, shape ``(n, parts)``, numbers of choices as floats; values, shape ``(n,)``, 0 without a critic;
        log-probabilities, shape ``(n,)``
    :raises ValueError: if shapes do not fit
    """
    params, observations = check_inputs(network, params, observations)
    shape = len(observations), len(network.components)
    if rng is None:
        noise = np.empty((0, 0), params.dtype)
    elif not isinstance(rng, np.random.Generator):
        raise ValueError(f"`rng` must be a numpy.random.Generator or None, but {shown(rng)} was given.")
    elif network.distribution == GAUSSIAN:
        noise = rng.standard_normal(shape, params.dtype)
    else:
        noise = rng.random(shape, params.dtype)
    actions, log_probs = np.empty(shape, params.dtype), np.empty(shape[0], params.dtype)
    values = np.zeros(shape[0], params.dtype)
    _act(network, params, observations, noise, actions, values, log_probs)
    return actions, values, log_probs


def policy_values(network: Network, params: np.ndarray, observations: np.ndarray) -> np.ndarray:
    """
    Compute values; the arguments are explained at :func:`policy_forward`.

    :return: values, shape ``(n,)``, 0 without a critic
    :raises ValueError: if shapes do not fit
    """
    params, observations = check_inputs(network, params, observations)
    values = np.zeros(len(observations), params.dtype)
    _evaluate_critic(network, params, observations, values)
    return values


def policy_outputs(network: Network, params: np.ndarray, observations: np.ndarray) -> np.ndarray:
    """
    Compute the actor's outputs, which :func:`ppo_epoch` needs of a reference policy: logits, not normalised, or means. The
    arguments are explained at :func:`policy_forward`.

    :return: shape ``(n, outputs)``
    :raises ValueError: if shapes do not fit
    """
    params, observations = check_inputs(network, params, observations)
    outputs = np.empty((len(observations), int(network.actor[-1, OUTPUTS])), params.dtype)
    _evaluate_actor(network, params, observations, outputs)
    return outputs


@compiled()
def _act(network, params, observations, noise, actions, values, log_probs):
    actor, n = network.actor, len(observations)
    outputs_at = actor[0, INPUTS] * STRIDE
    x = aligned(outputs_at + total_outputs(actor) * (STRIDE + FEW), params)
    log_std = params[max(network.log_std, 0) :]
    if 0 < n <= FEW:
        last = forward_few(params, actor, network.activation, x, outputs_at, observations, n)
        act(network.distribution, network.components, x, last, n, log_std, noise, 0, actions, log_probs)
    else:
        for first in range(0, n, BLOCK):
            count = min(BLOCK, n - first)
            gather_rows(observations, first, count, x)
            last = forward(params, actor, network.activation, x, 0, outputs_at, padded(count))
            act(network.distribution, network.components, x, last, count, log_std, noise, first, actions, log_probs)
    _evaluate_critic(network, params, observations, values)


@compiled()
def _evaluate_critic(network, params, observations, values):
    critic, n = network.critic, len(observations)
    outputs_at = network.actor[0, INPUTS] * STRIDE
    x = aligned(outputs_at + total_outputs(critic) * (STRIDE + FEW), params)
    if 0 < n <= FEW and len(critic):
        last = forward_few(params, critic, network.activation, x, outputs_at, observations, n)
        values[:] = x[last : last + n]
        return
    for first in range(0, n if len(critic) else 0, BLOCK):
        count = min(BLOCK, n - first)
        gather_rows(observations, first, count, x)
        last = forward(params, critic, network.activation, x, 0, outputs_at, padded(count))
        for c in range(count):
            values[first + c] = x[last + c]


@compiled()
def _evaluate_actor(network, params, observations, outputs):
    actor, n = network.actor, len(observations)
    outputs_at = actor[0, INPUTS] * STRIDE
    x = aligned(outputs_at + total_outputs(actor) * STRIDE, params)
    for first in range(0, n, BLOCK):
        count = min(BLOCK, n - first)
        gather_rows(observations, first, count, x)
        last = forward(params, actor, network.activation, x, 0, outputs_at, padded(count))
        for j in range(outputs.shape[1]):
            for c in range(count):
                outputs[first + c, j] = x[last + j * STRIDE + c]
