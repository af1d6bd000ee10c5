"""
Environment steps per second of ``learn``: AsyncPPO with one and two collectors beside PPO, with the same environments in all.

Run by hand on a machine with nothing else to do, with at least two cores: ``python -m tests.benchmarks.async_throughput``.
Both learn in turns, round by round, with one torch thread each. The first ``learn`` of each, which starts the collector, is
not timed. Printed are the medians, their ratio, and the load of the machine before each round, which should be near zero.
"""

import argparse
import os
import statistics
import time
from functools import partial
from typing import Any

import torch as th
from stable_baselines3.common.env_util import make_vec_env

from sb3_flow import PPO, AsyncPPO


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="HalfCheetah-v5")
    parser.add_argument("--n-envs", type=int, default=8)
    parser.add_argument("--n-steps", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--n-epochs", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=12, help="rollouts in a timed run")
    parser.add_argument("--backend", default="auto", choices=("auto", "torch", "native"))
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    th.set_num_threads(1)
    settings = {"n_steps": arguments.n_steps, "batch_size": arguments.batch_size, "n_epochs": arguments.n_epochs}
    settings["backend"] = arguments.backend
    candidates: dict[str, tuple[type[PPO], dict[str, Any]]] = {
        "PPO, GAE": (PPO, {}),
        "PPO, V-trace": (PPO, {"advantage": "vtrace"}),
        "AsyncPPO, lockstep, GAE": (AsyncPPO, {"advantage": "gae"}),
        "AsyncPPO, lockstep": (AsyncPPO, {}),
        "AsyncPPO, free": (AsyncPPO, {"mode": "free"}),
        "2 collectors, sync": (AsyncPPO, {"mode": "sync", "n_collectors": 2}),
        "2 collectors, lockstep": (AsyncPPO, {"n_collectors": 2}),
        "2 collectors, free": (AsyncPPO, {"mode": "free", "n_collectors": 2}),
    }
    steps = arguments.iterations * arguments.n_steps * arguments.n_envs
    models = {}
    for name, (algorithm, kwargs) in candidates.items():
        n_envs = arguments.n_envs // kwargs.get("n_collectors", 1)
        make = partial(make_vec_env, arguments.task, n_envs=n_envs)
        models[name] = algorithm(
            "MlpPolicy", make if "n_collectors" in kwargs else make(), device="cpu", seed=0, **settings, **kwargs
        )
        models[name].learn(arguments.n_steps * arguments.n_envs)
    rates: dict[str, list[float]] = {name: [] for name in models}
    for number in range(arguments.rounds):
        print(f"round {number + 1} of {arguments.rounds}, load {os.getloadavg()[0]:.2f}", flush=True)
        for name, model in models.items():
            since = time.perf_counter()
            model.learn(steps)
            rates[name].append(steps / (time.perf_counter() - since))
            print(f"  {name:25} {rates[name][-1]:8.0f} steps/s", flush=True)
    reference = statistics.median(rates["PPO, GAE"])
    for name, found in rates.items():
        median = statistics.median(found)
        print(f"{name:25} {median:8.0f} steps/s   {median / reference:.2f}   ({min(found):.0f} to {max(found):.0f})")


if __name__ == "__main__":
    main()
