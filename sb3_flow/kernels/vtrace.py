"""
V-trace (Espeholt et al. 2018, arXiv 1802.01561) with lambda, in the form that is GAE exactly when the policies agree.

With the ratios w_t = pi(a_t | s_t) / mu(a_t | s_t), rho_t = min(rho_bar, w_t), c_t = lambda min(c_bar, w_t):
delta_t = rho_t (r_t + gamma (1 - term_t) V'_t - V_t);  e_t = delta_t + gamma (1 - done_t) c_t e_{t+1};  vs_t = V_t + e_t.
The policy's target mixes (1 - lambda) V_{t+1} + lambda vs_{t+1} = V_{t+1} + lambda e_{t+1} (rlax's form), so that
q_t - V_t = r_t + gamma (1 - term_t) V'_t - V_t + gamma lambda (1 - done_t) e_{t+1};  A_t = min(rho_pg_bar, w_t) (q_t - V_t).
The ratio multiplies the whole error, not the reward alone: that would move the values' fixed point.
"""

import math

import numpy as np

from sb3_flow.compiled import Loop
from sb3_flow.kernels.array_arguments import BOOL, FLOAT32, FLOAT64, NDARRAY, check_positive, check_shape, float_array
from sb3_flow.kernels.recurrence import CHUNK, all_finite, solve
from sb3_flow.kernels.sequences import check_discounts, check_sequences, continuations, explain, shapes_fit, td_errors


def compute_vtrace(
    log_rhos: np.ndarray,
    rewards: np.ndarray,
    values: np.ndarray,
    *,
    last_values: np.ndarray | float | None = None,
    terminated: np.ndarray | None = None,
    truncated: np.ndarray | None = None,
    final_values: np.ndarray | None = None,
    gamma: float = 0.99,
    gae_lambda: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    rho_pg_bar: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Compute V-trace's value targets and advantages.

    :param log_rhos: log pi(a_t | s_t) - log mu(a_t | s_t), float32 or float64, shape ``(T,)`` or ``(T, N)``; an infinite
        entry means a ratio of 0 or the cap
    :param rewards: same shape and dtype, as all arguments up to ``final_values``, which :func:`compute_gae` explains
    :param values: V of the policy that learns, at update time
    :param last_values: V of the observation after the last step, shape ``(N,)``
    :param terminated: bool
    :param truncated: bool
    :param final_values: V of the final observations
    :param gamma: discount factor
    :param gae_lambda: 1 is the paper's V-trace
    :param rho_bar: cap of the ratios in the errors; it decides which policy's values are learned
    :param c_bar: cap of the ratios in the trace, at most ``rho_bar``
    :param rho_pg_bar: cap of the ratios in the policy gradient's advantages
    :return: value targets vs; q - V, for losses that carry the ratio themselves (PPO's surrogate); advantages rho_pg (q - V);
        shape and dtype of ``rewards``
    :raises ValueError: if shapes or dtypes do not fit, a log ratio is NaN, another number that is used is not finite, a factor
        is not in [0, 1], or ``rho_bar < c_bar``
    """
    factors = check_discounts(gamma, gae_lambda)
    check_positive(rho_bar=rho_bar, c_bar=c_bar, rho_pg_bar=rho_pg_bar)
    if rho_bar < c_bar:
        raise ValueError(f"`rho_bar` must be at least `c_bar`, but {rho_bar} and {c_bar} were given.")
    settings = *factors, float(rho_bar), float(c_bar), float(rho_pg_bar)
    # A little above the largest cap: nothing overflows, and the caps are met exactly
    limit = math.log(max(rho_bar, c_bar, rho_pg_bar)) + 0.01
    try:
        # Arrays that numba's dispatcher may mistake for plain arrays are left out, as in compute_gae
        dtype, ends = rewards.dtype, np.zeros(rewards.shape, BOOL) if terminated is None else terminated
        plain = type(log_rhos) is type(rewards) is type(values) is type(last_values) is type(ends) is NDARRAY
        plain = plain and (truncated is None or type(truncated) is type(final_values) is NDARRAY)
        known = (
            plain and (dtype is FLOAT32 or dtype is FLOAT64) and log_rhos.dtype is values.dtype is last_values.dtype is dtype  # type: ignore[union-attr]
        )
        if known and (final_values is None or final_values.dtype is dtype):
            out = np.empty((3, *rewards.shape), dtype)
            ratios = np.minimum(log_rhos, limit)
            np.exp(ratios, out=ratios)  # numba's own exp is several times slower
            if _vtrace.call(ratios, rewards, values, last_values, ends, truncated, final_values, *settings, out):
                return out[0], out[1], out[2]
    except Exception:  # numba's are of many kinds
        pass
    # An argument needs to be converted or is wrong, or the loop needs to be compiled
    arrays = check_sequences(rewards, values, last_values, terminated, truncated, final_values)
    steps = arrays[0]
    log_rhos = float_array("log_rhos", log_rhos, dtype=steps.dtype)
    check_shape("log_rhos", log_rhos.shape, rewards.shape)
    ratios = np.exp(np.minimum(log_rhos, limit)).reshape(steps.shape)
    out = np.empty((3, *steps.shape), steps.dtype)
    if not _vtrace.checked(ratios, *arrays, *settings, out):
        if np.isnan(log_rhos).any():
            raise ValueError(f"`log_rhos` must not be NaN, but {np.isnan(log_rhos).sum()} of its entries are.")
        explain(arrays)
    if rewards.ndim == 1:
        return out[0, :, 0], out[1, :, 0], out[2, :, 0]
    return out[0], out[1], out[2]


@Loop
def _vtrace(
    ratios, rewards, values, last_values, terminated, truncated, final_values, gamma, factor, rho_bar, c_bar, rho_pg_bar, out
):
    if ratios.shape != rewards.shape or not shapes_fit(rewards, values, last_values, terminated, truncated, final_values):
        return False
    n_envs = last_values.size
    term = terminated.ravel()
    trunc = None if truncated is None else truncated.ravel()
    final = None if final_values is None else final_values.ravel()
    w_all, r, v, vs = ratios.ravel(), rewards.ravel(), values.ravel(), out[0].ravel()
    q_all, a_all = out[1].ravel(), out[2].ravel()
    real = vs.dtype.type
    g, gl, cap, c_cap, pg_cap = real(gamma), real(factor), real(rho_bar), real(c_bar), real(rho_pg_bar)
    carry = np.zeros(n_envs, vs.dtype)  # e of the step after the chunk
    chunk = max(CHUNK // n_envs, 1) * n_envs
    stop = r.size
    while stop > 0:
        start = max(stop - chunk, 0)
        # The advantages' place holds coefficients until the end. NaN ratios stay NaN: no comparison replaces them.
        w, e, q, c = w_all[start:stop], vs[start:stop], q_all[start:stop], a_all[start:stop]
        td_errors(r, v, last_values, term, trunc, final, g, start, q)
        for i in range(e.size):
            e[i] = (cap if w[i] > cap else w[i]) * q[i]
        continuations(term, trunc, gl, start, c)
        for i in range(c.size):
            c[i] *= c_cap if w[i] > c_cap else w[i]
        last = e.size - n_envs
        for i in range(n_envs):
            e[last + i] += c[last + i] * carry[i]
        c[last:] = 0
        solve(e, c, n_envs)
        continuations(term, trunc, gl, start, c)
        following = e[n_envs:]
        for i in range(last):
            q[i] += c[i] * following[i]
        for i in range(n_envs):
            q[last + i] += c[last + i] * carry[i]
        for i in range(n_envs):
            carry[i] = e[i]
        for i in range(q.size):
            c[i] = (pg_cap if w[i] > pg_cap else w[i]) * q[i]
        of = v[start:stop]
        for i in range(e.size):
            e[i] += of[i]
        stop = start
    return all_finite(vs) and all_finite(a_all)
