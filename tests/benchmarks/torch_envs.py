"""
PPO on Gymnasium's CartPole in JAX, stepped by tensors, beside SB3's PPO, which steps the same environments through NumPy.

Run by hand: ``python -m tests.benchmarks.torch_envs`` (``pip install 'sb3-flow[jax]'``). ``speed`` prints environment steps
per second of ``learn``: both learn in turns, in one process and from the same environments, with the same arguments, and with
a learning rate of 0, so that episodes stay alike: JAX compiles anew for each number of environments that reset at once, which
is done before. ``alone`` is the time of the environments themselves. ``learn`` prints the steps and seconds until the mean
return of the last 100 episodes reaches 475.
"""

import argparse
import statistics
import time
from typing import Any

import stable_baselines3
import torch as th
from stable_baselines3.common.callbacks import BaseCallback

import sb3_flow
from sb3_flow.envs import JaxVecEnv

TASK = "phys2d/CartPole-v1"


def compile_resets(env: JaxVecEnv, counts: range) -> None:
    """Have JAX compile the reset of each number of environments."""
    import jax.numpy as jnp

    env.reset_tensors()
    for count in counts:
        env.envs.unwrapped.prev_done = jnp.arange(env.num_envs) < count
        env.step_tensors(th.zeros(env.num_envs, dtype=th.int64))


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """:return: arguments of both algorithms"""
    return {"n_steps": given.n_steps, "batch_size": given.batch_size, "n_epochs": given.n_epochs, "seed": 0, "device": "cpu"}


def speed(given: argparse.Namespace) -> None:
    """Compare steps per second."""
    env = JaxVecEnv(TASK, given.n_envs)
    rollout = given.n_steps * given.n_envs
    models: dict[str, Any] = {
        "SB3's PPO": stable_baselines3.PPO("MlpPolicy", env, learning_rate=0.0, **settings(given)),
        "ours, torch": sb3_flow.PPO("MlpPolicy", env, learning_rate=0.0, backend="torch", **settings(given)),
        "ours": sb3_flow.PPO("MlpPolicy", env, learning_rate=0.0, **settings(given)),
    }
    print(f"backend of ours: {models['ours'].chosen_backend}")
    compile_resets(env, range(round(0.02 * given.n_envs), round(0.08 * given.n_envs)))
    for model in models.values():
        model.learn(given.warm_up * rollout)
    rates: dict[str, list[float]] = {name: [] for name in (*models, "alone")}
    for _ in range(given.rounds):
        for name, model in models.items():
            since = time.perf_counter()
            model.learn(given.iterations * rollout, reset_num_timesteps=False)
            rates[name].append(given.iterations * rollout / (time.perf_counter() - since))
        since = time.perf_counter()
        for _ in range(given.iterations * given.n_steps):
            env.step_tensors(th.randint(2, (given.n_envs,)))
        rates["alone"].append(given.iterations * rollout / (time.perf_counter() - since))
    reference = statistics.median(rates["SB3's PPO"])
    for name, found in rates.items():
        median = statistics.median(found)
        print(f"{name:12} {median:9.0f} steps/s   {median / reference:.2f}   ({min(found):.0f} to {max(found):.0f})")


class Until(BaseCallback):
    """Ends training at the threshold."""

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.reached = (
            bool(self.model.ep_info_buffer) and statistics.mean(one["r"] for one in self.model.ep_info_buffer) >= 475
        )


def learn(given: argparse.Namespace) -> None:
    """Learn to 475."""
    model = sb3_flow.PPO("MlpPolicy", JaxVecEnv(TASK, given.n_envs), learning_rate=1e-3, gamma=0.98, **settings(given))
    until, since = Until(), time.perf_counter()
    while not getattr(until, "reached", False) and model.num_timesteps < given.most:
        model.learn(given.n_steps * given.n_envs, callback=until, reset_num_timesteps=False)
    mean = statistics.mean(one["r"] for one in model.ep_info_buffer)
    seconds = time.perf_counter() - since
    print(f"mean return {mean:.0f} after {model.num_timesteps} steps, {seconds:.0f} s with JAX's compilations")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="speed", choices=("speed", "learn"))
    parser.add_argument("--n-envs", type=int, default=1024)
    parser.add_argument("--n-steps", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--n-epochs", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=8, help="rollouts in a timed run")
    parser.add_argument("--warm-up", type=int, default=12, help="rollouts of each before")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=int, default=20_000_000, help="most steps of `learn`")
    given = parser.parse_args()
    th.set_num_threads(1)
    {"speed": speed, "learn": learn}[given.what](given)


if __name__ == "__main__":
    main()
