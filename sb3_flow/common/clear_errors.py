"""
Arguments of SB3's classes that are refused with a message of this package, because SB3's message leads elsewhere.

The class overrides SB3's ``_wrap_env`` and ``_init_callback`` (checked with stable-baselines3 2.9.2, named in
``tests/test_sb3_private_api.py``).
"""

from typing import Any

import gymnasium as gym
from stable_baselines3.common import callbacks
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import MaybeCallback
from stable_baselines3.common.vec_env import VecEnv


def check_progress_bar(progress_bar: bool) -> None:
    """
    Check that a progress bar can be shown.

    :param progress_bar: whether it was asked for
    :raises ImportError: naming the extra that installs its packages
    """
    if progress_bar and callbacks.tqdm is None:
        raise ImportError("`progress_bar=True` needs the packages tqdm and rich: pip install 'sb3-flow[plots]'")


def check_no_gymnasium_vector(name: str, env: Any) -> None:
    """
    Check that an environment is none of Gymnasium's vector environments, which SB3 does not know.

    :param name: of the argument
    :param env: what was given
    :raises ValueError: naming SB3's way to make several environments
    """
    if isinstance(env, gym.vector.VectorEnv):
        raise ValueError(
            f"`{name}` must be a single environment or a VecEnv of SB3, but a vector environment of Gymnasium "
            f"({type(env).__name__}) was given: make a VecEnv by "
            f"stable_baselines3.common.env_util.make_vec_env(..., n_envs={env.num_envs})."
        )


class ClearErrors(BaseAlgorithm):
    """Algorithm that says what is wrong with its environment or its progress bar."""

    @staticmethod
    def _wrap_env(env: Any, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        check_no_gymnasium_vector("env", env)
        return BaseAlgorithm._wrap_env(env, verbose, monitor_wrapper)

    def _init_callback(self, callback: MaybeCallback, progress_bar: bool = False) -> BaseCallback:
        check_progress_bar(progress_bar)
        return super()._init_callback(callback, progress_bar)
