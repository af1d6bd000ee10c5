"""
Collect while learning: PPO and AsyncPPO beside each other, and what the second one logs.

The environments of AsyncPPO run in a process of their own, so that they are stepped while the other process learns. The most
that this can be worth is twice the speed, where a rollout takes as long as an update; `async/wait_*` tell which side waits for
the other. V-trace corrects for the lag, the number of updates since the policy acted.

    python examples/async_ppo.py --steps 60000 --out demo_output
"""

import argparse
import csv
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure

from sb3_flow import PPO, AsyncPPO

SETTINGS: dict[str, Any] = {"n_steps": 128, "batch_size": 256, "gamma": 0.9, "learning_rate": 1e-3, "seed": 0, "device": "cpu"}
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "PPO": (PPO, {}),
    'AsyncPPO(mode="lockstep")': (AsyncPPO, {"mode": "lockstep"}),
    'AsyncPPO(mode="free")': (AsyncPPO, {"mode": "free"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60_000, help="time steps of each training")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="folder of the logs")
    arguments = parser.parse_args()
    out = arguments.out / "async_ppo"
    th.set_num_threads(1)  # the collector has the other core

    print(f"{'Pendulum-v1, 16 environments':<30} {'steps/s':>8} {'return':>8}   of a rollout", flush=True)
    for name, (algorithm, settings) in RUNS.items():
        env = make_vec_env("Pendulum-v1", n_envs=16, seed=0)
        model = algorithm("MlpPolicy", env, **SETTINGS, **settings)
        model.learn(1)  # what happens once: imports, the start of the collector
        model.set_logger(configure(str(out / name.replace('"', "")), ["csv"]))
        start = time.perf_counter()
        model.learn(arguments.steps)
        speed = model.num_timesteps / (time.perf_counter() - start)
        returns = [episode["r"] for episode in model.ep_info_buffer]
        with Path(model.logger.dir, "progress.csv").open() as file:
            rows = list(csv.DictReader(file))
        found = {key: np.mean([float(row[key]) for row in rows]) for key in rows[0] if key.startswith("async/")}
        logged = ", ".join(f"{key.removeprefix('async/')} {value:.2f}" for key, value in found.items())
        print(f"{name:<30} {speed:8.0f} {np.mean(returns or [np.nan]):8.1f}   {logged}", flush=True)
        if isinstance(model, AsyncPPO):
            model.close()  # ends the collector process
    print(f"logs: {out}")


if __name__ == "__main__":
    main()
