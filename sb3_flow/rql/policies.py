"""Networks of RQL: a velocity field over actions, a value function over partial actions, and how to act with them."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import CombinedExtractor, NatureCNN
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule

from sb3_flow.common.checks import check_known, check_whole
from sb3_flow.flow import AverageVelocity, Critic, Velocity, VelocityNetwork, euler_forward
from sb3_flow.offline_to_online.acting import ActingPolicy
from sb3_flow.offline_to_online.actors import GenerativeActor
from sb3_flow.offline_to_online.generative_policy import EnsembleValue, GenerativePolicy

Value = Callable[..., th.Tensor]
"""``value(x, t, frozen=False) -> V_k(s, x, t)`` of shape ``(K, B, 1)``, closed over the observation."""


class FlowActor(GenerativeActor):
    """
    Flow policy: noise x^0 ~ N(0, I) is carried to an action x^F by ``flow_steps`` Euler steps along u(s, x, t).

    Arguments that are not listed are those of ``GenerativeActor``.

    :param flow_steps: Euler steps F
    """

    def __init__(self, *args: Any, flow_steps: int = 10, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flow_steps = flow_steps
        self.velocity_net = VelocityNetwork(self.features_dim, self.chunk_dim, self.net_arch, self.activation_fn)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {**super()._get_constructor_parameters(), "flow_steps": self.flow_steps}

    def velocity(self, observation: PyTorchObs, n_candidates: int = 1) -> Velocity:
        """:return: ``velocity(x, t)`` closed over a batch of observations, each for ``n_candidates`` successive rows of x"""
        features = self.extract_features(observation, self.features_extractor)
        return self.velocity_net.bind(features if n_candidates == 1 else features.repeat_interleave(n_candidates, dim=0))

    def act(self, observation: PyTorchObs, noise: th.Tensor) -> th.Tensor:
        n_candidates = noise.shape[1]
        velocity = self.velocity(observation, n_candidates)
        return euler_forward(velocity, noise.flatten(0, 1), self.flow_steps).clamp(-1, 1).unflatten(0, (-1, n_candidates))


class PartialActionValue(EnsembleValue):
    """
    Ensemble of values of partial actions V_k(s, x, t): how good it is to have refined noise to x by flow time t.
    V(s, a, 1) is the Q-function; V(s, x, 0) with x ~ N(0, I) is a one-sample estimate of the state value.

    The arguments are those of ``EnsembleValue``.
    """

    extra_inputs = 1

    def value(self, observation: PyTorchObs) -> Value:
        """:return: ``value(x, t, frozen)`` closed over a batch of observations; frozen: gradients reach x only"""
        features, ensemble = self.features(observation), self.ensemble.bind()

        def value(x: th.Tensor, t: th.Tensor, frozen: bool = False) -> th.Tensor:
            own = features.detach() if frozen else features
            return ensemble(th.cat([own, x, t], dim=-1), frozen)

        return value

    def forward(self, observation: PyTorchObs, actions: th.Tensor) -> tuple[th.Tensor, ...]:
        """:return: the members' Q(s, a) = V(s, a, 1), as SB3's critics: one tensor of shape ``(B, 1)`` each"""
        return tuple(self.value(observation)(actions, th.ones_like(actions[:, :1])))


class RQLPolicy(GenerativePolicy):
    """
    Policy class (flow actor, its moving average, value ensemble and target) for RQL.

    ``predict`` uses the moving average of the actor; only exploration (``explore_chunk``) uses the actor itself. Candidates
    are ranked by mean_k V_k(s, a, 1).

    Arguments that are not listed are those of ``GenerativePolicy``.

    :param observation_space: Observation space
    :param action_space: Action space
    :param lr_schedule: Learning rate schedule (could be constant)
    :param horizon_length: actions per decision h
    :param flow_steps: Euler steps F
    :param n_critics: ensemble size K
    :param n_candidates: n of ``"best_of_n"``
    :param acting_mode: ``"zero"``, ``"sample"`` (the paper's), ``"best_of_n"`` or ``"qgbs"``, see :class:`ActingPolicy`
    """

    actor_class = FlowActor
    critic_class = PartialActionValue
    SEARCH: ClassVar[dict[str, Any]] = {**ActingPolicy.SEARCH, "completion": "average"}
    q_aggregation = "mean"
    actor: FlowActor
    critic: PartialActionValue

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Box,
        lr_schedule: Schedule,
        horizon_length: int = 1,
        flow_steps: int = 10,
        n_critics: int = 10,
        n_candidates: int = 32,
        acting_mode: str = "zero",
        **kwargs: Any,
    ) -> None:
        check_known(type(self), kwargs)
        super().__init__(observation_space, action_space, horizon_length, n_critics, n_candidates, acting_mode, **kwargs)
        check_whole(1, flow_steps=flow_steps, n_critics=n_critics)
        self.flow_steps = flow_steps
        self._build(lr_schedule)
        self.actor_ema = self._frozen_actor()
        self.set_backend(self.backend)

    def _actor_arguments(self) -> dict[str, Any]:
        return {"flow_steps": self.flow_steps}

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {**super()._get_constructor_parameters(), "flow_steps": self.flow_steps}

    @property
    def acting_actor(self) -> FlowActor:
        return self.actor_ema

    @property
    def steps_of_a_sample(self) -> int:  # type: ignore[override]
        return self.flow_steps

    steps_of_a_jump = steps_of_a_sample

    def samples(self, observation: PyTorchObs, noise: th.Tensor) -> th.Tensor:
        return self.actor_ema.act(observation, noise)

    def explore_chunk(self, observation: PyTorchObs) -> th.Tensor:
        """:return: chunks of the actor itself from fresh noise, as the online phase collects them"""
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
        """V_k(s, x, t): how good it is to have refined noise to x by flow time t."""
        n_times, batch_size, n, _ = points.shape
        features = self.critic.features(observation)[None, :, None].expand(n_times, -1, n, -1)
        inputs = th.cat([features, points, times[:, None, None, None].expand(-1, batch_size, n, 1)], dim=-1)
        return self.critic.ensemble(inputs.flatten(0, 2), frozen=True).view(self.n_critics, n_times, batch_size, n)

    def _critic_of(self, observation: PyTorchObs) -> Critic:
        """:return: values V_k(s, a, 1) of actions of shape ``(B, n, A)``, shape ``(K, B, n)``"""
        features = self.critic.features(observation).unsqueeze(1)

        def critic(actions: th.Tensor) -> th.Tensor:
            rows = actions.shape[:-1]
            inputs = th.cat([features.expand(*rows, -1), actions, th.ones_like(actions[..., :1])], dim=-1)
            return self.critic.ensemble(inputs.flatten(0, 1), frozen=True).view(self.n_critics, *rows)

        return critic

    def _average_velocity(self, observation: PyTorchObs) -> AverageVelocity:
        """:return: what ``flow_steps`` Euler steps from flow time r to t amount to, for points of shape ``(B, n, A)``"""
        features = self.actor_ema.extract_features(observation, self.actor_ema.features_extractor)

        def average(x: th.Tensor, r: th.Tensor, t: th.Tensor) -> th.Tensor:
            velocity = self.actor_ema.velocity_net.bind(features.repeat_interleave(x.shape[1], dim=0))
            start, step = r.flatten(0, 1), ((t - r) / self.flow_steps).flatten(0, 1)
            end = x.flatten(0, 1)
            for i in range(self.flow_steps):
                end = th.addcmul(end, step, velocity(end, th.add(start, step, alpha=i)))
            return (end.unflatten(0, x.shape[:2]) - x) / (t - r)

        return average


MlpPolicy = RQLPolicy


class CnnPolicy(RQLPolicy):
    """RQL's policy for image observations, see :class:`RQLPolicy`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("features_extractor_class", NatureCNN)
        super().__init__(*args, **kwargs)


class MultiInputPolicy(RQLPolicy):
    """RQL's policy for Dict observations, see :class:`RQLPolicy`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("features_extractor_class", CombinedExtractor)
        super().__init__(*args, **kwargs)
