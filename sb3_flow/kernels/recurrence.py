"""
Backward linear recurrences x_t = d_t + c_t x_{t+1}, the core of every discounted sum in this package; compiled with numba.

Arrays are flat views of time-major ``(T, N)`` arrays, so a step's successor lies N entries further: one loop over entries
serves any N, and the compiler vectorises it where N is a power of two that it knows. For N below 8 neighbouring steps are
first merged (x_t = (d_t + c_t d_{t+1}) + c_t c_{t+1} x_{t+2}), which makes a chain of T dependent operations 8 times shorter.

A ``reassoc`` or ``contract`` flag lets the compiler reorder or fuse operations; NaN and infinity keep their meaning.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

CHUNK = 2048
"""Entries that are worked on at a time, from the last to the first, so that scratch memory stays in the cache."""

Function = Callable[..., Any]


def compiled(**options: Any) -> Callable[[Function], Function]:
    """:return: the decorator of this package's loops, which release the GIL and may use fused multiply-add"""
    settings: dict[str, Any] = {"fastmath": {"contract"}, "error_model": "numpy", "nogil": True, "cache": True}
    decorator: Callable[[Function], Function] = njit(**{**settings, **options})
    return decorator


class Loop:
    """
    A loop that is compiled only by :meth:`checked`. ``call`` raises TypeError if arguments are not exactly of a kind that was
    checked once (dtype, dimensions, C-contiguous, writable), which saves these checks in Python: they would cost more than
    the loop does.
    """

    def __init__(self, function: Function) -> None:
        self._function = compiled()(function)
        self.call: Function = self._refuse

    def checked(self, *arguments: Any) -> Any:
        """:return: the loop's result; the arguments are known to be right"""
        try:
            return self.call(*arguments)
        except TypeError:
            pass
        function: Any = self._function
        function.disable_compile(False)
        try:
            return function(*arguments)
        finally:
            function.disable_compile()
            self.call = function

    @staticmethod
    def _refuse(*arguments: Any) -> Any:
        raise TypeError("not compiled yet")


@compiled(inline="always")
def merge(d, c, lag):  # type: ignore[no-untyped-def]
    """From a recurrence over ``lag`` entries to one over twice as many."""
    size = d.size - lag
    for i in range(size):
        d[i] += c[i] * d[i + lag]
    for i in range(size):
        c[i] *= c[i + lag]


@compiled(inline="always")
def backward(d, c, lag):  # type: ignore[no-untyped-def]
    for i in range(d.size - lag - 1, -1, -1):
        d[i] += c[i] * d[i + lag]


@compiled(inline="always")
def dispatch(d, c, lag):  # type: ignore[no-untyped-def]
    # The distances are literals: with a variable the compiler could not vectorise the loop
    if lag == 1:
        backward(d, c, 1)
    elif lag == 2:
        backward(d, c, 2)
    elif lag == 4:
        backward(d, c, 4)
    elif lag == 8:
        backward(d, c, 8)
    elif lag == 16:
        backward(d, c, 16)
    elif lag == 32:
        backward(d, c, 32)
    elif lag == 64:
        backward(d, c, 64)
    elif lag == 128:
        backward(d, c, 128)
    elif lag == 256:
        backward(d, c, 256)
    else:
        distance = np.uintp(lag)  # unsigned: no test for negative indices
        for k in range(lag, d.size):
            i = np.uintp(d.size - 1 - k)
            d[i] += c[i] * d[i + distance]


@compiled()
def solve(d, c, lag):  # type: ignore[no-untyped-def]
    """
    x_i = d_i + c_i x_{i + lag}

    :param d: flat; receives x, which at the last ``lag`` entries is d
    :param c: flat, as long; zero at the last ``lag`` entries; overwritten
    :param lag: number of environments
    """
    if lag == 1:
        merge(d, c, 1)
    if lag <= 2:
        merge(d, c, 2)
    if lag <= 2 or lag == 4:
        merge(d, c, 4)
        lag = 8
    dispatch(d, c, lag)


@compiled(fastmath=False)
def solve_in_order(d, c, lag):  # type: ignore[no-untyped-def]
    """As :func:`solve`, one multiplication and one addition per entry, each rounded; c is left alone, its end is not read."""
    dispatch(d, c, lag)


@compiled(fastmath={"contract", "reassoc"})
def all_finite(x):  # type: ignore[no-untyped-def]
    """:return: whether no entry of a flat array is NaN or infinite"""
    zero = x.dtype.type(0)
    total = zero
    for i in range(x.size):
        total += x[i] * zero
    return total == zero
