"""Where the parts of ``gpu.py`` run: on the GPU at full size, or at a tiny size on the CPU."""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.logger import Logger

import sb3_flow
from sb3_flow import OfflineDataset
from sb3_flow.execution import UpdateRunner
from tests.tape import Tape

OBSERVATION, ACTION, CHUNK = 55, 5, 5
SIZES = {"full": (10, [512] * 4, 256), "small": (2, [256] * 2, 256)}
"""Critics, hidden layers, rows of a batch."""


class Setting:
    """Where the parts run: on the GPU at full size, or a dry run on the CPU at a tiny size."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.dry = given.dry_run or not th.cuda.is_available()
        self.device = "cpu" if self.dry else "cuda"
        self.sizes = {name: (2, [8, 8], 8) for name in SIZES} if self.dry else SIZES
        self.until = time.monotonic() + given.seconds
        self.rql: Path | None = given.rql

    def wait(self) -> None:
        if not self.dry:
            th.cuda.synchronize()

    def model(self, algorithm: str, size: str, execution: str, **own: Any) -> Any:
        n_critics, net_arch, batch_size = self.sizes[size]
        policy = {"net_arch": net_arch, "n_critics": n_critics}
        return self.build(getattr(sb3_flow, algorithm), execution, policy_kwargs=policy, batch_size=batch_size, **own)

    def build(self, algorithm: Any, execution: str, **own: Any) -> Any:
        """:return: a model with its dataset, ready for updates"""
        data = own.pop("data", None) or dataset(2_000 if self.dry else 100_000)
        model = algorithm(
            *("MlpPolicy", None),
            **{"offline_dataset": data, "horizon_length": CHUNK, "device": self.device, "seed": 0, "storage": "device", **own},
            backend="torch",
            execution="auto" if self.dry else execution,
        )
        if self.dry and execution == "graph":
            model._runner = UpdateRunner("graph", model.device, recorder=Tape())
        model.set_logger(Logger(None, []))
        model.set_offline_dataset(data)
        model.replay_buffer.offline_only = True
        return model

    def rate(self, make: Callable[[int], object], seconds: float = 2.0, at_once: int = 20) -> float:
        """:return: how many things a function makes per second, the median of several turns"""
        make(at_once)
        self.wait()
        rates, began = [], time.perf_counter()
        while time.perf_counter() - began < (0.1 if self.dry else seconds) or len(rates) < 3:
            since = time.perf_counter()
            make(at_once)
            self.wait()
            rates.append(at_once / (time.perf_counter() - since))
        return statistics.median(rates)


def dataset(n: int) -> OfflineDataset:
    """:return: random steps in the dimensions of OGBench's manipulation tasks"""
    rng = np.random.default_rng(0)
    return OfflineDataset.from_arrays(
        rng.normal(size=(n, OBSERVATION)).astype(np.float32),
        rng.uniform(-1, 1, size=(n, ACTION)).astype(np.float32),
        rng.normal(size=n),
        np.zeros(n, bool),
        np.arange(n) % 200 == 199,
    )
