"""Wrappers of SB3 around environments of tensors: what they do to arrays, done to tensors, while a rollout is collected."""

import copy
from typing import Any

import torch as th
from stable_baselines3.common.vec_env import VecEnvWrapper, VecTransposeImage

from sb3_flow.common.torch_vec_env import Tensors, TensorStep, TorchVecEnv


class TensorView:
    """
    See environments of tensors through a wrapper, for the time of a rollout.

    :param wrapper: the wrapper
    :param env: what it wraps: a :class:`TorchVecEnv`, or another such view
    """

    observations: Tensors
    """Present observations, as the wrapper shows them."""
    num_envs: int
    resets_late: bool

    def __init__(self, wrapper: VecEnvWrapper, env: "TensorEnv"):
        self.wrapper, self.env, self.num_envs, self.resets_late = wrapper, env, env.num_envs, env.resets_late

    @property
    def device(self) -> th.device:
        """Return the device of the tensors."""
        return self.env.device

    @property
    def started(self) -> float:
        """Return when the first episode began."""
        return self.env.started

    @property
    def episode_starts(self) -> th.Tensor:
        """Return where the next step begins an episode."""
        return self.env.episode_starts

    @property
    def tells_last(self) -> bool:
        """Return whether steps have had ``final_observations``."""
        return self.env.tells_last

    @tells_last.setter
    def tells_last(self, told: bool) -> None:
        self.env.tells_last = told

    def reset(self) -> Any:
        """Reset all environments; return arrays."""
        raise NotImplementedError

    def step_tensors(self, actions: th.Tensor) -> TensorStep:
        """Step all environments."""
        raise NotImplementedError

    def write(self) -> None:
        """Bring the wrappers up to date."""
        if isinstance(self.env, TensorView):
            self.env.write()


TensorEnv = TorchVecEnv | TensorView


class TransposedTensors(TensorView):
    """
    See environments through a ``VecTransposeImage``: the channels of images come first. Nothing is copied.

    :param wrapper: the wrapper
    :param env: what it wraps
    """

    wrapper: VecTransposeImage

    @property
    def observations(self) -> Tensors:  # type: ignore[override]
        """Return the present observations."""
        return self._transposed(self.env.observations)

    def _transposed(self, observations: Tensors) -> Tensors:
        if self.wrapper.skip:
            return observations
        if isinstance(observations, dict):
            images = self.wrapper.image_space_keys
            return {key: part.permute(0, 3, 1, 2) if key in images else part for key, part in observations.items()}
        return observations.permute(0, 3, 1, 2)

    def reset(self) -> Any:
        """Reset all environments; return arrays."""
        return self.wrapper.transpose_observations(self.env.reset())  # type: ignore[arg-type]

    def step_tensors(self, actions: th.Tensor) -> TensorStep:
        """Step all environments, and transpose what they return, as ``VecTransposeImage.step_wait`` does."""
        found = copy.copy(self.env.step_tensors(actions))
        found.observations = self._transposed(found.observations)
        if found.final_observations is not None:
            found.final_observations = self._transposed(found.final_observations)
        return found
