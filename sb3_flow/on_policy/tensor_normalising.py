"""SB3's ``VecNormalize`` around environments of tensors: its statistics as tensors, while a rollout is collected."""

import copy
import warnings
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, VecTransposeImage

from sb3_flow.common.normalisers import RecordedMeanStd
from sb3_flow.common.observations import map_arrays
from sb3_flow.common.torch_vec_env import Tensors, TensorStep, TorchVecEnv, to_numpy
from sb3_flow.common.wrapper_chain import chain
from sb3_flow.on_policy.tensor_views import TensorEnv, TensorView, TransposedTensors


class RunningMoments:
    """
    Hold running statistics as tensors.

    :param statistic: SB3's statistics, which these begin with
    :param device: device of the tensors
    """

    def __init__(self, statistic: RunningMeanStd, device: th.device):
        self.statistic = statistic
        self.mean, self.var = (th.tensor(part, dtype=th.float64, device=device) for part in (statistic.mean, statistic.var))
        self.count = th.tensor(statistic.count, dtype=th.float64, device=device)
        self.news = RunningMoments(statistic.news, device) if isinstance(statistic, RecordedMeanStd) else None

    def update(self, values: th.Tensor, counts: th.Tensor | None = None) -> None:
        """
        Add a batch by the parallel variance.

        :param values: shape ``(n_envs, ...)``
        :param counts: rows that count, bool ``(n_envs,)``; None for all
        """
        values = values.to(th.float64)
        if counts is None:
            n: Any = float(len(values))
            mean, var = values.mean(dim=0), values.var(dim=0, correction=0)
        else:
            weight = counts.to(th.float64).reshape(-1, *[1] * (values.dim() - 1))
            n = weight.sum()
            mean = (weight * values).sum(dim=0) / n.clamp(min=1.0)
            var = (weight * (values - mean) ** 2).sum(dim=0) / n.clamp(min=1.0)
        self._add(mean, var, n)
        if self.news is not None:
            self.news._add(mean, var, n)

    def _add(self, mean: th.Tensor, var: th.Tensor, n: Any) -> None:
        count, delta = self.count + n, mean - self.mean
        total = count.clamp(min=1e-8)  # news may be of no rows
        self.mean = self.mean + delta * n / total
        self.var = (self.var * self.count + var * n + delta**2 * self.count * n / total) / total
        self.count = count

    def write(self) -> None:
        """Write the numbers back to SB3's statistics."""
        if self.news is not None:
            self.news.write()
        self.statistic.mean, self.statistic.var = self.mean.cpu().numpy(), self.var.cpu().numpy()
        self.statistic.count = float(self.count)


class NormalisedTensors(TensorView):
    """
    See environments through a ``VecNormalize``. Steps that only reset an environment do not count for the statistics of
    rewards.

    :param wrapper: the normaliser; :meth:`write` brings its statistics up to date
    :param env: what it wraps
    """

    wrapper: VecNormalize

    def __init__(self, wrapper: VecNormalize, env: TensorEnv):
        super().__init__(wrapper, env)
        self._rewards: th.Tensor | None = None
        self._read()

    def _read(self) -> None:
        wrapper = self.wrapper
        statistics: Any = getattr(wrapper, "obs_rms", {}) if wrapper.norm_obs else {}
        self._of_observations = {
            key: RunningMoments(statistic, self.device)
            for key, statistic in (statistics if isinstance(statistics, dict) else {"": statistics}).items()
        }
        self._of_returns = RunningMoments(wrapper.ret_rms, self.device)
        self._returns = th.as_tensor(wrapper.returns, dtype=th.float64, device=self.device)
        self.observations = self._normalised(self.env.observations)

    def reset(self) -> Any:
        """Reset all environments; return arrays."""
        observations = self.wrapper.reset()
        self._read()
        return observations

    def _normalised(self, observations: Tensors) -> Any:
        def part(key: str, values: th.Tensor) -> th.Tensor:
            if key not in self._of_observations:
                return values
            moments, limit = self._of_observations[key], self.wrapper.clip_obs
            scaled = (values - moments.mean) / th.sqrt(moments.var + self.wrapper.epsilon)
            return scaled.clamp(-limit, limit).to(th.float32)

        if isinstance(observations, dict):
            return {key: part(key, values) for key, values in observations.items()}
        return part("", observations)

    def step_tensors(self, actions: th.Tensor) -> TensorStep:
        """Step all environments, and normalise what they return, as ``VecNormalize.step_wait`` does."""
        wrapper, found = self.wrapper, self.env.step_tensors(actions)
        seen, self._rewards = found.observations, found.rewards
        if wrapper.training:
            for key, moments in self._of_observations.items():
                moments.update(seen[key] if isinstance(seen, dict) else seen)
            counts = None if found.resets is None else ~found.resets
            returns = self._returns * wrapper.gamma + found.rewards
            self._returns = returns if counts is None else th.where(counts, returns, self._returns)
            self._of_returns.update(self._returns, counts)
        rewards = found.rewards
        if wrapper.norm_reward:
            limit = wrapper.clip_reward
            rewards = (
                (rewards.to(th.float64) / th.sqrt(self._of_returns.var + wrapper.epsilon)).clamp(-limit, limit).to(th.float32)
            )
        self._returns = th.where(found.dones, 0.0, self._returns)
        self.observations = self._normalised(seen)
        step = copy.copy(found)
        step.observations, step.rewards = self.observations, rewards
        if found.final_observations is not None:
            step.final_observations = self._normalised(found.final_observations)
        return step

    def write(self) -> None:
        """Bring the statistics of the ``VecNormalize`` up to date."""
        for moments in (*self._of_observations.values(), self._of_returns):
            moments.write()
        self.wrapper.returns = self._returns.cpu().numpy()
        self.wrapper.old_obs = map_arrays(np.array, to_numpy(self.env.observations))
        if self._rewards is not None:
            self.wrapper.old_reward = np.array(to_numpy(self._rewards))
        super().write()


VIEWS: dict[type[VecEnv], Any] = {VecNormalize: NormalisedTensors, VecTransposeImage: TransposedTensors}
"""How an environment of tensors is seen through a wrapper; other wrappers see arrays."""


def of_tensors(env: VecEnv) -> TensorEnv | None:
    """Find what steps an environment by tensors, which may have wrappers of ``VIEWS`` around it; None if nothing does."""
    *wrappers, inner = chain(env)
    if not isinstance(inner, TorchVecEnv) or any(type(wrapper) not in VIEWS for wrapper in wrappers):
        return None
    if not hasattr(inner, "observations"):  # after `set_env(..., force_reset=False)`
        env.reset()
    seen: TensorEnv = inner
    for wrapper in reversed(wrappers):
        seen = VIEWS[type(wrapper)](wrapper, seen)
    return seen


def check_wrappers(model: Any, env: VecEnv, by_tensors: bool = False) -> None:
    """
    Refuse to learn through NumPy from environments that reset one step late; of others say that a wrapper makes them slower.

    :param by_tensors: the model would step the environments by tensors, if there were no wrapper
    :raises ValueError: naming what stands between
    """
    *wrappers, inner = chain(env)
    between = [type(wrapper).__name__ for wrapper in wrappers]
    if not isinstance(inner, TorchVecEnv):
        return
    if not inner.resets_late:
        if between and by_tensors:
            warnings.warn(
                f"`env` steps tensors ({type(inner).__name__}), but {', '.join(between)} takes it through NumPy, which is "
                "slower. Only VecNormalize and VecTransposeImage do not."
            )
        return
    told = f"through {', '.join(between)}" if between else "through NumPy"
    raise ValueError(
        f"`env` resets one step late ({type(inner).__name__}), and {type(model).__name__} steps it {told}, where a step that "
        "only resets cannot be told from others. PPO, GRPO and GSPO leave it out if they are given the environment itself, or "
        "with VecNormalize and VecTransposeImage around it."
    )
