"""Actors that turn Gaussian noise into action chunks, among them flows of several steps."""

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import get_action_dim
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import nn

from sb3_flow.flow import (
    AverageVelocity,
    NoiseSource,
    TanhGELU,
    Velocity,
    VelocityNetwork,
    euler_forward,
    fresh_noise,
    keyed_noise,
    multipliers,
)
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
    flow_steps: int = 1
    """Evaluations of the network from noise to action."""

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

    def path(self, observation: PyTorchObs, noise: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """
        Follow the way from noise to actions, which is a single step unless a subclass has more.

        :param observation: B observations
        :param noise: n starting points for each of them, shape ``(B, n, A)``
        :return: flow times from 0 to 1, shape ``(T,)``, and points, shape ``(T, B, n, A)``, of which the last are actions
        """
        return th.linspace(0, 1, 2, device=noise.device), th.stack([noise, self.act(observation, noise)])

    def heads_for(self, observation: PyTorchObs, points: th.Tensor, time: th.Tensor) -> th.Tensor:
        """
        Find the actions that points on their way are heading for; at time 1 the points are actions.

        :param observation: B observations
        :param points: n for each of them, shape ``(B, n, A)``
        :param time: flow time of the points, a scalar
        :return: actions in [-1, 1], shape ``(B, n, A)``
        """
        return (points + (1 - time) * (self.act(observation, points) - points)).clamp(-1, 1)

    def forward(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        return self.predict_chunk(observation, deterministic)

    def predict_chunk(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        return self.act(observation, self.noise(observation, self.generator, keyed=deterministic)(1))[:, 0]


class FlowActor(GenerativeActor):
    """
    Flow policy: noise x^0 ~ N(0, I) is carried to an action x^F by ``flow_steps`` Euler steps along u(s, x, t).

    ``GenerativeActor`` describes the other arguments.

    :param flow_steps: Euler steps F
    """

    def __init__(self, *args: Any, flow_steps: int = 10, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flow_steps = flow_steps
        self.velocity_net = VelocityNetwork(self.features_dim, self.chunk_dim, self.net_arch, self.activation_fn)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {**super()._get_constructor_parameters(), "flow_steps": self.flow_steps}

    def velocity(self, observation: PyTorchObs, n_candidates: int = 1) -> Velocity:
        """
        Close the velocity field over observations.

        :param observation: B observations
        :param n_candidates: successive rows of x for each observation
        :return: ``velocity(x, t)``
        """
        features = self.extract_features(observation, self.features_extractor)
        return self.velocity_net.bind(features if n_candidates == 1 else features.repeat_interleave(n_candidates, dim=0))

    def act(self, observation: PyTorchObs, noise: th.Tensor) -> th.Tensor:
        n_candidates = noise.shape[1]
        velocity = self.velocity(observation, n_candidates)
        end = euler_forward(velocity, noise.flatten(0, 1), self.flow_steps).clamp(-1, 1)
        chunks: th.Tensor = end.unflatten(0, (-1, n_candidates))
        return chunks

    def path(self, observation: PyTorchObs, noise: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """Follow the F Euler steps, see :meth:`GenerativeActor.path`."""
        velocity = self.velocity(observation, noise.shape[1])
        points: list[th.Tensor] = []

        def recorded(x: th.Tensor, t: th.Tensor) -> th.Tensor:
            points.append(x)
            return velocity(x, t)

        points.append(euler_forward(recorded, noise.flatten(0, 1), self.flow_steps).clamp(-1, 1))
        times = th.linspace(0, 1, self.flow_steps + 1, device=noise.device)
        return times, th.stack(points).unflatten(1, noise.shape[:2])

    def heads_for(self, observation: PyTorchObs, points: th.Tensor, time: th.Tensor) -> th.Tensor:
        """Compute x_t + (1 - t) u(s, x_t, t), see :meth:`GenerativeActor.heads_for`."""
        rows, n = points.flatten(0, 1), points.shape[1]
        u = self.velocity(observation, n)(rows, time.expand(len(rows), 1)).unflatten(0, (-1, n))
        actions: th.Tensor = (points + (1 - time) * u).clamp(-1, 1)
        return actions

    def average_velocity(self, observation: PyTorchObs) -> AverageVelocity:
        """
        Average ``flow_steps`` Euler steps from flow time r to t.

        :param observation: B observations
        :return: average velocity for points of shape ``(B, n, A)``
        """
        features = self.extract_features(observation, self.features_extractor)

        def average(x: th.Tensor, r: th.Tensor, t: th.Tensor) -> th.Tensor:
            velocity = self.velocity_net.bind(features.repeat_interleave(x.shape[1], dim=0))
            start, step = r.flatten(0, 1), ((t - r) / self.flow_steps).flatten(0, 1)
            end = x.flatten(0, 1)
            for i in range(self.flow_steps):
                end = th.addcmul(end, step, velocity(end, th.add(start, step, alpha=i)))
            average_velocity: th.Tensor = (end.unflatten(0, x.shape[:2]) - x) / (t - r)
            return average_velocity

        return average
