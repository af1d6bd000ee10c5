"""Ways to move vectorised environments into another process."""

import inspect
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv

from sb3_flow.common.wrapper_chain import chain

# attribute of a VecEnv that a user's function made: the function, which the collector calls once more
FACTORY = "collector_factory"


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
