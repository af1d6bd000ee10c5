"""Wrappers that bring environments of other suites to SB3's conventions."""

from typing import Any

import gymnasium as gym
import numpy as np


class SuccessInfo(gym.Wrapper[Any, Any, Any, Any]):
    """
    Reports success where SB3 looks for it: ``info["is_success"]`` from an environment's own ``info["success"]``
    (OGBench and other manipulation suites), so that ``rollout/success_rate`` and ``eval/success_rate`` are logged.

    :param env: environment that puts ``success`` into its infos
    """

    def step(self, action: np.ndarray) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        info["is_success"] = bool(info["success"])
        return observation, reward, terminated, truncated, info


class SparseReward(gym.RewardWrapper[Any, Any]):
    """
    Gives rewards of -1 until the task is solved, instead of minus the number of unsolved parts.
    ``OfflineDataset.sparse_rewards`` does the same with data.

    :param env: environment whose reward is 0 where the task is solved and negative elsewhere
    """

    def reward(self, reward: Any) -> float:
        return -1.0 if reward != 0 else 0.0
