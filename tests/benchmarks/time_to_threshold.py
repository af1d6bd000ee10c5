"""
Wall-clock seconds until the training return reaches a threshold: SB3's PPO, and ours with the same hyperparameters.

Run by hand: ``python -m tests.benchmarks.time_to_threshold --tasks CartPole-v1 Pendulum-v1 HalfCheetah-v5 --seeds 3``. Every
run has a process and a thread of its own, one process at a time, programs in turns. The clock starts with ``learn`` (compiled
loops come from numba's cache, as in every run but a machine's first) and stops when the mean of the last 20 training episodes
is at least the threshold. Printed are medians over the seeds, with those of the environment steps that it took.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

# threshold, most steps, arguments; all with 8 environments
TASKS: dict[str, tuple[float, int, dict[str, float]]] = {
    "CartPole-v1": (475, 300_000, {"n_steps": 128, "batch_size": 256, "n_epochs": 10, "gamma": 0.98, "learning_rate": 1e-3}),
    "Pendulum-v1": (-200, 600_000, {"n_steps": 128, "batch_size": 256, "n_epochs": 10, "gamma": 0.9, "learning_rate": 1e-3}),
    # with VecNormalize, and policy_kwargs of rl-zoo's PPO for this task
    "HalfCheetah-v5": (2000, 500_000, {"n_steps": 256, "batch_size": 64, "n_epochs": 10, "gamma": 0.98, "gae_lambda": 0.92}),
}

PROGRAM = """
import json, time
import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
torch.set_num_threads(1)
if program == "SB3":
    from stable_baselines3 import PPO
elif program == "ours, asynchronous":
    from sb3_flow import AsyncPPO as PPO
else:
    from sb3_flow import PPO

class Until(BaseCallback):
    reached = False
    def _on_step(self):
        return not self.reached
    def _on_rollout_end(self):
        returns = [one["r"] for one in list(self.model.ep_info_buffer)[-20:]]
        self.reached = len(returns) == 20 and np.mean(returns) >= threshold
        self.seconds = time.perf_counter() - start

env = make_vec_env(task, n_envs=8, seed=seed)
if task == "HalfCheetah-v5":
    env = VecNormalize(env, gamma=settings["gamma"])
    settings["policy_kwargs"] = {"log_std_init": -2.0, "ortho_init": False, "activation_fn": torch.nn.ReLU}
if program.startswith("ours"):
    settings["backend"] = "torch" if program == "ours, torch" else "native"
model = PPO("MlpPolicy", env, seed=seed, device="cpu", **settings)
until, start = Until(), time.perf_counter()
model.learn(most, callback=until)
print(json.dumps([until.seconds if until.reached else None, model.num_timesteps]))
"""


def run(program: str, task: str, seed: int) -> tuple[float | None, int]:
    """:return: seconds, None if the threshold was not reached; environment steps"""
    threshold, most, settings = TASKS[task]
    names = {"program": program, "task": task, "seed": seed, "threshold": threshold, "most": most, "settings": settings}
    header = "\n".join(f"{name} = {value!r}" for name, value in names.items())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", header + PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{program}: {done.stderr[-2000:]}")
    seconds, steps = json.loads(done.stdout.strip().splitlines()[-1])
    return seconds, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--programs", nargs="+", default=["SB3", "ours", "ours, asynchronous"])
    arguments = parser.parse_args()
    for task in arguments.tasks:
        found: dict[str, list[tuple[float | None, int]]] = {name: [] for name in arguments.programs}
        for seed in range(arguments.seeds):
            for name in arguments.programs:
                found[name].append(run(name, task, seed))
        print(f"\n{task}, to a training return of {TASKS[task][0]:g}: medians of {arguments.seeds} seeds", flush=True)
        for name, runs in found.items():
            times = [float("inf") if seconds is None else seconds for seconds, _ in runs]
            each = ", ".join("not reached" if seconds is None else f"{seconds:.0f}" for seconds, _ in runs)
            steps = statistics.median(count for _, count in runs)
            print(f"  {name:<20} {statistics.median(times):7.1f} s  {steps / 1000:6.0f}k steps   (each: {each})", flush=True)


if __name__ == "__main__":
    main()
