"""Gaussian noise keyed by rows in one compiled loop, the twin of :mod:`sb3_flow.flow.noise`."""

import math
import operator
from typing import Any

import numpy as np

from sb3_flow.compiled import Loop, inlined
from sb3_flow.compiled.choices import shown
from sb3_flow.kernels.array_arguments import FLOAT32, INT64, NDARRAY

GAMMA, FIRST, SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
LOW = np.uint64(2**32 - 1)


@inlined()
def _mix(x):
    x = (x ^ (x >> np.uint64(30))) * FIRST
    x = (x ^ (x >> np.uint64(27))) * SECOND
    return x ^ (x >> np.uint64(31))


@Loop
def _fill(rows, odd, seed, first, out):
    """Fill ``out``, float32 of shape ``(B, n)``, with the numbers of each row; see :func:`keyed_normal_rows`."""
    for row in range(rows.shape[0]):
        total = np.uint64(seed)
        for i in range(rows.shape[1]):
            mantissa, exponent = math.frexp(rows[row, i])
            integer = np.int64(mantissa * 16777216.0) * np.int64(1024) + np.int64(exponent)
            total += np.uint64(integer) * np.uint64(odd[i])
        key = _mix(total)
        for i in range(0, out.shape[1], 2):
            bits = _mix(key + np.uint64(first + i // 2 + 1) * GAMMA)
            radius = math.sqrt(-2.0 * math.log(float((bits & LOW) + np.uint64(1)) * 2.0**-32))
            angle = float(bits >> np.uint64(32)) * (2.0 * math.pi * 2.0**-32)
            out[row, i] = radius * math.cos(angle)
            if i + 1 < out.shape[1]:
                out[row, i + 1] = radius * math.sin(angle)


def keyed_normal_rows(rows: np.ndarray, odd: np.ndarray, seed: int, first: int, n: int) -> np.ndarray:
    """
    Draw standard normal numbers that depend on each row.

    :param rows: float32, shape ``(B, n_numbers)``
    :param odd: odd numbers, int64, shape ``(n_numbers,)``
    :param seed: the seed times SplitMix64's constant, int64
    :param first: number of the first pair
    :param n: numbers of each row
    :return: float32, shape ``(B, n)``
    :raises ValueError: if an array has another dtype, shape or memory layout, or a number does not fit int64
    """
    fits = type(rows) is type(odd) is NDARRAY and rows.dtype == FLOAT32 and odd.dtype == INT64
    fits = fits and rows.ndim == 2 and odd.shape == rows.shape[1:]
    if not (fits and rows.flags.c_contiguous and odd.flags.c_contiguous):
        raise ValueError(
            "`rows` and `odd` must be contiguous, float32 of shape (B, n) and int64 of shape (n,), but "
            f"{_described(rows)} and {_described(odd)} were given."
        )
    seed, first, n = _int64("seed", seed, -(2**63)), _int64("first", first, 0), _int64("n", n, 0)
    out = np.empty((len(rows), n), np.float32)
    try:
        _fill.call(rows, odd, seed, first, out)
    except TypeError:
        _fill.checked(rows, odd, seed, first, out)
    return out


def _described(array: Any) -> str:
    return f"{array.dtype} of shape {array.shape}" if isinstance(array, NDARRAY) else shown(array)


def _int64(name: str, given: Any, least: int) -> int:
    try:
        number = operator.index(given)
    except TypeError:
        raise ValueError(f"`{name}` must be a whole number, but {shown(given)} was given.") from None
    if not least <= number < 2**63:
        raise ValueError(f"`{name}` must be at least {least} and fit int64, but {shown(given)} was given.")
    return number
