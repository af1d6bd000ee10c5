"""Policies of RQL: a velocity field over actions, a value function over partial actions, and the ways to act with them."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, NatureCNN
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import nn

from sb3_flow.common.backends import Backend
from sb3_flow.common.checks import arguments_in, check_choice, check_minimum, check_number, check_whole
from sb3_flow.flow import AverageVelocity, Critic, TanhGELU, guided_euler
from sb3_flow.offline_to_online.acting import ActingMode, ActingPolicy
from sb3_flow.offline_to_online.actors import FlowActor
from sb3_flow.offline_to_online.generative_policy import GenerativePolicy
from sb3_flow.offline_to_online.values import EnsembleValue

Value = Callable[..., th.Tensor]
"""``value(x, t, frozen=False) -> V_k(s, x, t)`` of shape ``(K, B, 1)``, closed over the observation."""


class PartialActionValue(EnsembleValue):
    """
    Ensemble of values V_k(s, x, t) of partial actions: of having refined noise to x by flow time t. V(s, a, 1) is the
    Q-function; V(s, x, 0) with x ~ N(0, I) is a one-sample estimate of the state value. Arguments: see ``EnsembleValue``.
    """

    extra_inputs = 1

    def bind(self, observation: PyTorchObs) -> Value:
        """Close the value function over observations: ``value(x, t, frozen)``; if frozen, gradients reach x only."""
        features, ensemble = self.features(observation), self.ensemble.bind()

        def value(x: th.Tensor, t: th.Tensor, frozen: bool = False) -> th.Tensor:
            own = features.detach() if frozen else features
            return ensemble(th.cat([own, x, t], dim=-1), frozen)

        return value

    def forward(self, observation: PyTorchObs, actions: th.Tensor) -> tuple[th.Tensor, ...]:
        """Value actions, as SB3's critics do: return Q(s, a) = V(s, a, 1) of shape ``(B, 1)`` for every member."""
        return tuple(self.bind(observation)(actions, th.ones_like(actions[:, :1])))


class RQLPolicy(GenerativePolicy):
    """
    Policy class (flow actor, its moving average, value ensemble and target) for RQL.

    ``predict`` uses the moving average of the actor; only exploration (``explore_chunk``) uses the actor itself. Candidates
    are ranked by mean_k V_k(s, a, 1).

    ``GenerativePolicy`` describes the other arguments.

    :param flow_steps: Euler steps F
    :param acting_mode: ``"sample"`` (the paper's), ``"zero"``, ``"best_of_n"``, ``"qgbs"`` or ``"guided"``, see
        :class:`ActingPolicy`
    :param alpha: weight of flow matching against the value term that the actor is trained with; ``"guided"`` needs to know it
    :param guidance: strength of ``"guided"``, see ``guided_samples``
    :param objective: ``"rql"``, or ``"bc"`` if no value function is trained: modes that value actions are refused then
    """

    actor_class = FlowActor
    critic_class = PartialActionValue
    actor_arguments = ("flow_steps",)
    SEARCH: ClassVar[dict[str, Any]] = {**ActingPolicy.SEARCH, "completion": "average"}
    q_aggregation = "mean"
    actor: FlowActor
    critic: PartialActionValue
    flow_steps: int
    alpha: float
    guidance: float
    objective: Literal["rql", "bc"]

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Box,
        lr_schedule: Schedule,
        horizon_length: int = 1,
        flow_steps: int = 10,
        n_critics: int = 10,
        n_candidates: int = 32,
        acting_mode: ActingMode = "sample",
        alpha: float = 1.0,
        guidance: float = 0.5,
        objective: Literal["rql", "bc"] = "rql",
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
        check_minimum(0.0, alpha=self.alpha, guidance=self.guidance)
        check_number(alpha=self.alpha, guidance=self.guidance)
        check_choice(("rql", "bc"), objective=self.objective)

    def _build(self, lr_schedule: Schedule) -> None:
        super()._build(lr_schedule)
        self.actor_ema: FlowActor = self._frozen_copy_of_actor()

    @property
    def acting_actor(self) -> FlowActor:
        return self.actor_ema

    @property
    def no_values(self) -> str | None:
        return 'with `objective="bc"` no value function is trained' if self.objective == "bc" else super().no_values

    @property
    def no_guidance(self) -> str | None:  # type: ignore[override]
        return None if self.alpha > 0 else "with `alpha=0` nothing says how strong the guidance is"

    def guided_samples(self, observation: PyTorchObs, noise: th.Tensor) -> th.Tensor:
        """
        Turn noise into actions with :func:`sb3_flow.flow.guided_euler` and the weight ``guidance`` A / (2 alpha F).

        Where L_Q + alpha L_BC has its minimum, the velocity is that of the data and A / (2 alpha F) times the gradient of V.
        To first order ``guidance`` acts therefore as if alpha were divided by 1 + ``guidance``, whatever the scale of rewards.
        """
        value = partial(self.critic.bind(observation), frozen=True)
        weight = self.guidance * self.actor_ema.chunk_dim / (2 * self.alpha * self.flow_steps)
        velocity = self.actor_ema.velocity(observation)
        return guided_euler(velocity, value, noise, self.flow_steps, weight).clamp(-1, 1)

    @property
    def steps_of_a_sample(self) -> int:
        return self.flow_steps

    steps_of_a_jump = steps_of_a_sample

    def explore_chunk(self, observation: PyTorchObs) -> th.Tensor:
        """Decide chunks with the actor itself from fresh noise, as the online phase collects them."""
        return self.actor.act(observation, self.actor.noise(observation, self.exploration_generator)(1))[:, 0]

    def path_values(self, observation: PyTorchObs, times: th.Tensor, points: th.Tensor) -> th.Tensor:
        """Give V_k(s, x, t), the values of having refined noise to x by flow time t."""
        n_times, batch_size, n, _ = points.shape
        features = self.critic.features(observation)[None, :, None].expand(n_times, -1, n, -1)
        inputs = th.cat([features, points, times[:, None, None, None].expand(-1, batch_size, n, 1)], dim=-1)
        values: th.Tensor = self.critic.ensemble(inputs.flatten(0, 2), frozen=True)
        return values.view(self.n_critics, n_times, batch_size, n)

    def _bound_critic(self, observation: PyTorchObs) -> Critic:
        """Give V_k(s, a, 1) of actions of shape ``(B, n, A)``, shape ``(K, B, n)``."""
        features = self.critic.features(observation).unsqueeze(1)

        def critic(actions: th.Tensor) -> th.Tensor:
            rows = actions.shape[:-1]
            inputs = th.cat([features.expand(*rows, -1), actions, th.ones_like(actions[..., :1])], dim=-1)
            values: th.Tensor = self.critic.ensemble(inputs.flatten(0, 1), frozen=True)
            return values.view(self.n_critics, *rows)

        return critic

    def _average_velocity(self, observation: PyTorchObs) -> AverageVelocity:
        return self.actor_ema.average_velocity(observation)


MlpPolicy = RQLPolicy


class CnnPolicy(RQLPolicy):
    """RQL's policy for image observations, see :class:`RQLPolicy`."""

    default_features_extractor = NatureCNN


class MultiInputPolicy(RQLPolicy):
    """RQL's policy for Dict observations, see :class:`RQLPolicy`."""

    default_features_extractor = CombinedExtractor
