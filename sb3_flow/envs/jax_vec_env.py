"""Gymnasium's environments on JAX as a :class:`TorchVecEnv`."""

import importlib
from typing import Any

import gymnasium as gym

from sb3_flow.envs.torch_env_adapter import TorchEnvAdapter


class JaxVecEnv(TorchEnvAdapter):
    """
    Gymnasium's environments on JAX, stepped together by tensors. This class needs ``pip install 'sb3-flow[jax]'``::

        model = PPO("MlpPolicy", JaxVecEnv("phys2d/CartPole-v1", num_envs=1024), n_steps=32, batch_size=4096)

    They reset one step late, see :class:`TorchVecEnv`.

    :param task: id in Gymnasium's registry, such as ``phys2d/Pendulum-v0``
    :param num_envs: number of environments
    :param options: of ``gymnasium.make_vec``
    :raises ImportError: without JAX and Flax
    :raises ValueError: if JAX does not step these environments
    """

    def __init__(self, task: str, num_envs: int = 1, **options: Any):
        try:
            for name in ("jax", "flax"):
                importlib.import_module(name)
            to_torch = importlib.import_module("gymnasium.wrappers.vector").JaxToTorch
        except (ImportError, gym.error.DependencyNotInstalled) as error:
            raise ImportError(f"JaxVecEnv needs the package jax: pip install 'sb3-flow[jax]' ({error})") from error
        envs = gym.make_vec(task, num_envs=num_envs, **options)
        if not hasattr(envs.unwrapped, "func_env"):
            raise ValueError(
                f"`task` must be a task that Gymnasium steps by JAX, such as phys2d/CartPole-v1, but {task!r} was given, "
                f"which is a {type(envs.unwrapped).__name__}."
            )
        super().__init__(to_torch(envs))
