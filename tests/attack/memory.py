"""
NumPy arrays and torch tensors that end or start at a page that nobody may touch: a loop that reads or writes beyond them ends
the process with SIGSEGV at once, instead of changing somebody else's memory.

Whoever uses them runs in a process of its own and calls ``faulthandler.enable()``, which prints where it happened.
"""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch as th

PAGE = mmap.PAGESIZE
PROT_NONE = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def guarded_bytes(count: int, at_end: bool = True) -> np.ndarray:
    """
    :param count: number of bytes
    :param at_end: whether the last byte touches the page behind; else the first byte touches the page before
    :return: zeros, uint8, shape ``(count,)``; the pages live as long as the array or a view of it does
    """
    inner = -(-count // PAGE) * PAGE
    memory = mmap.mmap(-1, inner + 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (address, address + PAGE + inner):
        if _libc.mprotect(page, PAGE, PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect failed")
    return np.ndarray((count,), np.uint8, memory, PAGE + (inner - count if at_end else 0))


def guarded_empty(shape: int | tuple[int, ...], dtype: object = float, at_end: bool = True) -> np.ndarray:
    """:return: as ``np.empty``, C-contiguous; holds zeros"""
    dtype = np.dtype(dtype)  # type: ignore[call-overload]
    shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return np.ndarray(shape, dtype, guarded_bytes(count, at_end))


def guarded_array(array: np.ndarray, at_end: bool = True) -> np.ndarray:
    """:return: a copy with the same dtype, shape and strides (also negative or zero strides), between forbidden pages"""
    steps = [stride * (size - 1) for stride, size in zip(array.strides, array.shape, strict=True) if array.size]
    low, high = sum(min(step, 0) for step in steps), sum(max(step, 0) for step in steps)
    memory = guarded_bytes(high - low + array.itemsize if array.size else 0, at_end)
    copy: np.ndarray = np.ndarray(array.shape, array.dtype, memory, -low, array.strides)
    copy[...] = array
    return copy


def guarded_tensor(tensor: th.Tensor, at_end: bool = True) -> th.Tensor:
    """:return: a copy with the same dtype, shape, strides and ``requires_grad``, between forbidden pages"""
    extent = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)) + 1
    extent = extent if tensor.numel() else 0
    flat = th.from_numpy(guarded_bytes(extent * tensor.element_size(), at_end)).view(tensor.dtype)
    if extent:
        flat.copy_(tensor.detach().as_strided((extent,), (1,), tensor.storage_offset()))
    return flat.as_strided(tensor.shape, tensor.stride()).requires_grad_(tensor.requires_grad)


def guard_module(module: th.nn.Module, at_end: bool = True) -> None:
    """Moves all parameters and buffers of a module between forbidden pages."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = guarded_tensor(tensor.detach(), at_end)
        if tensor.grad is not None:
            tensor.grad = guarded_tensor(tensor.grad, at_end)


@contextmanager
def guarded_allocations(at_end: bool = True) -> Iterator[None]:
    """
    Meanwhile what Python code allocates with ``empty``, ``zeros``, ``empty_like`` or ``zeros_like`` of NumPy, or with
    ``torch.empty``, ``torch.empty_like`` or ``Tensor.new_empty`` (on the CPU), lies between forbidden pages; what compiled
    loops allocate does not.
    """
    tensor_empty, tensor_empty_like = th.empty, th.empty_like

    def empty(shape, dtype=float, **_):  # type: ignore[no-untyped-def]
        return guarded_empty(shape, dtype, at_end)

    def empty_like(array, dtype=None, **_):  # type: ignore[no-untyped-def]
        array = np.asarray(array)
        return guarded_empty(array.shape, dtype or array.dtype, at_end)

    def torch_empty(*size, **options):  # type: ignore[no-untyped-def]
        return guarded_tensor(tensor_empty(*size, **options).zero_(), at_end)

    def torch_empty_like(tensor, **options):  # type: ignore[no-untyped-def]
        return guarded_tensor(tensor_empty_like(tensor, **options).zero_(), at_end)

    def tensor_new_empty(self, *size, **options):  # type: ignore[no-untyped-def]
        return torch_empty(*size, **{"dtype": self.dtype, **options})

    with (
        mock.patch.object(np, "empty", empty),
        mock.patch.object(np, "zeros", empty),
        mock.patch.object(np, "empty_like", empty_like),
        mock.patch.object(np, "zeros_like", empty_like),
        mock.patch.object(th, "empty", torch_empty),
        mock.patch.object(th, "empty_like", torch_empty_like),
        mock.patch.object(th.Tensor, "new_empty", tensor_new_empty),
    ):
        yield
