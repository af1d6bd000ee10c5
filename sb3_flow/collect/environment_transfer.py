"""Ways to move vectorised environments into another process, and to keep the statistics of their normalisers equal."""

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv, VecNormalize

from sb3_flow.common.wrapper_chain import chain

# attribute of a VecEnv that a user's function made: the function, which the collector calls once more
FACTORY = "collector_factory"
SETTINGS = ("training", "norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon")


def made_by(factory: Callable[[], Any], verbose: int = 0) -> VecEnv:
    """
    Make an environment by a function, which is kept for the collector, and wrap the environment as SB3 does.

    :param factory: makes an environment or a vectorised environment
    :param verbose: verbosity level
    """
    env = BaseAlgorithm._wrap_env(factory(), verbose)
    setattr(env, FACTORY, factory)
    return env


def factory_of(env: VecEnv) -> Callable[[], Any] | None:
    """Find the function by which :func:`made_by` made an environment; None if it was made otherwise."""
    return next((vars(link)[FACTORY] for link in chain(env) if FACTORY in vars(link)), None)


def pack(env: VecEnv) -> bytes:
    """
    Pack an environment, or the function that makes it, for :func:`unpack` in another process.

    :raises TypeError: if the environment cannot be moved
    """
    factory = factory_of(env)
    *wrappers, innermost = chain(env)
    # VecEnvWrapper looks up unknown attributes in the wrapped environment, which it does not have while a pickle is read
    left_out = ("venv", "class_attributes")
    states = [(type(link), {name: value for name, value in vars(link).items() if name not in left_out}) for link in wrappers]
    try:
        if factory is None and isinstance(innermost, SubprocVecEnv):
            raise TypeError("its worker processes belong to the process that started them")
        packed: bytes = cloudpickle.dumps((None, innermost, states) if factory is None else (factory, None, []))
        return packed
    except Exception as error:
        raise TypeError(
            "`env` must be an environment that can be moved into the collector process, or a function that makes one; but "
            f"{type(innermost).__name__} cannot be moved: {error}. A function was expected, e.g. "
            "`env=lambda: SubprocVecEnv([make_env] * 8)`."
        ) from error


def unpack(packed: bytes) -> VecEnv:
    """Make the environment that :func:`pack` packed."""
    factory, innermost, states = pickle.loads(packed)
    if factory is not None:
        return made_by(factory)
    env: VecEnv = innermost
    for kind, state in reversed(states):
        wrapper = kind.__new__(kind)
        wrapper.__dict__.update(state, venv=env, class_attributes=dict(inspect.getmembers(kind)))
        env = wrapper
    return env


def coming_reset(env: VecEnv) -> tuple[Any, Any]:
    """Read the seeds and options of the next reset."""
    innermost = chain(env)[-1]
    return getattr(innermost, "_seeds", None), getattr(innermost, "_options", None)


def set_coming_reset(env: VecEnv, values: tuple[Any, Any]) -> None:
    """Set the seeds and options of the next reset to values of :func:`coming_reset`."""
    innermost = chain(env)[-1]
    for name, value in zip(("_seeds", "_options"), values, strict=True):
        if value is not None and hasattr(innermost, name):
            setattr(innermost, name, value)


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


def merge_normalisers(env: VecEnv, news: list[dict[str, Any]]) -> None:
    """Add what came to the statistics of another process, see :func:`recorded_normalisers`, by the parallel variance."""
    for state, added in zip(normalisers(env), news, strict=True):
        for name, part in added.items():
            pairs = [(state[name][key], part[key]) for key in part] if isinstance(part, dict) else [(state[name], part)]
            for statistic, other in pairs:
                if other.count > 0:
                    statistic.combine(other)
