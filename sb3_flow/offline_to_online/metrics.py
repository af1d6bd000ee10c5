"""Training metrics that stay on the device until they are logged."""

import numpy as np
import torch as th
from stable_baselines3.common.logger import Logger

from sb3_flow.common.checks import check_computed
from sb3_flow.common.ranks import mean_over_ranks

CHECK_EVERY = 100
"""Gradient steps between two checks of metrics on a device, each of which waits for it; on the CPU every step is checked."""


class MetricSums:
    """Running means of scalar tensors between two log lines, with a check that all are finite."""

    def __init__(self) -> None:
        self.clear()

    def add(self, metrics: dict[str, th.Tensor], step: int) -> None:
        """
        Add the metrics of a gradient step.

        :param metrics: scalar tensors by name
        :param step: number of the gradient step
        :raises FloatingPointError: if a metric is not finite, with the step and the name
        """
        names = tuple(metrics)
        values = th.stack([value.detach() for value in metrics.values()])
        total = self._sums[names] + values if names in self._sums else values
        self._sums[names], self._counts[names] = total, self._counts.get(names, 0) + 1
        if values.device.type == "cpu" or step % CHECK_EVERY == 0:
            # a sum with an entry that is not finite stays so
            numbers = total.cpu().numpy()
            if not np.isfinite(numbers).all():
                check_computed(f"Gradient step {step} left", **dict(zip(names, numbers, strict=True)))

    def flush(self, logger: Logger) -> None:
        """Log the means over steps and ranks under ``train/``, and start anew; all ranks do so together."""
        for names, total in self._sums.items():
            for name, mean in zip(names, mean_over_ranks(total / self._counts[names]).tolist(), strict=True):
                logger.record(f"train/{name}", mean)
        self.clear()

    def clear(self) -> None:
        """Start anew."""
        self._sums: dict[tuple[str, ...], th.Tensor] = {}  # sums of metrics that come together, by their names
        self._counts: dict[tuple[str, ...], int] = {}
