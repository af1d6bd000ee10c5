"""What the other modules of this package share."""

import math

import torch as th

# exp(20) = 4.9e8: no estimate with such a ratio means anything, and its products are still far from float32's overflow
MAX_LOG_RATIO = 20.0


def importance_ratio(log_ratio: th.Tensor, cap: float = math.inf) -> th.Tensor:
    """
    min(exp(log_ratio), cap) that cannot overflow: the logarithm is cut at 20 before it is exponentiated. What is cut has no
    gradient; NaN stays NaN (looking for it would wait for the device).

    :param log_ratio: log pi(a|s) - log mu(a|s), any shape
    :param cap: largest ratio
    :return: same shape
    """
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    return ratio if math.isinf(cap) else ratio.clamp(max=cap)


def require_same_shape(**tensors: th.Tensor) -> None:
    """
    (B,) beside (B, 1) broadcasts to (B, B) without a word, so it is refused.

    :param tensors: by the name that the message gives them
    :raises ValueError: if their shapes differ
    """
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"The shapes must be equal: {shapes}.")
