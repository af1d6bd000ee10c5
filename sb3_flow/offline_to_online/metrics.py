"""Training metrics that stay on the device until they are logged."""

import numpy as np
import torch as th
from stable_baselines3.common.logger import Logger

from sb3_flow.common.checks import check_computed

CHECK_EVERY = 100
"""Gradient steps between two looks at metrics on a device, each of which waits for it; on the CPU every step is looked at."""


class MetricSums:
    """Running means of scalar tensors between two log lines, and the watch over their being finite."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], th.Tensor] = {}  # of metrics that come together
        self._counts: dict[tuple[str, ...], int] = {}

    def add(self, metrics: dict[str, th.Tensor], step: int) -> None:
        """
        Add the metrics of a gradient step.

        :param metrics: scalar tensors of one gradient step
        :param step: number of the gradient step
        :raises FloatingPointError: if a metric is not finite, with the step and the name
        """
        names = tuple(metrics)
        values = th.stack([value.detach() for value in metrics.values()])
        total = self._sums[names] + values if names in self._sums else values
        self._sums[names], self._counts[names] = total, self._counts.get(names, 0) + 1
        if values.device.type == "cpu" or step % CHECK_EVERY == 0:
            # a sum that was broken once stays broken
            numbers = total.cpu().numpy()
            if not np.isfinite(numbers).all():
                check_computed(f"Gradient step {step} left", **dict(zip(names, numbers, strict=True)))

    def flush(self, logger: Logger) -> None:
        """
        Log the means under ``train/`` and start anew.

        :param logger: of the model
        """
        for names, total in self._sums.items():
            for name, mean in zip(names, (total / self._counts[names]).tolist(), strict=True):
                logger.record(f"train/{name}", mean)
        self.clear()

    def clear(self) -> None:
        """Start anew."""
        self._sums, self._counts = {}, {}
