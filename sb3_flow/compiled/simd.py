"""Pieces of vector code in LLVM's language that several compiled rooms share."""

from llvmlite import binding, ir

WIDE = bool(binding.get_host_cpu_features().get("avx512f", False))
"""Whether a register holds 16 numbers; else 8."""


def broadcast(builder, value, count):  # type: ignore[no-untyped-def]
    """:return: a vector of so many lanes, all of them this value"""
    lanes = ir.VectorType(value.type, count)
    first = builder.insert_element(lanes(ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, lanes(ir.Undefined), ir.VectorType(ir.IntType(32), count)([0] * count))
