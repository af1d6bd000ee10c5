"""Policies without a value function."""

from typing import Any

import torch as th
from stable_baselines3.common.policies import ActorCriticCnnPolicy, ActorCriticPolicy, MultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import MlpExtractor
from stable_baselines3.common.type_aliases import Schedule
from torch import nn


class NoValue(nn.Module):
    """Stand in for a value head, without parameters."""

    def forward(self, latent: th.Tensor) -> th.Tensor:
        """Return zeros, shape ``(B, 1)``, for latents of shape ``(B, size)``."""
        return latent.new_zeros(len(latent), 1)


class ActorPolicy(ActorCriticPolicy):
    """
    Act by SB3's actor-critic policy without its critic: the actor and the arguments are the same, values are 0, and the ``vf``
    part of ``net_arch`` is ignored. SB3's tools that expect an ``ActorCriticPolicy`` work with this policy.
    """

    has_critic = False

    def _build_mlp_extractor(self) -> None:
        actor = self.net_arch["pi"] if isinstance(self.net_arch, dict) else self.net_arch
        self.mlp_extractor = MlpExtractor(
            self.features_dim, net_arch={"pi": actor, "vf": []}, activation_fn=self.activation_fn, device=self.device
        )

    def _build(self, lr_schedule: Schedule) -> None:
        super()._build(lr_schedule)
        self.value_net = NoValue()  # type: ignore[assignment]
        # an optimizer without the parameters of the head that SB3 built
        optimizer_kwargs: dict[str, Any] = self.optimizer_kwargs
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **optimizer_kwargs)  # type: ignore[call-arg]


class ActorCnnPolicy(ActorPolicy, ActorCriticCnnPolicy):
    """Act on images by SB3's ``ActorCriticCnnPolicy`` without its critic."""


class MultiInputActorPolicy(ActorPolicy, MultiInputActorCriticPolicy):
    """Act on Dict observations by SB3's ``MultiInputActorCriticPolicy`` without its critic."""


MlpPolicy, CnnPolicy, MultiInputPolicy = ActorPolicy, ActorCnnPolicy, MultiInputActorPolicy
