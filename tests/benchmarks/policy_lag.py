"""
What PPO learns from rollouts that are 0, 1, 2 or 4 updates old, by loss.

Run by hand: ``python -m tests.benchmarks.policy_lag --tasks HalfCheetah-v5 --lags 0 1 2 4 --seeds 5 --workers 2``. The lag is
exact: AsyncPPO in lockstep, with as many rollouts asked for ahead; lag 0 is its mode "sync", with one collector. Each run is a
process that learns as many steps as the task says, and prints the mean return of the last 20 training episodes at each quarter
of the steps. A table has the interquartile means over the seeds, and their 95 % bootstrap interval at the end. ``--out``
keeps a row for each run, and the same command goes on from there.
"""

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from sb3_flow.common.statistics import bootstrap_interval, interquartile_mean
from tests.benchmarks.time_to_threshold import TASKS as SETTINGS
from tests.benchmarks.time_to_threshold import told_by

# steps; the arguments are those of ``time_to_threshold``, and Hopper has those of HalfCheetah
STEPS = {"HalfCheetah-v5": 200_000, "CartPole-v1": 60_000, "Pendulum-v1": 150_000, "Hopper-v5": 200_000}
LOSSES: dict[str, dict[str, str]] = {
    "decoupled": {},
    "clip": {"policy_loss": "clip"},
    "decoupled, GAE": {"advantage": "gae"},
    "decoupled, estimating each epoch": {"recompute_advantages": "epoch"},
}

PROGRAM = """
import json
import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
from sb3_flow import AsyncPPO

class Lagging(AsyncPPO):
    def _ahead(self, consuming):
        return lag if lag else 1 - consuming

class Quarters(BaseCallback):
    returns = []
    def _on_step(self):
        return True
    def _on_rollout_end(self):
        if self.num_timesteps >= (len(self.returns) + 1) * steps / 4:
            self.returns.append(float(np.mean([one["r"] for one in list(self.model.ep_info_buffer)[-20:]])))

env = make_vec_env(task, n_envs=8)
if task in ("HalfCheetah-v5", "Hopper-v5"):
    env = VecNormalize(env, gamma=settings["gamma"])
    settings["policy_kwargs"] = {"log_std_init": -2.0, "ortho_init": False, "activation_fn": torch.nn.ReLU}
model = Lagging("MlpPolicy", env, seed=seed, device="cpu", mode="lockstep" if lag else "sync", **settings)
model.n_slots = lag + 1  # the constructor warns of slots that the mode does not use
quarters = Quarters()
model.learn(steps, callback=quarters)
print(json.dumps(quarters.returns))
"""
Key = tuple[str, int, str, int]


def run(task: str, lag: int, loss: str, seed: int) -> list[float]:
    """:return: mean return of the last 20 training episodes, at each quarter of the steps"""
    settings = SETTINGS["HalfCheetah-v5" if task == "Hopper-v5" else task][3] | (LOSSES[loss] if lag else {})
    names = {"task": task, "lag": lag, "seed": seed, "steps": STEPS[task], "settings": settings}
    returns: list[float] = told_by(PROGRAM, names)
    return returns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--losses", nargs="+", default=["decoupled", "clip"], choices=list(LOSSES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("policy_lag.jsonl"))
    arguments = parser.parse_args()
    lines = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    found: dict[Key, list[float]] = {tuple(key): returns for key, returns in map(json.loads, lines)}

    def make(key: Key) -> None:
        if key not in found:
            found[key] = run(*key)
            with arguments.out.open("a") as file:
                print(json.dumps([key, found[key]]), file=file)

    # without lag, the loss is PPO's
    cells = [
        (t, lag, loss) for t in arguments.tasks for lag in arguments.lags for loss in arguments.losses[: None if lag else 1]
    ]
    with ThreadPoolExecutor(arguments.workers) as pool:
        list(pool.map(make, [(*cell, seed) for seed in range(arguments.seeds) for cell in cells]))
    print(f"{'':<52} return after a quarter, a half, three quarters of the steps, and at the end [95 %]")
    for task, lag, loss in cells:
        returns = np.array([found[task, lag, loss, seed] for seed in range(arguments.seeds)])
        means = "  ".join(f"{interquartile_mean(quarter):6.0f}" for quarter in returns.T)
        low, high = bootstrap_interval(returns[:, -1])[1:] if arguments.seeds > 1 else (np.nan, np.nan)
        name = f"{task}, {STEPS[task] // 1000}k, lag {lag}, {loss if lag else 'clip, GAE'}"
        print(f"{name:<52} {means} [{low:.0f}, {high:.0f}]")


if __name__ == "__main__":
    main()
