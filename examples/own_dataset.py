"""
Data of your own: log episodes of your environment, train on them, evaluate.

The environment is a boat that has to dock while a current drives it away. The controller that is logged steers towards the
dock, knows nothing of the current, and its hand shakes. Training sees its episodes alone, never the environment.

    python examples/own_dataset.py             # the log: plain arrays
    python examples/own_dataset.py --minari    # the log: a Minari dataset on disk (extra `minari`)
"""

import argparse
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_flow import RQL, OfflineDataset


class Boat(gym.Env):
    """Reward -1 a step until the boat is within 0.15 of the dock."""

    observation_space = spaces.Box(-10, 10, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.position = self.np_random.uniform(-1, 1, 2)
        return self.position.astype(np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        current = np.array([0.5, -0.3])
        self.position = np.clip(self.position + 0.1 * (action + current), -10, 10)
        docked = bool(np.linalg.norm(self.position) < 0.15)
        return self.position.astype(np.float32), -1.0, docked, False, {}


gym.register("Boat-v0", Boat, max_episode_steps=50)


def log(env: gym.Env, episodes: int) -> dict[str, np.ndarray]:
    """Play with the controller, one row a step. A time limit ends the trajectory, not the task: it is not `terminated`."""
    rng, rows = np.random.default_rng(0), []
    for episode in range(episodes):
        observation, _ = env.reset(seed=episode)
        done = False
        while not done:
            action = np.clip(-2 * observation + rng.normal(0, 0.7, 2), -1, 1).astype(np.float32)
            successor, reward, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
            rows.append((observation, action, reward, terminated, done, successor))
            observation = successor
    names = ("observations", "actions", "rewards", "terminated", "trajectory_ends", "next_observations")
    return {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def to_minari(arrays: dict[str, np.ndarray], env: gym.Env) -> str:
    """Write the log as a Minari dataset. Its `DataCollector` would log by itself; it needs the extra `minari[create]`."""
    import minari
    from minari.data_collector import EpisodeBuffer

    episodes, first = [], 0
    for last in np.flatnonzero(arrays["trajectory_ends"]):
        rows = slice(first, last + 1)
        terminated = arrays["terminated"][rows]
        episodes.append(
            EpisodeBuffer(
                id=len(episodes),
                observations=np.concatenate([arrays["observations"][rows], arrays["next_observations"][[last]]]),
                actions=arrays["actions"][rows],
                rewards=arrays["rewards"][rows],
                terminations=terminated,
                truncations=arrays["trajectory_ends"][rows] & ~terminated,
            )
        )
        first = last + 1
    name = "boat/controller-v0"
    if name in minari.list_local_datasets():
        minari.delete_dataset(name)
    about = dict.fromkeys(("author", "author_email", "code_permalink", "description"), "none")
    box = {"observation_space": env.observation_space, "action_space": env.action_space}
    minari.create_dataset_from_buffers(name, episodes, algorithm_name="controller", **box, **about)
    return f"minari:{name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200, help="episodes to log")
    parser.add_argument("--steps", type=int, default=2_000, help="gradient steps of each training")
    parser.add_argument("--minari", action="store_true", help="write the log as a Minari dataset and load that")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="folder of the model")
    arguments = parser.parse_args()
    out = arguments.out / "own_dataset"
    th.set_num_threads(1)  # small networks are slower with more

    env = gym.make("Boat-v0")
    arrays = log(env, arguments.episodes)
    if arguments.minari:
        dataset = OfflineDataset.load(to_minari(arrays, env))
    else:
        dataset = OfflineDataset.from_arrays(
            **arrays, observation_space=env.observation_space, action_space=env.action_space, source="the boat's log"
        )
    print(dataset.summary())

    print(f"\n{'controller, as logged':<24} {-len(dataset) / dataset.n_trajectories:6.1f} return", flush=True)
    test_env = make_vec_env(lambda: gym.make("Boat-v0"), n_envs=10, seed=1)
    for name, objective in (("behaviour cloning", "bc"), ("RQL", "rql")):
        model = RQL(
            *("MlpPolicy", None),
            learning_rate=1e-3,
            tau=0.02,
            gamma=0.98,
            alpha=0.1,
            n_critics=2,
            objective=objective,
            offline_dataset=dataset,
            policy_kwargs={"net_arch": [64, 64]},
            seed=0,
            device="cpu",
        )
        model.learn_offline(dataset, arguments.steps, log_interval=None)
        mean, deviation = evaluate_policy(model, test_env, n_eval_episodes=100)
        print(f"{name:<24} {mean:6.1f} +- {1.96 * deviation / 10:.1f} (100 episodes, 95 %)", flush=True)
    model.save(out / "boat")
    print(f"model: {out / 'boat.zip'}")


if __name__ == "__main__":
    main()
