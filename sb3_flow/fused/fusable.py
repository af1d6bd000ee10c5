"""
The test whether compiled networks may stand in for torch's own operators: they may where nothing looks into the networks.

Tracing, exporting and transforming see operators, hooks see modules; a kernel shows neither. Private names of torch, checked
with torch 2.13: ``torch._C._functorch.peek_interpreter_stack``, ``torch._C._is_tracing``, the lengths of the stacks of
modes, ``forward_ad._current_level``, ``Tensor._is_zerotensor``, ``torch._C._has_storage``, ``module._has_any_global_hook``.
"""

from typing import Any, TypeGuard

import torch as th
from torch import nn
from torch.nn.modules import module as modules

_PLAIN = (th.Tensor, nn.Parameter)


def is_plain(tensor: Any) -> TypeGuard[th.Tensor]:
    """Say whether kernels can read an object by address and strides: a float32 tensor, no subclass, in the CPU's memory."""
    return (
        type(tensor) in _PLAIN
        and tensor.dtype is th.float32
        and tensor.is_cpu
        and tensor.layout is th.strided
        and not tensor.is_neg()
    )


def sizes_are_numbers() -> bool:
    """Say whether a decision by a tensor's size concerns this call alone: nothing records operators for other sizes."""
    return not (th.compiler.is_compiling() or th.compiler.is_exporting() or th._C._is_tracing())


def nothing_looks_in() -> bool:
    """
    Say whether torch is running operators and nothing else: no torch.compile, torch.export, tracing or ONNX export, no
    torch.func transform, no forward-mode derivative, no mode that intercepts operators or functions, no autocast (which would
    change the type of products), no hook on all modules.
    """
    return sizes_are_numbers() and not (
        th._C._functorch.peek_interpreter_stack() is not None
        or th.autograd.forward_ad._current_level >= 0
        or th._C._len_torch_dispatch_stack()
        or th._C._len_torch_function_stack()
        or th.is_autocast_enabled("cpu")
        or modules._has_any_global_hook()
    )


def can_fuse(*tensors: object) -> bool:
    """Say whether a compiled network may be used on these inputs now: nothing looks in, all are plain and none is empty."""
    return nothing_looks_in() and are_filled(*tensors)


def are_filled(*tensors: object) -> bool:
    """Say whether all are plain tensors, not empty, with memory of their own."""
    for tensor in tensors:
        # Wrappers of transforms that are over have no memory; neither has the zero tensor that a derivative may be
        if not (is_plain(tensor) and tensor.numel() and th._C._has_storage(tensor) and not tensor._is_zerotensor()):
            return False
    return True


def is_untouched(module: nn.Module, kind: type[nn.Module]) -> bool:
    """
    Say whether a module computes what its class computes.

    :param module: part of a network
    :param kind: class of the module when it was built
    :return: True if the module still is of that class, with neither hooks nor parametrizations nor its own ``forward``
    """
    return type(module) is kind and not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )
