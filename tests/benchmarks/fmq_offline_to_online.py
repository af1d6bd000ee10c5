"""
FMQ on a point maze: offline, then 20,000 environment steps online, with guidance and with imitation alone, over several seeds.

Run by hand: ``python -m tests.benchmarks.fmq_offline_to_online --workers 2`` (half an hour on two cores). The
data are made locally: statistically, not bitwise, the published ones. Of every seed one model is trained offline and both
rules go on from it. Prints the success rates over seeds and episodes with 95% intervals (Wilson's over all episodes; the
seeds' means beside it).
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import ogbench  # noqa: F401  (registers the environments)
import torch as th
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize, sync_envs_normalization

from sb3_flow import FMQ, OfflineDataset
from sb3_flow.common.statistics import success_interval
from sb3_flow.data.generate import generate
from sb3_flow.envs import SuccessInfo

EPISODES = 50
SETTINGS = {
    "learning_rate": 1e-3,
    "learning_starts": 0,
    "tau": 0.02,
    "gamma": 0.995,
    "train_freq": 4,
    "horizon_length": 10,
    "n_candidates": 8,
    "warmup_steps": 500,
    "anneal_end_step": 3_000,
    "offline_fraction": 0.5,
    "policy_kwargs": {"net_arch": [128, 128, 128]},
}


def evaluate(model: FMQ, task: str, mode: str = "best_of_n") -> tuple[np.ndarray, np.ndarray]:
    """:return: successes and returns"""
    model.set_acting_mode(mode)
    env = VecNormalize(make_vec_env(task, n_envs=10, wrapper_class=SuccessInfo), training=False, norm_reward=False)
    sync_envs_normalization(model.get_env(), env)
    successes: list[bool] = []

    def note(local: dict, _: dict) -> None:
        if local["done"]:
            successes.append(local["info"]["is_success"])

    np.random.seed(0)  # OGBench draws its start noise from NumPy's global generator
    returns, _ = evaluate_policy(
        model, env, n_eval_episodes=EPISODES, deterministic=False, callback=note, return_episode_rewards=True
    )
    return np.array(successes), np.array(returns)


def run(seed: int, arguments: argparse.Namespace) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    th.set_num_threads(1)
    task = f"{arguments.maze}-singletask-task{arguments.task}-v0"
    file = arguments.data / f"{arguments.maze}-navigate-v0.npz"
    dataset = OfflineDataset.load(f"ogbench:{arguments.maze}-navigate-singletask-task{arguments.task}-v0@{file}")
    results = {}

    def report(name: str, model: FMQ, *mode: str) -> None:
        results[name] = evaluate(model, task, *mode)
        success, returns = (part.mean() for part in results[name])
        print(f"seed {seed}  {name:<44} success {success:4.2f}  return {returns:7.1f}", flush=True)

    def environment() -> VecNormalize:
        return VecNormalize(make_vec_env(task, wrapper_class=SuccessInfo, seed=seed), norm_reward=False)

    model = FMQ("MlpPolicy", environment(), seed=seed, **SETTINGS)
    model.learn_offline(dataset, arguments.offline_steps, log_interval=None)
    report("behaviour cloning (one sample)", model, "sample")
    report("FMQ offline (best of n)", model)
    path = arguments.out / f"offline_{seed}"
    model.save(path)
    model.get_env().save(str(path) + ".vecnormalize.pkl")
    for rule in arguments.rules:
        env = VecNormalize.load(str(path) + ".vecnormalize.pkl", environment().venv)
        model = FMQ.load(path, env=env, online_rule=rule)
        model.set_offline_dataset(dataset)
        for part in range(arguments.parts):
            model.learn(arguments.online_steps // arguments.parts, reset_num_timesteps=part == 0, log_interval=10**9)
            report(f"online_rule={rule!r}, {model.num_timesteps} steps", model)
        report(f"online_rule={rule!r}, one sample", model, "sample")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maze", default="pointmaze-large")
    parser.add_argument("--task", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--offline-steps", type=int, default=500, help="few: with 3,000 it is solved offline")
    parser.add_argument("--online-steps", type=int, default=20_000)
    parser.add_argument("--parts", type=int, default=2, help="evaluations of the online phase")
    parser.add_argument("--rules", nargs="+", default=["fmq", "bc"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data", type=Path, default=Path("demo_output/data"))
    parser.add_argument("--out", type=Path, default=Path("demo_output/fmq"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    arguments.data.mkdir(parents=True, exist_ok=True)
    if not (arguments.data / f"{arguments.maze}-navigate-v0.npz").exists():
        generate(f"{arguments.maze}-navigate", 200, workers=arguments.workers, seed=0, out=arguments.data)
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("forkserver")) as pool:
        runs = list(pool.map(run, arguments.seeds, [arguments] * len(arguments.seeds)))
    print(f"\n{arguments.maze} task {arguments.task}, {len(runs)} seeds x {EPISODES} episodes; local data")
    for name in runs[0]:
        success, returns = (np.concatenate([one[name][i] for one in runs]) for i in (0, 1))
        _, low, high = success_interval(success.mean(), len(success))
        means = ", ".join(f"{one[name][0].mean():.2f}" for one in runs)
        print(f"{name:<44} {success.mean():4.2f} [{low:4.2f}, {high:4.2f}]  return {returns.mean():7.1f}  seeds: {means}")


if __name__ == "__main__":
    main()
