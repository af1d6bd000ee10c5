"""Environments and helpers of the on-policy tests."""

from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import DummyVecEnv


class Walk(gym.Env):
    """
    A walk of random length: the reward is the number of the step, some episodes terminate and some are cut off, all at
    random. Its spaces are those that are asked for.
    """

    def __init__(self, action_space: spaces.Space, observation_space: spaces.Space | None = None, mean_length: int = 6):
        self.action_space = action_space
        self.observation_space = observation_space or spaces.Box(-10, 10, (3,), np.float32)
        self.mean_length = mean_length

    def _observation(self) -> Any:
        def one(space: spaces.Space) -> Any:
            if isinstance(space, spaces.Dict):
                return {key: one(part) for key, part in space.items()}
            if isinstance(space, spaces.Discrete):
                return int(self.np_random.integers(space.n))
            if isinstance(space, spaces.MultiDiscrete):
                return self.np_random.integers(space.nvec)
            if isinstance(space, spaces.MultiBinary):
                return self.np_random.integers(2, size=space.n, dtype=np.int8)
            if space.dtype == np.uint8:
                return self.np_random.integers(0, 256, space.shape, dtype=np.uint8)
            return self.np_random.standard_normal(space.shape).astype(space.dtype)

        return one(self.observation_space)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.step_number = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        self.step_number += 1
        end = self.np_random.random(2) < 0.5 / self.mean_length
        return self._observation(), float(self.step_number), bool(end[0]), bool(end[1]), {}

    def action_masks(self) -> np.ndarray:
        """All but a random one of the discrete actions."""
        sizes = [self.action_space.n] if isinstance(self.action_space, spaces.Discrete) else list(self.action_space.nvec)
        masks = [np.ones(size, dtype=bool) for size in sizes]
        for mask in masks:
            mask[self.np_random.integers(len(mask))] = False
        return np.concatenate(masks)


ACTION_SPACES = {
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "discrete": spaces.Discrete(3),
    "multi_discrete": spaces.MultiDiscrete([2, 3]),
    "multi_binary": spaces.MultiBinary(3),
}
DICT = spaces.Dict({"a": spaces.Box(-1, 1, (2,), np.float32), "b": spaces.Discrete(3)})
IMAGE = spaces.Box(0, 255, (36, 36, 1), np.uint8)


def walks(
    n_envs: int, action_space: spaces.Space, observation_space: spaces.Space | None = None, **kwargs: Any
) -> DummyVecEnv:
    """:return: that many walks"""
    return DummyVecEnv([lambda: Walk(action_space, observation_space, **kwargs)] * n_envs)


class Recorder(Logger):
    """A logger that keeps what was recorded, dump by dump."""

    def __init__(self) -> None:
        super().__init__(folder=None, output_formats=[])
        self.dumps: list[dict[str, Any]] = []

    def dump(self, step: int = 0) -> None:
        self.dumps.append(dict(self.name_to_value))
        super().dump(step)


def learned(model: BaseAlgorithm, total_timesteps: int) -> tuple[dict[str, th.Tensor], list[dict[str, Any]]]:
    """:return: the weights after learning, and what was logged, but for times"""
    recorder = Recorder()
    model.set_logger(recorder)
    model.learn(total_timesteps)
    logged = [{key: value for key, value in one.items() if not key.startswith("time/")} for one in recorder.dumps]
    return model.policy.state_dict(), logged


def assert_same_weights(ours: dict[str, th.Tensor], theirs: dict[str, th.Tensor]) -> None:
    """To the last bit."""
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert th.equal(ours[name], weight), f"{name} differs by {(ours[name] - weight).abs().max()}"
