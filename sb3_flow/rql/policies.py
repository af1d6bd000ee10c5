"""Networks of RQL: a velocity field over actions, a value function over partial actions, and how to act with them."""

from collections.abc import Callable
from typing import Any

import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BaseModel
from stable_baselines3.common.preprocessing import get_action_dim
from stable_baselines3.common.torch_layers import (
    BaseFeaturesExtractor,
    CombinedExtractor,
    FlattenExtractor,
    NatureCNN,
    get_actor_critic_arch,
)
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import nn

from sb3_flow.common.chunking import ChunkedPolicy
from sb3_flow.flow import EnsembleMLP, TanhGELU, Velocity, VelocityNetwork, euler_forward

EVALUATION_MODES = ("sample", "zero", "best_of_n")
NOISE_BANK_SEED = 0

Value = Callable[..., th.Tensor]
"""``value(x, t, frozen=False) -> V_k(s, x, t)`` of shape ``(K, B, 1)``, closed over the observation."""


class FlowActor(ChunkedPolicy):
    """
    Flow policy: noise x^0 ~ N(0, I) is carried to an action x^F by ``flow_steps`` Euler steps along u(s, x, t).

    :param observation_space: Observation space
    :param action_space: Action space
    :param net_arch: hidden layer sizes of the velocity network
    :param features_extractor: Network to extract features (a CNN when using images, a nn.Flatten() layer otherwise)
    :param features_dim: Number of features
    :param activation_fn: Activation function
    :param normalize_images: Whether to normalize images or not, dividing by 255.0 (True by default)
    :param horizon_length: actions per decision h
    :param flow_steps: Euler steps F
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Box,
        net_arch: list[int],
        features_extractor: BaseFeaturesExtractor,
        features_dim: int,
        activation_fn: type[nn.Module] = TanhGELU,
        normalize_images: bool = True,
        horizon_length: int = 1,
        flow_steps: int = 10,
    ) -> None:
        super().__init__(
            observation_space,
            action_space,
            features_extractor=features_extractor,
            normalize_images=normalize_images,
            squash_output=True,
        )
        self.net_arch = net_arch
        self.features_dim = features_dim
        self.activation_fn = activation_fn
        self.horizon_length = horizon_length
        self.flow_steps = flow_steps
        self.chunk_dim = horizon_length * get_action_dim(action_space)
        self.velocity_net = VelocityNetwork(features_dim, self.chunk_dim, net_arch, activation_fn)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        data = super()._get_constructor_parameters()
        names = ("net_arch", "features_dim", "activation_fn", "features_extractor", "horizon_length", "flow_steps")
        return {**data, **{name: getattr(self, name) for name in names}}

    def velocity(self, observation: PyTorchObs) -> Velocity:
        """:return: ``velocity(x, t)`` closed over a batch of observations"""
        return self.velocity_net.bind(self.extract_features(observation, self.features_extractor))

    def act(self, observation: PyTorchObs, noise: th.Tensor) -> th.Tensor:
        """
        :param observation: B observations
        :param noise: n starting points for each of them, shape ``(B, n, A)``
        :return: actions in [-1, 1], shape ``(B, n, A)``
        """
        n_candidates = noise.shape[1]
        features = self.extract_features(observation, self.features_extractor)
        velocity = self.velocity_net.bind(features.repeat_interleave(n_candidates, dim=0))
        return euler_forward(velocity, noise.flatten(0, 1), self.flow_steps).clamp(-1, 1).unflatten(0, (-1, n_candidates))

    def forward(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        return self.predict_chunk(observation, deterministic)

    def predict_chunk(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        shape = (_batch_size(observation), 1, self.chunk_dim)
        noise = th.zeros(shape, device=self.device) if deterministic else th.randn(shape, device=self.device)
        return self.act(observation, noise)[:, 0]


class PartialActionValue(BaseModel):
    """
    Ensemble of values of partial actions V_k(s, x, t): how good it is to have refined noise to x by flow time t.
    V(s, a, 1) is the Q-function; V(s, x, 0) with x ~ N(0, I) is a one-sample estimate of the state value.

    :param observation_space: Observation space
    :param action_space: Action space
    :param net_arch: hidden layer sizes of every member
    :param features_extractor: Network to extract features
    :param features_dim: Number of features
    :param activation_fn: Activation function
    :param normalize_images: Whether to normalize images or not, dividing by 255.0 (True by default)
    :param horizon_length: actions per decision h
    :param n_critics: ensemble size K
    :param share_features_extractor: whether the features extractor is the actor's, which then trains it alone
    """

    features_extractor: BaseFeaturesExtractor
    optimizer: th.optim.Optimizer

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Box,
        net_arch: list[int],
        features_extractor: BaseFeaturesExtractor,
        features_dim: int,
        activation_fn: type[nn.Module] = TanhGELU,
        normalize_images: bool = True,
        horizon_length: int = 1,
        n_critics: int = 10,
        share_features_extractor: bool = False,
    ) -> None:
        super().__init__(
            observation_space, action_space, features_extractor=features_extractor, normalize_images=normalize_images
        )
        self.n_critics = n_critics
        self.share_features_extractor = share_features_extractor
        input_dim = features_dim + horizon_length * get_action_dim(action_space) + 1
        self.ensemble = EnsembleMLP(n_critics, input_dim, net_arch, activation_fn)

    def value(self, observation: PyTorchObs) -> Value:
        """:return: ``value(x, t, frozen)`` closed over a batch of observations; frozen: gradients reach x only"""
        with th.set_grad_enabled(th.is_grad_enabled() and not self.share_features_extractor):
            features = self.extract_features(observation, self.features_extractor)

        def value(x: th.Tensor, t: th.Tensor, frozen: bool = False) -> th.Tensor:
            own = features.detach() if frozen else features
            return self.ensemble(th.cat([own, x, t], dim=-1), frozen)

        return value

    def forward(self, observation: PyTorchObs, actions: th.Tensor) -> tuple[th.Tensor, ...]:
        """:return: the members' Q(s, a) = V(s, a, 1), as SB3's critics: one tensor of shape ``(B, 1)`` each"""
        return tuple(self.value(observation)(actions, actions.new_ones(len(actions), 1)))


class RQLPolicy(ChunkedPolicy):
    """
    Policy class (flow actor, its moving average, value ensemble and target) for RQL.

    Which noise an action starts from, by ``evaluation_mode`` and ``deterministic``:

    =============  ==========================================  =============================================
    mode           ``deterministic=False``                     ``deterministic=True`` (repeatable)
    =============  ==========================================  =============================================
    ``sample``     fresh Gaussian noise (the paper's protocol)  one fixed noise vector
    ``zero``       zeros                                       zeros
    ``best_of_n``  best of n fresh samples by mean_k V_k(s, a, 1)  best of a fixed bank of n by the same
    =============  ==========================================  =============================================

    All of them use the moving average of the actor; only exploration (``explore_chunk``) uses the actor itself.

    :param observation_space: Observation space
    :param action_space: Action space
    :param lr_schedule: Learning rate schedule (could be constant)
    :param horizon_length: actions per decision h
    :param flow_steps: Euler steps F
    :param n_critics: ensemble size K
    :param evaluation_mode: ``"sample"``, ``"zero"`` or ``"best_of_n"``
    :param n_candidates: n of ``"best_of_n"``
    :param net_arch: hidden layers of both networks, or ``dict(pi=..., qf=...)``; default 4 x 512
    :param activation_fn: Activation function
    :param features_extractor_class: Features extractor to use.
    :param features_extractor_kwargs: Keyword arguments to pass to the features extractor.
    :param normalize_images: Whether to normalize images or not, dividing by 255.0 (True by default)
    :param optimizer_class: The optimizer to use, ``th.optim.Adam`` by default
    :param optimizer_kwargs: Additional keyword arguments, excluding the learning rate, to pass to the optimizer
    :param share_features_extractor: Whether to share or not the features extractor between the actor and the critic
    """

    actor: FlowActor
    critic: PartialActionValue
    noise_bank: th.Tensor

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Box,
        lr_schedule: Schedule,
        horizon_length: int = 1,
        flow_steps: int = 10,
        n_critics: int = 10,
        evaluation_mode: str = "zero",
        n_candidates: int = 32,
        net_arch: list[int] | dict[str, list[int]] | None = None,
        activation_fn: type[nn.Module] = TanhGELU,
        features_extractor_class: type[BaseFeaturesExtractor] = FlattenExtractor,
        features_extractor_kwargs: dict[str, Any] | None = None,
        normalize_images: bool = True,
        optimizer_class: type[th.optim.Optimizer] = th.optim.Adam,
        optimizer_kwargs: dict[str, Any] | None = None,
        share_features_extractor: bool = False,
    ) -> None:
        super().__init__(
            observation_space,
            action_space,
            features_extractor_class,
            features_extractor_kwargs,
            optimizer_class=optimizer_class,
            optimizer_kwargs=optimizer_kwargs,
            normalize_images=normalize_images,
            squash_output=True,
        )
        self.horizon_length = horizon_length
        self.flow_steps = flow_steps
        self.n_critics = n_critics
        self.n_candidates = n_candidates
        self.set_evaluation_mode(evaluation_mode)
        self.net_arch = [512] * 4 if net_arch is None else net_arch
        self.activation_fn = activation_fn
        self.share_features_extractor = share_features_extractor
        self._build(lr_schedule)

    def _build(self, lr_schedule: Schedule) -> None:
        actor_arch, critic_arch = get_actor_critic_arch(self.net_arch)
        shared_kwargs = {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "activation_fn": self.activation_fn,
            "normalize_images": self.normalize_images,
            "horizon_length": self.horizon_length,
        }
        actor_kwargs = {**shared_kwargs, "net_arch": actor_arch, "flow_steps": self.flow_steps}
        critic_kwargs = {
            **shared_kwargs,
            "net_arch": critic_arch,
            "n_critics": self.n_critics,
            "share_features_extractor": self.share_features_extractor,
        }
        self.actor = FlowActor(**self._update_features_extractor(actor_kwargs))
        shared = self.actor.features_extractor if self.share_features_extractor else None
        self.critic = PartialActionValue(**self._update_features_extractor(critic_kwargs, shared))
        # Targets never share their features extractor with what they follow
        self.actor_ema = FlowActor(**self._update_features_extractor(actor_kwargs))
        self.critic_target = PartialActionValue(**self._update_features_extractor(critic_kwargs))
        for target, source in ((self.actor_ema, self.actor), (self.critic_target, self.critic)):
            target.load_state_dict(source.state_dict())
            target.set_training_mode(False)
            target.requires_grad_(False)

        # As in SAC the critic's loss does not train a shared features extractor
        critic_parameters = (self.critic if shared is None else self.critic.ensemble).parameters()
        # fused: one kernel per step instead of a loop over the parameters
        defaults: dict[str, Any] = {"fused": True} if self.optimizer_class is th.optim.Adam else {}
        optimizer_kwargs = {"lr": lr_schedule(1), **defaults, **self.optimizer_kwargs}
        self.actor.optimizer = self.optimizer_class(self.actor.parameters(), **optimizer_kwargs)
        self.critic.optimizer = self.optimizer_class(critic_parameters, **optimizer_kwargs)

        bank = th.randn(self.n_candidates, self.actor.chunk_dim, generator=th.Generator().manual_seed(NOISE_BANK_SEED))
        self.register_buffer("noise_bank", bank, persistent=False)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        data = super()._get_constructor_parameters()
        names = (
            *("horizon_length", "flow_steps", "n_critics", "evaluation_mode", "n_candidates", "net_arch", "activation_fn"),
            *("features_extractor_class", "features_extractor_kwargs", "optimizer_class", "optimizer_kwargs"),
            "share_features_extractor",
        )
        return {**data, "lr_schedule": self._dummy_schedule, **{name: getattr(self, name) for name in names}}

    def set_evaluation_mode(self, mode: str) -> None:
        """:param mode: ``"sample"``, ``"zero"`` or ``"best_of_n"``, see the class"""
        if mode not in EVALUATION_MODES:
            raise ValueError(f"`evaluation_mode` must be one of {EVALUATION_MODES}, but {mode!r} was given.")
        self.evaluation_mode = mode

    def set_training_mode(self, mode: bool) -> None:
        self.actor.set_training_mode(mode)
        self.critic.set_training_mode(mode)
        self.training = mode

    def forward(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        return self._predict(observation, deterministic)

    def predict_chunk(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        batch_size = _batch_size(observation)
        n_candidates = self.n_candidates if self.evaluation_mode == "best_of_n" else 1
        if self.evaluation_mode == "zero":
            noise = self.noise_bank.new_zeros(batch_size, 1, self.actor.chunk_dim)
        elif deterministic:
            noise = self.noise_bank[:n_candidates].expand(batch_size, -1, -1)
        else:
            noise = self._noise(batch_size, n_candidates, self.generator)
        candidates = self.actor_ema.act(observation, noise)
        return candidates[:, 0] if n_candidates == 1 else self._best(observation, candidates)

    def explore_chunk(self, observation: PyTorchObs) -> th.Tensor:
        """:return: chunks of the actor itself from fresh noise, as the online phase collects them"""
        return self.actor.act(observation, self._noise(_batch_size(observation), 1, self.exploration_generator))[:, 0]

    def _noise(self, batch_size: int, n_candidates: int, generator: th.Generator | None) -> th.Tensor:
        shape = (batch_size, n_candidates, self.actor.chunk_dim)
        return th.randn(shape, generator=generator, device=self.device)

    def _best(self, observation: PyTorchObs, candidates: th.Tensor) -> th.Tensor:
        """Rank candidates of shape ``(B, n, A)`` by the ensemble mean of V(s, a, 1)."""
        batch_size, n_candidates, _ = candidates.shape
        features = self.critic.extract_features(observation, self.critic.features_extractor)
        actions = candidates.flatten(0, 1)
        inputs = th.cat([features.repeat_interleave(n_candidates, dim=0), actions, actions.new_ones(len(actions), 1)], dim=-1)
        scores = self.critic.ensemble(inputs).mean(dim=0).view(batch_size, n_candidates)
        return candidates[th.arange(batch_size, device=candidates.device), scores.argmax(dim=1)]


def _batch_size(observation: PyTorchObs) -> int:
    return len(next(iter(observation.values())) if isinstance(observation, dict) else observation)


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
