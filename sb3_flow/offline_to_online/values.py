"""Ensembles of value functions: the critics of generative actors."""

from typing import Any, ClassVar

import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BaseModel
from stable_baselines3.common.preprocessing import get_action_dim
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.type_aliases import PyTorchObs
from torch import nn

from sb3_flow.flow import Critic, EnsembleMLP, TanhGELU


class EnsembleValue(BaseModel):
    """
    Ensemble of K values of observations and (partial) action chunks.

    :param observation_space: Observation space
    :param action_space: Action space
    :param net_arch: hidden layer sizes of every member
    :param features_extractor: Network to extract features
    :param features_dim: Number of features
    :param activation_fn: Activation function
    :param normalize_images: Whether to normalize images or not, dividing by 255.0 (True by default)
    :param horizon_length: actions per decision h
    :param n_critics: ensemble size K
    :param share_features_extractor: True if the features extractor is the actor's and the actor alone trains it
    """

    features_extractor: BaseFeaturesExtractor
    optimizer: th.optim.Optimizer
    extra_inputs: ClassVar[int] = 0
    """Count of inputs besides features and chunk."""

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
        n_critics: int = 2,
        share_features_extractor: bool = False,
    ) -> None:
        super().__init__(
            observation_space, action_space, features_extractor=features_extractor, normalize_images=normalize_images
        )
        self.n_critics = n_critics
        self.share_features_extractor = share_features_extractor
        input_dim = features_dim + horizon_length * get_action_dim(action_space) + self.extra_inputs
        self.ensemble = EnsembleMLP(n_critics, input_dim, net_arch, activation_fn)

    def features(self, observation: PyTorchObs) -> th.Tensor:
        """
        Extract features, without gradients if the extractor is the actor's.

        :param observation: B observations
        :return: shape ``(B, features_dim)``
        """
        with th.set_grad_enabled(th.is_grad_enabled() and not self.share_features_extractor):
            return self.extract_features(observation, self.features_extractor)


class ActionValue(EnsembleValue):
    """Q-functions Q_k(s, a) of action chunks, with the arguments of ``EnsembleValue``."""

    def bind(self, observation: PyTorchObs, frozen: bool = False) -> Critic:
        """
        Close the Q-functions over observations.

        :param observation: B observations
        :param frozen: gradients reach actions only
        :return: ``critic(a) -> Q_k``: for a of shape ``(B, A)`` values of shape ``(K, B)``, for ``(B, n, A)`` ``(K, B, n)``
        """
        features = self.features(observation)
        features, ensemble = features.detach() if frozen else features, self.ensemble.bind()

        def critic(actions: th.Tensor) -> th.Tensor:
            rows = actions.shape[:-1]
            own = features if actions.dim() == 2 else features.unsqueeze(1).expand(*rows, -1)
            inputs = th.cat([own, actions], dim=-1).flatten(0, -2)
            q_values: th.Tensor = ensemble(inputs, frozen).unflatten(1, rows).squeeze(-1)
            return q_values

        return critic

    def forward(self, observation: PyTorchObs, actions: th.Tensor) -> tuple[th.Tensor, ...]:
        """Value actions, as SB3's critics do: return Q(s, a) of shape ``(B, 1)`` for every member."""
        return tuple(self.bind(observation)(actions).unsqueeze(-1))
