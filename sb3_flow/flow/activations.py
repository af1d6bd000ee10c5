"""GELU and GELU followed by LayerNorm in torch's own operators; :mod:`sb3_flow.flow.fused` is the faster way on CPUs."""

import torch as th
from torch import nn
from torch.nn import functional as F

LAYER_NORM_EPS = 1e-6


def gelu(x: th.Tensor) -> th.Tensor:
    """:return: GELU in its tanh approximation, the default of the JAX reference implementations"""
    return F.gelu(x, approximate="tanh")


def layer_norm(x: th.Tensor, scale: th.Tensor, shift: th.Tensor) -> th.Tensor:
    """:return: LayerNorm of x, shape ``(K, B, D)``, with scale and shift per member, shape ``(K, 1, D)``"""
    return th.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=LAYER_NORM_EPS), scale)


def gelu_layer_norm(x: th.Tensor, scale: th.Tensor, shift: th.Tensor) -> th.Tensor:
    """:return: LayerNorm(GELU(x)) of K members at once, shapes as in :func:`layer_norm`"""
    return layer_norm(gelu(x), scale, shift)


class TanhGELU(nn.Module):
    """:func:`gelu` as a module."""

    def forward(self, x: th.Tensor) -> th.Tensor:
        return gelu(x)
