"""Pieces of vector code in LLVM's language that several compiled rooms share."""

from typing import Any

from llvmlite import binding, ir
from numba.extending import intrinsic as numba_intrinsic

intrinsic: Any = numba_intrinsic  # the signature of an operation names the compiler's argument, too
WIDE = bool(binding.get_host_cpu_features().get("avx512f", False))
"""True if a register holds 16 numbers; else it holds 8."""


def broadcast(builder, value, count):
    """Make a vector of ``count`` lanes, each of which is the value."""
    lanes = ir.VectorType(value.type, count)
    first = builder.insert_element(lanes(ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, lanes(ir.Undefined), ir.VectorType(ir.IntType(32), count)([0] * count))
