"""
Backward linear recurrences x_t = d_t + c_t x_{t+1}, the core of every discounted sum in this package; compiled with numba.

Arrays are flat views of time-major ``(T, N)`` arrays, so a step's successor lies N entries further: one loop over blocks
of 8 entries serves any N. For N below 8 neighbouring steps are first merged, x_t = (d_t + c_t d_{t+1}) + c_t c_{t+1} x_{t+2},
which also makes the chain of dependent operations up to 8 times shorter.

``contract`` and ``reassoc`` let the compiler fuse or reorder operations; NaN and infinity keep their meaning.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

CHUNK = 2048
"""Entries that are worked on at a time, from the last to the first, so that scratch memory stays in the cache."""

BLOCK = 8
"""Entries of one vector operation."""

Function = Callable[..., Any]
_intrinsic: Any = intrinsic  # its signature names the compiler's argument, too


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


def _block_operation(fused: bool, add: bool) -> Any:
    """
    :return: an operation on d, c, i, j: d[i:i+8] += c[i:i+8] d[j:j+8], or without c: d[i:i+8] *= d[j:j+8]; all entries are
        read before any is written. The compiler cannot make this of a loop, as it does not know that blocks are independent.
    """
    flags = ("contract",) if fused else ()

    def operation(typingctx, d, c, i, j):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            kind = signature.args[0]
            block, align = ir.VectorType(context.get_value_type(kind.dtype), BLOCK), kind.dtype.bitwidth // 8

            def place(array, index):  # type: ignore[no-untyped-def]
                data = context.make_array(signature.args[array])(context, builder, value=args[array]).data
                return builder.bitcast(builder.gep(data, [args[index]]), block.as_pointer())

            first, second = builder.load(place(0, 2), align=align), builder.load(place(0, 3), align=align)
            if add:
                product = builder.fmul(builder.load(place(1, 2), align=align), second, flags=flags)
                result = builder.fadd(first, product, flags=flags)
            else:
                result = builder.fmul(first, second)
            builder.store(result, place(0, 2), align=align)
            return context.get_dummy_value()

        return types.none(d, c, types.intp, types.intp), codegen

    return _intrinsic(operation)


_add_block, _add_block_in_order = _block_operation(True, True), _block_operation(False, True)
_multiply_block = _block_operation(True, False)


@_intrinsic
def _chain_blocks(typingctx, d, c, count):  # type: ignore[no-untyped-def]
    """From d[8 count:8 count+8] down to d[0:8], each block += its c times the following block, which stays in a register."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind = signature.args[0]
        block, align = ir.VectorType(context.get_value_type(kind.dtype), BLOCK), kind.dtype.bitwidth // 8
        x, factors = (context.make_array(kind)(context, builder, value=array).data for array in args[:2])
        size = args[2].type(BLOCK)

        def place(data, index):  # type: ignore[no-untyped-def]
            return builder.bitcast(builder.gep(data, [builder.mul(index, size)]), block.as_pointer())

        following = cgutils.alloca_once(builder, block)
        builder.store(builder.load(place(x, args[2]), align=align), following)
        with cgutils.for_range(builder, args[2]) as loop:
            index = builder.sub(builder.sub(args[2], loop.index), args[2].type(1))
            product = builder.fmul(
                builder.load(place(factors, index), align=align), builder.load(following), flags=("contract",)
            )
            result = builder.fadd(builder.load(place(x, index), align=align), product, flags=("contract",))
            builder.store(result, place(x, index), align=align)
            builder.store(result, following)
        return context.get_dummy_value()

    return types.none(d, c, types.intp), codegen


@compiled(inline="always")
def _merge(d, c, lag):  # type: ignore[no-untyped-def]
    """From a recurrence over ``lag`` entries to one over twice as many."""
    size = d.size - lag
    blocks = max(size - size % BLOCK, 0)
    for i in range(0, blocks, BLOCK):
        _add_block(d, c, i, i + lag)
        _multiply_block(c, c, i, i + lag)
    for i in range(blocks, size):
        d[i] += c[i] * d[i + lag]
        c[i] *= c[i + lag]


@compiled()
def solve(d, c, lag):  # type: ignore[no-untyped-def]
    """
    x_i = d_i + c_i x_{i + lag}

    :param d: flat; receives x, which at the last ``lag`` entries is d
    :param c: flat, as long; zero at the last ``lag`` entries; overwritten
    :param lag: number of environments
    """
    while lag < BLOCK and lag < d.size:
        _merge(d, c, lag)
        lag *= 2
    i = d.size - lag - BLOCK
    if lag == BLOCK and i >= 0:
        rest = d.size % BLOCK
        _chain_blocks(d[rest:], c[rest:], d.size // BLOCK - 1)
        i = rest - BLOCK
    while i >= 0:
        _add_block(d, c, i, i + lag)
        i -= BLOCK
    for k in range(i + BLOCK - 1, -1, -1):
        d[k] += c[k] * d[k + lag]


@compiled(fastmath=False)
def solve_in_order(d, c, lag):  # type: ignore[no-untyped-def]
    """As :func:`solve`, one multiplication and one addition per entry, each rounded; c is left alone, its end is not read."""
    i = d.size - lag - BLOCK
    while i >= 0 and lag >= BLOCK:
        _add_block_in_order(d, c, i, i + lag)
        i -= BLOCK
    for k in range(min(i + BLOCK, d.size - lag) - 1, -1, -1):
        d[k] = d[k] + c[k] * d[k + lag]


@compiled(fastmath={"contract", "reassoc"})
def all_finite(x):  # type: ignore[no-untyped-def]
    """:return: whether no entry of a flat array is NaN or infinite"""
    zero = x.dtype.type(0)
    total = zero
    for i in range(x.size):
        total += x[i] * zero
    return total == zero
