"""
Products of a minibatch's rows with the weights of a layer, from which whole networks can be put together; a library's
products would have to be called for one layer at a time.

Weights are read in panels of ``PANEL`` columns, ``CHUNK`` rows at a time, and are copied before only if vectors of their
columns cannot be loaded. A tile of the result is worked out at a time, whose sums stay in registers. Each entry is summed up
in one order, so a result does not depend on other rows and columns of the call.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from sb3_flow.compiled import inlined
from sb3_flow.compiled.simd import WIDE, broadcast, intrinsic

# Tiles as large as the registers allow: 32 of 16 numbers, or 16 of 8
LANES, VECTORS = (16, 4) if WIDE else (8, 2)
PANEL = VECTORS * LANES
TILE_ROWS = 6
UNROLL = 4
CHUNK = 128
"""Rows of the weights that are worked on at a time, so that they stay in the cache from one tile to the next."""

_float = ir.FloatType()
_lanes = ir.VectorType(_float, LANES)
_FUSED = ("contract",)
_number = types.CPointer(types.float32)


@intrinsic
def pointer(typingctx, address):
    """Make a pointer of an address."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], _float.as_pointer())

    return _number(types.int64), codegen


@intrinsic
def address(typingctx, data):
    """Make an address of a pointer."""

    def codegen(context, builder, signature, args):
        return builder.ptrtoint(args[0], ir.IntType(64))

    return types.int64(_number), codegen


@intrinsic
def stack_array(typingctx, size):
    """Make room for so many numbers until the function returns; call it outside of loops."""

    def codegen(context, builder, signature, args):
        return builder.alloca(_float, args[0])

    return _number(types.int64), codegen


def _total(context, builder, signature, args):
    """Sum up the arrays' entries, or their products."""
    *arrays, size = args
    integer = size.type

    def term(index, vector):
        places = [builder.gep(data, [index]) for data in arrays]
        places = [builder.bitcast(place, _lanes.as_pointer()) if vector else place for place in places]
        values = [builder.load(place, align=4) for place in places]
        return values[0] if len(values) == 1 else builder.fmul(*values)

    # Several sums, for a single sum would wait for each addition
    sums = [cgutils.alloca_once_value(builder, _lanes([0.0] * LANES)) for _ in range(UNROLL)]

    def add(place, vector):
        builder.store(builder.fadd(builder.load(place), term(builder.mul(vector, integer(LANES)), True)), place)

    vectors = builder.sdiv(size, integer(LANES))
    groups = builder.sdiv(vectors, integer(UNROLL))
    with cgutils.for_range(builder, groups) as loop:
        first = builder.mul(loop.index, integer(UNROLL))
        for i, place in enumerate(sums):
            add(place, builder.add(first, integer(i)))
    grouped = builder.mul(groups, integer(UNROLL))
    with cgutils.for_range(builder, builder.sub(vectors, grouped)) as loop:
        add(sums[0], builder.add(grouped, loop.index))
    lanes = builder.load(sums[0])
    for place in sums[1:]:
        lanes = builder.fadd(lanes, builder.load(place))
    half = LANES
    while half > 1:
        half //= 2
        moved = ir.VectorType(ir.IntType(32), LANES)([(lane + half) % LANES for lane in range(LANES)])
        lanes = builder.fadd(lanes, builder.shuffle_vector(lanes, lanes, moved))
    total = cgutils.alloca_once_value(builder, builder.extract_element(lanes, ir.IntType(32)(0)))
    whole = builder.mul(vectors, integer(LANES))
    with cgutils.for_range(builder, builder.sub(size, whole)) as loop:
        builder.store(builder.fadd(builder.load(total), term(builder.add(whole, loop.index), False)), total)
    return builder.load(total)


@intrinsic
def sum_of(typingctx, x, size):
    """Sum up numbers, always in the same order, which is up to the compiler in a loop that it may reorder."""
    return types.float32(_number, types.int64), _total


@intrinsic
def dot(typingctx, x, y, size):
    """Sum up products, as :func:`sum_of`."""
    return types.float32(_number, _number, types.int64), _total


@intrinsic
def no_overlap(typingctx):
    """
    Declare that the pointers of the calling function lead to memory that does not overlap, and that the function is not copied
    into its callers. Otherwise each loop would compare addresses first and take its scalar form where arrays lie close
    together: another order of summation, so training would depend on where memory was free.

    The declaration also asks for 512-bit vectors where the CPU has them (LLVM avoids them by default): a third faster.
    """

    def codegen(context, builder, signature, args):
        function = builder.function
        function.attributes.add("noinline")
        # llvmlite knows no such attribute, hence the base class's method; compilers without it ignore the string
        set.add(function.attributes, '"prefer-vector-width"="512"')
        for argument in function.args:
            if isinstance(argument.type, ir.PointerType):
                argument.add_attribute("noalias")
        return context.get_dummy_value()

    return types.none(), codegen


def _tile(rows: int, vectors: int) -> Any:
    """
    Make an operation, y[i, j] = start[i, j] + sum_k x[i, k] w[k, j] for ``rows`` i and ``vectors`` times ``LANES`` j, of
    pointers to the first entries and the distances between rows.
    """

    def operation(typingctx, x, x_row, w, w_row, start, start_row, y, y_row, depth):
        def codegen(context, builder, signature, args):
            x, x_row, w, w_row, start, start_row, y, y_row, depth = args
            integer = depth.type

            def entry(data, row, stride, column=0):
                return builder.gep(data, [builder.add(builder.mul(stride, integer(row)), integer(column))])

            def load(place):
                return builder.load(builder.bitcast(place, _lanes.as_pointer()), align=4)

            tile = [(i, v) for i in range(rows) for v in range(vectors)]
            sums = [cgutils.alloca_once_value(builder, load(entry(start, i, start_row, v * LANES))) for i, v in tile]
            x_rows = [entry(x, i, x_row) for i in range(rows)]

            def add_products(k):
                of_k = builder.gep(w, [builder.mul(k, w_row)])
                columns = [load(builder.gep(of_k, [integer(v * LANES)])) for v in range(vectors)]
                factors = [broadcast(builder, builder.load(builder.gep(of_row, [k])), LANES) for of_row in x_rows]
                for (i, v), total in zip(tile, sums, strict=True):
                    product = builder.fmul(factors[i], columns[v], flags=_FUSED)
                    builder.store(builder.fadd(builder.load(total), product, flags=_FUSED), total)

            groups = builder.sdiv(depth, integer(UNROLL))
            whole = builder.mul(groups, integer(UNROLL))
            with cgutils.for_range(builder, groups) as loop:
                first = builder.mul(loop.index, integer(UNROLL))
                for i in range(UNROLL):
                    add_products(builder.add(first, integer(i)))
            with cgutils.for_range(builder, builder.sub(depth, whole)) as loop:
                add_products(builder.add(whole, loop.index))
            for (i, v), total in zip(tile, sums, strict=True):
                place = builder.bitcast(entry(y, i, y_row, v * LANES), _lanes.as_pointer())
                builder.store(builder.load(total), place, align=4)
            return context.get_dummy_value()

        n = types.int64
        return types.none(_number, n, _number, n, _number, n, _number, n, n), codegen

    return intrinsic(operation)


# The last panel's columns may be few; the output of a value function is one
_whole, _whole_row = _tile(TILE_ROWS, VECTORS), _tile(1, VECTORS)
_half, _half_row = _tile(TILE_ROWS, VECTORS // 2), _tile(1, VECTORS // 2)
_narrow, _narrow_row = _tile(TILE_ROWS, 1), _tile(1, 1)


@intrinsic
def _transpose(typingctx, source, source_row, target, target_row):
    """Set target[i, j] = source[j, i] for ``LANES`` i and j, of pointers to the first entries and distances between rows."""

    def codegen(context, builder, signature, args):
        source, source_row, target, target_row = args
        integer = source_row.type

        def place(data, row, stride):
            return builder.bitcast(builder.gep(data, [builder.mul(stride, integer(row))]), _lanes.as_pointer())

        def choose(u, v, lanes):
            return builder.shuffle_vector(u, v, ir.VectorType(ir.IntType(32), LANES)(lanes))

        vectors = [builder.load(place(source, i, source_row), align=4) for i in range(LANES)]
        size = 1
        while size < LANES:  # exchange the squares of this size beside the diagonal
            for i in range(LANES):
                if not i & size:
                    u, v = vectors[i], vectors[i + size]
                    low = [LANES + lane - size if lane & size else lane for lane in range(LANES)]
                    high = [LANES + lane if lane & size else lane + size for lane in range(LANES)]
                    vectors[i], vectors[i + size] = choose(u, v, low), choose(u, v, high)
            size *= 2
        for i in range(LANES):
            builder.store(vectors[i], place(target, i, target_row), align=4)
        return context.get_dummy_value()

    n = types.int64
    return types.none(_number, n, _number, n), codegen


@inlined()
def _copy(source, source_row, source_column, target, target_row, rows, columns):
    """Copy source[i, j] to target[i, j], of addresses, with the distances of rows and of columns."""
    no_overlap()
    a, b = pointer(source), pointer(target)
    tall, wide = 0, 0
    if source_row == 1:
        tall, wide = rows - rows % LANES, columns - columns % LANES
        for j in range(0, wide, LANES):
            for i in range(0, tall, LANES):
                _transpose(
                    *(pointer(source + 4 * (j * source_column + i)), source_column),
                    *(pointer(target + 4 * (i * target_row + j)), target_row),
                )
    for i in range(rows):
        for j in range(wide if i < tall else 0, columns):
            b[i * target_row + j] = a[i * source_row + j * source_column]


@inlined()
def _multiply(x, x_row, w, w_row, start, start_row, y, y_row, rows, depth, columns):
    """Compute a tile of ``rows``, which are ``TILE_ROWS`` or 1, and ``columns``, rounded up; of addresses."""
    no_overlap()
    x, w, start, y = pointer(x), pointer(w), pointer(start), pointer(y)
    if rows == TILE_ROWS:
        if columns > PANEL // 2:
            _whole(x, x_row, w, w_row, start, start_row, y, y_row, depth)
        elif columns > LANES:
            _half(x, x_row, w, w_row, start, start_row, y, y_row, depth)
        else:
            _narrow(x, x_row, w, w_row, start, start_row, y, y_row, depth)
    elif columns > PANEL // 2:
        _whole_row(x, x_row, w, w_row, start, start_row, y, y_row, depth)
    elif columns > LANES:
        _half_row(x, x_row, w, w_row, start, start_row, y, y_row, depth)
    else:
        _narrow_row(x, x_row, w, w_row, start, start_row, y, y_row, depth)


@inlined()
def product(x, x_row, x_column, w, w_row, w_column, start, start_row, y, rows, depth, columns):
    """
    Compute y[i, j] = start[i, j] + sum_k x[i, k] w[k, j]. y is C-contiguous and overlaps no other array.

    :param x: address of x[0, 0]; likewise w, start and y
    :param x_row: distance of the rows of x; likewise w_row, and start_row, 0 for a bias
    :param x_column: distance of the columns of x; likewise w_column
    :param rows: rows of x, start and y
    :param depth: columns of x, rows of w
    :param columns: columns of w, start and y
    """
    no_overlap()
    corner, end = address(stack_array(TILE_ROWS * PANEL)), address(stack_array(TILE_ROWS * PANEL))
    panel, block = stack_array(CHUNK * PANEL), address(stack_array(rows * CHUNK if x_column != 1 else 0))
    rest = rows % TILE_ROWS
    at_end = rows - TILE_ROWS if rest else rows  # the last tile is as large as the others and shares rows with one of them
    count = TILE_ROWS if rows >= TILE_ROWS else 1
    for k in range(0, max(depth, 1), CHUNK):
        part = min(CHUNK, depth - k)
        inputs, x_distance = x + 4 * k * x_column, x_row
        if x_column != 1:
            _copy(inputs, x_row, x_column, block, CHUNK, rows, part)
            inputs, x_distance = block, CHUNK
        for j in range(0, columns, PANEL):
            some = min(columns - j, PANEL)
            weights, w_distance = w + 4 * (k * w_row + j * w_column), w_row
            if w_column != 1 or some < PANEL:
                for i in range(part * PANEL if some < PANEL else 0):
                    panel[i] = 0.0
                _copy(weights, w_row, w_column, address(panel), PANEL, part, some)
                weights, w_distance = address(panel), PANEL
            before, before_row = (start, start_row) if k == 0 else (y, columns)
            before += 4 * j
            if 0 <= at_end < rows:
                _copy(before + 4 * at_end * before_row, before_row, 1, end, PANEL, TILE_ROWS, some)
                at = inputs + 4 * at_end * x_distance
                _multiply(at, x_distance, weights, w_distance, end, PANEL, end, PANEL, TILE_ROWS, part, some)
            for i in range(0, rows - rest if count > 1 else rows, count):
                first, first_row = before + 4 * i * before_row, before_row
                out, out_row = y + 4 * (i * columns + j), columns
                if some < PANEL:  # vectors would reach beyond the last column
                    _copy(first, before_row, 1, corner, PANEL, count, some)
                    first, first_row, out, out_row = corner, PANEL, corner, PANEL
                at = inputs + 4 * i * x_distance
                _multiply(at, x_distance, weights, w_distance, first, first_row, out, out_row, count, part, some)
                if some < PANEL:
                    _copy(corner, PANEL, 1, y + 4 * (i * columns + j), columns, count, some)
            if 0 <= at_end < rows:
                kept = end + 4 * (TILE_ROWS - rest) * PANEL
                _copy(kept, PANEL, 1, y + 4 * ((rows - rest) * columns + j), columns, rest, some)
