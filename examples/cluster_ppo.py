"""
Collect on a Ray cluster: AsyncPPO with actors in place of processes, and SB3's SAC in a RayVecEnv.

On one machine this starts a local Ray, which ends with the script. On a cluster start the head with `ray start --head`, the
other machines with `ray start --address HEAD:6379`, each with the same packages, and give `--address auto` on one of them.

    python examples/cluster_ppo.py --collectors 2 --steps 60000
    python examples/cluster_ppo.py --address auto --collectors 16 --steps 1000000
"""

import argparse
import time
from functools import partial

import numpy as np
import ray
import torch as th
from stable_baselines3 import SAC
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_flow import AsyncPPO
from sb3_flow.envs import RayVecEnv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="local", help="of the cluster: auto, local, or host:port (default: local)")
    parser.add_argument("--collectors", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60_000, help="time steps of AsyncPPO; SAC makes a hundredth")
    arguments = parser.parse_args()
    th.set_num_threads(1)
    local = {"num_cpus": arguments.collectors, "include_dashboard": False} if arguments.address == "local" else {}
    ray.init(address=arguments.address, **local)

    # each collector makes 8 environments where it runs; they are never stepped here
    make = partial(make_vec_env, "CartPole-v1", n_envs=8)
    settings = {"n_steps": 128, "batch_size": 256, "gamma": 0.98, "learning_rate": 1e-3, "seed": 0, "device": "cpu"}
    model = AsyncPPO("MlpPolicy", make, n_collectors=arguments.collectors, collectors="ray", mode="sync", **settings)
    model.learn(1)  # starts the actors
    start = time.perf_counter()
    model.learn(arguments.steps)
    seconds = time.perf_counter() - start
    returns = [episode["r"] for episode in model.ep_info_buffer]
    model.close()  # gives the cluster's CPUs back
    print(
        f"AsyncPPO, {arguments.collectors} actors: {model.num_timesteps / seconds:.0f} steps/s, return {np.mean(returns):.0f}"
    )

    # any algorithm of SB3: the environments are stepped elsewhere, the algorithm runs here
    env = make_vec_env(
        "Pendulum-v1", n_envs=4, seed=0, vec_env_cls=RayVecEnv, vec_env_kwargs={"n_actors": min(arguments.collectors, 4)}
    )
    sac = SAC("MlpPolicy", env, learning_starts=100, seed=0, device="cpu", policy_kwargs={"net_arch": [32]})
    sac.learn(max(arguments.steps // 100, 200))
    mean, _ = evaluate_policy(sac, env, n_eval_episodes=4, warn=False)
    print(f"SAC in a RayVecEnv: {sac.num_timesteps} steps, return {mean:.0f}")
    env.close()


if __name__ == "__main__":
    main()
