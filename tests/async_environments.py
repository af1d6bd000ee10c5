"""Environments of the tests of asynchronous collection, which the collector process imports."""

import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv


class Clock(gym.Env):
    """
    Tells the number of the episode and of the step in its observation. Episodes have 3, 4, 5, 3, ... steps; those of an even
    number terminate, the others are cut off. At step ``when`` of all, something happens: ``trouble`` is "raise" or "hang".
    """

    observation_space = spaces.Box(-1e3, 1e3, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, trouble: str | None = None, when: int = 40, sleep: float = 0.0):
        self.trouble, self.when, self.sleep = trouble, when, sleep
        self.episode, self.number, self.steps = -1, 0, 0

    def _observation(self) -> np.ndarray:
        return np.array([self.episode, self.number], dtype=np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.episode, self.number = self.episode + 1, 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps += 1
        if self.steps >= self.when and self.trouble == "raise":
            raise ZeroDivisionError("the wheel is off")
        if self.steps >= self.when and self.trouble == "hang":
            time.sleep(1000)
        time.sleep(self.sleep)
        self.number += 1
        end, cut = self.number == 3 + self.episode % 3, bool(self.episode % 2)
        return self._observation(), float(self.number), end and not cut, end and cut, {"number": self.number}


def clocks(n_envs: int = 2, **kwargs: Any) -> DummyVecEnv:
    """:return: that many clocks"""
    return DummyVecEnv([lambda: Clock(**kwargs)] * n_envs)


def clock_processes(n_envs: int = 2) -> SubprocVecEnv:
    """:return: that many clocks, each in its process"""
    return SubprocVecEnv([Clock] * n_envs, start_method="fork")
