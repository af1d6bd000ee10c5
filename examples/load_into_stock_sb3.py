"""
Weights go both ways between our PPO and SB3's: train fast here, deploy or go on there, and come back.

Four ways, each checked by the actions that both models predict: a saved file opened by SB3's class, a file that SB3 saved
opened by ours, parameters handed over in memory, and a policy file. The optimizer's state travels too. `VecNormalize`
statistics are in a file of their own, as ever in SB3: `VecNormalize.load` reads them for either class.

    python examples/load_into_stock_sb3.py --steps 20000 --out demo_output
"""

import argparse
from pathlib import Path

import numpy as np
import stable_baselines3
import torch as th
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_flow import PPO


def compare(name: str, ours: PPO | ActorCriticPolicy, theirs: stable_baselines3.PPO | ActorCriticPolicy) -> None:
    """Print whether both act alike in 1000 random states."""
    observations = np.random.default_rng(0).normal(size=(1000, *ours.observation_space.shape)).astype(np.float32)
    same = np.array_equal(
        ours.predict(observations, deterministic=True)[0], theirs.predict(observations, deterministic=True)[0]
    )
    print(f"{name:<56} actions identical: {same}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="time steps of each training")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="folder of the models")
    arguments = parser.parse_args()
    out = arguments.out / "load_into_stock_sb3"
    th.set_num_threads(1)  # small networks are slower with more

    env = make_vec_env("Pendulum-v1", n_envs=4, seed=0)
    ours = PPO("MlpPolicy", env, backend="auto", gamma=0.9, learning_rate=1e-3, n_steps=1024, seed=0, device="cpu")
    ours.learn(arguments.steps)
    ours.save(out / "ours")

    # what is ours alone (advantage, policy_loss, backend, ...) rides along in the file, and SB3's class ignores it
    stock = stable_baselines3.PPO.load(out / "ours", env=env, device="cpu")
    compare("our file, opened by SB3's PPO", ours, stock)
    steps = [int(next(iter(model.policy.optimizer.state.values()))["step"]) for model in (ours, stock)]
    print(f"steps that Adam has made: ours {steps[0]}, SB3's {steps[1]}; SB3's goes on from there")

    stock.learn(arguments.steps, reset_num_timesteps=False)
    stock.save(out / "stock")
    back = PPO.load(out / "stock", env=env, backend="auto", device="cpu")
    compare("SB3's file, opened by our PPO", back, stock)

    fresh = stable_baselines3.PPO("MlpPolicy", env, device="cpu")
    fresh.set_parameters(ours.get_parameters())
    compare("SB3's set_parameters of our get_parameters", ours, fresh)
    ours.set_parameters(stock.get_parameters())
    compare("our set_parameters of SB3's get_parameters", ours, stock)

    ours.policy.save(out / "policy.pth")
    compare("the policy alone, opened by SB3's ActorCriticPolicy", ours, ActorCriticPolicy.load(out / "policy.pth"))

    reward, _ = evaluate_policy(back, make_vec_env("Pendulum-v1", n_envs=4, seed=1), n_eval_episodes=20)
    print(f"mean return after both trainings: {reward:.0f}; models are in {out}")


if __name__ == "__main__":
    main()
