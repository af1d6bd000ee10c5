"""The running statistics of ``VecNormalize`` wrappers, and ways to keep them equal in several processes."""

from collections.abc import Callable
from typing import Any

import numpy as np
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_flow.common.wrapper_chain import chain

SETTINGS = ("training", "norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon")


def normalisers(env: VecEnv, settings: bool = False) -> list[dict[str, Any]]:
    """
    Read the running statistics of each ``VecNormalize`` around an environment.

    :param env: the environment
    :param settings: include the settings, which steps do not change
    """
    names = ("obs_rms", "ret_rms", *(SETTINGS if settings else ()))
    found = [link for link in chain(env) if isinstance(link, VecNormalize)]
    return [{name: getattr(wrapper, name) for name in names if hasattr(wrapper, name)} for wrapper in found]


def set_normalisers(env: VecEnv, states: list[dict[str, Any]]) -> None:
    """Set the running statistics of normalisers to states of :func:`normalisers`."""
    found = [link for link in chain(env) if isinstance(link, VecNormalize)]
    for wrapper, state in zip(found, states, strict=True):
        for name, value in state.items():
            setattr(wrapper, name, value)


class RecordedMeanStd(RunningMeanStd):
    """
    Running statistics that also keep the statistics of what came since they were copied.

    :param start: statistics to begin with, which are copied
    """

    def __init__(self, start: RunningMeanStd):
        super().__init__(shape=start.mean.shape)
        self.mean, self.var, self.count = start.mean.copy(), start.var.copy(), start.count
        self.news = RunningMeanStd(epsilon=0.0, shape=start.mean.shape)

    def update_from_moments(self, batch_mean: np.ndarray, batch_var: np.ndarray, batch_count: float) -> None:
        """Add the moments of a batch."""
        super().update_from_moments(batch_mean, batch_var, batch_count)
        self.news.update_from_moments(batch_mean, batch_var, batch_count)

    def __reduce__(self) -> Any:
        # files and copies get SB3's class, which knows no news
        return RunningMeanStd, (), vars(self.copy())


def _changed(env: VecEnv, change: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Apply a function to each running statistic of each normaliser around an environment."""
    states = normalisers(env)
    for state in states:
        for name, found in state.items():
            state[name] = {key: change(part) for key, part in found.items()} if isinstance(found, dict) else change(found)
    return states


def record_normalisers(env: VecEnv) -> None:
    """Begin to keep apart what comes to the statistics of the normalisers from now on."""
    set_normalisers(env, _changed(env, RecordedMeanStd))


def recorded_normalisers(env: VecEnv) -> list[dict[str, Any]]:
    """Read what came to the statistics of the normalisers since :func:`record_normalisers`."""
    return _changed(env, lambda statistic: statistic.news)


def stop_recording(env: VecEnv) -> None:
    """Leave the normalisers with their present statistics, and without :func:`record_normalisers`."""
    set_normalisers(env, _changed(env, lambda statistic: statistic.copy()))


def merge_normalisers(env: VecEnv, news: list[dict[str, Any]]) -> None:
    """Add what came to the statistics of another process, see :func:`recorded_normalisers`, by the parallel variance."""
    for state, added in zip(normalisers(env), news, strict=True):
        for name, part in added.items():
            pairs = [(state[name][key], part[key]) for key in part] if isinstance(part, dict) else [(state[name], part)]
            for statistic, other in pairs:
                if other.count > 0:
                    statistic.combine(other)
