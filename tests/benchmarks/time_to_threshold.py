"""
Wall-clock seconds until the training return reaches a threshold, steps per second, and the return after a number of steps.

Run by hand: ``python -m tests.benchmarks.time_to_threshold --tasks CartPole-v1 Pendulum-v1 HalfCheetah-v5 --seeds 3``. SB3's
PPO, ours and AsyncPPO have the same hyperparameters and 8 environments. Every run has a process of its own with a thread of
torch, one run at a time, programs in turns. The clock starts with ``learn``, so that the start of collectors counts; compiled
loops come from numba's cache, as in every run but a machine's first. The threshold is reached when the mean of the last 20
training episodes is at least that. Printed are medians over the seeds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

# threshold, steps after which the return is taken, most steps, arguments
TASKS: dict[str, tuple[float, int, int, dict[str, float]]] = {
    "CartPole-v1": (
        475,
        30_000,
        300_000,
        {"n_steps": 128, "batch_size": 256, "n_epochs": 10, "gamma": 0.98, "learning_rate": 1e-3},
    ),
    "Pendulum-v1": (
        -200,
        100_000,
        600_000,
        {"n_steps": 128, "batch_size": 256, "n_epochs": 10, "gamma": 0.9, "learning_rate": 1e-3},
    ),
    # with VecNormalize, and policy_kwargs of rl-zoo's PPO for this task
    "HalfCheetah-v5": (
        2000,
        200_000,
        500_000,
        {"n_steps": 256, "batch_size": 64, "n_epochs": 10, "gamma": 0.98, "gae_lambda": 0.92},
    ),
}

# class, arguments, collectors
PROGRAMS: dict[str, tuple[str, dict[str, object], int]] = {
    "SB3": ("stable_baselines3.PPO", {}, 0),
    "ours": ("sb3_flow.PPO", {"backend": "native"}, 0),
    "ours, torch": ("sb3_flow.PPO", {"backend": "torch"}, 0),
    "1 collector": ("sb3_flow.AsyncPPO", {"backend": "native"}, 1),
    "1 collector, estimating each epoch": (
        "sb3_flow.AsyncPPO",
        {"backend": "native", "recompute_advantages": "epoch"},
        1,
    ),
    "1 collector, clip": ("sb3_flow.AsyncPPO", {"backend": "native", "policy_loss": "clip"}, 1),
    "2 collectors": ("sb3_flow.AsyncPPO", {"backend": "native"}, 2),
    "2 collectors, clip": ("sb3_flow.AsyncPPO", {"backend": "native", "policy_loss": "clip"}, 2),
    "2 collectors, sync": ("sb3_flow.AsyncPPO", {"backend": "native", "mode": "sync"}, 2),
}

PROGRAM = """
import importlib, json, time
import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
torch.set_num_threads(1)
module, _, name = program.rpartition(".")
algorithm = getattr(importlib.import_module(module), name)

class Until(BaseCallback):
    seconds, steps, later, speed = None, None, None, None
    def _on_step(self):
        return self.seconds is None or self.later is None
    def _on_rollout_end(self):
        now = time.perf_counter() - start
        returns = [one["r"] for one in list(self.model.ep_info_buffer)[-20:]]
        if self.seconds is None and len(returns) == 20 and np.mean(returns) >= threshold:
            self.seconds, self.steps = now, self.num_timesteps
        if self.later is None and self.num_timesteps >= at:
            self.later, self.speed = float(np.mean(returns)), self.num_timesteps / now

def make():
    env = make_vec_env(task, n_envs=8 // max(n_collectors, 1))
    return VecNormalize(env, gamma=settings["gamma"]) if task == "HalfCheetah-v5" else env

if task == "HalfCheetah-v5":
    settings["policy_kwargs"] = {"log_std_init": -2.0, "ortho_init": False, "activation_fn": torch.nn.ReLU}
if n_collectors:
    settings["n_collectors"] = n_collectors
model = algorithm("MlpPolicy", make if n_collectors else make(), seed=seed, device="cpu", **settings)
until, start = Until(), time.perf_counter()
model.learn(most, callback=until)
print(json.dumps([until.seconds, until.steps, until.later, until.speed]))
"""


def told_by(program: str, names: dict[str, Any]) -> Any:
    """:return: what a program, given values by name, prints last, as JSON; it has a process and one thread of its own"""
    header = "\n".join(f"{name} = {value!r}" for name, value in names.items())
    command = [sys.executable, "-W", "ignore", "-c", header + program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{names}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def run(program: str, task: str, seed: int) -> tuple[float, float, float, float]:
    """:return: seconds and steps to the threshold, infinite if it was not reached; return and steps per second later"""
    threshold, at, most, settings = TASKS[task]
    algorithm, options, n_collectors = PROGRAMS[program]
    names = {"program": algorithm, "n_collectors": n_collectors, "task": task, "seed": seed, "threshold": threshold}
    names |= {"at": at, "most": most, "settings": {**settings, **options}}
    seconds, steps, later, speed = told_by(PROGRAM, names)
    return seconds or float("inf"), steps or float("inf"), later, speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--programs", nargs="+", default=["SB3", "ours", "1 collector", "2 collectors"], choices=list(PROGRAMS)
    )
    arguments = parser.parse_args()
    for task in arguments.tasks:
        found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in arguments.programs}
        for seed in range(arguments.seeds):
            for name in arguments.programs:
                found[name].append(run(name, task, seed))
                print(f"{task} seed {seed} {name}: {found[name][-1]}", file=sys.stderr, flush=True)
        threshold, at = TASKS[task][:2]
        print(f"\n{task}, medians of {arguments.seeds} seeds (each seed)")
        print(f"{'':<36} {f'seconds to {threshold:g}':<28} {'steps':>6}   {f'return at {at // 1000}k':<34} steps/s")
        for name, runs in found.items():
            seconds, steps, later, speed = zip(*runs, strict=True)
            to = f"{statistics.median(seconds):.1f} ({', '.join(f'{one:.0f}' for one in seconds)})"
            returns = f"{statistics.median(later):.0f} ({', '.join(f'{one:.0f}' for one in later)})"
            thousands = statistics.median(steps) / 1000
            print(f"{name:<36} {to:<28} {thousands:5.0f}k   {returns:<34} {statistics.median(speed):.0f}", flush=True)


if __name__ == "__main__":
    main()
