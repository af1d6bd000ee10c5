"""
The runner of ``bench`` and ``sweep``: makes runs in processes of this machine or as tasks of Ray, and adds the row of each to
the results when it ends.

A run is made by a function ``run(plan, folder, ...)``, which writes to its folder and returns its row.
"""

import argparse
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, NoReturn

import torch as th

from sb3_flow.common.checks import check_whole
from sb3_flow.common.ray_runtime import connected
from sb3_flow.common.workers import start_worker
from sb3_flow.zoo.bench.pictures import draw_curves, draw_profile
from sb3_flow.zoo.bench.ray_runs import in_ray_tasks
from sb3_flow.zoo.bench.results import PHASES, AnyRun, Run, add_row, read_rows, scores_of, table, unfinished, write_text

Job = tuple[Any, ...]
"""Arguments of ``run``: a plan, the folder of its files, and what else it takes."""
Ends = Generator[tuple[Job, dict[str, Any] | Exception]]
"""Runs in the order in which they end, each with its row or its error."""


@dataclass(frozen=True)
class Place:
    """
    Where runs are made.

    :param workers: runs at a time on this machine
    :param own_processes: whether each run has a process of its own; else a single worker is this process, and others go on
        with the next run
    :param ray_address: of the Ray cluster that makes the runs; None for this machine
    :param cpus: cores of a run, which is the number of its threads
    :param gpus: of a run in Ray, also a part of one
    """

    workers: int = 1
    own_processes: bool = False
    ray_address: str | None = None
    cpus: int = 1
    gpus: float = 0.0


def add_runner_flags(parser: argparse.ArgumentParser) -> None:
    """Add what ``bench`` and ``sweep`` share to the arguments of a command."""
    parser.add_argument("--workers", type=int, help="runs at a time on this machine, each a process (default: 1)")
    parser.add_argument("--ray-address", help="make the runs with Ray: auto, local (this machine alone) or host:port")
    parser.add_argument("--cpus-per-run", type=int, default=1, help="cores and threads of a run (default: 1)")
    parser.add_argument("--gpus-per-run", type=float, default=0.0, help="for Ray; 0.25 for four runs on a GPU (default: 0)")
    parser.add_argument("--only-table", action="store_true", help="train nothing; write table and pictures of what is there")


def place_of(given: argparse.Namespace, own_processes: bool = False) -> Place:
    """
    Check the arguments of :func:`add_runner_flags`.

    :param given: the parsed command
    :param own_processes: see :class:`Place`
    :raises ValueError: if they do not go together
    """
    if given.ray_address is not None and given.workers is not None:
        raise ValueError("--workers and --ray-address exclude each other: Ray makes as many runs at a time as fit its nodes.")
    if given.ray_address is None and given.gpus_per_run:
        raise ValueError("--gpus-per-run needs --ray-address; without Ray all --workers share the GPU that torch sees first.")
    workers = 1 if given.workers is None else given.workers
    check_whole(1, **{"--workers": workers, "--cpus-per-run": given.cpus_per_run})
    if not 0 <= given.gpus_per_run < float("inf"):
        raise ValueError(f"--gpus-per-run {given.gpus_per_run}: give a number of GPUs, or a part of one such as 0.25.")
    return Place(workers, own_processes, given.ray_address, given.cpus_per_run, given.gpus_per_run)


def run_folder(out: Path, plan: Run) -> Path:
    """Give the folder of a run's files."""
    return out / "runs" / plan.task.replace("/", "_") / plan.algorithm.replace("/", "_").replace(" ", "_") / str(plan.seed)


def make(run: Callable[..., dict[str, Any]], jobs: Sequence[Job], file: Path, place: Place) -> int:
    """
    Make the runs, add the row of each when it ends, and count those that failed. Ctrl-C and SIGTERM end the program and all
    that it started.

    :param run: makes a run
    :param jobs: its arguments for each run
    :param file: the CSV
    :param place: where
    """
    began, failed = time.monotonic(), 0
    with closing(rows(run, jobs, file.parent, place)) as ends:
        for number, ((plan, *_), row) in enumerate(ends, start=1):
            name = f"{number}/{len(jobs)} {plan.task} {plan.algorithm} seed {plan.seed}"
            try:
                if isinstance(row, Exception):
                    raise row
                add_row(file, row)
            except Exception as error:
                failed += 1
                text = "".join(traceback.format_exception(error))
                print(f"{name} failed:", text, sep="\n", file=sys.stderr, flush=True)
                continue
            hours = (time.monotonic() - began) / number * (len(jobs) - number) / 3600
            scores = " -> ".join(f"{row[phase]:g}" for phase in PHASES if row[phase] != "")
            print(f"{name}: score {scores}; about {hours:.1f} h left", flush=True)
    return failed


def run_all(
    run: Callable[..., dict[str, Any]],
    todo: Sequence[AnyRun],
    jobs: Callable[[list[AnyRun]], Sequence[Job]],
    out: Path,
    place: Place,
    only_table: bool,
) -> None:
    """
    Make the runs that have no row yet, and report on all.

    :param run: makes a run
    :param todo: all runs
    :param jobs: gives the arguments of ``run`` for each of the runs that are left
    :param out: folder of the results
    :param place: where
    :param only_table: make none
    :raises SystemExit: if runs failed
    """
    file, failed = out / "results.csv", 0
    if not only_table:
        left = unfinished(todo, read_rows(file))
        print(f"{len(todo)} runs, {len(todo) - len(left)} of them finished; results: {file}", flush=True)
        failed = make(run, jobs(left), file, place)
    report(out, file)
    if failed:
        sys.exit(f"error: {failed} runs failed; the same command tries them again")


def rows(run: Callable[..., dict[str, Any]], jobs: Sequence[Job], out: Path, place: Place) -> Ends:
    """Make the runs, see :func:`make`; ``out`` is the folder of the results."""
    if not jobs:
        return
    source = _here(run, jobs, place.cpus)
    if place.ray_address is not None:
        ray = connected("--ray-address", place.ray_address)  # which answers SIGTERM in its own way
        source = in_ray_tasks(ray, run, jobs, out, place.cpus, place.gpus)
    elif place.workers > 1 or place.own_processes:
        source = _in_processes(run, jobs, place)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield from source
    except (KeyboardInterrupt, GeneratorExit):
        print("stopped; the same command goes on", file=sys.stderr, flush=True)
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def _here(run: Callable[..., dict[str, Any]], jobs: Sequence[Job], threads: int) -> Ends:
    # two runs with a thread each are faster than two runs one after the other with two threads
    th.set_num_threads(threads)
    for job in jobs:
        try:
            row: dict[str, Any] | Exception = run(*job)
        except Exception as error:
            row = error
        yield job, row


def _in_processes(run: Callable[..., dict[str, Any]], jobs: Sequence[Job], place: Place) -> Ends:
    pool = ProcessPoolExecutor(
        min(place.workers, len(jobs)),
        get_context("spawn"),
        initializer=_start_run_worker,
        initargs=(place.cpus,),
        max_tasks_per_child=1 if place.own_processes else None,
    )
    futures = {pool.submit(run, *job): job for job in jobs}
    try:
        for future in as_completed(futures):
            try:
                row: dict[str, Any] | Exception = future.result()
            except BrokenProcessPool:  # the others have ended, too
                sys.exit(
                    "error: a worker was killed, perhaps for want of memory: give fewer --workers; the same command goes on"
                )
            except Exception as error:
                row = error
            yield futures[future], row
    except (KeyboardInterrupt, GeneratorExit):
        for process in active_children():  # what they have not saved is made again
            process.kill()
        raise
    pool.shutdown()


def _start_run_worker(threads: int) -> None:
    start_worker()
    th.set_num_threads(threads)


def report(out: Path, file: Path) -> None:
    """Print the table, and write table and pictures beside the CSV."""
    found = read_rows(file)
    if not found:
        print(f"{file} has no finished run yet")
        return
    text = table(found)
    print(text)
    write_text(out / "table.md", text + "\n")
    draw_curves(found, out / "curves.png")
    for phase in PHASES:
        if scores_of(found, phase):
            draw_profile(found, out / f"profile_{phase}.png", phase)
