"""GELU and GELU followed by LayerNorm: torch's own operators, or compiled kernels where these are faster (CPU)."""

from typing import Any

import torch as th
from torch import nn
from torch.nn import functional as F

from sb3_flow.kernels import activations as kernels

LAYER_NORM_EPS = 1e-6


def _use_kernels(x: th.Tensor) -> bool:
    """Plain float32 tensors on the CPU; not under torch.compile nor torch.func, which cannot look into a kernel."""
    return (
        x.device.type == "cpu"
        and x.dtype == th.float32
        and not th.compiler.is_compiling()
        and th._C._functorch.peek_interpreter_stack() is None
        and th.autograd.forward_ad._current_level < 0
    )


def _gelu_into(x: th.Tensor, out: th.Tensor) -> th.Tensor:
    kernels.gelu_forward(x.numpy().reshape(-1), out.numpy().reshape(-1))
    return out


def _gelu_layer_norm_into(
    x: th.Tensor, scale: th.Tensor, shift: th.Tensor, out: th.Tensor, statistics: th.Tensor
) -> th.Tensor:
    arrays = (x.numpy(), scale.numpy()[:, 0], shift.numpy()[:, 0], LAYER_NORM_EPS, out.numpy())
    kernels.gelu_layer_norm_forward(*arrays, *statistics.numpy())
    return out


class _Gelu(th.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: th.Tensor) -> th.Tensor:
        ctx.save_for_backward(x)
        return _gelu_into(x.detach(), th.empty_like(x))

    @staticmethod
    @th.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: th.Tensor) -> th.Tensor:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach()
        grad_in = th.empty_like(x)
        arrays = (x.numpy(), grad_out.contiguous().numpy(), grad_in.numpy())
        kernels.gelu_backward(*(array.reshape(-1) for array in arrays))
        return grad_in


class _GeluLayerNorm(th.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: th.Tensor, scale: th.Tensor, shift: th.Tensor) -> th.Tensor:
        statistics = x.new_empty(2, *x.shape[:2])
        ctx.save_for_backward(x, scale, statistics)
        return _gelu_layer_norm_into(x.detach(), scale.detach(), shift.detach(), th.empty_like(x), statistics)

    @staticmethod
    @th.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: th.Tensor) -> tuple[th.Tensor, ...]:  # type: ignore[override]
        x, scale, statistics = (tensor.detach() for tensor in ctx.saved_tensors)
        grads = (th.empty_like(x), th.empty_like(scale), th.empty_like(scale))
        kernels.gelu_layer_norm_backward(
            *(x.numpy(), scale.numpy()[:, 0], *statistics.numpy(), grad_out.contiguous().numpy()),
            *(grads[0].numpy(), grads[1].numpy()[:, 0], grads[2].numpy()[:, 0]),
        )
        return grads


def gelu(x: th.Tensor) -> th.Tensor:
    """
    GELU in its tanh approximation, the default of the JAX reference implementations.

    :param x: any shape
    :return: same shape; equal to ``torch.nn.functional.gelu(x, approximate="tanh")`` up to rounding
    """
    if not _use_kernels(x):
        return F.gelu(x, approximate="tanh")
    x = x.contiguous()
    if th.is_grad_enabled() and x.requires_grad:
        return _Gelu.apply(x)  # type: ignore[no-any-return]
    x = x.detach()
    return _gelu_into(x, th.empty_like(x))


def gelu_layer_norm(x: th.Tensor, scale: th.Tensor, shift: th.Tensor) -> th.Tensor:
    """
    LayerNorm(GELU(x)) of K members at once, eps 1e-6.

    :param x: shape ``(K, B, D)``
    :param scale: shape ``(K, 1, D)``
    :param shift: shape ``(K, 1, D)``
    :return: shape ``(K, B, D)``
    """
    if not _use_kernels(x):
        return layer_norm(F.gelu(x, approximate="tanh"), scale, shift)
    x = x.contiguous()
    if th.is_grad_enabled() and (x.requires_grad or scale.requires_grad or shift.requires_grad):
        return _GeluLayerNorm.apply(x, scale, shift)  # type: ignore[no-any-return]
    x = x.detach()
    return _gelu_layer_norm_into(x, scale.detach(), shift.detach(), th.empty_like(x), x.new_empty(2, *x.shape[:2]))


def layer_norm(x: th.Tensor, scale: th.Tensor, shift: th.Tensor) -> th.Tensor:
    """:return: LayerNorm of x, shape ``(K, B, D)``, with scale and shift per member, shape ``(K, 1, D)``"""
    return th.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=LAYER_NORM_EPS), scale)


class TanhGELU(nn.Module):
    """:func:`gelu` as a module."""

    def forward(self, x: th.Tensor) -> th.Tensor:
        return gelu(x)
