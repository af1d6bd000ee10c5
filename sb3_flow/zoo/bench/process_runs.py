"""Runs in worker processes of this machine, which may share its GPUs."""

import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from typing import Any

import torch as th

from sb3_flow.common.workers import start_worker


def visible_gpus() -> list[str]:
    """List the GPUs that this process may use, each by the name that makes it the only one in ``CUDA_VISIBLE_DEVICES``."""
    count = th.cuda.device_count()  # does not begin to use them
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(count)] if given is None else [name.strip() for name in given.split(",")]
    return names[:count]


def in_processes(
    run: Callable[..., dict[str, Any]],
    jobs: Sequence[tuple[Any, ...]],
    workers: int,
    threads: int,
    own_processes: bool,
    gpus: Sequence[str] = (),
) -> Generator[tuple[tuple[Any, ...], dict[str, Any] | Exception]]:
    """
    Make runs in processes, and give each with its row, or its error, when it ends.

    :param run: makes a run
    :param jobs: its arguments for each run
    :param workers: runs at a time
    :param threads: of a run
    :param own_processes: whether each run has a process of its own; else a worker goes on with the next run
    :param gpus: each is all that ``workers / len(gpus)`` of the workers see; none: workers see what this process sees
    :raises SystemExit: if a worker was killed
    """
    each = workers // max(len(gpus), 1)
    pools = {
        gpu: ProcessPoolExecutor(
            each,
            get_context("spawn"),
            initializer=_start_run_worker,
            initargs=(threads, gpu),
            max_tasks_per_child=1 if own_processes else None,
        )
        for gpu in gpus or (None,)
    }
    places = [gpu for _ in range(each) for gpu in pools]  # all GPUs have a run before one of them has two
    try:
        for job, future in as_places_are_free(places, jobs, lambda gpu, job: pools[gpu].submit(run, *job)):
            try:
                row: dict[str, Any] | Exception = future.result()
            except BrokenProcessPool:
                raise
            except Exception as error:
                row = error
            yield job, row
    except BrokenProcessPool:
        _kill_workers()
        fewer = "a smaller --per-device" if gpus else "fewer --workers"
        sys.exit(f"error: a worker was killed, perhaps for want of memory: give {fewer}; the same command goes on")
    except (KeyboardInterrupt, GeneratorExit):
        _kill_workers()
        raise
    for pool in pools.values():
        pool.shutdown()


def as_places_are_free(
    places: Iterable[Any], jobs: Iterable[tuple[Any, ...]], submit: Callable[[Any, tuple[Any, ...]], "Future[Any]"]
) -> Generator[tuple[tuple[Any, ...], "Future[Any]"]]:
    """
    Begin the jobs in their order, each at the place that has been free for the longest time, and give each when it has ended,
    or failed, which leaves its place to the next.

    :param places: where a job can be made; a place that is listed twice takes two jobs at a time
    :param submit: begins a job at a place
    """
    free, waiting = deque(places), deque(jobs)
    running: dict[Future[Any], tuple[Any, tuple[Any, ...]]] = {}
    while waiting or running:
        while waiting and free:
            place, job = free.popleft(), waiting.popleft()
            running[submit(place, job)] = place, job
        ended, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in ended:
            place, job = running.pop(future)
            free.append(place)
            yield job, future


def _kill_workers() -> None:
    for process in active_children():  # what they have not saved is made again
        process.kill()


def _start_run_worker(threads: int, gpu: str | None) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # read when the process first asks for GPUs, which no import does
    start_worker()
    th.set_num_threads(threads)
