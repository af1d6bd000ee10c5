"""
Runs as tasks of Ray, on one machine or on a cluster whose nodes need not share a file system. Rows always come back; from a
node that does not have the folder of the results the files of the run come with the row, but for replay buffers.
"""

import io
import os
import signal
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch as th

TRIES = 4
"""How often a run is begun whose worker is lost."""


def in_ray_tasks(
    ray: Any, run: Callable[..., dict[str, Any]], jobs: Sequence[tuple[Any, ...]], out: Path, cpus: int, gpus: float
) -> Generator[tuple[tuple[Any, ...], dict[str, Any] | Exception]]:
    """
    Make runs as tasks, each in a process of its own, and give each with its row, or its error, when it ends. A run whose
    worker or node is lost is begun again.

    :param ray: the package, connected
    :param run: makes a run
    :param jobs: its arguments for each run
    :param out: the folder of the results
    :param cpus: of a run
    :param gpus: of a run, also a part of one
    :raises ValueError: if no node has as many
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):
        largest = ", ".join(f"{node.get('CPU', 0):g} and {node.get('GPU', 0):g}" for node in nodes)
        raise ValueError(
            f"--cpus-per-run {cpus} --gpus-per-run {gpus:g}: no node of the cluster is that large; CPUs and GPUs of its "
            f"nodes: {largest}."
        )
    errors = ray.exceptions
    lost = (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError, errors.ObjectLostError)
    task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_calls=1, max_retries=0)(_run_there)
    mark = out / f".shared-{uuid.uuid4().hex}"
    out.mkdir(parents=True, exist_ok=True)
    mark.touch()
    waiting = {task.remote(run, job, mark, cpus): (job, 1) for job in jobs}
    try:
        while waiting:
            (ended,), _ = ray.wait(list(waiting))
            job, tries = waiting.pop(ended)
            try:
                row, files = ray.get(ended)
                if files is not None:
                    zipfile.ZipFile(io.BytesIO(files)).extractall(job[1])
            except lost as error:
                plan = job[0]
                name = f"{plan.task} {plan.algorithm} seed {plan.seed}"
                print(f"{name}: its worker was lost in try {tries} of {TRIES}", file=sys.stderr, flush=True)
                if tries < TRIES:
                    waiting[task.remote(run, job, mark, cpus)] = job, tries + 1
                    continue
                row = error
            except Exception as error:
                row = error
            yield job, row
    except (KeyboardInterrupt, GeneratorExit):
        ray.shutdown()  # ends the tasks
        raise
    finally:
        mark.unlink(missing_ok=True)


def _run_there(
    run: Callable[..., dict[str, Any]], job: tuple[Any, ...], mark: Path, threads: int
) -> tuple[dict[str, Any], bytes | None]:
    """
    Make a run in a process of Ray.

    :param run: makes the run
    :param job: its arguments
    :param mark: a file beside the results, which is here if the file system is
    :param threads: of the run
    :return: the row, and the files of the run as a zip archive if they have to be sent
    """
    os.environ.setdefault("MUJOCO_GL", "disable")  # as `start_worker`
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    th.set_num_threads(threads)
    if mark.exists():
        return run(*job), None
    plan, _, *rest = job
    with tempfile.TemporaryDirectory() as folder:
        return run(plan, Path(folder), *rest), packed(Path(folder))


def packed(folder: Path) -> bytes:
    """Pack the files of a folder as a zip archive, without replay buffers, which would fill the memory of both sides."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as target:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "replay_buffer" not in path.name:
                target.write(path, path.relative_to(folder))
    return archive.getvalue()
