"""
Activations between two matrix products of an MLP: GELU (tanh approximation), alone and followed by a LayerNorm, forward and
backward in one pass over memory.

On CPUs torch's tanh-GELU costs several times its matrix product's share in networks of this size; these loops vectorise.
All arrays are float32, C-contiguous and given by pointers; they do not overlap.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from sb3_flow.compiled import inlined
from sb3_flow.compiled.tanh import CLAMP, P1, P3, P5, P7, P9, P11, P13, Q0, Q2, Q4, Q6
from sb3_flow.fused.argument_blocks import LAYER_NORM_EPS
from sb3_flow.fused.panels import dot, no_overlap, stack_array, sum_of

_float = np.float32
_EPS = _float(LAYER_NORM_EPS)
_ZERO, _HALF, _ONE, _THREE, _FIVE = _float(0.0), _float(0.5), _float(1.0), _float(3.0), _float(5.0)
_SQRT_2_OVER_PI, _CUBIC = _float(0.7978845608028654), _float(0.044715)


def _inlined(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    # With "reassoc" the order of a sum would depend on how often the code was optimised, which a load from disk changes
    return inlined(fastmath={"contract", "arcp", "nnan", "ninf", "nsz"}, **options)


@_inlined(inline="always")
def _tanh(x):
    x = min(max(x, -CLAMP), CLAMP)
    x2 = x * x
    p = P13 * x2 + P11
    p = p * x2 + P9
    p = p * x2 + P7
    p = p * x2 + P5
    p = p * x2 + P3
    p = p * x2 + P1
    q = Q6 * x2 + Q4
    q = q * x2 + Q2
    q = q * x2 + Q0
    return x * p / q


@_inlined(inline="always")
def _gelu_tanh(v):
    return _tanh(_SQRT_2_OVER_PI * v * (_ONE + _CUBIC * v * v))


@_inlined(inline="always")
def _gelu_slope(v, t):
    # For large v, t is 1 but for the last bit, which the cube of v would enlarge; 1 - t^2 vanishes before |v| = 5
    c = min(max(v, -_FIVE), _FIVE)
    return _HALF * (_ONE + t) + _HALF * c * (_ONE - t * t) * _SQRT_2_OVER_PI * (_ONE + _THREE * _CUBIC * c * c)


@_inlined()
def gelu_forward(z, out, rows, size):
    """Compute out = 0.5 z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))), both of shape ``(rows, size)``."""
    no_overlap()
    for b in range(0, rows * size, size):  # in each row the rest that fills no vector may differ in the last bit
        for j in range(size):
            out[b + j] = _HALF * z[b + j] * (_ONE + _gelu_tanh(z[b + j]))


@_inlined()
def gelu_backward(z, grad, of_bias, rows, size):
    """
    Compute gradients of :func:`gelu_forward`.

    :param z: input of the GELU, shape ``(rows, size)``
    :param grad: holds the gradient of the result and receives the gradient of z
    :param of_bias: receives the sum of the gradient of z over rows, shape ``(size,)``
    """
    no_overlap()
    slope = stack_array(size)
    for j in range(size):
        of_bias[j] = _ZERO
    for b in range(0, rows * size, size):
        for j in range(size):
            slope[j] = _gelu_slope(z[b + j], _gelu_tanh(z[b + j]))
        for j in range(size):
            g = grad[b + j] * slope[j]
            grad[b + j] = g
            of_bias[j] += g


@_inlined()
def gelu_layer_norm_forward(z, scale, shift, out, means, roots, rows, size):
    """
    Compute out = LayerNorm(GELU(z)), eps 1e-6.

    :param z: shape ``(rows, size)``
    :param scale: shape ``(size,)``
    :param shift: shape ``(size,)``
    :param out: shape ``(rows, size)``
    :param means: receives the means of the GELU, for the backward pass, shape ``(rows,)``
    :param roots: receives the reciprocal standard deviations of the GELU, likewise
    """
    no_overlap()
    centred = stack_array(size)
    inverse = _ONE / _float(size)
    for row in range(rows):
        b = row * size
        for j in range(size):
            centred[j] = _HALF * z[b + j] * (_ONE + _gelu_tanh(z[b + j]))
        m = sum_of(centred, size) * inverse
        for j in range(size):
            centred[j] -= m
        r = _ONE / np.sqrt(dot(centred, centred, size) * inverse + _EPS)
        means[row] = m
        roots[row] = r
        for j in range(size):
            out[b + j] = centred[j] * r * scale[j] + shift[j]


@_inlined()
def gelu_layer_norm_backward(z, scale, means, roots, grad, of_bias, of_scale, of_shift, rows, size):
    """
    Compute gradients of :func:`gelu_layer_norm_forward`.

    :param grad: holds the gradient of the result and receives the gradient of z, shape ``(rows, size)``
    :param of_bias: receives the sum of the gradient of z over rows, shape ``(size,)``
    :param of_scale: receives the gradient of scale, likewise
    :param of_shift: receives the gradient of shift, likewise
    """
    no_overlap()
    normed, slope, grad_normed = stack_array(size), stack_array(size), stack_array(size)
    inverse = _ONE / _float(size)
    for j in range(size):
        of_bias[j] = of_scale[j] = of_shift[j] = _ZERO
    for row in range(rows):
        b, m, r = row * size, means[row], roots[row]
        for j in range(size):
            v = z[b + j]
            t = _gelu_tanh(v)
            slope[j] = _gelu_slope(v, t)
            n = (_HALF * v * (_ONE + t) - m) * r
            normed[j] = n
            of_scale[j] += grad[b + j] * n
            of_shift[j] += grad[b + j]
            grad_normed[j] = grad[b + j] * scale[j]
        mean = sum_of(grad_normed, size) * inverse
        slant = dot(grad_normed, normed, size) * inverse
        for j in range(size):
            g = r * (grad_normed[j] - mean - normed[j] * slant) * slope[j]
            grad[b + j] = g
            of_bias[j] += g
