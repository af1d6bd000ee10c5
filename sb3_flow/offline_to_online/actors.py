"""Actors that turn Gaussian noise into action chunks."""

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import get_action_dim
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import nn

from sb3_flow.flow import NoiseSource, TanhGELU, fresh_noise, keyed_noise, multipliers
from sb3_flow.offline_to_online.chunking import ChunkedPolicy


def batch_size_of(observation: PyTorchObs) -> int:
    """Count the observations of a batch, also while the batch is traced: to tracers len() is a constant."""
    return (next(iter(observation.values())) if isinstance(observation, dict) else observation).shape[0]


def draw_seed() -> int:
    """Draw a seed from torch's global generator."""
    return int(th.randint(2**31, (1,)).item())


class GenerativeActor(ChunkedPolicy):
    """
    An actor that turns Gaussian noise into action chunks. Subclasses build their network and define ``act``.

    :param observation_space: Observation space
    :param action_space: Action space
    :param net_arch: hidden layer sizes
    :param features_extractor: Network to extract features (a CNN when using images, a nn.Flatten() layer otherwise)
    :param features_dim: Number of features
    :param activation_fn: Activation function
    :param normalize_images: Whether to normalize images or not, dividing by 255.0 (True by default)
    :param horizon_length: actions per decision h
    :param noise_seed: seed of the noise of deterministic decisions, by default random
    """

    optimizer: th.optim.Optimizer
    key_multipliers: th.Tensor

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Box,
        net_arch: list[int],
        features_extractor: BaseFeaturesExtractor,
        features_dim: int,
        activation_fn: type[nn.Module] = TanhGELU,
        normalize_images: bool = True,
        horizon_length: int = 1,
        noise_seed: int | None = None,
    ) -> None:
        images: dict[str, Any] = {"features_extractor": features_extractor, "normalize_images": normalize_images}
        super().__init__(observation_space, action_space, **images, squash_output=True)
        self.net_arch = net_arch
        self.features_dim = features_dim
        self.activation_fn = activation_fn
        self.horizon_length = horizon_length
        self.chunk_dim = horizon_length * get_action_dim(action_space)
        self.noise_seed = draw_seed() if noise_seed is None else noise_seed
        parts = observation_space.values() if isinstance(observation_space, spaces.Dict) else [observation_space]
        n_numbers = sum(int(np.prod(part.shape or ())) for part in parts)
        self.register_buffer("key_multipliers", multipliers(n_numbers), persistent=False)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        data = super()._get_constructor_parameters()
        names = ("net_arch", "features_dim", "activation_fn", "features_extractor", "horizon_length", "noise_seed")
        return {**data, **{name: getattr(self, name) for name in names}}

    def noise(self, observation: PyTorchObs, generator: th.Generator | None = None, keyed: bool = False) -> NoiseSource:
        """
        Draw Gaussian starting points of decisions.

        :param observation: B observations
        :param generator: of fresh noise; None for torch's own
        :param keyed: the noise depends on the observation and ``noise_seed`` alone, see :mod:`sb3_flow.flow.noise`
        :return: source of noise of shape ``(B, n, A)``
        """
        if not keyed:
            return fresh_noise(batch_size_of(observation), self.chunk_dim, generator, self.device)
        parts = [observation[name] for name in sorted(observation)] if isinstance(observation, dict) else [observation]
        rows = [(part.flatten(1) if part.dim() > 1 else part.unsqueeze(1)).float() for part in parts]
        return keyed_noise(th.cat(rows, 1), self.key_multipliers, self.noise_seed, self.chunk_dim)

    def act(self, observation: PyTorchObs, noise: th.Tensor) -> th.Tensor:
        """
        Turn noise into actions.

        :param observation: B observations
        :param noise: n starting points for each of them, shape ``(B, n, A)``
        :return: actions in [-1, 1], shape ``(B, n, A)``
        """
        raise NotImplementedError  # pragma: no cover

    def forward(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        return self.predict_chunk(observation, deterministic)

    def predict_chunk(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        return self.act(observation, self.noise(observation, self.generator, keyed=deterministic)(1))[:, 0]
