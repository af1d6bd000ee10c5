"""
Offline RL from data with two ways of doing the same thing, which a flow policy can represent.

A point has to get past a swamp. The policy that is logged passes it on either side at random, at half speed and with a shaking
hand; its mean goes straight into the swamp. RQL learns from the log alone. Compared are the log, behaviour cloning by the same
network, and RQL, each from fresh noise and from zero noise; the picture shows the paths.

    python examples/offline_rql.py --out demo_output
"""

import argparse
from pathlib import Path

import gymnasium as gym
import matplotlib
import numpy as np
import torch as th
from gymnasium import spaces

from sb3_flow import RQL, OfflineDataset

matplotlib.use("Agg")
from matplotlib import pyplot as plt

GOAL = np.array([1.0, 0.0])


class Detour(gym.Env):
    """From about (-1, 0) to (1, 0), reward -1 a step; within 0.4 of (0, 0) steps are a fifth as long."""

    observation_space = spaces.Box(-2, 2, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.position = np.array([-1.0, 0.0]) + self.np_random.uniform(-0.1, 0.1, 2)
        return self.position.astype(np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        length = 0.02 if np.linalg.norm(self.position) < 0.4 else 0.1
        self.position = np.clip(self.position + length * action, -2, 2)
        arrived = bool(np.linalg.norm(self.position - GOAL) < 0.15)
        return self.position.astype(np.float32), -1.0, arrived, False, {}


def play(env: gym.Env, act: object, episodes: int) -> list[list[tuple]]:
    """:return: episodes of rows: observation, action, reward, terminated, end of the trajectory, next observation"""
    played = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=episode)
        rows: list[tuple] = []
        while not rows or not rows[-1][4]:
            action = act(observation, len(rows))
            successor, reward, terminated, truncated, _ = env.step(action)
            rows.append((observation, action, reward, terminated, terminated or truncated, successor))
            observation = successor
        played.append(rows)
    return played


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200, help="episodes of the log")
    parser.add_argument("--steps", type=int, default=2_500, help="gradient steps of each training")
    parser.add_argument("--eval-episodes", type=int, default=50, help="episodes of each row of the table")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="folder of the picture and the model")
    arguments = parser.parse_args()
    out = arguments.out / "offline_rql"
    out.mkdir(parents=True, exist_ok=True)
    th.set_num_threads(1)  # small networks are slower with more
    env, rng, side = gym.wrappers.TimeLimit(Detour(), 100), np.random.default_rng(0), [1.0]

    def scripted(position: np.ndarray, step: int) -> np.ndarray:
        if step == 0:
            side[0] = rng.choice([-1.0, 1.0])
        direction = (GOAL if position[0] > 0 else np.array([0.1, 0.7 * side[0]])) - position
        return np.clip(0.5 * direction / np.linalg.norm(direction) + rng.normal(0, 0.5, 2), -1, 1).astype(np.float32)

    played = {"logged": play(env, scripted, arguments.episodes)}
    columns = [np.array(column) for column in zip(*(row for rows in played["logged"] for row in rows), strict=True)]
    dataset = OfflineDataset.from_arrays(*columns, observation_space=env.observation_space, action_space=env.action_space)
    print(dataset.summary(), end="\n\n", flush=True)
    for name, objective in (("behaviour cloning", "bc"), ("RQL", "rql")):
        model = RQL(
            *("MlpPolicy", None),
            learning_rate=1e-3,
            tau=0.02,
            gamma=0.98,
            alpha=0.03,
            flow_steps=5,
            n_critics=2,
            objective=objective,
            offline_dataset=dataset,
            policy_kwargs={"net_arch": [64, 64]},
            seed=0,
            device="cpu",
        )
        model.learn_offline(dataset, arguments.steps, log_interval=None)
        for mode, noise in (("sample", "fresh noise"), ("zero", "zero noise")):
            model.set_acting_mode(mode)
            played[f"{name}, {noise}"] = play(
                env, lambda position, _, model=model: model.predict(position)[0], arguments.eval_episodes
            )
    model.save(out / "model")

    figure, axes = plt.subplots(1, len(played), figsize=(18, 3.5), sharey=True)
    for axis, (name, episodes) in zip(axes, played.items(), strict=True):
        returns = np.array([sum(row[2] for row in rows) for rows in episodes])
        arrived, error = np.mean([rows[-1][3] for rows in episodes]), 1.96 * returns.std(ddof=1) / np.sqrt(len(returns))
        print(
            f"{name:<30} arrives {arrived:4.2f}, return {returns.mean():6.1f} +- {error:.1f} ({len(returns)} episodes, 95 %)"
        )
        for rows in episodes[:50]:
            axis.plot(*np.array([rows[0][0], *(row[5] for row in rows)]).T, linewidth=0.7)
        axis.add_patch(plt.Circle((0, 0), 0.4, color="lightgray"))
        axis.set(title=f"{name}: {returns.mean():.1f}", xlim=(-1.3, 1.3), ylim=(-1.2, 1.2), aspect="equal")
    figure.savefig(out / "paths.png", dpi=150, bbox_inches="tight")
    print(f"picture: {out / 'paths.png'}, model: {out / 'model.zip'}")


if __name__ == "__main__":
    main()
