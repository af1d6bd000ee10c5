"""
GAE and V-trace on the device: the recursion over time is an associative scan in log2(T) steps of plain tensor operations,
which never wait for the host. On a CPU the loops of ``sb3_flow.kernels`` do less work.

Arrays are time-major, ``(T, N)`` for T steps of N environments. ``terminated`` and ``truncated`` belong to step t, as the
environment returned them; a step that is both counts as terminated. ``final_values`` holds the values of the last
observations of truncated episodes, and no other entry is read. The results are targets and carry no gradient.
"""

from typing import NamedTuple

import torch as th

from sb3_flow.losses.tensors import importance_ratio, require_same_shape


class Advantages(NamedTuple):
    """Results of :func:`gae_scan`, each ``(T, N)``."""

    advantages: th.Tensor
    returns: th.Tensor


class VTrace(NamedTuple):
    """Results of :func:`vtrace_scan`, each ``(T, N)``."""

    vs: th.Tensor
    q_minus_v: th.Tensor
    pg_advantages: th.Tensor


def linear_scan(decay: th.Tensor, increment: th.Tensor) -> th.Tensor:
    """
    Solve x_t = increment_t + decay_t x_{t+1} backwards in time, x_T = 0, by composing the affine maps of ever longer windows:
    (a, b) o (a', b') = (a a', b + a b').

    :param decay: shape ``(T, ...)``
    :param increment: same shape; finite, because a decay of zero multiplies
    :return: x, same shape
    :raises ValueError: if the shapes differ
    """
    require_same_shape(decay=decay, increment=increment)
    a, b = decay, increment
    window = 1  # steps that the maps cover so far
    while window < len(b):
        # The last maps already reach the end
        b = th.cat((b[:-window] + a[:-window] * b[window:], b[-window:]))
        a = th.cat((a[:-window] * a[window:], a[-window:]))
        window *= 2
    return b


@th.no_grad()
def gae_scan(
    rewards: th.Tensor,
    values: th.Tensor,
    last_values: th.Tensor,
    terminated: th.Tensor,
    truncated: th.Tensor,
    final_values: th.Tensor,
    gamma: float,
    gae_lambda: float,
) -> Advantages:
    """
    Estimate advantages (GAE, arXiv 1506.02438, Eq. 16) with a bootstrap at time limits:

        delta_t = r_t + gamma (1 - term_t) V(s'_t) - V_t,   A_t = delta_t + gamma lambda (1 - done_t) A_{t+1}

    :param rewards: r, as the environment gave them (no bootstrap added), shape ``(T, N)``
    :param values: V, shape ``(T, N)``
    :param last_values: V of the observations after the last step, shape ``(N,)``
    :param terminated: bool, shape ``(T, N)``
    :param truncated: bool, shape ``(T, N)``
    :param final_values: V of the final observation where an episode was truncated, shape ``(T, N)``
    :param gamma: discount
    :param gae_lambda: lambda
    :return: A and the returns A + V, shape ``(T, N)`` each
    :raises ValueError: if the shapes do not fit
    """
    terminated, done = _ends(terminated, truncated)
    delta = _td_errors(rewards, values, last_values, terminated, done, final_values, gamma)
    advantages = linear_scan(gamma * gae_lambda * (~done).to(delta.dtype), delta)
    return Advantages(advantages, advantages + values)


@th.no_grad()
def vtrace_scan(
    log_rhos: th.Tensor,
    rewards: th.Tensor,
    values: th.Tensor,
    last_values: th.Tensor,
    terminated: th.Tensor,
    truncated: th.Tensor,
    final_values: th.Tensor,
    gamma: float,
    gae_lambda: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    rho_pg_bar: float = 1.0,
) -> VTrace:
    """
    Compute V-trace (arXiv 1802.01561, Eq. 1 and Remark 2). With w = exp(log_rhos), rho = min(rho_bar, w), c = lambda
    min(c_bar, w):

        delta_t = rho_t (r_t + gamma (1 - term_t) V(s'_t) - V_t),   e_t = delta_t + gamma (1 - done_t) c_t e_{t+1}
        vs_t = V_t + e_t,   q_t - V_t = r_t + gamma (1 - term_t) n_t - V_t

    n_t is V(s'_t) at the end of an episode or of the rollout, else (1 - lambda) V_{t+1} + lambda vs_{t+1}. With that mixture
    V-trace on samples of the policy itself (w = 1) is GAE, for every lambda; lambda = 1 is the paper.

    A surrogate that has a ratio takes ``q_minus_v``; with ``pg_advantages`` w would enter twice.

    :param log_rhos: log pi(a|s) - log mu(a|s), shape ``(T, N)``
    :param rewards: r, as the environment gave them (no bootstrap added), shape ``(T, N)``
    :param values: V of the learner, not of the collector, shape ``(T, N)``
    :param last_values: V of the observations after the last step, shape ``(N,)``
    :param terminated: bool, shape ``(T, N)``
    :param truncated: bool, shape ``(T, N)``
    :param final_values: V of the final observation where an episode was truncated, shape ``(T, N)``
    :param gamma: discount
    :param gae_lambda: lambda
    :param rho_bar: cap of rho, at most exp(20), which decides whose value function is learned
    :param c_bar: cap of the trace, at most ``rho_bar``, which decides variance and speed only
    :param rho_pg_bar: cap of the weight of ``pg_advantages``
    :return: vs, q - V and min(rho_pg_bar, w) (q - V), shape ``(T, N)`` each
    :raises ValueError: if the shapes do not fit or ``c_bar`` is above ``rho_bar``
    """
    if c_bar > rho_bar:
        raise ValueError(f"`c_bar` must be at most `rho_bar`, but {c_bar} and {rho_bar} were given.")
    require_same_shape(log_rhos=log_rhos, rewards=rewards)
    terminated, done = _ends(terminated, truncated)
    td = _td_errors(rewards, values, last_values, terminated, done, final_values, gamma)
    discount = gamma * gae_lambda * (~done).to(td.dtype)
    e = linear_scan(discount * importance_ratio(log_rhos, c_bar), importance_ratio(log_rhos, rho_bar) * td)
    # gamma n_t = gamma V(s'_t) + gamma lambda e_{t+1}, without the last term at ends
    q_minus_v = td + discount * th.cat((e[1:], th.zeros_like(e[:1])))
    return VTrace(values + e, q_minus_v, importance_ratio(log_rhos, rho_pg_bar) * q_minus_v)


def _ends(terminated: th.Tensor, truncated: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
    """Make two bool tensors: terminated; terminated or truncated."""
    require_same_shape(terminated=terminated, truncated=truncated)
    return terminated.bool(), terminated.bool() | truncated.bool()


def _td_errors(
    rewards: th.Tensor,
    values: th.Tensor,
    last_values: th.Tensor,
    terminated: th.Tensor,
    done: th.Tensor,
    final_values: th.Tensor,
    gamma: float,
) -> th.Tensor:
    """Compute r_t + gamma (1 - term_t) V(s'_t) - V_t, shape ``(T, N)``."""
    require_same_shape(rewards=rewards, values=values, terminated=terminated, done=done, final_values=final_values)
    require_same_shape(last_values=last_values, first_values=values[0])
    successors = th.where(done, final_values, th.cat((values[1:], last_values.unsqueeze(0))))
    # Selection instead of multiplication: entries that are not read may be NaN
    return rewards + gamma * successors.masked_fill(terminated, 0.0) - values
