"""
Updates per second of RQL's offline phase on one rank and on two ranks, one thread each, in turns; and where the time goes.

Run by hand, with two cores of its own: ``python -m tests.benchmarks.ranks``. Two strangers are two processes with half a batch
each that do not talk: ranks cannot be faster. Where other programs take the cores' time, the ratio of a rank's CPU time says
what ranks would gain if they never waited for a core.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch as th
import torch.distributed as dist
from stable_baselines3.common.callbacks import BaseCallback

from sb3_flow.common import ranks
from sb3_flow.offline_to_online.moving_average import MovingAverage
from tests.benchmarks.bench_rql_updates import model

SIZES = {"small": (2, [256] * 4, 256, 50), "full": (10, [512] * 4, 256, 5), "large batch": (10, [512] * 4, 1024, 2)}
"""Critics, hidden layers, rows of a batch, and updates of a turn."""


class Turns(BaseCallback):
    """Waits for its turn, and sends how long the turn's updates took, and of it what took how long."""

    def __init__(self, connection: Connection, updates: int, spent: dict[str, float]) -> None:
        super().__init__()
        self.connection, self.updates, self.spent = connection, updates, spent
        self.start = self.cpu_start = 0.0

    def _on_step(self) -> bool:
        if self.n_calls % self.updates == 0:
            self.spent["CPU"] = time.process_time() - self.cpu_start
            self.connection.send((time.perf_counter() - self.start, dict(self.spent)))
            go_on: bool = self.connection.recv()
            self.spent.clear()
            self.start, self.cpu_start = time.perf_counter(), time.process_time()
            return go_on
        return True


def timed(spent: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """:return: the function, which also adds its seconds to a sum"""

    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **kwargs)
        spent[name] += time.perf_counter() - start
        return result

    return run


def train(rank: int | None, meeting: str, connection: Connection | None, size: str, batch_size: int) -> None:
    th.set_num_threads(1)
    if rank is not None:
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    n_critics, net_arch, _, updates = SIZES[size]
    built = model("RQL", n_critics, net_arch)
    built.batch_size = batch_size
    spent: dict[str, float] = defaultdict(float)
    ranks._add = timed(spent, "exchange", ranks._add)
    MovingAverage.step = timed(spent, "averages", MovingAverage.step)  # type: ignore[method-assign]
    for optimizer in built.optimizers:
        optimizer.step = timed(spent, "Adam", optimizer.step)  # type: ignore[method-assign]
    callback = None if connection is None else Turns(connection, updates, spent)
    built.learn_offline(built.offline_dataset, 10**9, callback, log_interval=None)


def compare(size: str, rounds: int, folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    *_, batch, updates = SIZES[size]
    kinds = {"1 rank": ((None, batch),), "2 strangers": ((None, batch // 2),) * 2}
    kinds |= {"2 ranks": ((0, batch), (1, batch))}
    connections: dict[str, list[Connection]] = {name: [] for name in kinds}
    processes = []
    for name, kind in kinds.items():
        meeting = f"file://{folder / size}{name.split()[-1]}"
        for rank, batch_size in kind:
            ours, theirs = (None, None) if rank == 1 else context.Pipe()  # rank 1 waits for rank 0
            processes.append(context.Process(target=train, args=(rank, meeting, theirs, size, batch_size), daemon=True))
            processes[-1].start()
            connections[name] += [ours] if ours else []
    for of_kind in connections.values():  # the first turn compiles
        for connection in of_kind:
            connection.recv()
    turns: dict[str, list[tuple[float, dict[str, float]]]] = {name: [] for name in kinds}
    for _ in range(rounds + 1):
        for name, of_kind in connections.items():
            for connection in of_kind:
                connection.send(True)
            turns[name].append(max((connection.recv() for connection in of_kind), key=lambda turn: turn[0]))
    for of_kind in connections.values():
        for connection in of_kind:
            connection.send(False)
    for process in processes:
        process.join()
    for name, (_, *of_kind) in turns.items():
        seconds = statistics.median(each for each, _ in of_kind) / updates
        parts = {part: statistics.median(spent[part] for _, spent in of_kind) / updates for part in of_kind[0][1]}
        cpu, told = parts.pop("CPU"), ", ".join(f"{part} {1e3 * each:.1f}" for part, each in parts.items())
        pairs = list(zip(turns["1 rank"][1:], of_kind, strict=True))
        ratios = [one / each for (one, _), (each, _) in pairs]
        by_cpu = statistics.median(one["CPU"] / each["CPU"] for (_, one), (_, each) in pairs)
        spread = (
            f"{statistics.median(ratios):.2f} x one rank ({min(ratios):.2f} to {max(ratios):.2f}; by CPU time {by_cpu:.2f})"
        )
        print(f"{size} (batch {batch}), {name}: {1 / seconds:.2f} updates/s, {spread}")
        print(f"    {1e3 * seconds:.1f} ms, CPU {1e3 * cpu:.1f}, of it {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    arguments = parser.parse_args()
    print(f"RQL, one thread a rank, medians of {arguments.rounds} turns")
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.sizes:
            compare(size, arguments.rounds, Path(folder))


if __name__ == "__main__":
    main()
