"""
Peers instead of a critic: what a step was worth is told by the other members of a group.

Eight environments of a group start each episode in the same state (the `GroupedStart` wrapper sees to it) and are compared
with each other. GRPO here gives each step the return from there on; the published form, one number for a whole episode, is
`credit="outcome"`; PPO with its critic learns beside them. Prints the time steps that each needed, draws their curves.

    python examples/grpo_groups.py --steps 200000 --out demo_output
"""

import argparse
import csv
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch as th
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure

from sb3_flow import GRPO, PPO, GroupedStart

matplotlib.use("Agg")
from matplotlib import pyplot as plt

THRESHOLD = 450  # of at most 500
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "GRPO, return-to-go": (GRPO, {"n_steps": 500, "group_size": 8}),
    "GRPO, outcome": (GRPO, {"n_steps": 500, "group_size": 8, "credit": "outcome"}),
    "PPO": (PPO, {"n_steps": 32, "batch_size": 256, "gamma": 0.98, "learning_rate": 1e-3, "backend": "auto"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000, help="time steps of each training")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="folder of the picture and the logs")
    arguments = parser.parse_args()
    out = arguments.out / "grpo_groups"
    th.set_num_threads(1)  # small networks are slower with more

    figure, axis = plt.subplots(figsize=(7, 4))
    for name, (algorithm, settings) in RUNS.items():
        env = make_vec_env("CartPole-v1", n_envs=32, seed=0, wrapper_class=GroupedStart)
        model = algorithm("MlpPolicy", env, seed=0, device="cpu", **settings)
        model.set_logger(configure(str(out / name), ["csv"]))
        model.learn(arguments.steps)
        with (out / name / "progress.csv").open() as file:
            rows = [(row["time/total_timesteps"], row["rollout/ep_rew_mean"]) for row in csv.DictReader(file)]
        steps, returns = np.array([row for row in rows if all(row)], dtype=float).T
        reached = steps[returns >= THRESHOLD]
        when = f"after {reached[0]:.0f} steps" if len(reached) else "not reached"
        print(f"{name:<20} mean return {returns[-1]:5.1f} at the end; {THRESHOLD}: {when}", flush=True)
        axis.plot(steps, returns, label=name)
    axis.set(xlabel="time steps", ylabel="mean return of the last 100 episodes", title="CartPole-v1, 32 environments, seed 0")
    axis.legend()
    figure.savefig(out / "curves.png", dpi=150, bbox_inches="tight")
    print(f"picture: {out / 'curves.png'}")


if __name__ == "__main__":
    main()
