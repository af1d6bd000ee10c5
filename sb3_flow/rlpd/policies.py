"""Policies of RLPD: SAC's tanh-Gaussian actor with its entropy coefficient, and an ensemble of critics."""

from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, NatureCNN
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import nn

from sb3_flow.common.backends import Backend
from sb3_flow.common.checks import arguments_in, check_whole
from sb3_flow.flow import TanhGELU
from sb3_flow.offline_to_online.acting import ActingMode
from sb3_flow.offline_to_online.gaussian_actor import EntropyCoefficient, GaussianActor, check_entropy
from sb3_flow.offline_to_online.generative_policy import GenerativePolicy
from sb3_flow.offline_to_online.values import ActionValue


class RLPDPolicy(GenerativePolicy):
    """
    Policy class (actor, entropy coefficient, Q-functions and target) for RLPD.

    Candidates of ``best_of_n`` are ranked by the mean of the Q-functions, which the actor is trained to climb.
    ``GenerativePolicy`` describes the other arguments.

    :param acting_mode: ``"zero"`` (the mode of the Gaussian), ``"sample"`` or ``"best_of_n"``, see :class:`ActingPolicy`
    :param ent_coef: coefficient of the entropy, see :class:`EntropyCoefficient`
    :param target_entropy: see :class:`EntropyCoefficient`
    """

    actor_class = GaussianActor
    critic_class = ActionValue
    no_search = "a Gaussian takes one step"
    q_aggregation = "mean"
    actor: GaussianActor
    critic: ActionValue
    ent_coef: str | float
    target_entropy: str | float

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Box,
        lr_schedule: Schedule,
        horizon_length: int = 1,
        ent_coef: str | float = "auto",
        target_entropy: str | float = "auto_0.5",
        n_critics: int = 10,
        n_candidates: int = 32,
        acting_mode: ActingMode = "zero",
        search: dict[str, Any] | None = None,
        noise_seed: int | None = None,
        execution_horizon: int | None = None,
        net_arch: list[int] | dict[str, list[int]] | None = None,
        activation_fn: type[nn.Module] = TanhGELU,
        features_extractor_class: type[BaseFeaturesExtractor] | None = None,
        features_extractor_kwargs: dict[str, Any] | None = None,
        normalize_images: bool = True,
        optimizer_class: type[th.optim.Optimizer] = th.optim.Adam,
        optimizer_kwargs: dict[str, Any] | None = None,
        share_features_extractor: bool = False,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(**arguments_in(locals()))

    def _check_arguments(self) -> None:
        super()._check_arguments()
        check_whole(1, n_critics=self.n_critics)
        check_entropy(self.ent_coef, self.target_entropy)

    def _build(self, lr_schedule: Schedule) -> None:
        super()._build(lr_schedule)
        self.entropy_coefficient = EntropyCoefficient(self.ent_coef, self.target_entropy, self.actor.chunk_dim, lr_schedule)

    def explore_chunk(self, observation: PyTorchObs) -> th.Tensor:
        """Decide a fresh sample in every acting mode, as the online phase collects data."""
        return self.actor.act(observation, self.actor.noise(observation, self.exploration_generator)(1))[:, 0]


MlpPolicy = RLPDPolicy


class CnnPolicy(RLPDPolicy):
    """RLPD's policy for image observations, see :class:`RLPDPolicy`."""

    default_features_extractor = NatureCNN


class MultiInputPolicy(RLPDPolicy):
    """RLPD's policy for Dict observations, see :class:`RLPDPolicy`."""

    default_features_extractor = CombinedExtractor
