"""
Prioritised replay beside uniform draws: the time of an update, the updates that a chain of rewards takes, and a task of SB3's.

Run by hand: ``python -m tests.benchmarks.prioritized_replay time`` (or ``chain``, or ``pendulum``).
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_flow import FQL, RLPD, RQL, OfflineDataset
from sb3_flow.data import PrioritizedReplayBuffer

GAMMA = 0.9
KINDS = ("prioritised", "uniform", "never told")


def given(kind: str, **kwargs: float) -> dict[str, Any]:
    """Make the arguments of a model: ``"never told"`` draws by priorities that no update changes."""
    if kind == "uniform":
        return {"sampling": "transition"}
    buffer = NeverTold if kind == "never told" else PrioritizedReplayBuffer
    return {"replay_buffer_class": buffer, "replay_buffer_kwargs": kwargs}


class NeverTold(PrioritizedReplayBuffer):
    """A mistake: errors are taken and forgotten."""

    def update_priorities(self, numbers: th.Tensor, errors: th.Tensor, valid: th.Tensor) -> None:
        self.was_told = True


def chain(n: int, others: int) -> OfflineDataset:
    """Make an episode along n states with reward 1 at its end, among many episodes of a single step without reward."""
    states = np.concatenate([np.arange(n), np.full(others, n)])
    successors = np.concatenate([np.arange(1, n), np.full(others + 1, n)])
    ends, one_hot = states >= n - 1, np.eye(n + 1, dtype=np.float32)
    actions, rewards = np.zeros((len(states), 1), np.float32), (states == n - 1).astype(np.float32)
    arrays = one_hot[states], actions, rewards, ends, ends
    return OfflineDataset.from_arrays(
        *arrays, next_observations=one_hot[successors], action_space=spaces.Box(-1, 1, (1,)), source="a chain"
    )


def updates_of_chain(kind: str, seed: int, limit: int, n: int = 8, others: int = 2000) -> int:
    """Count updates until every value along the chain is right to 0.1; at most ``limit``."""
    dataset = chain(n, others)
    model = FQL(
        "MlpPolicy",
        None,
        offline_dataset=dataset,
        learning_rate=0.03,
        batch_size=32,
        tau=0.05,
        gamma=GAMMA,
        n_critics=2,
        flow_steps=1,
        buffer_size=1,
        policy_kwargs={"net_arch": {"pi": [16], "qf": []}},
        seed=seed,
        device="cpu",
        **given(kind, alpha=0.8),
    )
    observations, actions = th.eye(n + 1)[:n], th.zeros(n, 1)
    truth = GAMMA ** th.arange(n - 1, -1, -1.0)

    class Right(BaseCallback):
        def _on_step(self) -> bool:
            if self.n_calls % 25 == 0:
                with th.no_grad():
                    values = model.critic.bind(observations)(actions).mean(dim=0)
                return bool((values - truth).abs().max() >= 0.1)
            return True

    model.learn_offline(dataset, limit, Right(), log_interval=None)
    return model.offline_updates


def tell_chain(seeds: int) -> None:
    print("updates until all values of a chain of 8 states among 2000 others are right to 0.1 (at most 1500)")
    for kind in KINDS:
        print(f"{kind:12}", *(updates_of_chain(kind, seed, 1500) for seed in range(seeds)))


def tell_time(rows: int) -> None:
    rng = np.random.default_rng(0)
    ends = np.arange(rows) % 200 == 199
    observations, actions = rng.normal(size=(rows, 8)).astype(np.float32), rng.uniform(-1, 1, (rows, 2)).astype(np.float32)
    bounds = {"action_space": spaces.Box(-1, 1, (2,)), "next_observations": np.roll(observations, -1, axis=0)}
    dataset = OfflineDataset.from_arrays(observations, actions, rng.normal(size=rows), ends, ends, **bounds)
    models: dict[str, Any] = {}
    for kind in ("prioritised", "uniform"):
        models[kind] = RQL("MlpPolicy", None, offline_dataset=dataset, buffer_size=1, seed=0, device="cpu", **given(kind))
        models[kind].learn_offline(dataset, 5, log_interval=None)
    seconds: dict[str, list[float]] = {kind: [] for kind in models}
    of_draw: dict[str, list[float]] = {kind: [] for kind in models}
    for _ in range(60):
        for kind, model in models.items():
            start = time.perf_counter()
            model.train(1, 256)
            seconds[kind].append(time.perf_counter() - start)
            start = time.perf_counter()
            batch = model.replay_buffer.sample(256)
            if kind == "prioritised":
                model.replay_buffer.update_priorities(batch.numbers, batch.rewards[:, 0], batch.valid[:, 0])
            of_draw[kind].append(time.perf_counter() - start)
    print(f"{rows} windows, batches of 256, {th.get_num_threads()} threads; milliseconds, median")
    for kind in models:
        update, draw = (1000 * statistics.median(times[kind]) for times in (seconds, of_draw))
        print(f"{kind:12} an update of RQL with the default networks {update:.2f}, of which draw and priorities {draw:.2f}")


def tell_pendulum(seeds: int, steps: int) -> None:
    import gymnasium as gym

    print(f"Pendulum-v1, RLPD online, {steps} steps: mean return of 20 episodes")
    for kind in ("prioritised", "uniform"):
        returns = []
        for seed in range(seeds):
            env = DummyVecEnv([lambda: gym.make("Pendulum-v1")])
            small = {"n_critics": 2, "policy_kwargs": {"net_arch": [64, 64]}, "learning_rate": 1e-3, "batch_size": 128}
            model = RLPD("MlpPolicy", env, seed=seed, device="cpu", buffer_size=20_000, **small, **given(kind))
            model.learn(steps, log_interval=10_000)
            env.seed(1000)
            returns.append(evaluate_policy(model, env, n_eval_episodes=20)[0])
        print(f"{kind:12}", *(f"{value:.0f}" for value in returns), f"mean {np.mean(returns):.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["time", "chain", "pendulum"])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--steps", type=int, default=3_000)
    arguments = parser.parse_args()
    th.set_num_threads(1)
    if arguments.part == "time":
        tell_time(arguments.rows)
    elif arguments.part == "chain":
        tell_chain(arguments.seeds)
    else:
        tell_pendulum(arguments.seeds, arguments.steps)


if __name__ == "__main__":
    main()
