"""Running compiled kernels from torch: on its threads, in memory that it allocates."""

import ctypes
import os
from array import array
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch as th

from sb3_flow.compiled import c_function

Key = TypeVar("Key", bound=Hashable)

SERIAL_BELOW = 8192
"""Elements; waking a second thread for fewer takes longer than they do."""
ALIGNMENT = 16
"""Elements of a cache line."""
PIECE = 2**22
"""Elements that are allocated at once."""


def _openmp() -> Any:
    """
    :return: ``GOMP_parallel`` of the OpenMP library that torch has loaded, or None. The kernels must run on torch's own
        threads: between two operations those wait actively, and any others would compete with them
    """
    try:
        parallel = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return parallel


_parallel = _openmp()


class Launch:
    """
    A kernel and what it is called with.

    :param kernel: the kernel
    :param elements: about how many numbers it works on
    :param arguments: its arguments, but for the counter
    """

    def __init__(self, kernel: c_function, elements: int, arguments: Sequence[int]) -> None:
        self.arguments = array("q", (0, *arguments))
        self._kernel, self._address = kernel, self.arguments.buffer_info()[0]
        self._threads = th.get_num_threads() if _parallel is not None and elements >= SERIAL_BELOW else 1

    def __call__(self) -> None:
        self.arguments[0] = 0
        if self._threads == 1:
            self._kernel.call(self._address)
        else:
            _parallel(self._kernel.address, self._address, self._threads, 0)


def address_of(tensor: th.Tensor | None) -> int:
    """:return: where its data are; 0 for None"""
    return 0 if tensor is None else tensor.data_ptr()


def allocate(like: th.Tensor, sizes: Mapping[Key, int]) -> tuple[list[th.Tensor], dict[Key, int]]:
    """
    :param like: what type and device are taken from
    :param sizes: elements of each array
    :return: memory for these arrays, and the address of each: a tensor for each would cost more than its use. Of several
        pieces if it is large: the C library returns such pieces to the system, and each page has to be got again
    """
    totals, places = [0], {}
    for key, size in sizes.items():
        if totals[-1] and totals[-1] + size > PIECE:
            totals.append(0)
        places[key] = len(totals) - 1, totals[-1]
        totals[-1] += -(-size // ALIGNMENT) * ALIGNMENT
    memory = [like.new_empty(total) for total in totals]
    starts = [piece.data_ptr() for piece in memory]
    return memory, {key: starts[piece] + 4 * offset for key, (piece, offset) in places.items()}
