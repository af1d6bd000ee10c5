"""Arrays in a block of memory that two processes share."""

import mmap
import os
import tempfile
from typing import Any

import numpy as np

ALIGNMENT = 64


class Layout:
    """Assign places to named arrays in a block of memory; both processes have the same layout."""

    def __init__(self) -> None:
        self.size = 0
        self._arrays: dict[str, tuple[int, tuple[int, ...], str]] = {}

    def add(self, name: str, shape: tuple[int, ...], dtype: Any) -> None:
        """Reserve the place of an array."""
        assert name not in self._arrays, name
        dtype = np.dtype(dtype)
        self._arrays[name] = (self.size, shape, dtype.str)
        length = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        self.size += -(-length // ALIGNMENT) * ALIGNMENT

    def view(self, block: mmap.mmap, name: str) -> np.ndarray:
        """Find an array in the shared memory by its name."""
        offset, shape, dtype = self._arrays[name]
        return np.ndarray(shape, dtype=dtype, buffer=block, offset=offset)


def reserve(size: int) -> int:
    """
    Reserve memory without a name: this memory vanishes with the last process that has it, and the size of ``/dev/shm`` (64 MB
    in a container by default) does not limit it. Pages that are never written take no room.

    :param size: in bytes
    :return: a file descriptor for the other process and for :func:`attach`
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("sb3_flow", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def attach(descriptor: int, size: int) -> mmap.mmap:
    """Map memory that :func:`reserve` reserved, and close its descriptor; the size is in bytes."""
    try:
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
