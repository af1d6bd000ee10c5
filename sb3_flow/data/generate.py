"""
Generation of benchmark data sets with the scripted oracles of the OGBench package.

``python -m sb3_flow.data.generate cube-single-play --episodes 100 --workers 2 --out data`` writes
``data/cube-single-play-v0.npz`` and ``data/cube-single-play-v0-val.npz`` in OGBench's own layout. The data follow the
recipes of the published data sets: they are the same statistically, not bitwise. Say so next to any number obtained
with them.

The same seed gives the same bytes for any number of workers, on the same machine with the same package versions. A run
that was stopped goes on where it was when started again.
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from sb3_flow.common.workers import start_worker
from sb3_flow.data.episode_files import is_whole, merge, replacing
from sb3_flow.data.oracles import RECIPES, EpisodeMaker, find_recipe

SPLITS = ("train", "val")
RECIPE_VERSION = 1  # to be raised whenever the same seed gives other data
_PACKAGES = ("ogbench", "mujoco", "gymnasium", "dm_control", "numpy", "scipy")


@dataclass(frozen=True)
class _Plan:
    """Settings from which a worker makes any episode."""

    name: str
    seed: int
    episode_length: int
    parts: pathlib.Path

    def part(self, split: int, index: int) -> pathlib.Path:
        return self.parts / f"{SPLITS[split]}-{index:06d}.npz"


def generate(
    name: str,
    episodes: int | None = None,
    *,
    workers: int = 1,
    seed: int = 0,
    out: str | os.PathLike[str] = ".",
    val_episodes: int | None = None,
    episode_length: int | None = None,
    progress_bar: bool = True,
) -> pathlib.Path:
    """
    Generate a data set, or finish a data set whose generation was stopped.

    With several workers the episodes are made in new processes, so a script needs the usual
    ``if __name__ == "__main__":`` around the call.

    :param name: data set, e.g. ``cube-single-play`` or ``cube-single-play-v0``
    :param episodes: training episodes; by default as many as the published data set has
    :param workers: number of processes; 1 works in this process
    :param seed: every episode derives its own seed from this
    :param out: folder for the files, made if it does not exist
    :param val_episodes: validation episodes, by default a tenth of ``episodes`` and at least 1
    :param episode_length: rows of an episode, one more than its transitions; by default as published
    :param progress_bar: whether to show progress, rate and remaining time
    :return: path of the training file; the validation file lies next to it, with the suffix ``-val``
    """
    recipe = find_recipe(name)
    name = recipe.name
    episodes = _at_least(1, "episodes", recipe.episodes if episodes is None else episodes)
    val_episodes = _at_least(1, "val_episodes", max(1, episodes // 10) if val_episodes is None else val_episodes)
    length = _at_least(2, "episode_length", recipe.episode_length if episode_length is None else episode_length)
    workers, seed = _at_least(1, "workers", workers), _at_least(0, "seed", seed)
    if importlib.util.find_spec("ogbench") is None:
        raise ImportError(f"generating {name} needs the package ogbench: pip install 'sb3-flow[ogbench]'")

    folder = pathlib.Path(out).absolute()
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"out={str(out)!r} is not a folder")
    targets = [folder / f"{name}-v0.npz", folder / f"{name}-v0-val.npz"]
    plan = _Plan(name, seed, length, folder / f".{name}-v0.parts")
    for target in targets:
        if target.exists() and not plan.parts.exists():
            raise FileExistsError(f"{target} exists already: delete it, or choose another folder with out=...")

    plan.parts.mkdir(parents=True, exist_ok=True)
    _check_manifest(plan)
    jobs = [(split, index) for split, count in enumerate((episodes, val_episodes)) for index in range(count)]
    todo = [job for job in jobs if not is_whole(plan.part(*job), length)]
    with _progress(name, len(jobs), len(jobs) - len(todo), progress_bar) as advance:
        _make_parts(plan, todo, workers, advance)
    for split in (1, 0):  # the training file last: once it is there, everything is
        merge([plan.part(*job) for job in jobs if job[0] == split], targets[split])
    for part in plan.parts.glob("*.npz"):  # the manifest goes last, to explain the files that a kill leaves here
        part.unlink()
    shutil.rmtree(plan.parts)
    return targets[0]


def _at_least(least: int, argument: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{argument}={value!r}: expected an integer >= {least}")
    return int(value)


def _check_manifest(plan: _Plan) -> None:
    """Refuse to go on with parts that were made with other settings or package versions."""
    wanted: dict[str, Any] = {"name": plan.name, "seed": plan.seed, "episode_length": plan.episode_length}
    wanted |= {"recipe": RECIPE_VERSION, **{package: importlib.metadata.version(package) for package in _PACKAGES}}
    path = plan.parts / "manifest.json"
    if not path.exists():
        if any(plan.parts.glob("*.npz")):
            raise ValueError(f"{plan.parts} holds episodes but no manifest.json: delete this folder")
        with replacing(path) as file:
            file.write(json.dumps(wanted, indent=2).encode())
        return
    found = json.loads(path.read_text())
    if found != wanted:
        keys = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
        differences = ", ".join(f"{key} {found.get(key)!r} there, {wanted.get(key)!r} now" for key in keys)
        raise ValueError(
            f"{plan.parts} holds the episodes of another, unfinished run ({differences}): "
            "start that run again to finish it, or delete this folder"
        )


@functools.lru_cache(maxsize=1)
def _maker(name: str, episode_length: int) -> EpisodeMaker:
    return EpisodeMaker(find_recipe(name), episode_length)


def _make_part(plan: _Plan, split: int, index: int) -> None:
    episode = _maker(plan.name, plan.episode_length).episode(plan.seed, split, index)
    with replacing(plan.part(split, index)) as file:
        np.savez(file, **episode)  # type: ignore[arg-type]


def _make_parts(plan: _Plan, todo: list[tuple[int, int]], workers: int, advance: Callable[[], object]) -> None:
    if workers == 1 or len(todo) <= 1:
        try:
            for job in todo:
                _make_part(plan, *job)
                advance()
        finally:
            _maker.cache_clear()
        return
    # spawn: a fork would copy the caller's threads' locks and its CUDA state
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(todo)), mp_context=context, initializer=start_worker)
    try:
        for future in as_completed([pool.submit(_make_part, plan, *job) for job in todo]):
            future.result()
            advance()
    except BrokenProcessPool as error:
        error.add_note("A script that generates with workers > 1 must do so under `if __name__ == '__main__':`")
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _progress(name: str, total: int, done: int, show: bool) -> Iterator[Callable[[], object]]:
    """
    Show progress with rate and remaining time, through tqdm if it is installed, else in plain lines.

    :param done: episodes that are there already
    :return: a function to call after each episode
    """
    if not show:
        yield lambda: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        start = last = time.monotonic()
        made = 0

        def advance() -> None:
            nonlocal made, last
            made, now = made + 1, time.monotonic()
            if now - last >= 10 or done + made == total:
                rate, last = made / (now - start), now
                left = (total - done - made) / rate
                text = f"{name}: {done + made}/{total} episodes, {rate:.2f} episodes/s, {left:.0f} s left"
                print(text, file=sys.stderr, flush=True)

        yield advance
    else:
        with tqdm(total=total, initial=done, desc=name, unit="episode", smoothing=0.1) as bar:
            yield bar.update


def main(arguments: list[str] | None = None) -> None:
    """
    Run the command line of the generator.

    :param arguments: used instead of ``sys.argv[1:]``
    """
    parser = argparse.ArgumentParser(
        prog="python -m sb3_flow.data.generate",
        description="Generate an OGBench data set with OGBench's scripted oracles. The result follows the published recipe: "
        "it is the published data set statistically, not bitwise. A stopped run goes on when started again.",
        epilog=f"data sets: {', '.join(RECIPES)}",
    )
    parser.add_argument("name", help="data set, e.g. cube-single-play")
    parser.add_argument("--episodes", type=int, help="training episodes (default: as published, 500 to 5000)")
    parser.add_argument("--val-episodes", type=int, help="validation episodes (default: a tenth, at least 1)")
    parser.add_argument("--episode-length", type=int, help="rows per episode (default: as published, 1001; giant maze 2001)")
    parser.add_argument("--workers", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed (default: %(default)s)")
    parser.add_argument("--out", default=".", help="folder for the files (default: the current folder)")
    parser.add_argument("--no-progress", dest="progress_bar", action="store_false", help="show no progress bar")
    options = parser.parse_args(arguments)
    os.environ.setdefault("MUJOCO_GL", "disable")
    try:
        path = generate(**vars(options))
    except (ValueError, ImportError, FileExistsError, NotADirectoryError) as error:
        parser.error(str(error))
    print(path)


if __name__ == "__main__":
    main()
