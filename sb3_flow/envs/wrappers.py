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


class ActionMasksFromInfo(gym.Wrapper[Any, Any, Any, Any]):
    """
    Gives masks of actions where sb3-contrib looks for them: ``action_masks()``, from ``info["action_mask"]`` of the last
    ``reset`` or ``step``, where Gymnasium's Taxi and many other environments have the mask. For masks that come from elsewhere
    sb3-contrib has ``ActionMasker``.

    :param env: environment that puts ``action_mask`` into its infos: a number for each choice, 0 where the choice is invalid
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._mask: np.ndarray | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._take_mask(info)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._take_mask(info)
        return observation, reward, terminated, truncated, info

    def _take_mask(self, info: dict[str, Any]) -> None:
        if "action_mask" not in info:
            raise ValueError(f"`info` of {self.env} must have the key 'action_mask', but it has {sorted(map(str, info))}.")
        self._mask = np.array(info["action_mask"], dtype=bool)

    def action_masks(self) -> np.ndarray:
        """
        Give the mask of the present state.

        :return: bools, True where a choice is valid
        :raises RuntimeError: before the first ``reset``
        """
        if self._mask is None:
            raise RuntimeError("`action_masks` was called before `reset`: there is no state yet.")
        return self._mask
