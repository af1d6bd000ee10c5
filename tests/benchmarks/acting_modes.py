"""
RQL's modes of acting on two tasks and two seeds, offline and after an online phase: what the default mode is chosen by.

Run by hand; the datasets are made here (local data), models that are in the folder are not trained again:

    python -m tests.benchmarks.acting_modes --out demo_output/acting_modes

The cube and the maze are OGBench's, 200 logged episodes each. Every row is evaluated on the same start states; fresh and keyed
noise ("deterministic") beside each other, then the modes, deterministic.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import ogbench  # noqa: F401  (registers the environments)
import torch as th
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from sb3_flow import RQL, OfflineDataset
from sb3_flow.data.generate import generate
from sb3_flow.envs import SuccessInfo
from sb3_flow.offline_to_online import compare_acting

SHARED: dict[str, Any] = {"learning_rate": 1e-3, "tau": 0.02, "offline_fraction": 0.5, "alpha": 5.0, "expectile": 0.7}
TASKS: dict[str, dict[str, Any]] = {
    "pointmaze-medium-navigate": {**SHARED, "gamma": 0.995, "horizon_length": 10, "n_critics": 2},
    "cube-single-play": {**SHARED, "gamma": 0.99, "horizon_length": 5, "n_critics": 2},
}
EPISODES_OF_DATA = 200


def environment(name: str, n_envs: int) -> Any:
    return make_vec_env(f"{name.rsplit('-', 1)[0]}-singletask-v0", n_envs=n_envs, wrapper_class=SuccessInfo)


def train(name: str, seed: int, arguments: argparse.Namespace) -> None:
    """Train a model in both phases, unless it is there."""
    path = arguments.out / f"{name}_{seed}"
    if Path(f"{path}_online.pkl").exists():
        return
    file = arguments.out / "data" / f"{name}-v0.npz"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        generate(name, EPISODES_OF_DATA, workers=1, seed=0, out=file.parent)
    dataset = OfflineDataset.load(f"ogbench:{name}-singletask-v0@{file}")
    env = VecNormalize(environment(name, 1), norm_reward=False)
    networks = {"net_arch": [128, 128, 128]}
    model = RQL("MlpPolicy", env, seed=seed, policy_kwargs=networks, device="cpu", **TASKS[name])
    model.learn_offline(dataset, arguments.offline_steps, log_interval=None)
    model.save(f"{path}_offline")
    env.save(f"{path}_offline.pkl")
    model.learn(arguments.online_steps, log_interval=10**9)
    model.save(f"{path}_online")
    env.save(f"{path}_online.pkl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_output/acting_modes"), help="folder of data and models")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--offline-steps", type=int, default=10_000)
    parser.add_argument("--online-steps", type=int, default=2_500)
    parser.add_argument("--episodes", type=int, default=50)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    th.set_num_threads(1)
    for name in arguments.tasks:
        for seed in arguments.seeds:
            train(name, seed, arguments)
            for phase in ("offline", "online"):
                path = arguments.out / f"{name}_{seed}_{phase}"
                env = VecNormalize.load(f"{path}.pkl", environment(name, 10))
                env.training = False
                model = RQL.load(path, env=env)
                print(f"\n{name}, seed {seed}, {phase}; {arguments.episodes} episodes a row; local data")
                for deterministic in (False, True):
                    np.random.seed(0)  # OGBench draws its start noise from NumPy's global generator
                    print("deterministic" if deterministic else "fresh noise", flush=True)
                    compare_acting(model, env, arguments.episodes, deterministic=deterministic)


if __name__ == "__main__":
    main()
