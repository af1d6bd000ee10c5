"""The arithmetic of a ``VecNormalize`` in tensors, to the last bit, so that batches need no way through NumPy."""

from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecNormalize

from sb3_flow.common.observations import map_arrays


class TensorNormalizer:
    """
    Normalises observations and rewards on their device. Statistics are compared at every call, and brought to the device again
    if they have changed, as they do with every environment step while a model trains. A class derived from ``VecNormalize``
    may compute something else, so its own methods are called.

    :param device: of observations and rewards
    """

    def __init__(self, device: th.device) -> None:
        self._device = device
        self._known: dict[str | None, tuple[tuple[bytes, bytes, float], th.Tensor, th.Tensor]] = {}

    def observations(self, observations: Any, env: VecNormalize) -> Any:
        """
        Normalise observations, see ``VecNormalize.normalize_obs``.

        :param observations: a tensor, or a dictionary of tensors
        :param env: has the statistics
        """
        if type(env) is not VecNormalize:
            arrays: Any = env.normalize_obs(map_arrays(lambda part: part.cpu().numpy(), observations))
            return map_arrays(lambda part: th.as_tensor(part, device=self._device), arrays)
        if not env.norm_obs:
            return observations
        if not isinstance(observations, dict):
            return self._normalized(observations, "", env.obs_rms, env)
        statistics, found = env.obs_rms, dict(observations)
        assert isinstance(statistics, dict)
        for key in env.norm_obs_keys or ():
            found[key] = self._normalized(found[key], key, statistics[key], env)
        return found

    def rewards(self, rewards: th.Tensor, env: VecNormalize) -> th.Tensor:
        """
        Normalise rewards, see ``VecNormalize.normalize_reward``.

        :param rewards: any shape
        :param env: has the statistics
        """
        if type(env) is not VecNormalize:
            return th.as_tensor(env.normalize_reward(rewards.cpu().numpy()), device=self._device)
        if not env.norm_reward:
            return rewards
        _, deviation = self._statistics(None, env.ret_rms, env.epsilon)
        return (rewards.double() / deviation).clamp(-env.clip_reward, env.clip_reward).float()

    def _normalized(self, values: th.Tensor, name: str, statistics: Any, env: VecNormalize) -> th.Tensor:
        mean, deviation = self._statistics(name, statistics, env.epsilon)
        return ((values.double() - mean) / deviation).clamp(-env.clip_obs, env.clip_obs).float()

    def _statistics(self, name: str | None, statistics: RunningMeanStd, epsilon: float) -> tuple[th.Tensor, th.Tensor]:
        """Give mean and standard deviation as they are now, in float64."""
        now = (statistics.mean.tobytes(), statistics.var.tobytes(), epsilon)
        if name not in self._known or self._known[name][0] != now:
            numbers = np.stack([statistics.mean, np.sqrt(statistics.var + epsilon)])
            mean, deviation = th.tensor(numbers, dtype=th.float64, device=self._device)
            self._known[name] = now, mean, deviation
        return self._known[name][1:]
