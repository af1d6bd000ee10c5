"""Importance ratios and checks of shapes for all losses."""

import math

import torch as th

from sb3_flow.compiled.ratio_limit import MAX_LOG_RATIO


def importance_ratio(log_ratio: th.Tensor, cap: float = math.inf) -> th.Tensor:
    """
    Compute min(exp(log_ratio), cap) without overflow: the logarithm is cut at 20 first. Cut entries have no gradient, and
    NaN stays NaN (a check for NaN would wait for the device).

    :param log_ratio: log pi(a|s) - log mu(a|s), any shape
    :param cap: largest ratio
    :return: same shape
    """
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    return ratio if math.isinf(cap) else ratio.clamp(max=cap)


def require_same_shape(**tensors: th.Tensor) -> None:
    """
    Refuse tensors of different shapes: (B,) beside (B, 1) would broadcast to (B, B) without a word.

    :param tensors: tensors by the names in the message
    :raises ValueError: if the shapes differ
    """
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"The shapes must be equal: {shapes}.")
