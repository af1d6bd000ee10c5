"""
What happens between two matrix products of an MLP: bias and GELU (tanh approximation), alone and followed by a LayerNorm,
forward and backward in one pass over memory.

On CPUs torch's tanh-GELU costs several times its matrix product's share in networks of this size; these loops vectorise.
All arrays are float32 and C-contiguous, their first axis is that of K independent members; outputs are given by the
caller and overlap no input (the loops would not vectorise). Serial, the interpreter lock is released.
"""

import numpy as np
from numba import njit

_float = np.float32
_HALF, _ONE, _THREE, _FIVE = _float(0.5), _float(1.0), _float(3.0), _float(5.0)
_SQRT_2_OVER_PI, _CUBIC = _float(0.7978845608028654), _float(0.044715)
# Rational approximation of tanh, odd degree 13 over even degree 6, exact to 4e-7 everywhere (as Eigen and XLA use it);
# beyond the clamp tanh is 1 in float32.
_CLAMP = _float(7.90531110763549805)
_P13, _P11, _P9 = _float(-2.76076847742355e-16), _float(2.00018790482477e-13), _float(-8.60467152213735e-11)
_P7, _P5, _P3, _P1 = (
    _float(5.12229709037114e-08),
    _float(1.48572235717979e-05),
    _float(6.37261928875436e-04),
    _float(4.89352455891786e-03),
)
_Q6, _Q4, _Q2, _Q0 = (
    _float(1.19825839466702e-06),
    _float(1.18534705686654e-04),
    _float(2.26843463243900e-03),
    _float(4.89352518554385e-03),
)


# error_model="numpy": Python's check for division by zero would keep the loops from vectorising
def _compiled(function):  # type: ignore[no-untyped-def]
    return njit(function, fastmath=True, error_model="numpy", nogil=True, cache=True)


@njit(fastmath=True, error_model="numpy", inline="always")
def _tanh(x):  # type: ignore[no-untyped-def]
    x = min(max(x, -_CLAMP), _CLAMP)
    x2 = x * x
    p = _P13 * x2 + _P11
    p = p * x2 + _P9
    p = p * x2 + _P7
    p = p * x2 + _P5
    p = p * x2 + _P3
    p = p * x2 + _P1
    q = _Q6 * x2 + _Q4
    q = q * x2 + _Q2
    q = q * x2 + _Q0
    return x * p / q


@njit(fastmath=True, error_model="numpy", inline="always")
def _gelu_tanh(v):  # type: ignore[no-untyped-def]
    return _tanh(_SQRT_2_OVER_PI * v * (_ONE + _CUBIC * v * v))


@njit(fastmath=True, error_model="numpy", inline="always")
def _gelu_slope(v, t):  # type: ignore[no-untyped-def]
    # Far out t is 1 but for its last bit, which the cube of v would enlarge; 1 - t^2 vanishes before |v| = 5
    c = min(max(v, -_FIVE), _FIVE)
    return _HALF * (_ONE + t) + _HALF * c * (_ONE - t * t) * _SQRT_2_OVER_PI * (_ONE + _THREE * _CUBIC * c * c)


@_compiled
def gelu_forward(z: np.ndarray, bias: np.ndarray, out: np.ndarray) -> None:
    """
    :param z: shape ``(K, B, D)``
    :param bias: shape ``(K, D)``
    :param out: receives 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) of x = z + bias, shape ``(K, B, D)``
    """
    members, batch, size = z.shape
    for k in range(members):
        for b in range(batch):
            for j in range(size):
                v = z[k, b, j] + bias[k, j]
                out[k, b, j] = _HALF * v * (_ONE + _gelu_tanh(v))


@_compiled
def gelu_backward(z: np.ndarray, bias: np.ndarray, grad: np.ndarray, grad_bias: np.ndarray) -> None:
    """
    Gradients of :func:`gelu_forward`.

    :param grad: holds the gradient of the result and receives that of ``z``, shape ``(K, B, D)``
    :param grad_bias: receives the gradient of ``bias``, shape ``(K, D)``
    """
    members, batch, size = z.shape
    for k in range(members):
        grad_bias[k] = _float(0.0)
        for b in range(batch):
            for j in range(size):
                v = z[k, b, j] + bias[k, j]
                t = _gelu_tanh(v)
                g = grad[k, b, j] * _gelu_slope(v, t)
                grad[k, b, j] = g
                grad_bias[k, j] += g


@_compiled
def gelu_layer_norm_forward(
    z: np.ndarray,
    bias: np.ndarray,
    scale: np.ndarray,
    shift: np.ndarray,
    eps: float,
    out: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
) -> None:
    """
    LayerNorm(GELU(z + bias)).

    :param z: shape ``(K, B, D)``
    :param bias: shape ``(K, D)``
    :param scale: shape ``(K, D)``
    :param shift: shape ``(K, D)``
    :param eps: added to the variance
    :param out: receives the result, shape ``(K, B, D)``
    :param mean: receives the means of the GELU, shape ``(K, B)``, for the backward pass
    :param rstd: receives the reciprocal standard deviations, shape ``(K, B)``
    """
    members, batch, size = z.shape
    inverse = _float(_ONE / _float(size))
    for k in range(members):
        for b in range(batch):
            total = _float(0.0)
            for j in range(size):
                v = z[k, b, j] + bias[k, j]
                g = _HALF * v * (_ONE + _gelu_tanh(v))
                out[k, b, j] = g
                total += g
            m = total * inverse
            squares = _float(0.0)
            for j in range(size):
                d = out[k, b, j] - m
                squares += d * d
            r = _ONE / np.sqrt(squares * inverse + _float(eps))
            mean[k, b] = m
            rstd[k, b] = r
            for j in range(size):
                out[k, b, j] = (out[k, b, j] - m) * r * scale[k, j] + shift[k, j]


@_compiled
def gelu_layer_norm_backward(
    z: np.ndarray,
    bias: np.ndarray,
    scale: np.ndarray,
    mean: np.ndarray,
    rstd: np.ndarray,
    grad: np.ndarray,
    grad_bias: np.ndarray,
    grad_scale: np.ndarray,
    grad_shift: np.ndarray,
) -> None:
    """
    Gradients of :func:`gelu_layer_norm_forward`.

    :param grad: holds the gradient of the result and receives that of ``z``, shape ``(K, B, D)``
    :param grad_bias: receives the gradient of ``bias``, shape ``(K, D)``
    :param grad_scale: receives the gradient of ``scale``, shape ``(K, D)``
    :param grad_shift: receives the gradient of ``shift``, shape ``(K, D)``
    """
    members, batch, size = z.shape
    inverse = _float(_ONE / _float(size))
    normed = np.empty(size, dtype=np.float32)
    slope = np.empty(size, dtype=np.float32)
    for k in range(members):
        grad_bias[k] = _float(0.0)
        grad_scale[k] = _float(0.0)
        grad_shift[k] = _float(0.0)
        for b in range(batch):
            m, r = mean[k, b], rstd[k, b]
            sum_d, sum_dn = _float(0.0), _float(0.0)
            for j in range(size):
                v = z[k, b, j] + bias[k, j]
                t = _gelu_tanh(v)
                slope[j] = _gelu_slope(v, t)
                n = (_HALF * v * (_ONE + t) - m) * r
                normed[j] = n
                go = grad[k, b, j]
                grad_scale[k, j] += go * n
                grad_shift[k, j] += go
                d = go * scale[k, j]
                sum_d += d
                sum_dn += d * n
            sum_d *= inverse
            sum_dn *= inverse
            for j in range(size):
                g = r * (grad[k, b, j] * scale[k, j] - sum_d - normed[j] * sum_dn) * slope[j]
                grad[k, b, j] = g
                grad_bias[k, j] += g
