"""CartPole in torch's operators, all environments at once, on any device: Gymnasium's equations, limits and resets."""

import math
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces

from sb3_flow.common.torch_vec_env import TensorStep, TorchVecEnv

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, SECONDS = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
TOO_FAR, TOO_STEEP, LIMIT = 2.4, 12 * 2 * math.pi / 360, 500


class TorchCartPole(TorchVecEnv):
    """
    CartPole-v1; environments reset within the step that ends an episode.

    :param num_envs: number of environments
    :param device: of all tensors
    """

    def __init__(self, num_envs: int, device: th.device | str = "cpu") -> None:
        high = np.array([2 * TOO_FAR, np.inf, 2 * TOO_STEEP, np.inf], np.float32)
        super().__init__(num_envs, spaces.Box(-high, high), spaces.Discrete(2), device)
        self.generator = th.Generator(device).manual_seed(0)

    def _fresh(self) -> th.Tensor:
        return th.rand(self.num_envs, 4, generator=self.generator, device=self.device) * 0.1 - 0.05

    def _reset(self, seed: int | None, options: dict[str, Any] | None) -> th.Tensor:
        if seed is not None:
            self.generator.manual_seed(seed)
        self.state = self._fresh()
        self.steps = th.zeros(self.num_envs, dtype=th.int64, device=self.device)
        return self.state

    def _step(self, actions: th.Tensor) -> TensorStep:
        x, x_dot, theta, theta_dot = self.state.unbind(1)
        force = FORCE * (2.0 * actions - 1.0)
        sine, cosine, mass = theta.sin(), theta.cos(), CART + POLE
        push = (force + POLE * HALF_LENGTH * theta_dot.square() * sine) / mass
        turn = (GRAVITY * sine - cosine * push) / (HALF_LENGTH * (4.0 / 3.0 - POLE * cosine.square() / mass))
        speed_up = push - POLE * HALF_LENGTH * turn * cosine / mass
        columns = (x + SECONDS * x_dot, x_dot + SECONDS * speed_up, theta + SECONDS * theta_dot, theta_dot + SECONDS * turn)
        last = th.stack(columns, dim=1)
        self.steps = self.steps + 1
        terminated = (last[:, 0].abs() > TOO_FAR) | (last[:, 2].abs() > TOO_STEEP)
        truncated = (self.steps >= LIMIT) & ~terminated
        done = terminated | truncated
        self.state = th.where(done.unsqueeze(1), self._fresh(), last)
        self.steps = self.steps * ~done
        return TensorStep(self.state, th.ones_like(x), terminated, truncated, final_observations=last)
