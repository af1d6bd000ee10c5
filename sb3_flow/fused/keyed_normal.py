"""Gaussian noise keyed by rows in one compiled loop, the twin of :mod:`sb3_flow.flow.noise`."""

import math

import numpy as np

from sb3_flow.compiled import Loop, inlined

GAMMA, FIRST, SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
LOW = np.uint64(2**32 - 1)


@inlined()
def _mix(x):
    x = (x ^ (x >> np.uint64(30))) * FIRST
    x = (x ^ (x >> np.uint64(27))) * SECOND
    return x ^ (x >> np.uint64(31))


def _fill(rows, odd, seed, first, out):
    """
    :param rows: float32, shape ``(B, n_numbers)``
    :param odd: int64, shape ``(n_numbers,)``
    :param seed: int64, the seed times SplitMix64's constant
    :param first: number of the first pair
    :param out: float32, shape ``(B, n)``, filled
    """
    for row in range(rows.shape[0]):
        total = np.uint64(seed)
        for i in range(rows.shape[1]):
            mantissa, exponent = math.frexp(rows[row, i])
            word = np.int64(mantissa * 16777216.0) * np.int64(1024) + np.int64(exponent)
            total += np.uint64(word) * np.uint64(odd[i])
        key = _mix(total)
        for i in range(0, out.shape[1], 2):
            bits = _mix(key + np.uint64(first + i // 2 + 1) * GAMMA)
            radius = math.sqrt(-2.0 * math.log(float((bits & LOW) + np.uint64(1)) * 2.0**-32))
            angle = float(bits >> np.uint64(32)) * (2.0 * math.pi * 2.0**-32)
            out[row, i] = radius * math.cos(angle)
            if i + 1 < out.shape[1]:
                out[row, i + 1] = radius * math.sin(angle)


_loop = Loop(_fill)


def keyed_normal_rows(rows: np.ndarray, odd: np.ndarray, seed: int, first: int, n: int) -> np.ndarray:
    """
    Draw standard normal numbers that depend on each row.

    :param rows: float32, shape ``(B, n_numbers)``
    :param odd: int64, shape ``(n_numbers,)``, odd numbers
    :param seed: int64
    :param first: number of the first pair
    :param n: numbers of each row
    :return: float32, shape ``(B, n)``
    :raises ValueError: if an array has another dtype, shape or memory layout
    """
    fits = rows.ndim == 2 and odd.shape == rows.shape[1:] and rows.dtype == np.float32 and odd.dtype == np.int64
    if not (fits and rows.flags.c_contiguous and odd.flags.c_contiguous):
        raise ValueError(
            f"`rows` and `odd` must be contiguous, float32 of shape (B, n) and int64 of shape (n,), but {rows.dtype} of shape "
            f"{rows.shape} and {odd.dtype} of shape {odd.shape} were given."
        )
    out = np.empty((len(rows), n), np.float32)
    try:
        _loop.call(rows, odd, seed, first, out)
    except TypeError:
        _loop.checked(rows, odd, seed, first, out)
    return out
