"""Networks that follow others."""

import torch as th
from torch import nn


class Follower:
    """
    Exponential moving average of a network, in place: ``target <- (1 - rate) * target + rate * source``. Running
    statistics (BatchNorm) are copied, as SB3 does.

    :param source: network to follow
    :param target: network of the same structure
    """

    def __init__(self, source: nn.Module, target: nn.Module) -> None:
        self._sources = [parameter.data for parameter in source.parameters()]
        self._targets = [parameter.data for parameter in target.parameters()]
        source_buffers = dict(source.named_buffers())
        self._running = [(source_buffers[name], buffer) for name, buffer in target.named_buffers() if "running_" in name]

    @th.no_grad()
    def step(self, rate: float) -> None:
        """:param rate: weight of the source"""
        for source, target in zip(self._sources, self._targets, strict=True):
            target.lerp_(source, rate)
        for source, target in self._running:
            target.copy_(source)
