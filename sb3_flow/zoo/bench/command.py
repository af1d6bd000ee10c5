"""
Train algorithms on the tasks of a suite, with the same data, networks and number of updates for all, and compare them.

    python -m sb3_flow.zoo bench --suite cpu --seeds 0 1 --workers 2
    python -m sb3_flow.zoo bench --suite cpu --algos rql --grid alpha=1,3,10 --tasks cube-single-play-singletask-task1-v0
    python -m sb3_flow.zoo bench --suite cpu --dataset minari:D4RL/door/human-v2 --env gymnasium_robotics:AdroitHandDoor-v1
    python -m sb3_flow.zoo bench --suite cpu --only-table

Results are in the folder --out: results.csv (a row for each finished run), table.md, curves.png, profile_offline.png and
profile_online.png. A bench that was stopped or killed goes on when the same command is given again: finished runs are not
made again, and others go on from their last evaluation. Datasets of OGBench that can be made here are made on demand: they
are the published data statistically, not bitwise.
"""

import argparse
import dataclasses
import itertools
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch as th
import yaml

from sb3_flow.common.checks import check_whole
from sb3_flow.common.workers import start_worker
from sb3_flow.data.generate import generate
from sb3_flow.data.ogbench import single_task
from sb3_flow.zoo.bench.pictures import draw_curves, draw_profile
from sb3_flow.zoo.bench.results import PHASES, add_row, read_rows, table, unfinished, write_text
from sb3_flow.zoo.bench.suites import Plan, Settings, Task, load_suite, plans
from sb3_flow.zoo.bench.training import run


def bench(arguments: Sequence[str] | None = None) -> None:
    """
    Run the command ``bench``.

    :param arguments: used instead of ``sys.argv[1:]``
    :raises SystemExit: if runs failed
    """
    given = _parser().parse_args(arguments)
    check_whole(1, **{"--workers": given.workers})
    suite = load_suite(given.suite)
    if (given.dataset is None) != (given.env is None):
        raise ValueError("--dataset and --env belong together: give both, or none of them.")
    if given.env is not None:
        suite = dataclasses.replace(suite, tasks={given.env: Task(dataset=given.dataset)})
    own = "" if given.env is None else "-" + given.env.replace("/", "_").replace(":", "_")
    out: Path = given.out or Path("bench") / f"{Path(given.suite).stem}{own}"
    file = out / "results.csv"
    todo = plans(suite, given.tasks, given.algos, given.seeds, list(_variants(given.grid)))
    failed = 0
    if not given.only_table:
        left = unfinished(todo, read_rows(file))
        print(f"{len(todo)} runs, {len(todo) - len(left)} of them finished; results: {file}", flush=True)
        data = given.data or Path("bench") / "data"
        failed = _make(left, out, file, data, given.workers)
    _report(out, file)
    if failed:
        sys.exit(f"error: {failed} runs failed; the same command tries them again")


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m sb3_flow.zoo bench", description=__doc__, formatter_class=form)
    parser.add_argument("--suite", default="cpu", help="cpu, paper, or a YAML file (default: cpu)")
    parser.add_argument("--tasks", nargs="+", help="tasks of the suite (default: all)")
    parser.add_argument("--algos", nargs="+", help="algorithms of the suite (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="(default: 0 1)")
    parser.add_argument("--grid", nargs="+", default=[], metavar="NAME=A,B", help="arguments to vary, in every combination")
    parser.add_argument("--dataset", help="instead of the suite's tasks: location of a dataset (OfflineDataset.load)")
    parser.add_argument("--env", help="the environment of --dataset")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, each a process with one thread (default: 1)")
    parser.add_argument("--out", type=Path, help="folder of results and checkpoints (default: bench/<suite>[-<env>])")
    parser.add_argument("--data", type=Path, help="folder of generated datasets (default: bench/data)")
    parser.add_argument("--only-table", action="store_true", help="train nothing; write table and pictures of what is there")
    return parser


def _variants(grid: Sequence[str]) -> Iterator[Settings]:
    """List every combination of ``name=a,b`` arguments, whose values are YAML."""
    found: dict[str, list[Any]] = {}
    for text in grid:
        name, equals, choices = text.partition("=")
        if not (name and equals and choices):
            raise ValueError(f"--grid {text}: give a name and its values, such as alpha=1,3,10.")
        try:
            values = [_number(value) for value in yaml.safe_load(f"[{choices}]")]
        except yaml.YAMLError as error:
            raise ValueError(f"--grid {text}: the values are no YAML, such as alpha=1,3,10 or net_arch=[64,64].") from error
        if name in found or any(values.count(value) > 1 for value in values):
            raise ValueError(f"--grid {' '.join(grid)}: {name} or one of its values is given twice.")
        found[name] = values
    for combination in itertools.product(*found.values()):
        yield dict(zip(found, combination, strict=True))


def _number(value: Any) -> Any:
    """Take 1e-3 as a number, which for YAML is a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def locate_data(plan: Plan, data: Path, workers: int = 1) -> str:
    """
    Find the dataset of a run. If the suite says how many episodes to make, make the dataset if it is not there.

    :param plan: the run
    :param data: folder of datasets that are made here, with a folder for each number of episodes
    :param workers: processes that make it
    :return: location, see ``OfflineDataset.load``
    :raises ValueError: if the dataset cannot be made here
    """
    prefix, _, name = plan.dataset.partition(":")
    if prefix != "ogbench" or "@" in name or plan.episodes is None:
        return plan.dataset
    dataset, folder = single_task(name).dataset, data / f"{plan.episodes}_episodes"
    file = folder / f"{dataset}.npz"
    if not file.exists():
        generate(dataset, plan.episodes, workers=workers, val_episodes=1, out=folder)
    return f"{plan.dataset}@{file}"


def _make(todo: Sequence[Plan], out: Path, file: Path, data: Path, workers: int) -> int:
    """Make the runs, add the row of each when it ends, and count those that failed."""
    locations = {plan.task: locate_data(plan, data, workers) for plan in todo}
    jobs = [(plan, run_folder(out, plan), locations[plan.task]) for plan in todo]
    began, failed = time.monotonic(), 0
    for number, (plan, row) in enumerate(_rows(jobs, workers), start=1):
        name = f"{number}/{len(jobs)} {plan.task} {plan.algorithm} seed {plan.seed}"
        try:
            if isinstance(row, Exception):
                raise row
            add_row(file, row)
        except Exception as error:
            failed += 1
            print(f"{name} failed:", "".join(traceback.format_exception(error)), sep="\n", file=sys.stderr, flush=True)
            continue
        hours = (time.monotonic() - began) / number * (len(jobs) - number) / 3600
        print(f"{name}: offline {row['offline']}, online {row['online']}; about {hours:.1f} h left", flush=True)
    return failed


def run_folder(out: Path, plan: Plan) -> Path:
    """Give the folder of a run's checkpoints."""
    return out / "runs" / plan.task.replace("/", "_") / plan.algorithm.replace("/", "_").replace(" ", "_") / str(plan.seed)


def _rows(jobs: Sequence[tuple[Plan, Path, str]], workers: int) -> Iterator[tuple[Plan, dict[str, Any] | Exception]]:
    """Make the runs, in this process or several, and give the row of each when it ends, or its error."""
    if workers == 1:
        _one_thread()
        for job in jobs:
            try:
                yield job[0], run(*job)
            except Exception as error:
                yield job[0], error
        return
    pool = ProcessPoolExecutor(min(workers, max(1, len(jobs))), get_context("spawn"), initializer=_start_run_worker)
    futures = {pool.submit(run, *job): job[0] for job in jobs}
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
        # workers end with this process; what they have not saved is made again
        print("stopped; the same command goes on", file=sys.stderr, flush=True)
        os._exit(130)
    pool.shutdown()


def _start_run_worker() -> None:
    start_worker()
    _one_thread()


def _one_thread() -> None:
    """Two runs with a thread each are faster than two runs one after the other with two threads."""
    th.set_num_threads(1)


def _report(out: Path, file: Path) -> None:
    """Print the table, and write table and pictures beside the CSV."""
    rows = read_rows(file)
    if not rows:
        print(f"{file} has no finished run yet")
        return
    text = table(rows)
    print(text)
    write_text(out / "table.md", text + "\n")
    draw_curves(rows, out / "curves.png")
    for phase in PHASES:
        draw_profile(rows, out / f"profile_{phase}.png", phase)
