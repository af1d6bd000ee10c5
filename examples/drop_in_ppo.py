"""
Swap one import: the same script with SB3's PPO and with ours, and how fast each of them is here.

Both learn CartPole with the same settings, one after the other, on one thread each. The clock runs over a whole `learn`, after
a short one that pays for what happens once (imports; compilation, the first time on a machine).

    python examples/drop_in_ppo.py --steps 30000
"""

import argparse
import time

import stable_baselines3
import torch as th
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

import sb3_flow


def train(algorithm: type[stable_baselines3.PPO], steps: int, **settings: object) -> tuple[float, float]:
    """:return: time steps per second of `learn`, and the mean return of 20 episodes afterwards"""
    env = make_vec_env("CartPole-v1", n_envs=8, seed=0)
    model = algorithm("MlpPolicy", env, n_steps=256, seed=0, device="cpu", **settings)
    model.learn(1)  # one rollout and its update
    start = time.perf_counter()
    model.learn(steps)
    speed = model.num_timesteps / (time.perf_counter() - start)
    return speed, evaluate_policy(model, make_vec_env("CartPole-v1", n_envs=8, seed=1), n_eval_episodes=20)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30_000, help="time steps of each training")
    arguments = parser.parse_args()
    th.set_num_threads(1)  # small networks are slower with more

    print(f"{'CartPole-v1, 8 environments':<40} {'steps/s':>8} {'x SB3':>6} {'return':>7}", flush=True)
    base = None
    for name, algorithm, settings in (
        ("stable_baselines3.PPO", stable_baselines3.PPO, {}),
        ("sb3_flow.PPO", sb3_flow.PPO, {}),
        ('sb3_flow.PPO(backend="torch")', sb3_flow.PPO, {"backend": "torch"}),  # SB3's numbers to the last bit
    ):
        speed, reward = train(algorithm, arguments.steps, **settings)
        base = base or speed
        print(f"{name:<40} {speed:8.0f} {speed / base:6.1f} {reward:7.1f}", flush=True)


if __name__ == "__main__":
    main()
