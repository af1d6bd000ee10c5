"""
What happens between two matrix products of an MLP: bias and GELU (tanh approximation), alone and followed by a LayerNorm,
forward and backward in one pass over memory.

On CPUs torch's tanh-GELU costs several times its matrix product's share in networks of this size; these loops vectorise.
All arrays are float32 and C-contiguous, their first axis is that of K independent members; outputs are given by the
caller and overlap no input.

A kernel is a C function of one pointer, ``void kernel(int64_t *arguments)``: a counter that starts at 0, K, B, D and the
arrays' addresses. It takes blocks of rows off the counter until none is left, so any number of threads may call it on the
same arguments, whoever owns them; results do not depend on how many do.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

BLOCK = 64
"""Rows that a thread takes at a time."""
LAYER_NORM_EPS = np.float32(1e-6)

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


_intrinsic: Any = intrinsic  # its signature names the compiler's argument, too


@_intrinsic
def _take(typingctx, counter):  # type: ignore[no-untyped-def]
    """Atomically: the counter's value, then one more."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        # 512-bit vectors where the CPU has them (LLVM avoids them by default): a third faster. llvmlite knows no such
        # attribute, hence the base class's method; compilers without it ignore the string.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return builder.atomic_rmw("add", args[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.CPointer(types.int64)), codegen


@_intrinsic
def _pointer(typingctx, address):  # type: ignore[no-untyped-def]
    """
    The address as a pointer that aliases no other. Otherwise each loop would compare addresses first and take its scalar
    form where arrays lie close together: another order of summation, so training would depend on where memory was free.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind = context.get_value_type(signature.return_type)
        name = "sb3_flow_restrict"
        if name not in builder.module.globals:
            function = ir.Function(builder.module, ir.FunctionType(kind, [ir.IntType(64)]), name)
            function.linkage = "internal"
            function.attributes.add("noinline")  # what is said of a function's result is lost where it is inlined
            function.return_value.add_attribute("noalias")
            body = ir.IRBuilder(function.append_basic_block())
            body.ret(body.inttoptr(function.args[0], kind))
        return builder.call(builder.module.globals[name], args)

    return types.CPointer(types.float32)(types.int64), codegen


@_intrinsic
def _on_stack(typingctx, size):  # type: ignore[no-untyped-def]
    """Room for so many numbers until the kernel returns; call it outside of loops."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.alloca(context.get_value_type(types.float32), args[0])

    return types.CPointer(types.float32)(types.int64), codegen


@njit(inline="always")
def _rows(arguments, i, rows, size):  # type: ignore[no-untyped-def]
    return carray(_pointer(arguments[4 + i]), (rows, size))


@njit(inline="always")
def _thirds(arguments, i, rows, size):  # type: ignore[no-untyped-def]
    address, a_third = arguments[4 + i], 4 * rows * size
    return (
        carray(_pointer(address), (rows, size)),
        carray(_pointer(address + a_third), (rows, size)),
        carray(_pointer(address + 2 * a_third), (rows, size)),
    )


@njit(inline="always")
def _row(size):  # type: ignore[no-untyped-def]
    return carray(_on_stack(size), (size,))


def n_blocks(batch: int) -> int:
    """:return: blocks of rows per member, of which each has its share of the parameters' gradients"""
    return -(-batch // BLOCK)


class Kernel:
    """A kernel, compiled when it is first used (from then on it comes from numba's cache)."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    @cached_property
    def compiled(self) -> Any:
        """numba's C function: ``.address``, and ``.ctypes`` to call it"""
        signature = types.void(types.CPointer(types.int64))
        return cfunc(signature, fastmath=True, error_model="numpy", cache=True)(self._function)


@Kernel
def gelu_forward(arguments):  # type: ignore[no-untyped-def]
    """
    Addresses: z, shape ``(K, B, D)``; bias, shape ``(K, D)``; out, shape ``(K, B, D)``, which receives
    0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) of x = z + bias.
    """
    members, batch, size = arguments[1], arguments[2], arguments[3]
    rows = members * batch
    z, bias, out = (_rows(arguments, 0, rows, size), _rows(arguments, 1, members, size), _rows(arguments, 2, rows, size))
    while True:
        start = _take(arguments) * BLOCK
        if start >= rows:
            break
        for b in range(start, min(start + BLOCK, rows)):
            k = b // batch
            for j in range(size):
                v = z[b, j] + bias[k, j]
                out[b, j] = _HALF * v * (_ONE + _gelu_tanh(v))


@Kernel
def gelu_backward(arguments):  # type: ignore[no-untyped-def]
    """
    Gradients of :func:`gelu_forward`. Addresses: z and bias; grad, which holds the gradient of the result and receives that
    of z; shares of the gradient of bias, shape ``(1, K, n_blocks(B), D)``, to be summed over blocks.
    """
    members, batch, size = arguments[1], arguments[2], arguments[3]
    rows, blocks = members * batch, (batch + BLOCK - 1) // BLOCK
    z, bias, grad = (_rows(arguments, 0, rows, size), _rows(arguments, 1, members, size), _rows(arguments, 2, rows, size))
    shares = _rows(arguments, 3, members * blocks, size)
    slope = _row(size)
    while True:
        block = _take(arguments)
        if block >= members * blocks:
            break
        k, start = block // blocks, (block % blocks) * BLOCK
        for j in range(size):
            shares[block, j] = _float(0.0)
        for b in range(k * batch + start, k * batch + min(start + BLOCK, batch)):
            for j in range(size):
                v = z[b, j] + bias[k, j]
                slope[j] = _gelu_slope(v, _gelu_tanh(v))
            for j in range(size):
                grad[b, j] *= slope[j]
                shares[block, j] += grad[b, j]


@Kernel
def gelu_layer_norm_forward(arguments):  # type: ignore[no-untyped-def]
    """
    LayerNorm(GELU(z + bias)), eps 1e-6. Addresses: z, shape ``(K, B, D)``; bias, scale, shift, shape ``(K, D)``; out, shape
    ``(K, B, D)``; mean and reciprocal standard deviation of the GELU, shape ``(2, K, B)``, for the backward pass.
    """
    members, batch, size = arguments[1], arguments[2], arguments[3]
    rows = members * batch
    z, bias = _rows(arguments, 0, rows, size), _rows(arguments, 1, members, size)
    scale, shift = _rows(arguments, 2, members, size), _rows(arguments, 3, members, size)
    out, statistics = _rows(arguments, 4, rows, size), _rows(arguments, 5, 2, rows)
    inverse = _ONE / _float(size)
    while True:
        start = _take(arguments) * BLOCK
        if start >= rows:
            break
        for b in range(start, min(start + BLOCK, rows)):
            k = b // batch
            total = _float(0.0)
            for j in range(size):
                v = z[b, j] + bias[k, j]
                g = _HALF * v * (_ONE + _gelu_tanh(v))
                out[b, j] = g
                total += g
            m = total * inverse
            squares = _float(0.0)
            for j in range(size):
                d = out[b, j] - m
                squares += d * d
            r = _ONE / np.sqrt(squares * inverse + LAYER_NORM_EPS)
            statistics[0, b] = m
            statistics[1, b] = r
            for j in range(size):
                out[b, j] = (out[b, j] - m) * r * scale[k, j] + shift[k, j]


@Kernel
def gelu_layer_norm_backward(arguments):  # type: ignore[no-untyped-def]
    """
    Gradients of :func:`gelu_layer_norm_forward`. Addresses: z, bias, scale; the statistics, shape ``(2, K, B)``; grad, which
    holds the gradient of the result and receives that of z; shares of the gradients of bias, scale and shift, shape
    ``(3, K, n_blocks(B), D)``, to be summed over blocks.
    """
    members, batch, size = arguments[1], arguments[2], arguments[3]
    rows, blocks = members * batch, (batch + BLOCK - 1) // BLOCK
    z, bias, scale = (_rows(arguments, 0, rows, size), _rows(arguments, 1, members, size), _rows(arguments, 2, members, size))
    statistics, grad = _rows(arguments, 3, 2, rows), _rows(arguments, 4, rows, size)
    # three arrays rather than one, for the compiler to know that their rows do not overlap
    of_bias, of_scale, of_shift = _thirds(arguments, 5, members * blocks, size)
    inverse = _ONE / _float(size)
    normed = _row(size)
    slope = _row(size)
    while True:
        block = _take(arguments)
        if block >= members * blocks:
            break
        k, start = block // blocks, (block % blocks) * BLOCK
        for j in range(size):
            of_bias[block, j] = _float(0.0)
            of_scale[block, j] = _float(0.0)
            of_shift[block, j] = _float(0.0)
        for b in range(k * batch + start, k * batch + min(start + BLOCK, batch)):
            m, r = statistics[0, b], statistics[1, b]
            sum_d, sum_dn = _float(0.0), _float(0.0)
            for j in range(size):
                v = z[b, j] + bias[k, j]
                t = _gelu_tanh(v)
                slope[j] = _gelu_slope(v, t)
                n = (_HALF * v * (_ONE + t) - m) * r
                normed[j] = n
                go = grad[b, j]
                of_scale[block, j] += go * n
                of_shift[block, j] += go
                d = go * scale[k, j]
                sum_d += d
                sum_dn += d * n
            sum_d *= inverse
            sum_dn *= inverse
            for j in range(size):
                g = r * (grad[b, j] * scale[k, j] - sum_d - normed[j] * sum_dn) * slope[j]
                grad[b, j] = g
                of_bias[block, j] += g
