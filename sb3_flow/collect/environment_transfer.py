"""Ways to move vectorised environments into another process, and to keep the statistics of their normalisers equal."""

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv, VecEnvWrapper, VecNormalize

# attribute of a VecEnv that a user's function made: the function, which the collector calls once more
FACTORY = "collector_factory"
SETTINGS = ("training", "norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon")


def chain(env: VecEnv) -> list[VecEnv]:
    """List the wrappers, the outermost first, and the environment that they wrap."""
    found = [env]
    while isinstance(found[-1], VecEnvWrapper):
        found.append(found[-1].venv)
    return found


def made_by(factory: Callable[[], Any], verbose: int = 0) -> VecEnv:
    """
    Make an environment by a function, which is kept for the collector, and wrap the environment as SB3 does.

    :param factory: makes an environment or a vectorised environment
    :param verbose: verbosity level
    """
    env = BaseAlgorithm._wrap_env(factory(), verbose)
    setattr(env, FACTORY, factory)
    return env


def comes_from_function(env: VecEnv) -> bool:
    """Say whether :func:`made_by` made an environment."""
    return any(FACTORY in vars(link) for link in chain(env))


def pack(env: VecEnv) -> bytes:
    """
    Pack an environment, or the function that makes it, for :func:`unpack` in another process.

    :raises TypeError: if the environment cannot be moved
    """
    factory = next((vars(link)[FACTORY] for link in chain(env) if FACTORY in vars(link)), None)
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
