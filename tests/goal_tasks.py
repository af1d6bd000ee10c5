"""A task with goals whose reward is sparse, and what is learnt of it with and without hindsight."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_flow import FQL, RLPD, HerReplayBuffer, OfflineDataset


class Reach(gym.Env):
    """
    A point in a square is to be at a goal: reward 0 within a radius of 0.1, else -1, as in the Fetch tasks.

    :param length: steps of an episode
    :param stops: whether an episode ends at its goal
    """

    def __init__(self, length=30, stops=False):
        self.length, self.stops = length, stops
        square = spaces.Box(-1, 1, (2,), np.float32)
        keys = ("observation", "achieved_goal", "desired_goal")
        self.observation_space, self.action_space = spaces.Dict(dict.fromkeys(keys, square)), square

    def observe(self):
        here = self.x.astype(np.float32)
        return {"observation": here, "achieved_goal": here.copy(), "desired_goal": self.goal.astype(np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        (self.x, self.goal), self.t = self.np_random.uniform(-1, 1, (2, 2)), 0
        return self.observe(), {}

    def step(self, action):
        self.x = np.clip(self.x + 0.1 * np.clip(action, -1, 1), -1, 1)
        self.t += 1
        found = self.observe()
        goals = found["achieved_goal"], found["desired_goal"], {}
        there = bool(self.compute_terminated(*goals))
        return found, float(self.compute_reward(*goals)), there and self.stops, self.t >= self.length, {"is_success": there}

    def compute_terminated(self, achieved, desired, infos):
        return np.linalg.norm(achieved - desired, axis=-1) <= 0.1

    def compute_reward(self, achieved, desired, infos):
        return self.compute_terminated(achieved, desired, infos).astype(np.float32) - 1.0


def wandering(episodes=200, seed=0, env=None):
    """Episodes of a behaviour that knows no goals: it changes its direction every five steps, with noise."""
    env, rng, rows = env or Reach(), np.random.default_rng(seed), []
    env.reset(seed=seed)
    for _ in range(episodes):
        (observation, _), done, t = env.reset(), False, 0
        directions = rng.uniform(-1, 1, (env.length, 2))
        while not done:
            direction = directions[t // 5]
            action = np.clip(direction + 0.3 * rng.normal(size=2), -1, 1).astype(np.float32)
            successor, reward, terminated, truncated, _ = env.step(action)
            done, t = terminated or truncated, t + 1
            rows.append((observation, action, reward, terminated, done, successor))
            observation = successor
    columns = list(zip(*rows, strict=True))
    for i in (0, 5):
        columns[i] = {key: np.stack([row[key] for row in columns[i]]) for key in columns[i][0]}
    spaces_of = {"observation_space": env.observation_space, "action_space": env.action_space}
    return OfflineDataset.from_arrays(*(part if isinstance(part, dict) else np.array(part) for part in columns), **spaces_of)


def success_rate(phase, n_sampled_goal, seed, steps=2000, **changes):
    """
    Train with chunks of five actions, and measure the share of 200 new episodes that are at the goal in the end.

    :param phase: "online" (RLPD, no dataset) or "offline" (FQL)
    :param n_sampled_goal: of the buffer; 0 for no hindsight
    """
    algorithm, own = {"online": (RLPD, {"learning_starts": 300}), "offline": (FQL, {"alpha": 0.3})}[phase]
    shared = {"learning_rate": 1e-3, "gamma": 0.95, "tau": 0.02, "batch_size": 128, "n_critics": 2, "buffer_size": 10_000}
    model = algorithm(
        "MultiInputPolicy",
        DummyVecEnv([Reach]),
        horizon_length=5,
        replay_buffer_class=HerReplayBuffer,
        replay_buffer_kwargs={"n_sampled_goal": n_sampled_goal},
        policy_kwargs={"net_arch": [64, 64]},
        seed=seed,
        **shared | own | changes,
    )
    if phase == "online":
        model.learn(steps)
    else:
        model.learn_offline(wandering(), steps, log_interval=None)
    return evaluate(model)


def evaluate(model, episodes=200):
    venv = DummyVecEnv([Reach] * episodes)
    venv.seed(1)
    observations, state, starts = venv.reset(), None, np.ones(episodes, dtype=bool)
    for _ in range(Reach().length):
        actions, state = model.predict(observations, state, starts, deterministic=True)
        observations, _, starts, infos = venv.step(actions)
    return float(np.mean([info["is_success"] for info in infos]))
