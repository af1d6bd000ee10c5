"""GELU and GELU followed by LayerNorm in torch's own operators; :mod:`sb3_flow.flow.fused` is the faster way on CPUs."""

import torch as th
from torch import nn
from torch.nn import functional as F

from sb3_flow.kernels.arguments import LAYER_NORM_EPS


def gelu(x: th.Tensor) -> th.Tensor:
    """:return: GELU in its tanh approximation, the default of the JAX reference implementations"""
    return F.gelu(x, approximate="tanh")


def layer_norm(x: th.Tensor, scale: th.Tensor, shift: th.Tensor) -> th.Tensor:
    """:return: LayerNorm of x, shape ``(K, B, D)``, with scale and shift per member, shape ``(K, 1, D)``"""
    return th.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=LAYER_NORM_EPS), scale)


class TanhGELU(nn.Module):
    """:func:`gelu` as a module."""

    def forward(self, x: th.Tensor) -> th.Tensor:
        return gelu(x)
