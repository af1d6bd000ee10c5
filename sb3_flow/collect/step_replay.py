"""A rollout that was collected elsewhere, step by step as if the environments were here."""

from typing import Any

import numpy as np
import torch as th

from sb3_flow.collect.slots import Observation, Rollout


class Replay:
    """
    Stands where ``collect_rollouts`` has its environments.

    :param rollout: to replay
    :param infos: of all steps, without terminal observations
    :param reward_dtype: of the environments' rewards
    """

    def __init__(self, rollout: Rollout, infos: list[list[dict[str, Any]]], reward_dtype: str):
        self.rollout, self.infos = rollout, infos
        self.num_envs = rollout.spec.n_envs
        self._finals = rollout.finals()
        self._reward_dtype = np.dtype(reward_dtype)
        self._step = 0

    def act(self) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """:return: what the policy that acted gave: actions, values and log-probabilities"""
        actions, values = self.rollout.actions[self._step], self.rollout.values[self._step]
        log_probs = self.rollout.log_probs[self._step]
        return th.from_numpy(actions.copy()), th.from_numpy(values[:, None].copy()), th.from_numpy(log_probs.copy())

    def step(self, actions: np.ndarray) -> tuple[Observation, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """
        :param actions: ignored; they were taken
        :return: what the environments returned
        """
        step, rollout = self._step, self.rollout
        infos = self.infos[step]
        for env, final in self._finals.get(step, {}).items():
            infos[env]["terminal_observation"] = final
        self._step += 1
        dones = rollout.terminated[step] | rollout.truncated[step]
        return rollout.observation(step + 1), rollout.rewards[step].astype(self._reward_dtype), dones, infos
