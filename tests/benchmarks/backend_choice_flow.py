"""
Compiled networks of RQL and FMQ beside torch's own operators, cell by cell: updates by width and batch, acting by width and
rows, on one and two threads. What ``backend="auto"`` chooses is fitted to this grid.

Run by hand, on a machine that does nothing else:

    python -m tests.benchmarks.backend_choice_flow --cells cells.jsonl                 # the whole grid, about 20 minutes
    python -m tests.benchmarks.backend_choice_flow --cells cells.jsonl --seconds 200   # a part of it; the next call goes on
    python -m tests.benchmarks.backend_choice_flow --cells cells.jsonl --seconds 0     # prints what there is

"update" is ``train(1, batch)`` on a dataset; "act" is ``predict`` of that many observations (RQL: 10 steps; FMQ: best of 32;
FMQ1: one step). Both backends of a cell run in one process, in turns; a figure is the median over the turns of torch's time
divided by native's in the same turn, with the 95 % interval of the median by order statistics. Each number of threads has a
process of its own.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch as th
from stable_baselines3.common.logger import configure

from sb3_flow import FMQ, RQL, OfflineDataset
from tests.benchmarks.backend_choice import interval

WIDTHS, BATCHES, ROWS = (32, 64, 128, 256, 512, 1024), (32, 128, 256, 1024, 4096), (1, 4, 8, 64)
UPDATES = {"RQL": BATCHES, "FMQ": BATCHES[:-1]}  # FMQ's rows are 32 candidates each
LAYERS, CRITICS, OBSERVATION, ACTION = 2, 2, 55, 5
FEWEST, MOST = 7, 41
"""Turns of a cell: as many as fit in its time."""


class Cell(NamedTuple):
    """What is timed: ``size`` is the batch of an update, or the rows that are acted on."""

    phase: str
    algorithm: str
    threads: int
    width: int
    size: int


def build(cell: Cell) -> Any:
    """:return: a model, ready to be trained"""
    n, rng = 10_000, np.random.default_rng(0)
    dataset = OfflineDataset.from_arrays(
        rng.normal(size=(n, OBSERVATION)).astype(np.float32),
        rng.uniform(-1, 1, size=(n, ACTION)).astype(np.float32),
        rng.normal(size=n),
        np.arange(n) % 1000 == 999,
        np.arange(n) % 1000 == 999,
    )
    algorithm: Any = RQL if cell.algorithm == "RQL" else FMQ
    settings = {"acting_mode": "sample"} if cell.algorithm == "FMQ1" else {}
    policy_kwargs = {"net_arch": [cell.width] * LAYERS, "n_critics": CRITICS}
    model = algorithm(
        "MlpPolicy", None, offline_dataset=dataset, policy_kwargs=policy_kwargs, seed=0, device="cpu", **settings
    )
    model.set_logger(configure(None, []))
    model.set_offline_dataset(dataset)
    return model


def measure(cell: Cell, seconds: float) -> dict[str, list[float]]:
    """:return: of each backend, the seconds of each turn"""
    model = build(cell)
    observations = np.zeros((cell.size, OBSERVATION), np.float32)
    run: Callable[[], object] = (
        (lambda: model.train(1, cell.size)) if cell.phase == "update" else (lambda: model.predict(observations))
    )
    backends = ["torch", "native"]

    def timed(backend: str, repeats: int) -> float:
        model.policy.set_backend(backend)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats

    first = min(timed(backend, 1) for backend in backends for _ in range(2))  # compiles, and makes the optimizers' states
    repeats = max(1, math.ceil(0.01 / first))
    times: dict[str, list[float]] = {backend: [] for backend in backends}
    start = time.perf_counter()
    for turn in range(MOST):
        if turn >= FEWEST and time.perf_counter() - start > seconds:
            break
        for backend in backends:
            times[backend].append(timed(backend, repeats))
        backends.reverse()
    return times


def grid(threads: int) -> Iterator[Cell]:
    """:return: all cells of a number of threads"""
    for width in WIDTHS:
        for algorithm in ("RQL", "FMQ", "FMQ1"):
            yield from (Cell("act", algorithm, threads, width, size) for size in ROWS)
            yield from (Cell("update", algorithm, threads, width, size) for size in UPDATES.get(algorithm, ()))


def known(path: Path) -> dict[Cell, dict[str, list[float]]]:
    """:return: the cells that are in the file; a line that was cut off is none"""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[Cell(*entry["cell"])] = entry["times"]
    return found


def work(arguments: argparse.Namespace, threads: int) -> None:
    """Measure the cells of one number of threads that are not yet in the file, until the time is over."""
    th.set_num_threads(threads)
    done = known(arguments.cells)
    for cell in grid(threads):
        if cell not in done and time.time() < arguments.until:
            times = measure(cell, arguments.of_a_cell)
            with arguments.cells.open("a") as file:
                file.write("\n" + json.dumps({"cell": cell, "times": times}))


def show(arguments: argparse.Namespace) -> None:
    """Print the cells in the file: a table for each phase and number of threads."""
    done = known(arguments.cells)
    titles = {"update": "train(1, batch)", "act": "predict(), by rows"}
    for phase, sizes in (("update", BATCHES), ("act", ROWS)):
        for threads in arguments.threads:
            print(
                f"\n{titles[phase]}, {threads} thread(s), {LAYERS} hidden layers, {CRITICS} critics, {OBSERVATION}"
                f" observations, {ACTION} actions; native x torch, median [95 % interval] of paired turns; * loses"
            )
            print(f"{'':>10}" + "".join(f"{size:>21}" for size in sizes))
            for algorithm in ("RQL", "FMQ", "FMQ1") if phase == "act" else ("RQL", "FMQ"):
                for width in WIDTHS:
                    row = f"{algorithm} {width:>5} "
                    for size in sizes:
                        times = done.get(Cell(phase, algorithm, threads, width, size))
                        if times is None:
                            row += f"{'-':>21}"
                            continue
                        median, low, high = interval(np.array(times["torch"]) / np.array(times["native"]))
                        row += f"{median:6.2f} [{low:.2f}, {high:.2f}]{'*' if high < 1 else ' '}".rjust(21)
                    print(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=Path, required=True, help="file that measured cells are appended to")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--of-a-cell", type=float, default=2.0, help="seconds of a cell, at least seven turns")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no cell after so many seconds")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.until is not None:
        work(arguments, arguments.threads[0])
        return
    until = time.time() + arguments.seconds
    for threads in arguments.threads if arguments.seconds > 0 else ():
        command = [sys.executable, "-m", "tests.benchmarks.backend_choice_flow", *sys.argv[1:], "--until", str(until)]
        subprocess.run([*command, "--threads", str(threads)], check=True)
    show(arguments)


if __name__ == "__main__":
    main()
