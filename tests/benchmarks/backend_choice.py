"""
Our PPO's backends beside SB3's PPO, cell by cell: whole updates and collecting, by width, batch, environments and threads.
What ``backend="auto"`` chooses is fitted to this grid.

Run by hand, on a machine that does nothing else:

    python -m tests.benchmarks.backend_choice --cells cells.jsonl                 # the whole grid, about 20 minutes
    python -m tests.benchmarks.backend_choice --cells cells.jsonl --seconds 200   # a part of it; the next call goes on
    python -m tests.benchmarks.backend_choice --cells cells.jsonl --seconds 0     # prints what there is
    python -m tests.benchmarks.backend_choice --cells few.jsonl --coarse          # every second width and size

"update" is ``train()`` on a filled rollout buffer, in which each epoch takes as many minibatches as fit; "collect" is
``collect_rollouts`` with environments whose steps cost nothing; "learn" is both in turn on Pendulum. All programs of a cell
run in one process, in turns; a figure is the median over the turns of SB3's time divided by ours in the same turn, with the
95 % interval of the median by order statistics. Thread counts have processes of their own.
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
import stable_baselines3
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecEnv

from sb3_flow import PPO
from sb3_flow.on_policy.backend_choice import torch_is_faster

WIDTHS, BATCHES, ENVIRONMENTS = (
    (32, 64, 128, 256, 512, 1024),
    (32, 64, 128, 256, 512, 1024, 2048, 4096),
    (1, 2, 4, 8, 16, 32, 64),
)
NETWORKS = (*((width, 2) for width in WIDTHS), (512, 3))
ROWS, EPOCHS, COLLECTED = 512, 2, 32
"""Rows of a rollout (at least a minibatch), passes over it, and steps of each environment that are collected."""
LEARNED = ((64, 2, 64), (256, 2, 64), (256, 2, 1024), (512, 3, 1024), (1024, 2, 1024))
"""Width, layers and batch of the cells of a whole ``learn()``: 8 environments, 256 steps each, 10 epochs."""
FEWEST, MOST = 7, 25
"""Turns of a cell: as many as fit in its time."""
BATCH = 64
"""Of the models that collect, for what "auto" chooses; SB3's default."""
PROGRAMS = ("sb3", "torch", "native")


class Cell(NamedTuple):
    """What is timed: ``size`` is the batch of an update, or the number of environments."""

    phase: str
    threads: int
    width: int
    layers: int
    size: int


class FreeEnvironments(VecEnv):
    """Environments whose steps cost nothing; observations are of 17 numbers, actions of 6, as HalfCheetah's."""

    def __init__(self, n_envs: int):
        super().__init__(n_envs, spaces.Box(-1, 1, (17,)), spaces.Box(-1, 1, (6,)))
        self.observations = np.random.default_rng(0).uniform(-1, 1, (n_envs, 17)).astype(np.float32)
        self.rewards, self.dones = np.zeros(n_envs, np.float32), np.zeros(n_envs, bool)
        self.infos: list[dict[str, Any]] = [{} for _ in range(n_envs)]

    def reset(self) -> np.ndarray:
        return self.observations

    def step_async(self, actions: np.ndarray) -> None:
        pass

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        return self.observations, self.rewards, self.dones, self.infos

    def close(self) -> None:
        pass

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [None] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        pass

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return [None] * self.num_envs

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


class Nothing(BaseCallback):
    """Does nothing."""

    def _on_step(self) -> bool:
        return True


def build(program: str, cell: Cell, env: VecEnv, **settings: Any) -> Any:
    """:return: a model of ``sb3`` or of one of our backends, ready to be trained"""
    ours = {} if program == "sb3" else {"backend": program}
    algorithm: Any = stable_baselines3.PPO if program == "sb3" else PPO
    policy_kwargs = {"net_arch": [cell.width] * cell.layers}
    model = algorithm("MlpPolicy", env, policy_kwargs=policy_kwargs, seed=0, device="cpu", **ours, **settings)
    model.set_logger(configure(None, []))
    model._setup_learn(10**6)
    model.set_logger(configure(None, []))
    return model


def update(program: str, cell: Cell) -> Callable[[], float]:
    """:return: a function that updates once, and says in how many seconds"""
    n_envs = 8
    n_steps = max(ROWS, cell.size) // n_envs
    model = build(program, cell, FreeEnvironments(n_envs), n_steps=n_steps, batch_size=cell.size, n_epochs=EPOCHS)
    callback = Nothing()
    callback.init_callback(model)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, n_steps)
    buffer, rng = model.rollout_buffer, np.random.default_rng(0)
    buffer.advantages = rng.standard_normal(buffer.advantages.shape).astype(np.float32)
    buffer.returns = buffer.values + buffer.advantages
    names = ("observations", "actions", "values", "log_probs", "advantages", "returns")
    arrays = {name: getattr(buffer, name) for name in names}

    def run() -> float:
        for name, array in arrays.items():
            setattr(buffer, name, array.copy())
        buffer.generator_ready = False
        start = time.perf_counter()
        model.train()
        return time.perf_counter() - start

    return run


def collect(program: str, cell: Cell) -> Callable[[], float]:
    """:return: a function that collects once, and says in how many seconds"""
    env = FreeEnvironments(cell.size)
    model = build(program, cell, env, n_steps=COLLECTED, batch_size=COLLECTED * cell.size)
    callback = Nothing()
    callback.init_callback(model)

    def run() -> float:
        start = time.perf_counter()
        model.collect_rollouts(model.env, callback, model.rollout_buffer, COLLECTED)
        return time.perf_counter() - start

    return run


def learn(program: str, cell: Cell) -> Callable[[], float]:
    """:return: a function that learns from one rollout of Pendulum, and says in how many seconds"""
    env = make_vec_env("Pendulum-v1", n_envs=8, seed=0)
    model = build(program, cell, env, n_steps=256, batch_size=cell.size)

    def run() -> float:
        start = time.perf_counter()
        model.learn(8 * 256)
        return time.perf_counter() - start

    return run


PHASES: dict[str, Callable[[str, Cell], Callable[[], float]]] = {"update": update, "collect": collect, "learn": learn}


def measure(cell: Cell, seconds: float) -> dict[str, list[float]]:
    """:return: of each program, the seconds of each turn"""
    runs = {program: PHASES[cell.phase](program, cell) for program in PROGRAMS}
    first = {program: min(run(), run()) for program, run in runs.items()}  # compiles, and makes the optimizer's state
    repeats = max(1, math.ceil(0.01 / first["sb3"]))
    times: dict[str, list[float]] = {program: [] for program in PROGRAMS}
    start = time.perf_counter()
    for turn in range(MOST):
        if turn >= FEWEST and time.perf_counter() - start > seconds:
            break
        for i in range(len(PROGRAMS)):
            program = PROGRAMS[(turn + i) % len(PROGRAMS)]
            times[program].append(sum(runs[program]() for _ in range(repeats)) / repeats)
    return times


def interval(ratios: np.ndarray) -> tuple[float, float, float]:
    """:return: median, and the bounds of its 95 % interval: the order statistics that it lies between with that probability"""
    ratios, n = np.sort(ratios), len(ratios)
    below, outside = 0, 0.5**n
    while 2 * (outside + math.comb(n, below + 1) * 0.5**n) <= 0.05:
        below += 1
        outside += math.comb(n, below) * 0.5**n
    return float(np.median(ratios)), float(ratios[below]), float(ratios[n - 1 - below])


def grid(arguments: argparse.Namespace, threads: int) -> Iterator[Cell]:
    """:return: the cells that were asked for"""
    every = 2 if arguments.coarse else 1
    for phase in arguments.phases:
        if phase == "learn":
            yield from (Cell(phase, threads, *one) for one in LEARNED)
            continue
        for width, layers in NETWORKS[::-every]:
            for size in (BATCHES if phase == "update" else ENVIRONMENTS)[::every]:
                if arguments.widths is None or width in arguments.widths:
                    if arguments.sizes is None or size in arguments.sizes:
                        yield Cell(phase, threads, width, layers, size)


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
    for cell in grid(arguments, threads):
        if cell in done:
            continue
        if time.time() > arguments.until:
            break
        times = measure(cell, arguments.of_a_cell)
        with arguments.cells.open("a") as file:
            file.write("\n" + json.dumps({"cell": cell, "times": times}))
        print("  ", *cell, *(f"{np.median(times['sb3']) / np.median(times[name]):.2f}" for name in PROGRAMS[1:]), flush=True)


def automatic(cell: Cell) -> str:
    """:return: what "auto" chooses"""
    n_in, n_out = (3, 1) if cell.phase == "learn" else (17, 6)
    hidden = [(n_in, cell.width), *[(cell.width, cell.width)] * (cell.layers - 1)]
    layers = [*hidden, (cell.width, n_out), *hidden, (cell.width, 1)]
    batch_size, n_envs = (BATCH, cell.size) if cell.phase == "collect" else (cell.size, 8)
    return "native" if torch_is_faster(layers, batch_size, n_envs, cell.threads) is None else "torch"


def show(arguments: argparse.Namespace) -> None:
    """Print the cells in the file."""
    done = known(arguments.cells)
    titles = {
        "update": f"train(), {EPOCHS} epochs, 8 environments, n_steps max({ROWS}, batch) / 8; sizes are batches",
        "collect": f"collect_rollouts(), n_steps {COLLECTED}, batch {BATCH}, steps that cost nothing; sizes are environments",
        "learn": "learn() of one rollout on Pendulum-v1, 8 environments, n_steps 256, 10 epochs; sizes are batches",
    }
    columns, below = ("torch", "native", "auto"), 0
    for phase, title in titles.items():
        cells = sorted(cell for cell in done if cell.phase == phase)
        if cells:
            print(f"\n{title}; x SB3, median [95 % interval] of paired turns, * wholly below 1")
            print(f"{'threads network   size   SB3 ms':<33}" + "".join(f"{name:<22}" for name in columns))
        for cell in cells:
            times = {program: np.array(values) for program, values in done[cell].items()}
            figures = {name: interval(times["sb3"] / times[name]) for name in PROGRAMS[1:]}
            chosen = automatic(cell)
            figures["auto"] = figures[chosen]
            below += sum(figures[name][2] < 1 for name in ("torch", "auto"))
            row = f"{cell.threads:>7} {cell.width:>4} x {cell.layers} {cell.size:>6} {1e3 * np.median(times['sb3']):8.2f}  "
            parts = (f"{m:5.2f} [{a:.2f}, {b:.2f}]{'*' if b < 1 else ''}" for m, a, b in figures.values())
            print(row + "".join(f"{part:<22}" for part in parts) + chosen)
    print(f"\n{len(done)} cells; of torch and auto, {below} are wholly below 1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=Path, required=True, help="file that measured cells are appended to")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--phases", nargs="+", default=["update", "collect"], choices=list(PHASES))
    parser.add_argument("--widths", type=int, nargs="+", help="only these")
    parser.add_argument("--sizes", type=int, nargs="+", help="only these batches or numbers of environments")
    parser.add_argument("--coarse", action="store_true", help="every second width and size")
    parser.add_argument("--of-a-cell", type=float, default=2.0, help="seconds of a cell, at least seven turns")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no cell after so many seconds")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.until is not None:
        work(arguments, arguments.threads[0])
        return
    until = time.time() + arguments.seconds
    for threads in arguments.threads if arguments.seconds > 0 else ():
        given = [part for part in sys.argv[1:]]
        command = [sys.executable, "-m", "tests.benchmarks.backend_choice", *given, "--until", str(until)]
        subprocess.run([*command, "--threads", str(threads)], check=True)
    show(arguments)


if __name__ == "__main__":
    main()
