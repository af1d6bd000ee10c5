"""
Updates of RQL per second on the CPU, beside the time that their matrix products alone take torch on the same machine.

Run by hand: ``python tests/benchmarks/bench_rql_updates.py --threads 2``. Another process on the same cores distorts it.
``--algorithms FQL QAM`` compares other algorithms, whose updates take turns.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.logger import configure

import sb3_flow
from sb3_flow import OfflineDataset
from sb3_flow.offline_to_online import OfflineToOnlineAlgorithm

BATCH, OBSERVATION, CHUNK, ACTION = 256, 55, 5, 5
MATRIX_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}


def model(algorithm: str, n_critics: int, net_arch: list[int], device: str = "cpu") -> OfflineToOnlineAlgorithm:
    n, rng = 20_000, np.random.default_rng(0)
    dataset = OfflineDataset.from_arrays(
        rng.normal(size=(n, OBSERVATION)).astype(np.float32),
        rng.uniform(-1, 1, size=(n, ACTION)).astype(np.float32),
        rng.normal(size=n),
        np.zeros(n, bool),
        np.arange(n) % 1000 == 999,
    )
    name, _, edits = algorithm.partition("-")
    own: dict[str, Any] = {"edit_scale": 0.1} if edits else {}
    built: OfflineToOnlineAlgorithm = getattr(sb3_flow, name)(
        *("MlpPolicy", None),
        horizon_length=CHUNK,
        n_critics=n_critics,
        policy_kwargs={"net_arch": net_arch},
        offline_dataset=dataset,
        device=device,
        seed=0,
        **own,
    )
    built.set_logger(configure(None, []))
    built.set_offline_dataset(dataset)
    return built


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def matrix_products(built: OfflineToOnlineAlgorithm) -> Callable[[], None]:
    """:return: a function that makes one update's matrix products with torch, and nothing else"""
    policy: Any = built.policy
    policy.set_backend("torch")  # the kernels' own products are not recorded
    with th.profiler.profile(activities=[th.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        built.train(1, BATCH)
    policy.set_backend("auto")
    operands = []
    for event in profile.events():
        if event.name in MATRIX_PRODUCTS:
            shapes = event.input_shapes[1:] if "add" in event.name else event.input_shapes
            a, b = (th.randn(shape) for shape in shapes[:2])
            operands.append((a, b, a @ b))

    def run() -> None:
        for a, b, out in operands:
            th.matmul(a, b, out=out)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--algorithms", nargs="+", default=["RQL"], help="QAM-E is QAM with edits")
    arguments = parser.parse_args()
    th.set_num_threads(arguments.threads)
    print(f"{arguments.threads} threads, batch {BATCH}, chunk {CHUNK} x {ACTION} actions, {OBSERVATION}-dim observations")
    for n_critics, net_arch, updates in ((10, [512] * 4, 3), (2, [256] * 4, 20)):
        models = {name: model(name, n_critics, net_arch) for name in arguments.algorithms}
        for built in models.values():
            built.train(3, BATCH)  # compiles the kernels
        products = {name: matrix_products(built) for name, built in models.items()}
        times: dict[str, list[float]] = {name: [] for name in models}
        floors: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(arguments.repeats):
            for name, built in models.items():
                times[name].append(seconds(lambda: built.train(updates, BATCH)) / updates)  # noqa: B023
                floors[name].append(seconds(lambda: [products[name]() for _ in range(updates)]) / updates)  # noqa: B023
        for name in models:
            update, floor = statistics.median(times[name]), statistics.median(floors[name])
            print(
                f"{name}, K={n_critics}, {len(net_arch)}x{net_arch[0]}: {1 / update:.2f} updates/s ({1e3 * update:.1f} ms);"
                f" its matrix products alone, by torch, {1e3 * floor:.1f} ms; outside of them {1 - floor / update:.0%} of the"
                " update"
            )


if __name__ == "__main__":
    main()
