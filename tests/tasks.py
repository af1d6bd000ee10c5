"""Small environments and datasets that several tests share."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from sb3_flow import OfflineDataset


class PointEnv(gym.Env):
    """
    A point on a plane is pushed towards the origin: reward -|x|, success within 0.2 ends the episode.

    :param kind: "box", "dict" or "image" observations
    """

    def __init__(self, kind="box", length=20):
        self.kind, self.length = kind, length
        self.action_space = spaces.Box(-2, 2, (2,))
        box = spaces.Box(-np.inf, np.inf, (2,))
        self.observation_space = {
            "box": box,
            "dict": spaces.Dict({"position": box, "clock": spaces.Box(0, 1, (1,))}),
            "image": spaces.Box(0, 255, (36, 36, 1), dtype=np.uint8),
        }[kind]

    def observe(self):
        if self.kind == "dict":
            return {"position": self.x.astype(np.float32), "clock": np.float32([self.t / self.length])}
        if self.kind == "image":
            image = np.zeros((36, 36, 1), dtype=np.uint8)
            row, column = np.clip((self.x + 1) * 18, 0, 35).astype(int)
            image[row, column] = 255
            return image
        return self.x.astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = self.np_random.uniform(-1, 1, 2), 0
        return self.observe(), {}

    def step(self, action):
        self.x = self.x + 0.1 * np.asarray(action)
        self.t += 1
        success = bool(np.linalg.norm(self.x) < 0.2)
        return self.observe(), -float(np.linalg.norm(self.x)), success, self.t >= self.length, {"success": success}


def collect(env, episodes=20, seed=0, policy=None):
    """Episodes of uniformly random actions (or of ``policy(observation, rng)``) as an OfflineDataset."""
    rng = np.random.default_rng(seed)
    rows = {name: [] for name in ("observations", "actions", "rewards", "terminated", "ends", "next_observations")}
    for episode in range(episodes):
        observation, _ = env.reset(seed=seed * 10_000 + episode)
        done = False
        while not done:
            action = rng.uniform(-2, 2, 2).astype(np.float32) if policy is None else policy(observation, rng)
            successor, reward, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
            for name, value in zip(rows, (observation, action, reward, terminated, done, successor), strict=True):
                rows[name].append(value)
            observation = successor

    def stack(values):
        if isinstance(values[0], dict):
            return {key: np.stack([value[key] for value in values]) for key in values[0]}
        return np.array(values)

    arrays = [stack(values) for values in rows.values()]
    return OfflineDataset.from_arrays(*arrays, observation_space=env.observation_space, action_space=env.action_space)
