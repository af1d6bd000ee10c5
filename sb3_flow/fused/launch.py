"""Launches of compiled kernels from torch: on torch's threads, in memory that torch allocates."""

import ctypes
import os
from array import array
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch as th

from sb3_flow.fused.argument_blocks import NOTHING, addresses_in
from sb3_flow.fused.fusable import is_plain

if TYPE_CHECKING:
    from sb3_flow.fused.rowwise import Kernel

SERIAL_BELOW = 8192
"""Elements; waking a second thread for fewer elements takes longer than computing them."""
ALIGNMENT = 16
"""Elements of a cache line."""
PIECE = 2**22
"""Elements that are allocated at once."""


def _openmp() -> Any:
    """
    Find ``GOMP_parallel`` of the OpenMP library that torch has loaded, or None. The kernels must run on torch's own threads,
    which wait actively between two operations: other threads would compete with them.
    """
    try:
        parallel = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return parallel


_parallel = _openmp()


@cache
def kernels() -> Any:
    """Import the module of the kernels when it is first used, for it needs numba."""
    from sb3_flow.fused import rowwise

    return rowwise


class Launch:
    """
    A kernel and its argument block, but for the addresses.

    :param kernel: the kernel
    :param elements: approximate count of the numbers that the kernel works on
    :param head: the block's first part
    :param layers: a part for each layer
    :param end: the block's last part, if the kernel has an end
    """

    def __init__(self, kernel: "Kernel", elements: int, head: Any, layers: Sequence[Any], end: Any = None) -> None:
        expected: Any = kernel.head
        fits = isinstance(head, expected) and head.layers == len(layers) and type(end) is (kernel.end or type(None))
        if not fits or any(type(layer) is not kernel.layer for layer in layers):
            raise TypeError(f"The kernel takes {kernel.head}, {kernel.layer} for each layer and {kernel.end}.")
        self._arguments, self._numbers = array("q", (0,)), []
        for part in (head, *layers, *(() if end is None else (end,))):
            kind: Any = type(part)
            for place in addresses_in(kind):
                if part[place] != NOTHING:
                    self._numbers.append((len(self._arguments) + place, part[place]))
            self._arguments.extend(part)
        self._code, self._elements = kernel.code, elements

    def __call__(self, addresses: Sequence[int]) -> None:
        """Run the kernel with the addresses that the block's entries number; the first address is nothing."""
        arguments = self._arguments[:]  # a block for each call: several may be under way at a time
        for place, number in self._numbers:
            arguments[place] = addresses[number]
        where = arguments.buffer_info()[0]
        threads = th.get_num_threads() if _parallel is not None and self._elements >= SERIAL_BELOW else 1
        if threads == 1:
            self._code.call(where)
        else:
            _parallel(self._code.address, where, threads, 0)


def check(name: str, tensor: object, shape: tuple[int, ...]) -> None:
    """
    Check a tensor that a kernel shall read.

    :param name: the argument's name
    :param tensor: the argument
    :param shape: expected shape
    :raises ValueError: if the argument is not a float32 tensor of that shape in the CPU's memory
    """
    if not is_plain(tensor):
        raise ValueError(f"`{name}` must be a float32 tensor of shape {shape} on the CPU, but {describe(tensor)} was given.")
    if tensor.shape != shape:
        raise ValueError(f"`{name}` must be of shape {shape}, but {tuple(tensor.shape)} was given.")


def describe(tensor: object) -> str:
    """Describe a tensor in a message."""
    if not isinstance(tensor, th.Tensor):
        return repr(tensor)
    kind = "" if tensor.layout is th.strided else f" {tensor.layout}"
    return f"a {type(tensor).__name__} of {tensor.dtype}{kind}, shape {tuple(tensor.shape)}, on {tensor.device}"


def address_of(tensor: th.Tensor) -> int:
    """
    Find the address of the data of a tensor that was checked or has just been made.

    :raises ValueError: if the tensor has no memory (``untyped_storage().resize_(0)``)
    """
    address = tensor.data_ptr()
    if not address:
        raise ValueError(f"A tensor of shape {tuple(tensor.shape)} has no memory.")
    return address


class Memory:
    """
    Room for several arrays, since a tensor for each array would cost more time than its use. Large rooms have several pieces:
    the C library returns larger pieces to the system, and each page has to be got again.

    :param sizes: elements of each array
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._totals: list[int] = []
        self._at: list[tuple[int, int]] = []
        for size in sizes:
            if not self._totals or self._totals[-1] + size > PIECE:
                self._totals.append(0)
            self._at.append((len(self._totals) - 1, 4 * self._totals[-1]))
            self._totals[-1] += -(-size // ALIGNMENT) * ALIGNMENT

    def allocate(self) -> tuple[list[th.Tensor], list[int]]:
        """Allocate the memory; return it, and the address of each array."""
        memory = [th.empty(total, dtype=th.float32, device="cpu") for total in self._totals]
        starts = [piece.data_ptr() for piece in memory]
        return memory, [starts[piece] + offset for piece, offset in self._at]
