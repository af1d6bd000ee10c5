"""
Updates of RQL per second on the CPU, beside the time that their matrix products alone take torch on the same machine.

Run by hand: ``python tests/benchmarks/bench_rql_updates.py --threads 2``. Another process on the same cores distorts it.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch as th
from stable_baselines3.common.logger import configure

from sb3_flow import RQL, OfflineDataset

BATCH, OBSERVATION, CHUNK, ACTION = 256, 55, 5, 5
MATRIX_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}


def model(n_critics: int, net_arch: list[int]) -> RQL:
    n, rng = 20_000, np.random.default_rng(0)
    dataset = OfflineDataset.from_arrays(
        rng.normal(size=(n, OBSERVATION)).astype(np.float32),
        rng.uniform(-1, 1, size=(n, ACTION)).astype(np.float32),
        rng.normal(size=n),
        np.zeros(n, bool),
        np.arange(n) % 1000 == 999,
    )
    rql = RQL(
        *("MlpPolicy", None),
        horizon_length=CHUNK,
        n_critics=n_critics,
        policy_kwargs={"net_arch": net_arch},
        offline_dataset=dataset,
        device="cpu",
        seed=0,
    )
    rql.set_logger(configure(None, []))
    rql.set_offline_dataset(dataset)
    return rql


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def matrix_products(rql: RQL) -> Callable[[], None]:
    """:return: a function that makes one update's matrix products with torch, and nothing else"""
    rql.policy.set_backend("torch")  # the kernels' own products are not recorded
    with th.profiler.profile(activities=[th.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        rql.train(1, BATCH)
    rql.policy.set_backend("auto")
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
    arguments = parser.parse_args()
    th.set_num_threads(arguments.threads)
    print(f"{arguments.threads} threads, batch {BATCH}, chunk {CHUNK} x {ACTION} actions, {OBSERVATION}-dim observations")
    for n_critics, net_arch, updates in ((10, [512] * 4, 3), (2, [256] * 4, 20)):
        rql = model(n_critics, net_arch)
        rql.train(3, BATCH)  # compiles the kernels
        products = matrix_products(rql)
        times, floors = [], []
        for _ in range(arguments.repeats):
            times.append(seconds(lambda: rql.train(updates, BATCH)) / updates)  # noqa: B023
            floors.append(seconds(lambda: [products() for _ in range(updates)]) / updates)  # noqa: B023
        update, floor = statistics.median(times), statistics.median(floors)
        print(
            f"K={n_critics}, {len(net_arch)}x{net_arch[0]}: {1 / update:.2f} updates/s ({1e3 * update:.1f} ms); its matrix"
            f" products alone, by torch, {1e3 * floor:.1f} ms; outside of them {1 - floor / update:.0%} of the update"
        )


if __name__ == "__main__":
    main()
