"""Policies of RQL: a velocity field over actions, a value function over partial actions, and the ways to act with them."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, NatureCNN
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import nn

from sb3_flow.common.backends import Backend
from sb3_flow.common.checks import arguments_in, check_whole
from sb3_flow.flow import AverageVelocity, Critic, TanhGELU, Velocity, VelocityNetwork, euler_forward
from sb3_flow.offline_to_online.acting import ActingMode, ActingPolicy
from sb3_flow.offline_to_online.actors import GenerativeActor
from sb3_flow.offline_to_online.generative_policy import GenerativePolicy
from sb3_flow.offline_to_online.values import EnsembleValue

Value = Callable[..., th.Tensor]
"""``value(x, t, frozen=False) -> V_k(s, x, t)`` of shape ``(K, B, 1)``, closed over the observation."""


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
    :param acting_mode: ``"zero"``, ``"sample"`` (the paper's), ``"best_of_n"`` or ``"qgbs"``, see :class:`ActingPolicy`
    """

    actor_class = FlowActor
    critic_class = PartialActionValue
    actor_arguments = ("flow_steps",)
    SEARCH: ClassVar[dict[str, Any]] = {**ActingPolicy.SEARCH, "completion": "average"}
    q_aggregation = "mean"
    actor: FlowActor
    critic: PartialActionValue
    flow_steps: int

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Box,
        lr_schedule: Schedule,
        horizon_length: int = 1,
        flow_steps: int = 10,
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
        check_whole(1, flow_steps=self.flow_steps, n_critics=self.n_critics)

    def _build(self, lr_schedule: Schedule) -> None:
        super()._build(lr_schedule)
        self.actor_ema: FlowActor = self._frozen_copy_of_actor()

    @property
    def acting_actor(self) -> FlowActor:
        return self.actor_ema

    @property
    def steps_of_a_sample(self) -> int:
        return self.flow_steps

    steps_of_a_jump = steps_of_a_sample

    def explore_chunk(self, observation: PyTorchObs) -> th.Tensor:
        """Decide chunks with the actor itself from fresh noise, as the online phase collects them."""
        return self.actor.act(observation, self.actor.noise(observation, self.exploration_generator)(1))[:, 0]

    def flow_path(self, observation: PyTorchObs, noise: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        velocity = self.actor_ema.velocity(observation, noise.shape[1])
        points: list[th.Tensor] = []

        def recorded(x: th.Tensor, t: th.Tensor) -> th.Tensor:
            points.append(x)
            return velocity(x, t)

        points.append(euler_forward(recorded, noise.flatten(0, 1), self.flow_steps).clamp(-1, 1))
        times = th.linspace(0, 1, self.flow_steps + 1, device=noise.device)
        return times, th.stack(points).unflatten(1, noise.shape[:2])

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
        """Average ``flow_steps`` Euler steps from flow time r to t, for points of shape ``(B, n, A)``."""
        features = self.actor_ema.extract_features(observation, self.actor_ema.features_extractor)

        def average(x: th.Tensor, r: th.Tensor, t: th.Tensor) -> th.Tensor:
            velocity = self.actor_ema.velocity_net.bind(features.repeat_interleave(x.shape[1], dim=0))
            start, step = r.flatten(0, 1), ((t - r) / self.flow_steps).flatten(0, 1)
            end = x.flatten(0, 1)
            for i in range(self.flow_steps):
                end = th.addcmul(end, step, velocity(end, th.add(start, step, alpha=i)))
            average_velocity: th.Tensor = (end.unflatten(0, x.shape[:2]) - x) / (t - r)
            return average_velocity

        return average


MlpPolicy = RQLPolicy


class CnnPolicy(RQLPolicy):
    """RQL's policy for image observations, see :class:`RQLPolicy`."""

    default_features_extractor = NatureCNN


class MultiInputPolicy(RQLPolicy):
    """RQL's policy for Dict observations, see :class:`RQLPolicy`."""

    default_features_extractor = CombinedExtractor
