"""
How far collectors scale: steps per second with several of them, and what the learner spends on a rollout.

Run by hand on a quiet machine, a part at a time::

    python -m tests.benchmarks.collectors throughput      # 1, 2 and 4 collectors, processes and Ray actors, beside PPO
    python -m tests.benchmarks.collectors learner         # bytes, and milliseconds to receive, replay, estimate and update
    python -m tests.benchmarks.collectors sleeping        # up to 64 collectors whose environments only sleep

``throughput`` has ``--n-envs`` environments for each collector, and takes turns, round by round; medians are printed.
``learner`` measures the parts of an iteration of AsyncPPO in mode "sync" for an MLP on HalfCheetah and for a CNN on pixels
of noise. ``sleeping`` replaces the collectors by processes without torch, which sleep ``--step`` milliseconds a step and then
fill their share of the shared memory, so that many fit into a machine: what is measured is the learner, with 0 epochs and with
1 epoch of updates.
"""

import argparse
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from sb3_flow import PPO, AsyncPPO
from sb3_flow.collect.collectors import CollectedRollout, Collection, Collectors
from sb3_flow.collect.infos import pack_infos
from sb3_flow.collect.memory import attach, reserve
from sb3_flow.ppo import collected

SLEEPER = """
import mmap, pickle, sys, time
from multiprocessing.connection import Connection
import numpy as np
pipe, memory, number, of_all, seconds = sys.argv[1:]
pipe, number, of_all = Connection(int(pipe)), int(number), int(of_all)
arrays, size, news = pickle.loads(pipe.recv_bytes())
block = mmap.mmap(int(memory), size)
def view(name):
    offset, shape, dtype = arrays[name]
    return np.ndarray(shape, dtype=dtype, buffer=block, offset=offset)
generator = np.random.default_rng(number)
while True:
    try:
        slot = pickle.loads(pipe.recv_bytes())
    except EOFError:
        break
    rewards = view(f"{slot}/rewards")
    n_steps, n_envs = rewards.shape
    share = n_envs // of_all
    until = time.monotonic() + n_steps * float(seconds)
    mine = np.s_[:, number * share : (number + 1) * share]
    rewards[mine] = generator.standard_normal((n_steps, share))
    for name in ("terminated", "truncated", "episode_starts", "versions"):
        view(f"{slot}/{name}")[mine] = 0
    view(f"{slot}/counts")[number] = 0
    observations = view(f"{slot}/observations/")[mine]
    observations[:] = generator.standard_normal(observations.shape)
    actions = view(f"{slot}/actions")[mine]
    actions[:] = generator.uniform(-1, 1, actions.shape)
    view(f"{slot}/values")[mine] = 0
    view(f"{slot}/log_probs")[mine] = -1
    time.sleep(max(0.0, until - time.monotonic()))
    pipe.send_bytes(news)
"""


class Sleepers(Collectors):
    """Processes without torch in place of collectors."""

    seconds = 0.0

    def __init__(self, collection: Collection):
        spec = collection.spec
        layout = collection.layout(spec, collection.n_slots)
        memory = reserve(layout.size)
        infos = pack_infos([[{} for _ in range(spec.share)] for _ in range(spec.n_steps)])
        news = {"infos": infos, "normalisers": [], "waited": 0.0, "reward_dtype": "<f4", "random_state": None}
        start = pickle.dumps((layout._arrays, layout.size, pickle.dumps(news)))
        self._pipes, self._processes = [], []
        for number in range(spec.n_collectors):
            mine, theirs = Pipe()
            arguments = [str(value) for value in (theirs.fileno(), memory, number, spec.n_collectors, self.seconds)]
            command = [sys.executable, "-c", SLEEPER, *arguments]
            self._processes.append(subprocess.Popen(command, pass_fds=(theirs.fileno(), memory)))
            theirs.close()
            mine.send_bytes(start)
            self._pipes.append(mine)
        super().__init__(collection, layout, attach(memory, layout.size))

    def begin(self, *_: Any, **__: Any) -> list[Any]:
        return [[] for _ in self._pipes]

    def _request(self, number: int, *_: Any) -> None:
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps(number))

    def receive(self) -> CollectedRollout:
        since = time.perf_counter()
        news = [pickle.loads(pipe.recv_bytes()) for pipe in self._pipes]
        return CollectedRollout(self.rollouts[self.outstanding[0]], news, time.perf_counter() - since)

    def cancel(self) -> None:
        while self.outstanding:
            self.receive()
            self.release()

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.wait()


class Pixels(gym.Env):
    """Images of noise, drawn once."""

    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = spaces.Discrete(4)

    def __init__(self) -> None:
        self.images = np.random.default_rng(0).integers(0, 255, (32, 84, 84, 4), dtype=np.uint8)
        self.number = 0

    def reset(self, **_: Any) -> tuple[np.ndarray, dict]:
        return self.images[0], {}

    def step(self, _: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.number += 1
        return self.images[self.number % 32], 0.0, self.number % 500 == 0, False, {}


def cheetahs(n_envs: int, normalized: bool = True) -> Any:
    """:return: HalfCheetah, normalised"""
    env = make_vec_env("HalfCheetah-v5", n_envs=n_envs)
    return VecNormalize(env) if normalized else env


@contextmanager
def timed(*parts: tuple[str, Any, str]) -> Any:
    """Add up the seconds that methods take, by a name of theirs."""
    seconds: dict[str, float] = defaultdict(float)
    originals = [(owner, method, getattr(owner, method)) for _, owner, method in parts]

    def timing(name: str, original: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            since = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seconds[name] += time.perf_counter() - since

        return call

    for name, owner, method in parts:
        setattr(owner, method, timing(name, getattr(owner, method)))
    yield seconds
    for owner, method, original in originals:
        setattr(owner, method, original)


def throughput(arguments: argparse.Namespace) -> None:
    """Print the steps per second with 1, 2 and 4 collectors."""
    settings = {"n_steps": arguments.n_steps, "batch_size": 256, "n_epochs": 10, "device": "cpu", "seed": 0}
    models: dict[str, PPO] = {"PPO": PPO("MlpPolicy", cheetahs(arguments.n_envs), **settings)}
    for place in arguments.collectors:
        for n_collectors in arguments.counts:
            make = partial(cheetahs, arguments.n_envs)
            name = f"{n_collectors} {'processes' if place == 'process' else 'Ray actors'}"
            kwargs = {"n_collectors": n_collectors, "collectors": place, "mode": arguments.mode}
            models[name] = AsyncPPO("MlpPolicy", make, **settings, **kwargs)
    rates: dict[str, list[float]] = defaultdict(list)
    for number in range(arguments.rounds):
        print(f"round {number + 1} of {arguments.rounds}, load {os.getloadavg()[0]:.2f}", flush=True)
        for name, model in models.items():
            model.learn(settings["n_steps"] * model.n_envs)  # starts the collectors
            steps = 10 * settings["n_steps"] * model.n_envs
            since = time.perf_counter()
            model.learn(steps)
            rates[name].append(steps / (time.perf_counter() - since))
            if isinstance(model, AsyncPPO):
                model.close()  # idle actors keep CPUs of the cluster
    for name, found in rates.items():
        median, reference = statistics.median(found), statistics.median(rates["PPO"])
        print(f"{name:15} {median:8.0f} steps/s   {median / reference:.2f}   ({min(found):.0f} to {max(found):.0f})")


def learner(arguments: argparse.Namespace) -> None:
    """Print what the learner spends on a rollout."""
    for policy, make, n_epochs in (("MlpPolicy", cheetahs, 10), ("CnnPolicy", partial(make_vec_env, Pixels), 4)):
        for place in arguments.collectors:
            n_steps = arguments.n_steps if policy == "MlpPolicy" else 128
            kwargs = {"n_collectors": 2, "collectors": place, "mode": "lockstep", "n_epochs": n_epochs, "batch_size": 256}
            model = AsyncPPO(policy, partial(make, n_envs=4), n_steps=n_steps, device="cpu", seed=0, **kwargs)
            model.learn(8 * n_steps)
            kind = type(model._collectors)
            parts = [("publish", kind, "publish"), ("wait and copy", kind, "receive"), ("replay", AsyncPPO, "_replay")]
            parts += [("statistics", AsyncPPO, "_add_statistics"), ("(of it, estimate)", AsyncPPO, "_estimate")]
            parts += [("update", PPO, "train")]
            if place == "ray":
                parts += [("(of it, copy)", kind, "_take")]
            iterations = 5
            with timed(*parts) as seconds:
                model.learn(iterations * 8 * n_steps)
            spec = model._collectors.rollouts[0]
            size = sum(part.nbytes for part in spec.columns().values())
            weights = sum(part.numel() * part.element_size() for part in model.policy.state_dict().values())
            told = ", ".join(f"{name} {1e3 * found / iterations:.1f} ms" for name, found in seconds.items())
            sizes = f"{size / 1e6:.1f} MB a rollout of {8 * n_steps} steps, weights {weights / 1e6:.2f} MB"
            print(f"{policy}, {place}: {sizes}; {told}", flush=True)
            model.close()


def sleeping(arguments: argparse.Namespace) -> None:
    """Print the steps per second with many collectors that only sleep."""
    collected.ProcessCollectors = Sleepers  # type: ignore[misc,assignment]
    Sleepers.seconds = arguments.step / 1e3
    print(f"environments sleep {arguments.step:g} ms a step: at most {1e3 / arguments.step:.0f} steps/s each", flush=True)
    for n_epochs in (0, 1):
        for n_collectors in (1, 2, 4, 8, 16, 32, 64):
            make = partial(cheetahs, arguments.n_envs, normalized=False)
            kwargs = {"n_steps": arguments.n_steps, "batch_size": 1024, "n_epochs": max(n_epochs, 1), "device": "cpu"}
            model = AsyncPPO("MlpPolicy", make, n_collectors=n_collectors, seed=0, **kwargs)
            if n_epochs == 0:
                model.train = lambda: None
            model.learn(arguments.n_steps * model.n_envs)
            iterations = 5
            since = time.perf_counter()
            with timed(("wait", Sleepers, "receive")) as seconds:
                model.learn(iterations * arguments.n_steps * model.n_envs)
            took = time.perf_counter() - since
            rate = iterations * arguments.n_steps * model.n_envs / took
            share = rate / (n_collectors * arguments.n_envs * 1e3 / arguments.step)
            told = (
                f"{n_epochs} epochs, {n_collectors:2} collectors of {arguments.n_envs}: {rate:8.0f} steps/s, {share:4.0%} of"
            )
            print(f"{told} what they offer; the learner waits {seconds['wait'] / took:4.0%} of the time", flush=True)
            model.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("throughput", "learner", "sleeping"))
    parser.add_argument("--n-envs", type=int, default=4, help="of each collector")
    parser.add_argument("--n-steps", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mode", default="lockstep", choices=("sync", "lockstep", "free"))
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--collectors", nargs="+", default=["process", "ray"])
    parser.add_argument("--step", type=float, default=2.0, help="milliseconds of a sleeping step")
    arguments = parser.parse_args()
    th.set_num_threads(1)
    if "ray" in arguments.collectors and arguments.part != "sleeping":
        import ray

        ray.init(address="local", num_cpus=max(arguments.counts), include_dashboard=False, log_to_driver=False)
    {"throughput": throughput, "learner": learner, "sleeping": sleeping}[arguments.part](arguments)


if __name__ == "__main__":
    main()
