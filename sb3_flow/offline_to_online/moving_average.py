"""Moving averages of networks."""

import torch as th
from torch import nn


class MovingAverage:
    """
    Exponential moving average of a network, in place. Running statistics (BatchNorm) are copied, as in SB3.

    :param source: network to follow
    :param target: network of the same structure that holds the average
    """

    def __init__(self, source: nn.Module, target: nn.Module) -> None:
        # The lists are made once: a walk through the modules takes longer than the averaging
        self._new: list[th.Tensor] = list(source.parameters())
        self._averages: list[th.Tensor] = list(target.parameters())
        statistics = dict(source.named_buffers())
        self._statistics = [(buffer, statistics[name]) for name, buffer in target.named_buffers() if "running_" in name]

    @th.no_grad()
    def step(self, rate: float) -> None:
        """Do ``target <- (1 - rate) * target + rate * source``."""
        th._foreach_lerp_(self._averages, self._new, rate)  # as torch.optim.swa_utils does
        for target, source in self._statistics:
            target.copy_(source)
