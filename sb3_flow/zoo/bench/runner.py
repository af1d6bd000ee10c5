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
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch as th

from sb3_flow.common.checks import check_whole
from sb3_flow.common.ray_runtime import connected
from sb3_flow.common.workers import available_cores
from sb3_flow.zoo.bench.pictures import draw_curves, draw_profile
from sb3_flow.zoo.bench.process_runs import in_processes, visible_gpus
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
    :param devices: GPUs of this machine, which share the workers evenly and are all that these see; none: workers see all GPUs
    """

    workers: int = 1
    own_processes: bool = False
    ray_address: str | None = None
    cpus: int = 1
    gpus: float = 0.0
    devices: tuple[str, ...] = ()


def add_runner_flags(parser: argparse.ArgumentParser) -> None:
    """Add what ``bench`` and ``sweep`` share to the arguments of a command."""
    parser.add_argument("--workers", type=int, help="runs at a time on this machine, each a process (default: 1)")
    parser.add_argument("--per-device", type=int, help="instead of --workers: runs at a time on each GPU, which see it alone")
    parser.add_argument("--ray-address", help="make the runs with Ray: auto, local (this machine alone) or host:port")
    shared = "default: 1; with --per-device and without Ray the runs share all cores"
    parser.add_argument("--cpus-per-run", type=int, help=f"cores and threads of a run ({shared})")
    parser.add_argument("--gpus-per-run", type=float, help="for Ray; 0.25 for four runs on a GPU (default: 0)")
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
    workers = 1 if given.workers is None else given.workers
    gpus = 0.0 if given.gpus_per_run is None else given.gpus_per_run
    cpus = 1 if given.cpus_per_run is None else given.cpus_per_run
    check_whole(1, **{"--workers": workers, "--cpus-per-run": cpus})
    if not 0 <= gpus < float("inf"):
        raise ValueError(f"--gpus-per-run {gpus}: give a number of GPUs, or a part of one such as 0.25.")
    if given.per_device is not None:
        return _place_of_gpus(given, own_processes, cpus)
    if given.ray_address is None and gpus:
        raise ValueError("--gpus-per-run needs --ray-address; without Ray --per-device says how many runs share each GPU.")
    return Place(workers, own_processes, given.ray_address, cpus, gpus)


def _place_of_gpus(given: argparse.Namespace, own_processes: bool, cpus: int) -> Place:
    """Find where runs are made with ``--per-device``."""
    each = given.per_device
    check_whole(1, **{"--per-device": each})
    if given.workers is not None:
        raise ValueError(
            f"--workers {given.workers} and --per-device {each} exclude each other: --per-device decides how many runs there "
            "are at a time, by the number of GPUs."
        )
    if given.gpus_per_run is not None:
        raise ValueError(
            f"--gpus-per-run {given.gpus_per_run:g} and --per-device {each} exclude each other: with Ray the latter is "
            f"--gpus-per-run {1 / each:.3g}."
        )
    if given.ray_address is not None:
        return Place(1, own_processes, given.ray_address, cpus, 1 / each)
    devices = tuple(visible_gpus())
    if not devices:
        raise ValueError(
            f"--per-device {each}: expected is a GPU, but torch {th.__version__} sees none here; give --workers {each} for as "
            "many runs at a time on the CPU."
        )
    workers = each * len(devices)
    shared = max(1, available_cores() // workers)
    return Place(workers, own_processes, None, shared if given.cpus_per_run is None else cpus, devices=devices)


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
    elif place.workers > 1 or place.own_processes or place.devices:
        source = in_processes(run, jobs, place.workers, place.cpus, place.own_processes, place.devices)
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
