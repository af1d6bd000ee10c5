"""Base class of policies with an actor that turns noise into action chunks, a value ensemble and its target."""

from collections.abc import Iterable
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import BaseModel
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, FlattenExtractor, get_actor_critic_arch
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from stable_baselines3.common.utils import get_device
from torch import nn

from sb3_flow.common.backends import Backend, choose_backend
from sb3_flow.common.checkpoints import write_atomically
from sb3_flow.common.checks import check_layers, check_whole
from sb3_flow.common.older_files import finding_moved_modules
from sb3_flow.common.saved_by import SAVED_VERSION, refuse, saved_by, saved_data, warn_of_newer
from sb3_flow.flow import Critic, TanhGELU
from sb3_flow.fused.compiled_network import compiled_networks, not_covered
from sb3_flow.offline_to_online.acting import ActingMode, ActingPolicy
from sb3_flow.offline_to_online.actors import GenerativeActor, draw_seed
from sb3_flow.offline_to_online.older_names import translate
from sb3_flow.offline_to_online.options import check_options, check_own
from sb3_flow.offline_to_online.values import EnsembleValue
from sb3_flow.version import __version__

Actor = TypeVar("Actor", bound=GenerativeActor)


class GenerativePolicy(ActingPolicy):
    """
    Actor, value ensemble and its target.

    A subclass names the classes of the two networks, and its constructor hands on every argument by name
    (``arguments_in(locals())``). Arguments that are not listed here become attributes, and a saved policy has them.
    ``actor_arguments`` names the arguments that the actor takes, too.

    :param observation_space: Observation space
    :param action_space: Action space
    :param lr_schedule: Learning rate schedule (could be constant)
    :param horizon_length: actions per decision h
    :param execution_horizon: actions of a chunk that are executed before the next decision (default: all)
    :param n_critics: ensemble size K
    :param n_candidates: n of best-of-n
    :param acting_mode: how actions are found, see :class:`ActingPolicy`
    :param search: settings of ``"qgbs"`` that differ from ``SEARCH``, see :func:`sb3_flow.flow.beam_search`
    :param noise_seed: seed of the noise of deterministic decisions; by default it is drawn from torch's global generator, and
        an algorithm's policy has the algorithm's seed
    :param net_arch: hidden layers of both networks, or ``dict(pi=..., qf=...)``; default 4 x 512
    :param activation_fn: Activation function
    :param features_extractor_class: Features extractor to use; by default that of the class, ``default_features_extractor``
    :param features_extractor_kwargs: Keyword arguments to pass to the features extractor.
    :param normalize_images: Whether to normalize images or not, dividing by 255.0 (True by default)
    :param optimizer_class: The optimizer to use, ``th.optim.Adam`` by default
    :param optimizer_kwargs: Additional keyword arguments, excluding the learning rate, to pass to the optimizer
    :param share_features_extractor: Whether to share or not the features extractor between the actor and the critic
    :param backend: see :meth:`set_backend`
    :param own: further arguments of a subclass
    """

    actor_class: type[GenerativeActor]
    critic_class: ClassVar[type[EnsembleValue]]
    actor_arguments: tuple[str, ...] = ()
    default_features_extractor: ClassVar[type[BaseFeaturesExtractor]] = FlattenExtractor
    chosen_backend: str
    """``"native"`` or ``"torch"``."""

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Box,
        lr_schedule: Schedule,
        horizon_length: int = 1,
        n_critics: int = 2,
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
        **own: Any,
    ) -> None:
        check_own(type(self), own)
        super().__init__(
            observation_space,
            action_space,
            features_extractor_class or self.default_features_extractor,
            features_extractor_kwargs,
            optimizer_class=optimizer_class,
            optimizer_kwargs=optimizer_kwargs,
            normalize_images=normalize_images,
            squash_output=True,
        )
        check_whole(1, horizon_length=horizon_length, n_candidates=n_candidates)
        check_whole(0, n_critics=n_critics)
        check_layers(net_arch)
        vars(self).update(own)
        self._own_arguments = tuple(own)
        self.horizon_length = horizon_length
        self.set_execution_horizon(execution_horizon)
        self.n_critics = n_critics
        self.n_candidates = n_candidates
        self.search = {}
        self.noise_seed = draw_seed() if noise_seed is None else noise_seed
        self.net_arch = [512] * 4 if net_arch is None else net_arch
        self.activation_fn = activation_fn
        self.share_features_extractor = share_features_extractor
        self.backend = backend
        self.set_acting_mode(acting_mode, **(search or {}))
        self._check_arguments()
        self._build(lr_schedule)
        self.set_backend(backend)

    def _check_arguments(self) -> None:
        """Refuse further arguments that a subclass cannot use."""
        check_options(self)

    def _build(self, lr_schedule: Schedule) -> None:
        actor_arch, critic_arch = get_actor_critic_arch(self.net_arch)
        shared_kwargs = {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "activation_fn": self.activation_fn,
            "normalize_images": self.normalize_images,
            "horizon_length": self.horizon_length,
        }
        self._actor_kwargs = {
            **shared_kwargs,
            "net_arch": actor_arch,
            "noise_seed": self.noise_seed,
        }
        self.actor = self._trained_actor(self.actor_class, lr_schedule, self.actor_arguments)
        if self.n_critics == 0:
            return
        self._critic_kwargs = {
            **shared_kwargs,
            "net_arch": critic_arch,
            "n_critics": self.n_critics,
            "share_features_extractor": self.share_features_extractor,
        }
        self.critic = self._trained_critic(lr_schedule)
        # A target never shares its features extractor with the network that it follows
        self.critic_target = _freeze(self.critic, self.critic_class(**self._update_features_extractor(self._critic_kwargs)))

    def _optimizer(self, parameters: Iterable[nn.Parameter], lr_schedule: Schedule) -> th.optim.Optimizer:
        # A fused step is one kernel instead of a loop over the parameters
        defaults: dict[str, Any] = {"fused": True} if self.optimizer_class is th.optim.Adam else {}
        return self.optimizer_class(parameters, **{"lr": lr_schedule(1), **defaults, **self.optimizer_kwargs})

    def _trained_actor(
        self, actor_class: type[Actor], lr_schedule: Schedule, arguments: tuple[str, ...] = (), **own: Any
    ) -> Actor:
        """
        Build an actor with its optimiser.

        :param actor_class: class of the actor
        :param lr_schedule: of the optimiser
        :param arguments: names of the policy's own arguments that the actor takes, too
        :param own: further arguments of the actor
        """
        own = {**own, **{name: getattr(self, name) for name in arguments}}
        actor = actor_class(**self._update_features_extractor({**self._actor_kwargs, **own}))
        actor.optimizer = self._optimizer(actor.parameters(), lr_schedule)
        return actor

    def _trained_critic(self, lr_schedule: Schedule) -> Any:
        """Build a critic with its optimiser."""
        shared = self.actor.features_extractor if self.share_features_extractor else None
        critic = self.critic_class(**self._update_features_extractor(self._critic_kwargs, shared))
        # As in SAC the critic's loss does not train a shared features extractor
        parameters = (critic if shared is None else critic.ensemble).parameters()
        critic.optimizer = self._optimizer(parameters, lr_schedule)
        return critic

    def save(self, path: str) -> None:
        """
        Save the policy with its class, so that the file tells what it is. The file is whole, or the previous one stays.

        :param path: of the file
        """
        data = self._get_constructor_parameters()
        content = {SAVED_VERSION: __version__, "state_dict": self.state_dict(), "data": data, "policy_class": type(self)}
        write_atomically(path, None, partial(th.save, content))

    @classmethod
    def load(cls, path: str, device: th.device | str = "auto") -> Self:
        """
        Load a policy from a file, see ``BaseModel.load``.

        :param path: of the file
        :param device: Device on which the policy should be loaded.
        :return: the policy
        :raises ValueError: if an algorithm saved the file
        """
        if found := saved_by(saved_data(path)):
            refuse(cls, found[0], path)
        device = get_device(device)
        with finding_moved_modules():
            saved = th.load(path, map_location=device, weights_only=False)
        warn_of_newer(saved.get(SAVED_VERSION), path)
        translate(saved["data"])
        policy = cls(**saved["data"])
        policy.load_state_dict(saved["state_dict"])
        return policy.to(device)

    def set_noise_seed(self, seed: int) -> None:
        """
        Set the seed of the noise of deterministic decisions.

        :param seed: any integer
        """
        self.noise_seed = seed
        for part in self.children():
            if isinstance(part, GenerativeActor):
                part.noise_seed = seed

    def _frozen_copy_of_actor(self) -> Any:
        own = {name: getattr(self, name) for name in self.actor_arguments}
        return _freeze(self.actor, self.actor_class(**self._update_features_extractor({**self._actor_kwargs, **own})))

    def _get_constructor_parameters(self) -> dict[str, Any]:
        data = super()._get_constructor_parameters()
        names = (
            *("horizon_length", "execution_horizon", "n_critics", "n_candidates", "net_arch", "activation_fn"),
            *("features_extractor_class", "features_extractor_kwargs", "optimizer_class", "optimizer_kwargs"),
            *("share_features_extractor", "backend", "acting_mode", "search", "noise_seed", *self._own_arguments),
        )
        return {**data, "lr_schedule": self._dummy_schedule, **{name: getattr(self, name) for name in names}}

    def set_backend(self, backend: Backend, earlier: str | None = None, verbose: int = 0) -> None:
        """
        Choose what computes the networks. Both backends give the same numbers up to rounding.

        :param backend: ``"native"``, compiled kernels wherever nothing looks into the networks (tracing, hooks, torch.func);
            ``"torch"``, torch's own operators; ``"auto"``, native if these networks and this machine allow it
        :param earlier: the choice for ``"auto"`` when a model that is now loaded was built
        :param verbose: 1 to print the choice for ``"auto"``
        :raises ValueError: if ``"native"`` is given and the kernels do not cover these networks or this machine
        """
        self.backend = backend
        self.chosen_backend = choose_backend(backend, earlier, not_covered(self), None, verbose, self.device.type)
        for network in compiled_networks(self):
            network.native = self.chosen_backend == "native"

    @property
    def acting_actor(self) -> GenerativeActor:
        return self.actor

    @property
    def flow(self) -> GenerativeActor:
        """The actor whose noise another policy can steer: the one that clones the data, or else the one that acts."""
        return self.acting_actor

    def frozen_flow(self) -> GenerativeActor:
        """Copy ``flow``; no gradient changes the copy."""
        return frozen_copy(self.flow)

    def samples(self, observation: PyTorchObs, noise: th.Tensor) -> th.Tensor:
        return self.acting_actor.act(observation, noise)

    def _bound_critic(self, observation: PyTorchObs) -> Critic:
        critic: Any = self.critic
        return critic.bind(observation, frozen=True)  # type: ignore[no-any-return]

    @property
    def _path_actor(self) -> GenerativeActor:
        """Actor whose way from noise to actions is drawn."""
        return self.acting_actor

    def flow_path(self, observation: PyTorchObs, noise: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """
        Follow the way from noise to actions of the actor that ``predict`` uses, for pictures; see ``GenerativeActor.path``.

        :param observation: B observations
        :param noise: n starting points for each of them, shape ``(B, n, A)``
        :return: flow times from 0 to 1, shape ``(T,)``, and the points at these times, shape ``(T, B, n, A)``; the points at
            time 1 are actions in [-1, 1]
        """
        return self._path_actor.path(observation, noise)

    def path_values(self, observation: PyTorchObs, times: th.Tensor, points: th.Tensor) -> th.Tensor:
        """
        Value points on their way to an action, for pictures: Q_k of the actions that the points are heading for.

        :param observation: B observations
        :param times: flow times, shape ``(T,)``
        :param points: shape ``(T, B, n, A)``
        :return: values of the K members, shape ``(K, T, B, n)``
        """
        q, actor = self._bound_critic(observation), self._path_actor
        return th.stack([q(actor.heads_for(observation, x, t)) for t, x in zip(times, points, strict=True)], dim=1)

    def set_training_mode(self, mode: bool) -> None:
        self.actor.set_training_mode(mode)
        if self.n_critics:
            self.critic.set_training_mode(mode)
        self.training = mode

    def forward(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        return self._predict(observation, deterministic)


def frozen_copy(actor: Actor) -> Actor:
    """Copy an actor, without its optimiser; no gradient changes the copy."""
    copied = deepcopy(actor)
    vars(copied).pop("optimizer", None)
    copied.set_training_mode(False)
    return copied.requires_grad_(False)


def _freeze(source: BaseModel, twin: Any) -> Any:
    """Give a network of the same structure the weights of the source, which no gradient changes from now on."""
    twin.load_state_dict(source.state_dict())
    twin.set_training_mode(False)
    twin.requires_grad_(False)
    return twin
