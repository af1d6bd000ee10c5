"""
What PPO, GRPO and GSPO learn in a given number of environment steps, over seeds.

Run by hand: ``python -m tests.benchmarks.on_policy_learning --task CartPole-v1 --workers 2`` (likewise ``Pendulum-v1``,
``HalfCheetah-v5``). Every algorithm gets the same number of time steps, the steps included that GRPO's rollouts of whole
episodes cannot use. Two figures of each seed: the mean return of the training episodes in the last tenth of the steps (the
policy that samples), and of 50 episodes of the deterministic policy at the end. Printed are interquartile means over the
seeds, with 95% bootstrap intervals.
"""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_flow import GRPO, GSPO, PPO, GroupedStart
from sb3_flow.common.statistics import bootstrap_interval

STEPS = {"CartPole-v1": 200_000, "Pendulum-v1": 800_000, "HalfCheetah-v5": 1_000_000}
# PPO with 8 environments, the group methods with 32
PPO_SETTINGS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"n_steps": 128, "batch_size": 256, "n_epochs": 10, "gamma": 0.98, "learning_rate": 1e-3},
    "Pendulum-v1": {"n_steps": 128, "batch_size": 256, "n_epochs": 10, "gamma": 0.9, "learning_rate": 1e-3},
    "HalfCheetah-v5": {"n_steps": 256, "batch_size": 256, "n_epochs": 10},
}
GROUP_SETTINGS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"n_steps": 500},
    "Pendulum-v1": {"n_steps": 200},
    "HalfCheetah-v5": {"n_steps": 1000},
}
ALGORITHMS: dict[str, tuple[type[PPO], dict[str, Any]]] = {
    "PPO, GAE": (PPO, {}),
    "PPO, V-trace": (PPO, {"advantage": "vtrace"}),
    "GRPO, return-to-go": (GRPO, {}),
    "GRPO, outcome": (GRPO, {"credit": "outcome"}),
    "GSPO": (GSPO, {}),
}


class LastEpisodes(BaseCallback):
    """Returns of the training episodes that end in the last tenth of the steps."""

    def __init__(self, total: int):
        super().__init__()
        self.total = total
        self.returns: list[float] = []

    def _on_step(self) -> bool:
        if self.num_timesteps > 0.9 * self.total:
            alive = self.locals.get("alive")
            infos = [info for i, info in enumerate(self.locals["infos"]) if alive is None or alive[i]]
            self.returns += [info["episode"]["r"] for info in infos if "episode" in info]
        return True


def run(
    name: str, task: str, seed: int, steps: int, n_envs: int, backend: str, settings: dict[str, Any]
) -> tuple[float, float, float]:
    """:return: last training returns, evaluation, seconds"""
    th.set_num_threads(1)
    algorithm, choice = ALGORITHMS[name]
    if issubclass(algorithm, GRPO):
        env = make_vec_env(task, n_envs=n_envs, seed=seed, wrapper_class=GroupedStart)
        kwargs = {**GROUP_SETTINGS[task], **choice, **settings}
    else:
        env = make_vec_env(task, n_envs=8, seed=seed)
        kwargs = {**PPO_SETTINGS[task], **choice}
    model = algorithm("MlpPolicy", env, seed=seed, device="cpu", backend=backend, **kwargs)
    last, start = LastEpisodes(steps), time.perf_counter()
    model.learn(steps, callback=last)
    seconds = time.perf_counter() - start
    evaluated, _ = evaluate_policy(model, make_vec_env(task, n_envs=10, seed=1000 + seed), n_eval_episodes=50)
    trained = float(np.mean(last.returns)) if last.returns else float("nan")
    print(f"{task} seed {seed}  {name:<20} training {trained:8.1f}  evaluation {evaluated:8.1f}  {seconds:5.0f} s", flush=True)
    return trained, float(evaluated), seconds


def summary(values: list[float]) -> str:
    """:return: interquartile mean and its interval"""
    if len(values) < 2:
        return f"{values[0]:7.1f}"
    value, low, high = bootstrap_interval(values)
    return f"{value:7.1f} [{low:.1f}, {high:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="CartPole-v1", choices=sorted(STEPS))
    parser.add_argument("--steps", type=int, default=None, help="default: 200k, 800k and 1M")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--n-envs", type=int, default=32, help="of the group methods")
    parser.add_argument("--backend", default="native", choices=("native", "torch"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other settings of the group methods")
    arguments = parser.parse_args()
    settings = {name: eval(value) for name, value in (one.split("=") for one in arguments.set)}
    steps = arguments.steps or STEPS[arguments.task]
    jobs = [(name, seed) for name in arguments.algorithms for seed in range(arguments.seeds)]
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("forkserver")) as pool:
        futures = {
            job: pool.submit(run, job[0], arguments.task, job[1], steps, arguments.n_envs, arguments.backend, settings)
            for job in jobs
        }
        results = {job: future.result() for job, future in futures.items()}
    print(f"\n{arguments.task}, {steps} steps, {arguments.seeds} seeds, {arguments.backend} backend;", end=" ")
    print("interquartile means with 95% bootstrap intervals")
    print(f"{'':<20} {'last training episodes':>30} {'deterministic policy':>30} {'seconds':>8}")
    for name in arguments.algorithms:
        trained, evaluated, seconds = zip(*(results[name, seed] for seed in range(arguments.seeds)), strict=True)
        print(f"{name:<20} {summary(trained):>30} {summary(evaluated):>30} {np.median(seconds):8.0f}")


if __name__ == "__main__":
    main()
