"""
Gaussian noise that is a function of the observation: the same for the same observation wherever and whenever it is drawn.

A counter-based generator: number i of a row is SplitMix64's output function (Steele, Lea and Flood 2014) of the row's key plus
i times an odd constant, so that a row's numbers depend neither on other rows nor on earlier draws. The key is a hash of the
observation's numbers and of a seed: a sum of products with random odd constants (multilinear hashing), mixed. Integers
have 64 bits and wrap around, which every device does alike, and their sums do not depend on the order.

The functions take NumPy's arrays or torch's tensors, which may be on any device and can be traced. On the CPU one compiled
loop draws the same numbers; without numba NumPy's operators do, which cost a tenth of torch's on so few numbers.
"""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch as th

from sb3_flow.compiled import unavailable
from sb3_flow.fused.fusable import can_fuse

NoiseSource = Callable[[int], th.Tensor]
"""``source(n)`` draws n new starting points for every observation, shape ``(B, n, A)``."""
Array = Any
"""A NumPy array or a tensor."""

GAMMA, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""Constants of SplitMix64: 2^64 divided by the golden ratio, and the factors of the output function, as signed numbers."""
LOW = 2**32 - 1


def _library(array: Array) -> ModuleType:
    return th if isinstance(array, th.Tensor) else np


def _float64(x: Array) -> Array:
    return x.double() if isinstance(x, th.Tensor) else x.astype(np.float64)


def _shift(x: Array, bits: int) -> Array:
    """Shift x to the right as an unsigned number."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def mix(x: Array) -> Array:
    """
    Apply SplitMix64's output function: a bijection of 64-bit integers in which every bit depends on all.

    :param x: int64, any shape
    :return: int64, same shape
    """
    x = (x ^ _shift(x, 30)) * FIRST
    x = (x ^ _shift(x, 27)) * SECOND
    return x ^ _shift(x, 31)


def multipliers(n_numbers: int) -> th.Tensor:
    """Make the odd constants of the hash, a constant for each number of an observation, int64, shape ``(n_numbers,)``."""
    odd: th.Tensor = mix(th.arange(1, n_numbers + 1) * GAMMA) | 1
    return odd


def row_keys(rows: Array, odd: Array, seed: int) -> Array:
    """
    Hash every row. Equal rows have equal keys; -0.0 counts as 0.0.

    :param rows: float32, shape ``(B, n_numbers)``
    :param odd: :func:`multipliers` of ``n_numbers``
    :param seed: any integer
    :return: int64, shape ``(B,)``
    """
    # Arithmetic can be traced, unlike a look at the bits: a mantissa of 24 bits and its exponent
    mantissas, exponents = _library(rows).frexp(rows)
    whole = mantissas * 2.0**24
    integers = (whole.long() if isinstance(whole, th.Tensor) else whole.astype(np.int64)) * 1024 + exponents
    return mix((integers * odd).sum(1) + _mixed_seed(seed))


def _mixed_seed(seed: int) -> int:
    return (seed * GAMMA + 2**63) % 2**64 - 2**63


def keyed_normal(keys: Array, first: int, n: int) -> Array:
    """
    Draw standard normal numbers by the Box-Muller transformation, in float64 so that devices agree to the last digit of
    float32.

    :param keys: int64, shape ``(B,)``
    :param first: number of the first pair, from 0; a pair is the same whatever else is drawn
    :param n: numbers of each row
    :return: float64, shape ``(B, n)``
    """
    library = _library(keys)
    pairs = library.arange(first + 1, first + 1 + math.ceil(n / 2), device=keys.device) * GAMMA
    bits = mix(keys[:, None] + pairs)
    radius = library.sqrt(-2 * library.log(_float64((bits & LOW) + 1) * 2.0**-32))
    angle = _float64(_shift(bits, 32)) * (2 * math.pi * 2.0**-32)
    numbers = library.stack([radius * library.cos(angle), radius * library.sin(angle)], -1)
    return numbers.reshape(keys.shape[0], 2 * len(pairs))[:, :n]


def keyed_noise(rows: th.Tensor, odd: th.Tensor, seed: int, size: int) -> NoiseSource:
    """
    Make the noise of observations, to be drawn in one or several parts.

    :param rows: numbers that the policy sees of B observations, float32, shape ``(B, n_numbers)``
    :param odd: :func:`multipliers` of ``n_numbers``, on the same device
    :param seed: another seed gives other noise
    :param size: numbers of a starting point, A
    :return: source of float32 noise that depends on observations, seed and the numbers drawn before
    :raises RuntimeError: in an export to ONNX, which knows too few operators on integers
    """
    if th.onnx.is_in_onnx_export():
        raise RuntimeError(
            "torch.onnx cannot export noise that is keyed by the observation: export the policy with acting_mode='zero', or a "
            "module that takes the noise as an input and calls `policy.samples(observation, noise)`."
        )
    rows, drawn = rows.detach().contiguous(), 0
    if can_fuse(rows):
        draw = _compiled_draw(rows.numpy(), odd.numpy(), seed)
    else:
        keys = row_keys(rows, odd, seed)

        def draw(first: int, n: int) -> th.Tensor:
            return keyed_normal(keys, first, n).float()  # type: ignore[no-any-return]

    def source(n: int) -> th.Tensor:
        nonlocal drawn
        first, drawn = drawn, drawn + math.ceil(n * size / 2)
        return draw(first, n * size).view(-1, n, size)

    return source


def _compiled_draw(rows: np.ndarray, odd: np.ndarray, seed: int) -> Callable[[int, int], th.Tensor]:
    """Make a function that draws float32 numbers, given the first pair and the count of numbers of each row."""
    if unavailable() is None:
        from sb3_flow.fused.keyed_normal import keyed_normal_rows  # brings numba

        mixed_seed = _mixed_seed(seed)
        return lambda first, n: th.from_numpy(keyed_normal_rows(rows, odd, mixed_seed, first, n))
    keys = row_keys(rows, odd, seed)
    return lambda first, n: th.from_numpy(keyed_normal(keys, first, n).astype(np.float32))


def fresh_noise(rows: int, size: int, generator: th.Generator | None, device: th.device) -> NoiseSource:
    """
    Make a source that draws new noise every time.

    :param rows: observations B
    :param size: numbers of a starting point, A
    :param generator: generator on ``device``; None for torch's own
    :param device: device of the noise
    """
    return lambda n: th.randn(rows, n, size, generator=generator, device=device)
