"""
Products of small matrices, the layers of a policy network, without the threads of a library and without its work per call.

Activations lie in blocks of up to ``BLOCK`` rows of a minibatch, feature by feature: entry (feature i, row j) of a block is
at ``i * STRIDE + j`` from its start. So vectors run along the minibatch for layers of any size, and the minibatch's rows are
padded to a multiple of ``LANES``. Weights are as torch stores them, ``(outputs, inputs)`` at an offset of a flat vector.

The loops compute the result tile by tile; the sums of a tile stay in registers.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from sb3_flow.compiled import compiled
from sb3_flow.compiled.simd import WIDE, broadcast, intrinsic

LANES = 16
"""Entries of one vector operation."""
BLOCK = 128
"""Rows of a minibatch that are worked on at a time."""
STRIDE = BLOCK + LANES
"""Distance of a block's features; not a power of two, whose multiples would share few sets of the cache."""

# Tiles as large as the registers allow: 32 of 16 numbers, or 16 of 8
TILE_ROWS, TILE_VECTORS = (8, 2) if WIDE else (4, 1)
TILE_COLUMNS = TILE_VECTORS * LANES
TILE_SIDE = 4 if WIDE else 2

_FUSED = ("contract",)


def _operations(context, builder, kind):
    """Make the scalar type, and functions that load and store a number of entries from an index on."""
    scalar, align = context.get_value_type(kind.dtype), kind.dtype.bitwidth // 8

    def place(data, index, count):
        pointer = builder.gep(data, [index])
        return pointer if count == 1 else builder.bitcast(pointer, ir.VectorType(scalar, count).as_pointer())

    def load(data, index, count=LANES):
        return builder.load(place(data, index, count), align=align)

    def store(value, data, index, count=LANES):
        builder.store(value, place(data, index, count), align=align)

    return scalar, load, store


def _summing(context, builder, depth, start, step):
    """Add ``step(index)``'s products to the sums ``start``, in registers; return the sums."""
    places = [cgutils.alloca_once_value(builder, value) for value in start]
    with cgutils.for_range(builder, depth) as loop:
        for place, (x, y) in zip(places, step(loop.index), strict=True):
            product = builder.fmul(x, y, flags=_FUSED)
            builder.store(builder.fadd(builder.load(place), product, flags=_FUSED), place)
    return [builder.load(place) for place in places]


def _product_tile(rows: int, vectors: int) -> Any:
    """
    Make an operation, y[i, j] = bias[i] + sum_k a[i, k] x[k, j] for ``rows`` i and ``vectors`` times ``LANES`` j. The arrays
    are flat, with the index of the tile's first entry; a and the bias have any strides.
    """

    def operation(typingctx, a, a_at, a_row, a_depth, bias, bias_at, bias_row, x, x_at, y, y_at, depth):
        def codegen(context, builder, signature, args):
            kind = signature.args[0]
            _, load, store = _operations(context, builder, kind)
            data = [context.make_array(kind)(context, builder, value=args[i]).data for i in (0, 4, 7, 9)]
            integer = args[1].type

            def at(base, index, stride):
                stride = integer(stride) if isinstance(stride, int) else stride
                return builder.add(base, builder.mul(index, stride))

            start = []
            for i in range(rows):
                value = broadcast(builder, load(data[1], at(args[5], integer(i), args[6]), 1), LANES)
                start += [value] * vectors

            def products(k):
                first = at(args[8], k, STRIDE)
                columns = [load(data[2], builder.add(first, integer(v * LANES))) for v in range(vectors)]
                of_k = at(args[1], k, args[3])
                for i in range(rows):
                    factor = broadcast(builder, load(data[0], at(of_k, integer(i), args[2]), 1), LANES)
                    for column in columns:
                        yield factor, column

            sums = _summing(context, builder, args[11], start, products)
            for i in range(rows):
                for v in range(vectors):
                    store(sums[i * vectors + v], data[3], builder.add(args[10], integer(i * STRIDE + v * LANES)))
            return context.get_dummy_value()

        n = types.intp
        return types.none(a, n, n, n, bias, n, n, x, n, y, n, n), codegen

    return intrinsic(operation)


def _inner_tile(rows: int, columns: int) -> Any:
    """
    Make an operation, g[i, l] += sum_j d[i, j] x[l, j] for ``rows`` i and ``columns`` l over ``depth`` vectors of j. The
    arrays are flat, with the index of the tile's first entry; the last argument is the stride of g's rows.
    """
    count = rows * columns

    def operation(typingctx, d, d_at, x, x_at, depth, g, g_at, g_row):
        def codegen(context, builder, signature, args):
            kind = signature.args[0]
            scalar, load, store = _operations(context, builder, kind)
            data = [context.make_array(kind)(context, builder, value=args[i]).data for i in (0, 2, 5)]
            integer = args[1].type

            def products(k):
                offset = builder.mul(k, integer(LANES))
                left = builder.add(args[1], offset)
                right = builder.add(args[3], offset)
                factors = [load(data[1], builder.add(right, integer(j * STRIDE))) for j in range(columns)]
                for i in range(rows):
                    of_i = load(data[0], builder.add(left, integer(i * STRIDE)))
                    for factor in factors:
                        yield of_i, factor

            zeros = ir.VectorType(scalar, LANES)([0.0] * LANES)
            sums = _sum_lanes(builder, _summing(context, builder, args[4], [zeros] * count, products))
            lanes = ir.VectorType(ir.IntType(32), columns)
            spread = LANES // count
            for i in range(rows):
                index = builder.add(args[6], builder.mul(integer(i), args[7]))
                chosen = [(i * columns + j) * spread for j in range(columns)]
                if columns == 1:
                    row = builder.extract_element(sums, ir.IntType(32)(chosen[0]))
                else:
                    row = builder.shuffle_vector(sums, sums, lanes(chosen))
                store(builder.fadd(load(data[2], index, columns), row), data[2], index, columns)
            return context.get_dummy_value()

        n = types.intp
        return types.none(d, n, x, n, n, g, n, n), codegen

    return intrinsic(operation)


def _sum_lanes(builder, vectors):
    """Make a vector whose lanes 0, s, 2 s, ... hold the sums of the given vectors, s = ``LANES // len(vectors)``."""
    lanes = ir.VectorType(ir.IntType(32), LANES)

    def add(u, v, low, high):
        halves = (builder.shuffle_vector(u, v, lanes([i % (2 * LANES) for i in part])) for part in (low, high))
        return builder.fadd(*halves)

    half = LANES // 2
    while len(vectors) > 1:  # a vector takes over the sums of two vectors, each on half as many lanes
        low = [group + i for group in range(0, 2 * LANES, 2 * half) for i in range(half)]
        high = [i + half for i in low]
        vectors = [add(u, v, low, high) for u, v in zip(vectors[::2], vectors[1::2], strict=True)]
        half //= 2
    while half:
        vectors = [add(vectors[0], vectors[0], range(LANES), [i + half for i in range(LANES)])]
        half //= 2
    return vectors[0]


_product, _product_row = _product_tile(TILE_ROWS, TILE_VECTORS), _product_tile(1, TILE_VECTORS)
_narrow, _narrow_row = _product_tile(TILE_ROWS, 1), _product_tile(1, 1)
_inner, _inner_row = _inner_tile(TILE_SIDE, TILE_SIDE), _inner_tile(1, TILE_SIDE)
_inner_one = _inner_tile(1, 1)


@intrinsic
def outlined(typingctx):
    """Keep the compiler from copying the calling function into its callers, which would then take long to compile."""

    def codegen(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.none(), codegen


@compiled()
def multiply(a, a_at, a_row, a_depth, bias, bias_at, bias_row, rows, depth, x, x_at, y, y_at, columns):
    """
    Compute y[i, j] = bias[i] + sum_k a[i, k] x[k, j].

    :param a: flat, with the index of a[0, 0] and the distances of its rows and columns
    :param bias: flat, with the index of its first entry and the distance of the next
    :param rows: number of rows of a and y
    :param depth: columns of a, rows of x
    :param x: flat, with the index of x[0, 0], rows ``STRIDE`` apart
    :param y: flat, as x; may be x if the two parts do not overlap
    :param columns: number of columns of x and y, a multiple of ``LANES``
    """
    outlined()
    whole, wide = rows - rows % TILE_ROWS, columns - columns % TILE_COLUMNS
    for j in range(0, wide, TILE_COLUMNS):
        for i in range(0, whole, TILE_ROWS):
            first, start, to = a_at + i * a_row, bias_at + i * bias_row, y_at + i * STRIDE + j
            _product(a, first, a_row, a_depth, bias, start, bias_row, x, x_at + j, y, to, depth)
        for i in range(whole, rows):
            first, start, to = a_at + i * a_row, bias_at + i * bias_row, y_at + i * STRIDE + j
            _product_row(a, first, a_row, a_depth, bias, start, bias_row, x, x_at + j, y, to, depth)
    for j in range(wide, columns, LANES):
        for i in range(0, whole, TILE_ROWS):
            first, start, to = a_at + i * a_row, bias_at + i * bias_row, y_at + i * STRIDE + j
            _narrow(a, first, a_row, a_depth, bias, start, bias_row, x, x_at + j, y, to, depth)
        for i in range(whole, rows):
            first, start, to = a_at + i * a_row, bias_at + i * bias_row, y_at + i * STRIDE + j
            _narrow_row(a, first, a_row, a_depth, bias, start, bias_row, x, x_at + j, y, to, depth)


@compiled()
def add_inner_products(d, d_at, rows, x, x_at, depth, columns, g, g_at):
    """
    Add sum_j d[i, j] x[l, j] to g[i, l].

    :param d: flat, with the index of d[0, 0], rows ``STRIDE`` apart
    :param rows: number of rows of d and g
    :param x: as d
    :param depth: rows of x, columns of g
    :param columns: number of columns of d and x, a multiple of ``LANES``
    :param g: flat, with the index of g[0, 0], rows ``depth`` apart
    """
    outlined()
    vectors = columns // LANES
    whole_rows, whole = rows - rows % TILE_SIDE, depth - depth % TILE_SIDE
    for i in range(0, whole_rows, TILE_SIDE):
        for k in range(0, whole, TILE_SIDE):
            _inner(d, d_at + i * STRIDE, x, x_at + k * STRIDE, vectors, g, g_at + i * depth + k, depth)
    for i in range(whole_rows, rows):
        for k in range(0, whole, TILE_SIDE):
            _inner_row(d, d_at + i * STRIDE, x, x_at + k * STRIDE, vectors, g, g_at + i * depth + k, depth)
    for i in range(rows):
        for k in range(whole, depth):
            _inner_one(d, d_at + i * STRIDE, x, x_at + k * STRIDE, vectors, g, g_at + i * depth + k, depth)
