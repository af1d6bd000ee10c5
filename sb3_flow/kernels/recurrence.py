"""
Backward linear recurrences x_t = d_t + c_t x_{t+1}, the core of every discounted sum in this package.

Arrays are flat views of time-major ``(T, N)`` arrays, so a step's successor lies N entries further and one loop over blocks
of entries serves any N. Where numba cannot be used, NumPy works on one step of all environments at a time.
"""

import numpy as np

from sb3_flow.compiled import compiled, unavailable

CHUNK = 2048
"""Entries that are worked on at a time, from the last to the first, so that scratch memory stays in the cache."""


def solve_stepwise(d: np.ndarray, c: np.ndarray, lag: int) -> None:
    """
    Solve x_i = d_i + c_i x_{i + lag}, one multiplication and one addition per entry, each rounded.

    :param d: flat; receives x, whose last ``lag`` entries are the entries of d
    :param c: flat, of the same length; its last ``lag`` entries are not read
    :param lag: number of environments
    """
    for end in range(d.size - lag, 0, -lag):
        start = max(end - lag, 0)
        d[start:end] += c[start:end] * d[start + lag : end + lag]


if unavailable() is None:
    from sb3_flow.kernels.scans import solve, solve_in_order
else:
    solve = solve_in_order = solve_stepwise


@compiled(fastmath={"contract", "reassoc"})
def all_finite(x):
    """Say whether no entry of a flat array is NaN or infinite."""
    zero = x.dtype.type(0)
    total = zero
    for i in range(x.size):
        total += x[i] * zero
    return total == zero
