"""
Generalised advantage estimation (GAE; Schulman et al. 2016, arXiv 1506.02438) with terminations and time limits told apart.

Arrays are time-major. A step that carries both flags counts as terminated, as in SB3.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sb3_flow.compiled import Loop, compiled
from sb3_flow.compiled.choices import shown
from sb3_flow.kernels.array_arguments import (
    BOOL,
    FLOAT32,
    FLOAT64,
    NDARRAY,
    check_finite,
    check_shape,
    explain_result,
    flag_array,
    float_array,
    numeric,
)
from sb3_flow.kernels.recurrence import CHUNK, all_finite, solve, solve_in_order
from sb3_flow.kernels.sequences import check_discounts, check_sequences, continuations, explain, shapes_fit, td_errors


def compute_gae(
    rewards: np.ndarray,
    values: np.ndarray,
    *,
    last_values: np.ndarray | float | None = None,
    terminated: np.ndarray | None = None,
    truncated: np.ndarray | None = None,
    final_values: np.ndarray | None = None,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
) -> tuple[np.ndarray, np.ndarray]:
    """
    Compute delta_t = r_t + gamma (1 - term_t) V'_t - V_t;  A_t = delta_t + gamma lambda (1 - done_t) A_{t+1};  R_t = A_t +
    V_t, where V'_t is V_{t+1}, ``last_values`` at the last step, or ``final_values`` where truncated and not terminated.

    :param rewards: float32 or float64, shape ``(T,)`` or ``(T, N)``
    :param values: V(s_t), same shape and dtype, or with a row T that holds the last values
    :param last_values: V of the observation after the last step, shape ``(N,)`` (a number for ``(T,)``); None if ``values``
        has T + 1 rows, or if every trajectory ends at the last step
    :param terminated: bool, same shape as ``rewards``; None: nowhere
    :param truncated: bool, same shape; ``final_values`` must then be given
    :param final_values: V of each step's final observation, before the reset, same shape; read only where truncated and not
        terminated
    :param gamma: discount factor
    :param gae_lambda: trade-off of bias and variance
    :return: advantages and returns, shape and dtype of ``rewards``
    :raises ValueError: if shapes or dtypes do not fit, a number that is used is not finite, or a factor is not in [0, 1]
    """
    factors = check_discounts(gamma, gae_lambda)
    try:
        # numba's dispatcher may take masked arrays for plain arrays, and swapped bytes for native bytes
        dtype, ends = rewards.dtype, np.zeros(rewards.shape, BOOL) if terminated is None else terminated
        plain = type(rewards) is type(values) is type(last_values) is type(ends) is NDARRAY
        plain = plain and (truncated is None or type(truncated) is type(final_values) is NDARRAY)
        known = plain and (dtype is FLOAT32 or dtype is FLOAT64) and values.dtype is last_values.dtype is dtype  # type: ignore[union-attr]
        if known and (final_values is None or final_values.dtype is dtype):
            out = np.empty((2, *rewards.shape), dtype)  # a single array is faster to allocate and to pass
            if _gae.call(rewards, values, last_values, ends, truncated, final_values, *factors, out):
                return out[0], out[1]
    except Exception:  # numba's are of many kinds
        pass
    # An argument needs to be converted or is wrong, or the loop needs to be compiled
    arrays = check_sequences(rewards, values, last_values, terminated, truncated, final_values)
    out = np.empty((2, *arrays[0].shape), arrays[0].dtype)
    if not _gae.checked(*arrays, *factors, out):
        explain(arrays)
    if rewards.ndim == 1:
        return out[0, :, 0], out[1, :, 0]
    return out[0], out[1]


def compute_lambda_returns(
    rewards: np.ndarray,
    values: np.ndarray,
    *,
    last_values: np.ndarray | float | None = None,
    terminated: np.ndarray | None = None,
    truncated: np.ndarray | None = None,
    final_values: np.ndarray | None = None,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
) -> np.ndarray:
    """
    Compute TD(lambda) returns G_t = r_t + gamma [(1 - lambda) V'_t + lambda G_{t+1}], G = V' where a trajectory or the arrays
    end: the returns of :func:`compute_gae`, which explains the arguments.

    :return: shape and dtype of ``rewards``
    :raises ValueError: as :func:`compute_gae`
    """
    return compute_gae(**locals())[1]


def compute_gae_sb3(
    rewards: np.ndarray,
    values: np.ndarray,
    episode_starts: np.ndarray,
    last_values: np.ndarray,
    dones: np.ndarray,
    gamma: float,
    gae_lambda: float,
) -> tuple[np.ndarray, np.ndarray]:
    """
    Compute advantages as SB3's ``RolloutBuffer.compute_returns_and_advantage``, to the last bit (checked on SB3 2.9.2).

    :param rewards: float32 or float64, shape ``(T, N)``; bootstrap values of time limits already added, as SB3 does
    :param values: same shape and dtype
    :param episode_starts: same shape and dtype: 1 where the step is the first of an episode
    :param last_values: V of the observation after the last step, shape ``(N,)``
    :param dones: 1 or True if the last step ended an episode, shape ``(N,)``, any dtype
    :param gamma: discount factor, a Python float as in SB3 (it is rounded to the arrays' dtype)
    :param gae_lambda: trade-off of bias and variance
    :return: advantages and returns, same shape and dtype
    :raises ValueError: if shapes or dtypes do not fit, a number is not finite, or a factor is not in [0, 1]
    """
    factors = check_discounts(gamma, gae_lambda)
    rewards = float_array("rewards", rewards)
    shape, dtype = rewards.shape, rewards.dtype
    if len(shape) != 2 or not rewards.size:
        raise ValueError(f"`rewards` must have shape (T, N), neither of them 0, but {shape} was given.")
    values = float_array("values", values, shape, dtype)
    episode_starts = float_array("episode_starts", episode_starts, shape, dtype)
    last_values = float_array("last_values", last_values, shape[1:], dtype)
    dones = float_array("dones", numeric("dones", dones, "fiub").astype(dtype), shape[1:], dtype)
    advantages, returns = np.empty_like(rewards), np.empty_like(rewards)
    arrays = rewards, values, episode_starts, last_values, dones
    if not _gae_sb3(*arrays, *factors, advantages, returns):
        names = ("rewards", "values", "episode_starts", "last_values", "dones")
        explain_result(dtype, **dict(zip(names, arrays, strict=True)))
    return advantages, returns


def batch_compute_gae(
    rewards: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
    *,
    last_values: Sequence[float] | np.ndarray | None = None,
    terminated: Sequence[bool] | np.ndarray | None = None,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """
    Compute :func:`compute_gae` of separate trajectories of different lengths, in a single call of the loop.

    :param rewards: an array of shape ``(T_i,)`` for each trajectory, all of the same dtype
    :param values: arrays of shape ``(T_i,)``, or all of ``(T_i + 1,)`` with the value of the last observation
    :param gamma: discount factor
    :param gae_lambda: trade-off of bias and variance
    :param last_values: value of each trajectory's last observation; None if ``values`` holds these, or if all trajectories
        terminate
    :param terminated: True for each trajectory that ends in a terminal state; None: no trajectory does
    :return: advantages and returns, one array of shape ``(T_i,)`` per trajectory
    :raises ValueError: if numbers of trajectories or lengths differ, or as :func:`compute_gae`
    """
    for name, given in (("rewards", rewards), ("values", values), ("last_values", last_values), ("terminated", terminated)):
        if given is not None or name in ("rewards", "values"):
            _check_entries(name, given, len(rewards) if name != "rewards" else None)
    n = len(rewards)
    given_ends = np.zeros(n, BOOL) if terminated is None else numeric("terminated", terminated, "biuf")
    ends = flag_array("terminated", given_ends, (n,))
    following = None if last_values is None else numeric("last_values", last_values)
    if not n:
        check_discounts(gamma, gae_lambda)
        return [], []
    dtype = float_array("rewards[0]", rewards[0]).dtype.newbyteorder("=")
    rewards = [float_array(f"rewards[{i}]", r, dtype=dtype) for i, r in enumerate(rewards)]
    values = [float_array(f"values[{i}]", v, dtype=dtype) for i, v in enumerate(values)]
    longer = int(values[0].size == rewards[0].size + 1)
    if longer and last_values is not None:
        raise ValueError("`last_values` must be None if `values` holds the values of the last observations.")
    for i, (r, v) in enumerate(zip(rewards, values, strict=True)):
        if r.ndim != 1 or not r.size:
            raise ValueError(f"`rewards[{i}]` must have shape (T,), at least one step, but {r.shape} was given.")
        check_shape(f"values[{i}]", v.shape, (r.size + longer,))
    if longer:
        bootstrap = np.array([v[-1] for v in values], dtype)
    elif following is not None:
        bootstrap = following.astype(dtype)
        check_shape("last_values", bootstrap.shape, (n,))
    elif ends.all():
        bootstrap = np.zeros(n, dtype)
    else:
        raise ValueError("`last_values` must be given, or `values` with T + 1 entries, unless all trajectories terminate.")
    check_finite(**{"values" if longer else "last_values": np.where(ends, 0, bootstrap)})
    # One long trajectory that is cut after each given trajectory
    last = np.cumsum([len(r) for r in rewards]) - 1
    flat = np.concatenate(rewards)
    term, trunc, final = np.zeros(flat.size, BOOL), np.zeros(flat.size, BOOL), np.zeros(flat.size, dtype)
    term[last], trunc[last], final[last] = ends, ~ends, bootstrap
    flat_values = np.concatenate([v[:-1] for v in values] if longer else values)
    advantages, returns = compute_gae(
        flat, flat_values, terminated=term, truncated=trunc, final_values=final, gamma=gamma, gae_lambda=gae_lambda
    )
    return np.split(advantages, last[:-1] + 1), np.split(returns, last[:-1] + 1)


def _check_entries(name: str, given: Any, expected: int | None) -> None:
    array = isinstance(given, np.ndarray) and given.ndim > 0
    if not array and (not isinstance(given, Sequence) or isinstance(given, (str, bytes))):
        raise ValueError(f"`{name}` must be a list, one entry per trajectory, but {shown(given)} was given.")
    if expected is not None and len(given) != expected:
        raise ValueError(f"`{name}` must have one entry per trajectory, {expected}, but {len(given)} were given.")


@Loop
def _gae(rewards, values, last_values, terminated, truncated, final_values, gamma, factor, out):
    if not shapes_fit(rewards, values, last_values, terminated, truncated, final_values):
        return False
    n_envs = last_values.size
    term = terminated.ravel()
    trunc = None if truncated is None else truncated.ravel()
    final = None if final_values is None else final_values.ravel()
    r, v, a, ret = rewards.ravel(), values.ravel(), out[0].ravel(), out[1].ravel()
    g, gl = a.dtype.type(gamma), a.dtype.type(factor)
    chunk = max(CHUNK // n_envs, 1) * n_envs
    stop = r.size
    while stop > 0:
        start = max(stop - chunk, 0)
        d, c = a[start:stop], ret[start:stop]  # the returns' place holds the coefficients until they are known
        td_errors(r, v, last_values, term, trunc, final, g, start, d)
        continuations(term, trunc, gl, start, c)
        last = d.size - n_envs
        if stop < r.size:
            for i in range(n_envs):
                d[last + i] += c[last + i] * a[stop + i]
        c[last:] = 0
        solve(d, c, n_envs)
        of = v[start:stop]
        for i in range(d.size):
            c[i] = d[i] + of[i]
        stop = start
    return all_finite(ret)


@compiled(fastmath=False)
def _gae_sb3(rewards, values, episode_starts, last_values, dones, gamma, factor, advantages, returns):
    # The order of operations, none of which are fused, makes the result equal to SB3's
    n_envs = last_values.size
    r, v, starts, a, ret = rewards.ravel(), values.ravel(), episode_starts.ravel(), advantages.ravel(), returns.ravel()
    g, gl = a.dtype.type(gamma), a.dtype.type(factor)
    zero, one = a.dtype.type(0), a.dtype.type(1)
    inside = r.size - n_envs
    following, next_starts, c = v[n_envs:], starts[n_envs:], np.empty_like(a)
    for i in range(inside):
        a[i] = r[i] + g * following[i] * (one - next_starts[i]) - v[i]
    for i in range(inside):
        c[i] = gl * (one - next_starts[i])
    for i in range(n_envs):
        j, alive = inside + i, one - dones[i]
        a[j] = (r[j] + g * last_values[i] * alive - v[j]) + gl * alive * zero
    solve_in_order(a, c, n_envs)
    for i in range(r.size):
        ret[i] = a[i] + v[i]
    return all_finite(ret)
