"""
Updates per second of RQL's offline phase, of 1, 2, 4 and 8 processes together that train on one GPU at the same time.

Run by hand, with nothing else on the GPU: ``python -m tests.benchmarks.packing``. The copies wait for each other after their
first updates, and are then counted for as long as ``--seconds`` says. ``--device cpu`` is a dry run with tiny networks.
"""

import argparse
import multiprocessing
import threading
import time
import warnings
from multiprocessing.synchronize import Barrier
from typing import Any

import torch as th
from stable_baselines3.common.callbacks import BaseCallback

from sb3_flow.common.workers import available_cores
from sb3_flow.zoo.registry import check_device
from tests.benchmarks.bench_rql_updates import BATCH, model

SIZES = {"tiny": (2, [16, 16]), "small": (2, [256] * 4), "full": (10, [512] * 4)}
"""Critics and hidden layers."""
LOOKS = 10
"""Updates between two looks at the clock, which wait for the GPU."""


class Window(BaseCallback):
    """Waits for the other copies after the warm-up, and counts updates until the time is over."""

    def __init__(self, barrier: Barrier, warm_up: int, seconds: float) -> None:
        super().__init__()
        self.barrier, self.warm_up, self.seconds = barrier, warm_up, seconds
        self.since = self.rate = 0.0

    def _on_step(self) -> bool:
        made = self.n_calls - self.warm_up
        if made < 0 or made % LOOKS:
            return True
        if self.model.device.type == "cuda":
            th.cuda.synchronize(self.model.device)
        if made == 0:
            self.barrier.wait()
            self.since = time.perf_counter()
            return True
        passed = time.perf_counter() - self.since
        self.rate = made / passed
        return passed < self.seconds


def train(barrier: Barrier, results: Any, given: argparse.Namespace, size: str, copies: int) -> None:
    """Train a copy, and send its updates per second and the GiB that are taken of the GPU by then, or an error."""
    try:
        warnings.simplefilter("ignore")  # the model's made-up data leave rows out
        th.set_num_threads(max(1, available_cores() // copies))
        built, window = model("RQL", *SIZES[size], given.device), Window(barrier, given.warm_up, given.seconds)
        built.batch_size = BATCH
        built.learn_offline(built.offline_dataset, 10**9, window, log_interval=None)  # type: ignore[arg-type]
        free, total = th.cuda.mem_get_info(built.device) if built.device.type == "cuda" else (0, 0)
        results.put((window.rate, (total - free) / 2**30))
    except threading.BrokenBarrierError:
        results.put(None)  # another copy has failed, and said why
    except Exception as error:
        barrier.abort()
        results.put(error)


def measure(given: argparse.Namespace, size: str, copies: int) -> list[tuple[float, float]]:
    """
    Train copies at the same time.

    :return: updates per second and GiB of each
    :raises Exception: of a copy that failed, for want of memory perhaps
    """
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(copies), context.Queue()
    processes = [context.Process(target=train, args=(barrier, results, given, size, copies)) for _ in range(copies)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", default="cuda" if th.cuda.is_available() else "cpu", help="(default: cuda if there is one)"
    )
    parser.add_argument("--copies", type=int, nargs="+", help="(default: 1 2 4 8; on the CPU 1 2)")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), help="(default: small full; on the CPU tiny)")
    parser.add_argument("--seconds", type=float, default=20.0, help="(default: 20)")
    parser.add_argument("--warm-up", type=int, default=50, help="updates before (default: 50)")
    given = parser.parse_args()
    check_device(given.device)
    cpu = th.device(given.device).type == "cpu"
    name = "the CPU, a dry run" if cpu else th.cuda.get_device_name(th.device(given.device))
    for size in given.sizes or (["tiny"] if cpu else ["small", "full"]):
        critics, layers = SIZES[size]
        print(f"RQL, {critics} critics, {len(layers)} x {layers[0]}, batch {BATCH}, {given.seconds:g} s each, on {name}\n")
        print("| Copies | Updates/s together | of the first row | slowest copy | GiB of the GPU |")
        print("|---|---|---|---|---|")
        first = 0.0
        for copies in given.copies or ([1, 2] if cpu else [1, 2, 4, 8]):
            try:
                rates, taken = zip(*measure(given, size, copies), strict=True)
            except th.OutOfMemoryError as error:
                print(f"| {copies} | {str(error).splitlines()[0]} | | | |", flush=True)
                break
            first = first or sum(rates)
            memory = "-" if cpu else f"{max(taken):.1f}"
            print(f"| {copies} | {sum(rates):.1f} | {sum(rates) / first:.2f} x | {min(rates):.1f} | {memory} |", flush=True)
        print()


if __name__ == "__main__":
    main()
