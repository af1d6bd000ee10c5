"""A small loop with an operation of its own in LLVM's language: larger loops ask no more of numba and llvmlite."""

import numpy as np
from llvmlite import ir
from numba import njit, types

from sb3_flow.compiled.cache import keep_on_disk
from sb3_flow.compiled.simd import intrinsic


@intrinsic
def _twice(typingctx, number):
    def codegen(context, builder, signature, args):
        return builder.fmul(args[0], ir.Constant(ir.DoubleType(), 2.0))

    return types.float64(types.float64), codegen


@njit
def _doubled(x):
    for i in range(x.size):
        x[i] = _twice(x[i])


keep_on_disk(_doubled)


def probe() -> None:
    """
    Run a compiled loop.

    :raises RuntimeError: if its result is wrong
    """
    x = np.arange(3.0)
    _doubled(x)
    if x.tolist() != [0.0, 2.0, 4.0]:
        raise RuntimeError(f"a compiled loop made {x} of [0, 1, 2], where [0, 2, 4] was expected")
