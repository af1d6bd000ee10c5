"""Policies of QAM: a flow that clones the data, a flow that is fine-tuned from it, and a policy that edits its actions."""

from typing import Any, ClassVar

import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, NatureCNN
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import nn

from sb3_flow.common.backends import Backend
from sb3_flow.common.checks import arguments_in, check_minimum, check_number, check_whole
from sb3_flow.flow import AverageVelocity, TanhGELU
from sb3_flow.offline_to_online.acting import ActingMode, ActingPolicy
from sb3_flow.offline_to_online.actors import FlowActor
from sb3_flow.offline_to_online.gaussian_actor import EntropyCoefficient, GaussianActor, check_entropy
from sb3_flow.offline_to_online.generative_policy import GenerativePolicy, frozen_copy
from sb3_flow.offline_to_online.values import ActionValue


class QAMPolicy(GenerativePolicy):
    """
    Policy class (fine-tuned flow, behaviour flow and its average, edit policy, Q-functions and target) for QAM.

    ``actor`` is the fine-tuned flow, which acts; ``behaviour`` clones the data, and ``behaviour_target`` is its moving
    average. With ``edit_scale > 0`` there are ``edit_actor``, which answers an observation and an action of the flow with an
    edit in [-1, 1], and ``entropy_coefficient``. Then the noise of a decision is the flow's followed by the edit's. Each
    network has a features extractor of its own. Candidates are ranked by mean_k Q_k(s, a).

    ``GenerativePolicy`` describes the other arguments.

    :param flow_steps: Euler steps F of both flows
    :param edit_scale: largest edit of a component of an action in [-1, 1]; 0 for no edit policy
    :param ent_coef: see :class:`EntropyCoefficient`, where there is an edit policy
    :param target_entropy: see :class:`EntropyCoefficient`, where there is an edit policy
    :param acting_mode: ``"sample"`` (the paper's), ``"zero"``, ``"best_of_n"`` or, without an edit policy, ``"qgbs"``, see
        :class:`ActingPolicy`
    """

    actor_class = FlowActor
    critic_class = ActionValue
    actor_arguments = ("flow_steps",)
    SEARCH: ClassVar[dict[str, Any]] = {**ActingPolicy.SEARCH, "completion": "average"}
    q_aggregation = "mean"
    actor: FlowActor
    critic: ActionValue
    edit_actor: GaussianActor
    entropy_coefficient: EntropyCoefficient
    flow_steps: int
    edit_scale: float
    ent_coef: str | float
    target_entropy: str | float

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Box,
        lr_schedule: Schedule,
        horizon_length: int = 1,
        flow_steps: int = 10,
        edit_scale: float = 0.0,
        ent_coef: str | float = "auto",
        target_entropy: str | float = "auto_0.5",
        n_critics: int = 10,
        n_candidates: int = 32,
        acting_mode: ActingMode = "sample",
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
        check_whole(1, flow_steps=self.flow_steps, n_critics=self.n_critics)
        check_minimum(0.0, edit_scale=self.edit_scale)
        check_number(edit_scale=self.edit_scale)
        check_entropy(self.ent_coef, self.target_entropy)

    def _build(self, lr_schedule: Schedule) -> None:
        super()._build(lr_schedule)
        self.behaviour = self._trained_actor(FlowActor, lr_schedule, self.actor_arguments)
        self.behaviour_target = frozen_copy(self.behaviour)
        if self.edits:
            chunk_dim = self.actor.chunk_dim
            self.edit_actor = self._trained_actor(GaussianActor, lr_schedule, condition_dim=chunk_dim)
            self.entropy_coefficient = EntropyCoefficient(self.ent_coef, self.target_entropy, chunk_dim, lr_schedule)

    def set_training_mode(self, mode: bool) -> None:
        self.behaviour.set_training_mode(mode)
        if self.edits:
            self.edit_actor.set_training_mode(mode)
        super().set_training_mode(mode)

    @property
    def flow(self) -> FlowActor:
        """The flow that clones the data, averaged."""
        return self.behaviour_target

    @property
    def edits(self) -> bool:
        """Say whether there is an edit policy."""
        return self.edit_scale > 0

    @property
    def noise_dim(self) -> int:
        return self.actor.chunk_dim * (2 if self.edits else 1)

    @property
    def steps_of_a_sample(self) -> int:
        return self.flow_steps + int(self.edits)

    @property
    def steps_of_a_jump(self) -> int:
        return self.flow_steps

    @property
    def no_search(self) -> str | None:  # type: ignore[override]
        return f"with `edit_scale={self.edit_scale}` actions are edited after the flow" if self.edits else None

    def split_noise(self, noise: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """Split the noise of decisions, shape ``(B, n, noise_dim)``, into the flow's and the edit's (empty without edits)."""
        return noise[..., : self.actor.chunk_dim], noise[..., self.actor.chunk_dim :]

    def edited(self, actions: th.Tensor, edits: th.Tensor) -> th.Tensor:
        """Add edits in [-1, 1] to actions, shape ``(B, n, A)``."""
        return (actions + self.edit_scale * edits).clamp(-1, 1)

    def samples(self, observation: PyTorchObs, noise: th.Tensor) -> th.Tensor:
        of_flow, of_edit = self.split_noise(noise)
        actions = self.actor.act(observation, of_flow)
        return self.edited(actions, self.edit_actor.act(observation, of_edit, actions)) if self.edits else actions

    def explore_chunk(self, observation: PyTorchObs) -> th.Tensor:
        """Decide a fresh sample, as the online phase collects data."""
        noise = self.actor.noise(observation, self.exploration_generator, noise_dim=self.noise_dim)
        return self.samples(observation, noise(1))[:, 0]

    def flow_path(self, observation: PyTorchObs, noise: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """Follow the fine-tuned flow; an edit is part of the last step."""
        of_flow, of_edit = self.split_noise(noise)
        times, points = super().flow_path(observation, of_flow)
        if self.edits:
            actions = self.edited(points[-1], self.edit_actor.act(observation, of_edit, points[-1]))
            points = th.cat([points[:-1], actions.unsqueeze(0)])
        return times, points

    def _average_velocity(self, observation: PyTorchObs) -> AverageVelocity:
        return self.actor.average_velocity(observation)


MlpPolicy = QAMPolicy


class CnnPolicy(QAMPolicy):
    """QAM's policy for image observations, see :class:`QAMPolicy`."""

    default_features_extractor = NatureCNN


class MultiInputPolicy(QAMPolicy):
    """QAM's policy for Dict observations, see :class:`QAMPolicy`."""

    default_features_extractor = CombinedExtractor
