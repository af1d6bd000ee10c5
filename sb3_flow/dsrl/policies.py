"""Policies of DSRL: a Gaussian over the noise of a flow, the flow that turns the noise into actions, and critics of both."""

from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, NatureCNN
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import nn

from sb3_flow.common.backends import Backend
from sb3_flow.common.checks import arguments_in, check_number, check_whole
from sb3_flow.flow import TanhGELU
from sb3_flow.offline_to_online.acting import ActingMode
from sb3_flow.offline_to_online.actors import FlowActor, GenerativeActor
from sb3_flow.offline_to_online.decoders import Decoder, FlowRecipe, take_flow
from sb3_flow.offline_to_online.gaussian_actor import EntropyCoefficient, GaussianActor, check_entropy
from sb3_flow.offline_to_online.generative_policy import GenerativePolicy, frozen_copy
from sb3_flow.offline_to_online.values import ActionValue


class DSRLPolicy(GenerativePolicy):
    """
    Policy class (noise actor, flow, Q-functions of actions and of noise) for DSRL.

    ``actor`` decides noise in [-1, 1], and ``flow`` turns ``noise_scale`` times this noise into an action. By default ``flow``
    is ``bc_flow_target``, the moving average of ``bc_flow``; with a ``decoder`` it is ``bc_flow``, and nothing trains it.

    ``GenerativePolicy`` describes the other arguments.

    :param noise_scale: bound of each component of the noise
    :param flow_steps: Euler steps F of the flow, if it is the policy's own
    :param decoder: a flow that is trained already: a model or a policy of sb3_flow, or a file with either. It is copied, and
        saved with the policy
    :param ent_coef: coefficient of the entropy of the noise, see ``EntropyCoefficient``
    :param target_entropy: entropy that a learned coefficient aims at, see ``EntropyCoefficient``
    :param n_candidates: n of best-of-n
    :param acting_mode: ``"sample"``, ``"zero"`` (the mode of the noise's distribution) or ``"best_of_n"``; by default
        ``"best_of_n"`` if ``n_candidates`` is more than 1, else ``"sample"``
    :param search: for compatibility with other policies; there is no search along the flow
    """

    actor_class = GaussianActor
    critic_class = ActionValue
    no_search = "DSRL decides the noise"
    q_aggregation = "mean"
    actor: GaussianActor
    critic: ActionValue
    bc_flow: GenerativeActor
    bc_flow_target: GenerativeActor
    noise_scale: float
    flow_steps: int
    decoder: Decoder | FlowRecipe | None
    ent_coef: str | float
    target_entropy: str | float

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Box,
        lr_schedule: Schedule,
        horizon_length: int = 1,
        noise_scale: float = 1.0,
        flow_steps: int = 10,
        decoder: Decoder | FlowRecipe | None = None,
        ent_coef: str | float = "auto",
        target_entropy: str | float = "auto_0.5",
        n_critics: int = 10,
        n_candidates: int = 1,
        acting_mode: ActingMode | None = None,
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
        if acting_mode is None:
            acting_mode = "sample" if n_candidates == 1 else "best_of_n"
        super().__init__(**arguments_in(locals()))

    def _check_arguments(self) -> None:
        super()._check_arguments()
        check_whole(1, flow_steps=self.flow_steps, n_critics=self.n_critics)
        check_entropy(self.ent_coef, self.target_entropy)
        check_number(noise_scale=self.noise_scale)
        if self.noise_scale <= 0:
            raise ValueError(f"`noise_scale` must be greater than 0, but {self.noise_scale} was given.")

    def _build(self, lr_schedule: Schedule) -> None:
        super()._build(lr_schedule)
        self.latent_critic: ActionValue = self._trained_critic(lr_schedule)
        self.entropy_coefficient = EntropyCoefficient(self.ent_coef, self.target_entropy, self.actor.chunk_dim, lr_schedule)
        if self.decoder is None:
            self.bc_flow = self._trained_actor(FlowActor, lr_schedule, ("flow_steps",))
            self.bc_flow_target = frozen_copy(self.bc_flow)
        else:
            self.bc_flow, self.decoder = take_flow(self.decoder, self)

    def set_training_mode(self, mode: bool) -> None:
        self.latent_critic.set_training_mode(mode)
        if self.trains_flow:
            self.bc_flow.set_training_mode(mode)
        super().set_training_mode(mode)

    @property
    def trains_flow(self) -> bool:
        """Say whether the flow is the policy's own."""
        return self.decoder is None

    @property
    def flow(self) -> GenerativeActor:
        """The flow that turns noise into actions."""
        return self.bc_flow_target if self.trains_flow else self.bc_flow

    _path_actor = flow

    @property
    def steps_of_a_sample(self) -> int:
        return 1 + self.flow.flow_steps

    @property
    def acting_modes(self) -> tuple[str, ...]:
        return ("sample", "zero") if self.n_candidates == 1 else super().acting_modes

    def set_acting_mode(self, mode: ActingMode, **search: Any) -> None:
        if mode == "best_of_n" and self.n_candidates == 1:
            raise ValueError('`acting_mode="best_of_n"` needs `n_candidates` of at least 2, but 1 was given.')
        super().set_acting_mode(mode, **search)

    def steered(self, observation: PyTorchObs, noise: th.Tensor) -> th.Tensor:
        """
        Turn the Gaussian noise of the actor into noise of the flow.

        :param observation: B observations
        :param noise: n starting points for each of them, shape ``(B, n, A)``
        :return: z in [-noise_scale, noise_scale], shape ``(B, n, A)``
        """
        return self.noise_scale * self.actor.act(observation, noise)

    def samples(self, observation: PyTorchObs, noise: th.Tensor) -> th.Tensor:
        return self.flow.act(observation, self.steered(observation, noise))

    def explore_chunk(self, observation: PyTorchObs) -> th.Tensor:
        """Decide a fresh sample, or the best of ``n_candidates``, as the online phase collects data."""
        noise = self.actor.noise(observation, self.exploration_generator)
        return self.best_of(observation, self.samples(observation, noise(self.n_candidates)))

    def flow_path(self, observation: PyTorchObs, noise: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """Follow the flow from the noise that the actor decides."""
        return super().flow_path(observation, self.steered(observation, noise))


MlpPolicy = DSRLPolicy


class CnnPolicy(DSRLPolicy):
    """DSRL's policy for image observations, see :class:`DSRLPolicy`."""

    default_features_extractor = NatureCNN


class MultiInputPolicy(DSRLPolicy):
    """DSRL's policy for Dict observations, see :class:`DSRLPolicy`."""

    default_features_extractor = CombinedExtractor
