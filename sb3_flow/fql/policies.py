"""Policies of FQL: a flow that clones the data, and a one-step actor distilled from it, or the best samples of the flow."""

from typing import Any, ClassVar, Literal

import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, NatureCNN
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import nn

from sb3_flow.common.backends import Backend
from sb3_flow.common.checks import arguments_in, check_whole
from sb3_flow.flow import AverageVelocity, OneStepNetwork, TanhGELU
from sb3_flow.offline_to_online.acting import ActingMode, ActingPolicy
from sb3_flow.offline_to_online.actors import FlowActor, GenerativeActor
from sb3_flow.offline_to_online.generative_policy import GenerativePolicy
from sb3_flow.offline_to_online.values import ActionValue

ActorType = Literal["distilled", "best_of_n"]


class OneStepActor(GenerativeActor):
    """
    One-step policy mu(s, z), which maps noise z ~ N(0, I) to an action in one evaluation of its network.

    ``GenerativeActor`` describes the arguments.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.network = OneStepNetwork(self.features_dim, self.chunk_dim, self.net_arch, self.activation_fn)

    def unclipped(self, observation: PyTorchObs, noise: th.Tensor) -> th.Tensor:
        """
        Evaluate mu(s, z), which distillation compares before actions are clipped.

        :param observation: B observations
        :param noise: n starting points for each of them, shape ``(B, n, A)``
        :return: shape ``(B, n, A)``
        """
        features, n_candidates = self.extract_features(observation, self.features_extractor), noise.shape[1]
        rows = features if n_candidates == 1 else features.repeat_interleave(n_candidates, dim=0)
        chunks: th.Tensor = self.network(rows, noise.flatten(0, 1)).unflatten(0, (-1, n_candidates))
        return chunks

    def act(self, observation: PyTorchObs, noise: th.Tensor) -> th.Tensor:
        return self.unclipped(observation, noise).clamp(-1, 1)


class FQLPolicy(GenerativePolicy):
    """
    Policy class (flow, one-step actor, Q-functions and target) for FQL.

    With ``actor_type="distilled"`` the actor is a one-step actor, and ``teacher`` the flow that clones the data; each network
    has a features extractor of its own. With ``"best_of_n"`` the actor is the flow, and there is no teacher.

    ``GenerativePolicy`` describes the other arguments.

    :param actor_type: ``"distilled"`` or ``"best_of_n"``
    :param flow_steps: Euler steps F of the flow
    :param acting_mode: ``"sample"``, ``"zero"``, ``"best_of_n"`` or ``"qgbs"``, see :class:`ActingPolicy`; by default
        ``"sample"`` for ``actor_type="distilled"``, which has no flow for ``"qgbs"``, and ``"best_of_n"`` for ``"best_of_n"``
    :param q_aggregation: ``"mean"`` or ``"min"`` over the critics ranks candidates
    """

    actor_class: type[GenerativeActor] = OneStepActor
    critic_class = ActionValue
    SEARCH: ClassVar[dict[str, Any]] = {**ActingPolicy.SEARCH, "completion": "average"}
    actor: OneStepActor | FlowActor
    critic: ActionValue
    teacher: FlowActor
    actor_type: ActorType
    flow_steps: int
    q_aggregation: Literal["mean", "min"]

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Box,
        lr_schedule: Schedule,
        horizon_length: int = 1,
        actor_type: ActorType = "distilled",
        flow_steps: int = 10,
        n_critics: int = 2,
        n_candidates: int = 32,
        acting_mode: ActingMode | None = None,
        q_aggregation: Literal["mean", "min"] = "mean",
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
            acting_mode = "best_of_n" if actor_type == "best_of_n" else "sample"
        super().__init__(**arguments_in(locals()))

    def _check_arguments(self) -> None:
        super()._check_arguments()
        check_whole(1, flow_steps=self.flow_steps, n_critics=self.n_critics)

    def _build(self, lr_schedule: Schedule) -> None:
        if not self.is_distilled:
            self.actor_class, self.actor_arguments = FlowActor, ("flow_steps",)
        super()._build(lr_schedule)
        if self.is_distilled:
            self.teacher = self._trained_actor(FlowActor, lr_schedule, ("flow_steps",))

    def set_training_mode(self, mode: bool) -> None:
        self.flow.set_training_mode(mode)
        super().set_training_mode(mode)

    @property
    def is_distilled(self) -> bool:
        """Say whether the actor is distilled from the flow."""
        return self.actor_type == "distilled"

    @property
    def flow(self) -> FlowActor:
        """The flow that clones the data."""
        return self.teacher if isinstance(self.actor, OneStepActor) else self.actor

    @property
    def samples_of_a_decision(self) -> int:
        """Samples of which targets and the online phase take the best, N for ``actor_type="best_of_n"``."""
        return 1 if self.is_distilled else self.n_candidates

    @property
    def steps_of_a_sample(self) -> int:
        return 1 if self.is_distilled else self.flow_steps

    steps_of_a_jump = steps_of_a_sample

    @property
    def no_search(self) -> str | None:  # type: ignore[override]
        return 'the actor with `actor_type="distilled"` takes one step' if self.is_distilled else None

    def explore_chunk(self, observation: PyTorchObs) -> th.Tensor:
        """Decide a fresh sample, or the best of N for ``actor_type="best_of_n"``, as the online phase collects data."""
        noise = self.actor.noise(observation, self.exploration_generator)
        return self.best_of(observation, self.actor.act(observation, noise(self.samples_of_a_decision)))

    def _average_velocity(self, observation: PyTorchObs) -> AverageVelocity:
        return self.flow.average_velocity(observation)


MlpPolicy = FQLPolicy


class CnnPolicy(FQLPolicy):
    """FQL's policy for image observations, see :class:`FQLPolicy`."""

    default_features_extractor = NatureCNN


class MultiInputPolicy(FQLPolicy):
    """FQL's policy for Dict observations, see :class:`FQLPolicy`."""

    default_features_extractor = CombinedExtractor
