"""
The recurrences of :mod:`sb3_flow.kernels.recurrence` in vectors of 8 entries, compiled with numba.

``contract`` lets the compiler fuse operations; NaN and infinity keep their meaning.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from sb3_flow.compiled import compiled
from sb3_flow.compiled.simd import intrinsic

BLOCK = 8
"""Entries of one vector operation."""


def _vectors(context, kind):
    """Make the type of a block of an array's entries, and functions that load and store a block at data[index:index + 8]."""
    block, align = ir.VectorType(context.get_value_type(kind.dtype), BLOCK), kind.dtype.bitwidth // 8

    def place(builder, data, index):
        return builder.bitcast(builder.gep(data, [index]), block.as_pointer())

    def load(builder, data, index):
        return builder.load(place(builder, data, index), align=align)

    def store(builder, value, data, index):
        builder.store(value, place(builder, data, index), align=align)

    return block, load, store


def _add_product(fused: bool) -> Any:
    """
    Make an operation on d, c, i, j: d[i:i+8] += c[i:i+8] d[j:j+8]. The compiler cannot make this of a loop, since it does not
    know that the blocks do not overlap.
    """
    flags = ("contract",) if fused else ()

    def operation(typingctx, d, c, i, j):
        def codegen(context, builder, signature, args):
            kind = signature.args[0]
            _, load, store = _vectors(context, kind)
            x, factors = (context.make_array(kind)(context, builder, value=array).data for array in args[:2])
            product = builder.fmul(load(builder, factors, args[2]), load(builder, x, args[3]), flags=flags)
            store(builder, builder.fadd(load(builder, x, args[2]), product, flags=flags), x, args[2])
            return context.get_dummy_value()

        return types.none(d, c, types.intp, types.intp), codegen

    return intrinsic(operation)


def _scan(lag: int) -> Any:
    """
    Make an operation on d, c, start, count that solves the recurrence over ``lag`` (1, 2, 4 or 8) entries in ``count`` blocks
    from ``start`` on. Steps within a block are merged, x_t = (d_t + c_t d_{t+1}) + c_t c_{t+1} x_{t+2} and so on; a single
    operation per block waits for the block after it.
    """

    def operation(typingctx, d, c, start, count):
        def codegen(context, builder, signature, args):
            kind = signature.args[0]
            block, load, store = _vectors(context, kind)
            x, factors = (context.make_array(kind)(context, builder, value=array).data for array in args[:2])
            lanes = ir.VectorType(ir.IntType(32), BLOCK)
            zeros, ones = block([0.0] * BLOCK), block([1.0] * BLOCK)

            def add_product(a, b, c):
                return builder.fadd(a, builder.fmul(b, c, flags=("contract",)), flags=("contract",))

            carry = cgutils.alloca_once(builder, block)
            builder.store(zeros, carry)
            with cgutils.for_range(builder, args[3]) as loop:
                back = builder.sub(builder.sub(args[3], loop.index), args[3].type(1))
                index = builder.add(args[2], builder.mul(back, args[3].type(BLOCK)))
                result, factor = load(builder, x, index), load(builder, factors, index)
                shift = lag
                while shift < BLOCK:
                    later = lanes(list(range(shift, BLOCK + shift)))
                    result = add_product(result, factor, builder.shuffle_vector(result, zeros, later))
                    factor = builder.fmul(factor, builder.shuffle_vector(factor, ones, later))
                    shift *= 2
                result = add_product(result, factor, builder.load(carry))
                store(builder, result, x, index)
                first = lanes([i % lag for i in range(BLOCK)])
                builder.store(builder.shuffle_vector(result, result, first), carry)
            return context.get_dummy_value()

        return types.none(d, c, types.intp, types.intp), codegen

    return intrinsic(operation)


_add_block, _add_block_in_order = _add_product(True), _add_product(False)
_scan_1, _scan_2, _scan_4, _scan_8 = _scan(1), _scan(2), _scan(4), _scan(8)


@compiled()
def solve(d, c, lag):
    """
    Solve x_i = d_i + c_i x_{i + lag} in place, as :func:`solve_stepwise`, but in any order of operations.

    :param c: must be zero at the last ``lag`` entries
    """
    rest, count = d.size % BLOCK, d.size // BLOCK
    i = d.size - lag  # entries from here on are done
    if lag in (1, 2, 4, 8):
        if lag == 1:
            _scan_1(d, c, rest, count)
        elif lag == 2:
            _scan_2(d, c, rest, count)
        elif lag == 4:
            _scan_4(d, c, rest, count)
        else:
            _scan_8(d, c, rest, count)
        i = min(i, rest)
    while i >= BLOCK and lag > BLOCK:
        i -= BLOCK
        _add_block(d, c, i, i + lag)
    for k in range(i - 1, -1, -1):
        d[k] += c[k] * d[k + lag]


@compiled(fastmath=False)
def solve_in_order(d, c, lag):
    """Solve as :func:`solve`, with one multiplication and one addition per entry, each rounded; the end of c is not read."""
    if lag == 1:
        following = d[d.size - 1]  # in a register, not read back
        for k in range(d.size - 2, -1, -1):
            following = d[k] + c[k] * following
            d[k] = following
        return
    i = d.size - lag
    while i >= BLOCK and lag >= BLOCK:
        i -= BLOCK
        _add_block_in_order(d, c, i, i + lag)
    for k in range(i - 1, -1, -1):
        d[k] = d[k] + c[k] * d[k + lag]
