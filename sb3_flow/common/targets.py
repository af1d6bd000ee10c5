"""Networks that follow others."""

import torch as th
from torch import nn


@th.no_grad()
def follow(source: nn.Module, target: nn.Module, rate: float) -> None:
    """
    Exponential moving average of a network, in place: ``target <- (1 - rate) * target + rate * source``. Running
    statistics (BatchNorm) are copied, as SB3 does.

    :param source: network to follow
    :param target: network of the same structure
    :param rate: weight of the source
    """
    for new, average in zip(source.parameters(), target.parameters(), strict=True):
        average.lerp_(new, rate)
    buffers = dict(source.named_buffers())
    for name, statistic in target.named_buffers():
        if "running_" in name:
            statistic.copy_(buffers[name])
