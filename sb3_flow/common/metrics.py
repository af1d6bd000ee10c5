"""Training metrics that stay on the device until they are logged."""

import torch as th
from stable_baselines3.common.logger import Logger


class MetricSums:
    """Running means of scalar tensors between two log lines."""

    def __init__(self) -> None:
        self._sums: dict[str, th.Tensor] = {}
        self._count = 0

    def add(self, metrics: dict[str, th.Tensor]) -> None:
        """:param metrics: scalar tensors of one gradient step, always under the same names"""
        self._count += 1
        for name, value in metrics.items():
            self._sums[name] = self._sums[name] + value.detach() if name in self._sums else value.detach().clone()

    def flush(self, logger: Logger) -> None:
        """:param logger: records the means under ``train/``; then counting starts anew"""
        for name, total in self._sums.items():
            logger.record(f"train/{name}", total.item() / self._count)
        self._sums, self._count = {}, 0
