"""
MLPs of K members in torch's own operators: GELU, GELU followed by LayerNorm, whole networks. They are the plain twin of
:mod:`sb3_flow.fused.fused_mlp`, its test oracle and its fallback.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch as th
from torch import nn
from torch.nn import functional as F

from sb3_flow.fused.argument_blocks import LAYER_NORM_EPS


def gelu(x: th.Tensor) -> th.Tensor:
    """Compute GELU in its tanh approximation, the default of the JAX reference implementations."""
    return F.gelu(x, approximate="tanh")


def layer_norm(x: th.Tensor, scale: th.Tensor, shift: th.Tensor) -> th.Tensor:
    """Compute LayerNorm of x, shape ``(K, B, D)``, with scale and shift per member, shape ``(K, 1, D)``."""
    return th.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=LAYER_NORM_EPS), scale)


class TanhGELU(nn.Module):
    """:func:`gelu` as a module."""

    def forward(self, x: th.Tensor) -> th.Tensor:
        return gelu(x)


class Layer(NamedTuple):
    """
    Parameters of one layer. The weight has shape ``(K, in, out)`` and the others ``(K, 1, out)``; or, of a single network,
    ``(out, in)`` as in ``nn.Linear`` and ``(out,)``. Scale and shift belong to a LayerNorm after the activation.
    """

    weight: th.Tensor
    bias: th.Tensor
    scale: th.Tensor | None = None
    shift: th.Tensor | None = None


def mlp(layers: Sequence[Layer], inputs: th.Tensor, activation: Callable[[th.Tensor], th.Tensor] = gelu) -> th.Tensor:
    """
    Compute an MLP.

    :param layers: parameters of the layers, the last of which is linear
    :param inputs: shape ``(B, in)``, shared by all members
    :param activation: of the hidden layers
    :return: shape ``(K, B, out)``
    """
    hidden = inputs if layers[0].weight.dim() == 2 else inputs.expand(layers[0].weight.shape[0], *inputs.shape)
    for i, (weight, bias, scale, shift) in enumerate(layers):
        hidden = F.linear(hidden, weight, bias) if weight.dim() == 2 else th.baddbmm(bias, hidden, weight)
        if i < len(layers) - 1:
            hidden = activation(hidden)
            hidden = hidden if scale is None or shift is None else layer_norm(hidden, scale, shift)
    return hidden if hidden.dim() == 3 else hidden.unsqueeze(0)
