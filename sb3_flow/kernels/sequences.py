"""Shared parts of GAE and V-trace: checks of a batch of trajectories, one-step errors, and where discounted sums are cut."""

import numpy as np

from sb3_flow.compiled import compiled
from sb3_flow.kernels.array_arguments import BOOL, check_range, explain_result, flag_array, float_array, numeric

Optional = np.ndarray | None
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Optional, Optional]


def check_discounts(gamma: float, gae_lambda: float) -> tuple[float, float]:
    """
    Check the discount factor and the trade-off of bias and variance.

    :return: gamma, and gamma gae_lambda
    :raises ValueError: if a factor is not in [0, 1]
    """
    try:
        if 0.0 <= gamma <= 1.0 and 0.0 <= gae_lambda <= 1.0:
            return float(gamma), float(gamma * gae_lambda)
    except (TypeError, ValueError, RuntimeError):
        pass
    gamma, gae_lambda = check_range("gamma", gamma, 0.0, 1.0), check_range("gae_lambda", gae_lambda, 0.0, 1.0)
    return gamma, gamma * gae_lambda


def check_sequences(
    rewards: np.ndarray,
    values: np.ndarray,
    last_values: np.ndarray | float | None,
    terminated: Optional,
    truncated: Optional,
    final_values: Optional,
) -> Arrays:
    """
    Check a batch of trajectories: the arguments of :func:`compute_gae`.

    :return: all arguments as the loops want them, of shape ``(T, N)`` and ``(N,)``; ``truncated`` and ``final_values``
        may be None
    :raises ValueError: if an argument is missing or does not fit
    """
    rewards = float_array("rewards", rewards)
    shape, dtype = rewards.shape, rewards.dtype
    if len(shape) not in (1, 2) or not rewards.size:
        raise ValueError(f"`rewards` must have shape (T,) or (T, N), neither of them 0, but {shape} was given.")
    terminated = np.zeros(shape, BOOL) if terminated is None else flag_array("terminated", terminated, shape)
    if truncated is not None or final_values is not None:
        truncated, final_values = _check_truncation(shape, dtype, truncated, final_values)
    n_steps = shape[0]
    if type(values) is np.ndarray and values.shape == (n_steps + 1, *shape[1:]):
        values = float_array("values", values, values.shape, dtype)
        if last_values is not None:
            raise ValueError(f"`last_values` must be None if `values` has T + 1 = {n_steps + 1} rows, but both were given.")
        last_values, values = values[n_steps:].reshape(-1), values[:n_steps]
    else:
        values = float_array("values", values, shape, dtype)
        if last_values is None:
            last_values = _no_last_values(shape, dtype, terminated, truncated)
        elif len(shape) == 1:
            last_values = numeric("last_values", last_values).astype(dtype)
            if last_values.shape not in ((), (1,)):
                raise ValueError(f"`last_values` must be one number, but shape {last_values.shape} was given.")
            last_values = last_values.reshape(1)
        else:
            last_values = float_array("last_values", last_values, shape[1:], dtype)  # type: ignore[arg-type]
    if len(shape) == 2:
        return rewards, values, last_values, terminated, truncated, final_values
    columns = [None if array is None else array.reshape(-1, 1) for array in (truncated, final_values)]
    return rewards.reshape(-1, 1), values.reshape(-1, 1), last_values, terminated.reshape(-1, 1), columns[0], columns[1]


def _check_truncation(
    shape: tuple[int, ...], dtype: np.dtype, truncated: Optional, final_values: Optional
) -> tuple[np.ndarray, np.ndarray]:
    for name, given, other in (("final_values", final_values, "truncated"), ("truncated", truncated, "final_values")):
        if given is None:
            raise ValueError(f"`{name}` must be given with `{other}`: both say where and how a time limit is bootstrapped.")
    return (
        flag_array("truncated", truncated, shape),  # type: ignore[arg-type]
        float_array("final_values", final_values, shape, dtype),  # type: ignore[arg-type]
    )


def _no_last_values(shape: tuple[int, ...], dtype: np.dtype, terminated: np.ndarray, truncated: Optional) -> np.ndarray:
    """Make zeros for the last values if all trajectories end at the last step."""
    done = terminated[-1] if truncated is None else terminated[-1] | truncated[-1]
    if not done.all():
        raise ValueError(
            f"`last_values` must be given, or `values` with T + 1 = {shape[0] + 1} rows, "
            "unless every trajectory ends at the last step."
        )
    return np.zeros(done.size, dtype)


def explain(arrays: Arrays) -> None:
    """Raise the error of a result that is not finite; bootstrap values that are not used are not searched for its cause."""
    rewards, values, last_values, ends, truncated, final_values = arrays
    final = {}
    if truncated is not None and final_values is not None:
        final = {"final_values": np.where(truncated & ~ends, final_values, 0)}
        ends = ends | truncated
    explain_result(rewards.dtype, rewards=rewards, values=values, last_values=np.where(ends[-1], 0, last_values), **final)


@compiled()
def shapes_fit(rewards, values, last_values, terminated, truncated, final_values):
    """Say whether all arrays have the shape of the rewards, and there is at least one step."""
    fit = rewards.size > 0 and values.shape == rewards.shape and last_values.size == rewards.shape[1]
    fit = fit and terminated.shape == rewards.shape
    if truncated is not None:
        fit = fit and truncated.shape == rewards.shape and final_values.shape == rewards.shape
    return fit


@compiled()
def td_errors(rewards, values, last_values, terminated, truncated, final_values, gamma, start, out):
    """
    Compute r_t + gamma (1 - term_t) V'_t - V_t, where V'_t is V_{t+1}, or V(final observation) where truncated.

    :param out: receives the entries from ``start`` on, in whole steps; all arrays but ``last_values`` are flat
    """
    size, n_envs = out.size, last_values.size
    inside = min(size, rewards.size - n_envs - start)  # entries whose successor is in the arrays
    first = start + n_envs
    r, v, following = rewards[start : start + size], values[start : start + size], values[first : first + inside]
    zero = out.dtype.type(0)
    # Values are loaded before they are chosen, and each loop stores to one array: the compiler vectorises nothing else
    if truncated is not None:
        term, trunc = terminated[start : start + size], truncated[start : start + size]
        final = final_values[start : start + size]
        for i in range(inside):
            at_limit, other = final[i], following[i]
            out[i] = at_limit if trunc[i] else other
        for i in range(inside, size):
            out[i] = final[i] if trunc[i] else last_values[i - inside]
        for i in range(size):
            successor = out[i]
            out[i] = r[i] + gamma * (zero if term[i] else successor) - v[i]
    else:
        term = terminated[start : start + size]
        for i in range(inside):
            successor = following[i]
            out[i] = r[i] + gamma * (zero if term[i] else successor) - v[i]
        for i in range(inside, size):
            out[i] = r[i] + gamma * (zero if term[i] else last_values[i - inside]) - v[i]


@compiled()
def continuations(terminated, truncated, factor, start, out):
    """Compute factor (1 - term_t) (1 - trunc_t) of the entries from ``start`` on; all arrays are flat."""
    zero = out.dtype.type(0)
    if truncated is not None:
        term, trunc = terminated[start : start + out.size], truncated[start : start + out.size]
        for i in range(out.size):
            out[i] = zero if term[i] | trunc[i] else factor
    else:
        term = terminated[start : start + out.size]
        for i in range(out.size):
            out[i] = zero if term[i] else factor
