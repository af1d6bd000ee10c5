"""Policies of FMQ, which act in one evaluation of their network, with the best of several samples, or by a search."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Self

import torch as th
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, NatureCNN
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import nn

from sb3_flow.common.backends import Backend
from sb3_flow.common.checks import arguments_in, check_whole, warn_without_effect
from sb3_flow.data import ChunkSamples, OfflineDataset, TrajectoryReplayBuffer
from sb3_flow.flow import AverageVelocity, FlowMapNetwork, TanhGELU, flow_map_sample, jump, sample_r_t
from sb3_flow.flow.guidance import Aggregation
from sb3_flow.losses import diagonal_loss, eulerian_loss, lagrangian_loss, progressive_loss
from sb3_flow.offline_to_online.acting import ActingMode
from sb3_flow.offline_to_online.actors import GenerativeActor
from sb3_flow.offline_to_online.generative_policy import GenerativePolicy
from sb3_flow.offline_to_online.metrics import MetricSums
from sb3_flow.offline_to_online.spaces import channels_first
from sb3_flow.offline_to_online.values import ActionValue

Distillation = Literal["mf", "lsd", "psd"]
LsdGradient = Literal["jump", "diagonal"]
N_PATH_POINTS = 11
"""Flow times of :meth:`FlowMapActor.path`."""


class ImitationDraws(NamedTuple):
    """Noise of flow matching and of self-distillation, shape ``(B, A)``, and flow times, shape ``(B, 1)``."""

    noise: th.Tensor
    other_noise: th.Tensor
    time: th.Tensor
    gamma: th.Tensor
    r: th.Tensor
    t: th.Tensor


class FlowMapActor(GenerativeActor):
    """
    Flow map policy: u_{r,t}(s, a_r) is the average velocity from flow time r to t, and a_1 = a_0 + u_{0,1}(s, a_0) the action
    of the noise a_0 ~ N(0, I).

    ``GenerativeActor`` describes the other arguments.

    :param fourier_dim: dimension of the embedding of each of the two times; 0 for raw numbers
    """

    def __init__(self, *args: Any, fourier_dim: int = 64, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fourier_dim = fourier_dim
        sizes = (self.features_dim, self.chunk_dim, self.net_arch)
        self.flow_map = FlowMapNetwork(*sizes, activation_fn=self.activation_fn, fourier_dim=fourier_dim)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {**super()._get_constructor_parameters(), "fourier_dim": self.fourier_dim}

    def velocity(self, observation: PyTorchObs, candidates: bool = False, n_candidates: int | None = None) -> AverageVelocity:
        """
        Close the average velocity over observations.

        :param observation: B observations
        :param candidates: several points for every observation
        :param n_candidates: count n of these points, if it is the same in all calls
        :return: ``velocity(a_r, r, t)`` for a_r of shape ``(B, A)``, with candidates ``(B, n, A)``
        """
        features = self.extract_features(observation, self.features_extractor)
        return self.flow_map.bind(features.unsqueeze(1) if candidates else features, n_candidates)

    def act(self, observation: PyTorchObs, noise: th.Tensor, steps: int | None = None) -> th.Tensor:
        """Turn noise into actions by equal jumps, by default ``flow_steps``, see :meth:`GenerativeActor.act`."""
        velocity = self.velocity(observation, candidates=True, n_candidates=noise.shape[1])
        return flow_map_sample(velocity, noise, self.flow_steps if steps is None else steps).clamp(-1, 1)

    def path(self, observation: PyTorchObs, noise: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """Reach every point by one jump from the noise, X_{0,t}(a_0); with several ``flow_steps`` from the point before."""
        velocity, start = self.velocity(observation, candidates=True), th.zeros_like(noise[..., :1])
        times = th.linspace(0, 1, N_PATH_POINTS if self.flow_steps == 1 else self.flow_steps + 1, device=noise.device)
        points = [noise]
        for r, t in pairwise(times):
            come_from, since = (noise, start) if self.flow_steps == 1 else (points[-1], start + r)
            points.append(jump(velocity, come_from, since, start + t))
        return times, th.stack([*points[:-1], points[-1].clamp(-1, 1)])

    def heads_for(self, observation: PyTorchObs, points: th.Tensor, time: th.Tensor) -> th.Tensor:
        """Jump to the end, see :meth:`GenerativeActor.heads_for`."""
        end = th.ones_like(points[..., :1])
        return jump(self.velocity(observation, candidates=True), points, end * time, end).clamp(-1, 1)


class FlowMapPolicy(GenerativePolicy):
    """
    Policy class with a flow map actor: for FMQ, or alone, trained by :meth:`learn_behaviour` on a dataset.

    ``GenerativePolicy`` describes the other arguments.

    :param horizon_length: actions per decision h (released: 5)
    :param n_critics: Q-functions K; 0 for a policy without the critic that ``best_of_n`` and ``qgbs`` need
    :param acting_mode: ``"sample"``, ``"zero"``, ``"best_of_n"`` or ``"qgbs"``, see :class:`ActingPolicy`; without a critic
        the default is ``"sample"``
    :param n_sampling_steps: jumps from noise to action, of every mode but ``"qgbs"``, whose samples take one
    :param q_aggregation: ``"min"`` or ``"mean"`` over the critics ranks candidates
    :param fourier_dim: dimension of the embedding of each of the two flow times; 0 for raw numbers
    :param distillation: self-distillation loss: ``"mf"`` (Eulerian, mean flow), ``"lsd"`` (Lagrangian), ``"psd"``
        (progressive)
    :param lsd_gradient: see :func:`sb3_flow.losses.lagrangian_loss`
    :param warmup_steps: gradient steps before self-distillation begins
    :param anneal_end_step: gradient steps until its pairs of times are spread over [0, 1]
    """

    actor_class = FlowMapActor
    critic_class = ActionValue
    actor_arguments = ("fourier_dim",)
    actor: FlowMapActor
    critic: ActionValue
    n_sampling_steps: int
    distillation: Distillation
    lsd_gradient: LsdGradient
    warmup_steps: int
    anneal_end_step: int
    n_steps: th.Tensor

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Box,
        lr_schedule: Schedule,
        horizon_length: int = 1,
        n_critics: int = 2,
        n_candidates: int = 32,
        acting_mode: ActingMode | None = None,
        n_sampling_steps: int = 1,
        q_aggregation: Aggregation = "min",
        fourier_dim: int = 64,
        distillation: Distillation = "mf",
        lsd_gradient: LsdGradient = "jump",
        warmup_steps: int = 5_000,
        anneal_end_step: int = 50_000,
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
            acting_mode = "best_of_n" if n_critics else "sample"
        super().__init__(**arguments_in(locals()))

    def _check_arguments(self) -> None:
        super()._check_arguments()
        check_whole(0, warmup_steps=self.warmup_steps, anneal_end_step=self.anneal_end_step)
        check_whole(1, n_sampling_steps=self.n_sampling_steps)
        unused = None if self.distillation == "lsd" else f'`distillation` is "{self.distillation}", not "lsd"'
        warn_without_effect(self, lsd_gradient=unused)

    def _build(self, lr_schedule: Schedule) -> None:
        super()._build(lr_schedule)
        if self.n_critics:
            self.anchor: FlowMapActor = self._frozen_copy_of_actor()
        # The count is a tensor, because an update is a function of tensors
        self.register_buffer("n_steps", th.zeros(()))

    @property
    def steps_of_a_sample(self) -> int:
        return self.n_sampling_steps

    def samples(self, observation: PyTorchObs, noise: th.Tensor) -> th.Tensor:
        return self.actor.act(observation, noise, self.n_sampling_steps)

    def _average_velocity(self, observation: PyTorchObs) -> AverageVelocity:
        return self.actor.velocity(observation, candidates=True)

    def explore_chunk(self, observation: PyTorchObs) -> th.Tensor:
        """Decide the best of n fresh samples (a single sample without a critic), as the online phase collects data."""
        noise = self.actor.noise(observation, self.exploration_generator)
        n_candidates = self.n_candidates if self.n_critics else 1
        return self.best_of(observation, self.actor.act(observation, noise(n_candidates)))

    def frozen_flow(self) -> GenerativeActor:
        flow = super().frozen_flow()
        flow.flow_steps = self.n_sampling_steps
        return flow

    def imitation_draws(self, actions: th.Tensor, generator: th.Generator | None) -> ImitationDraws:
        """
        Draw noise and times of :meth:`behaviour_loss`.

        :param actions: the chunks to imitate, shape ``(B, A)``
        :param generator: generator on the device of ``actions``
        """
        device, batch_size = actions.device, len(actions)
        noise, other_noise = th.randn(2, *actions.shape, generator=generator, device=device)
        time, gamma = th.rand(2, batch_size, 1, generator=generator, device=device)
        r, t = sample_r_t(batch_size, self.n_steps, self.warmup_steps, self.anneal_end_step, generator, device)
        return ImitationDraws(noise, other_noise, time, gamma, r, t)

    def behaviour_loss(self, velocity: AverageVelocity, batch: ChunkSamples, draws: ImitationDraws) -> dict[str, th.Tensor]:
        """
        Imitate data by flow matching on the diagonal (Eq. 3) and self-distillation off the diagonal (Eqs. 4-6), of weight zero
        during warm-up.

        :param velocity: the actor, bound to the batch's observations
        :param batch: windows of ``horizon_length`` steps
        :param draws: see :meth:`imitation_draws`
        :return: ``diagonal_loss`` and ``distillation_loss``, scalars to be added
        """
        actions, mask = batch.actions, batch.action_mask
        noise, other_noise, time, gamma, r, t = draws
        if self.distillation == "mf":
            distilled = eulerian_loss(velocity, actions, other_noise, r, t, mask)
        elif self.distillation == "lsd":
            distilled = lagrangian_loss(velocity, actions, other_noise, r, t, mask, self.lsd_gradient)
        else:
            distilled = progressive_loss(velocity, actions, other_noise, r, t, gamma, mask)
        return {
            "diagonal_loss": diagonal_loss(velocity, actions, noise, time, mask),
            "distillation_loss": (self.n_steps > self.warmup_steps) * distilled,
        }

    def learn_behaviour(
        self, dataset: OfflineDataset, gradient_steps: int, batch_size: int = 256, seed: int = 0, progress_bar: bool = False
    ) -> Self:
        """
        Clone the behaviour of a dataset with the actor alone: no critic, no environment, no algorithm around it. Another call
        continues the training.

        :param dataset: dataset with the spaces of this policy
        :param gradient_steps: gradient steps to make now
        :param batch_size: windows per step
        :param seed: seed of windows, noise and times
        :param progress_bar: show a progress bar
        :return: the policy
        :raises ValueError: if the dataset does not fit the policy, or ``batch_size`` is not at least 1
        :raises FloatingPointError: if the loss is not finite
        """
        check_whole(1, batch_size=batch_size)
        check_whole(0, gradient_steps=gradient_steps)
        buffer = TrajectoryReplayBuffer(
            *(1, self.observation_space, self.action_space, self.device),
            horizon_length=self.horizon_length,
            sampling="transition",
            window_rule="q_chunking",
        )
        buffer.set_offline(channels_first(dataset, self.observation_space))
        buffer.generator = th.Generator(buffer.storage_device).manual_seed(seed)
        generator = th.Generator(self.device).manual_seed(seed)
        self.actor.set_training_mode(True)
        metrics = MetricSums()
        before = int(self.n_steps)
        steps: Iterable[int] = range(1, gradient_steps + 1)
        if progress_bar:
            try:
                from tqdm import tqdm
            except ImportError as error:
                raise ImportError(
                    f"`progress_bar=True` needs the package tqdm: pip install 'sb3-flow[plots]' ({error})"
                ) from error
            steps = tqdm(steps)
        for step in steps:
            buffer.follow_rotation(before + step - 1)
            self.n_steps += 1
            batch = buffer.sample(batch_size)
            draws = self.imitation_draws(batch.actions, generator)
            losses = self.behaviour_loss(self.actor.velocity(batch.observations), batch, draws)
            self.actor.optimizer.zero_grad(set_to_none=True)
            sum(losses.values()).backward()  # type: ignore[union-attr]
            self.actor.optimizer.step()
            metrics.add(losses, step)
        self.actor.set_training_mode(False)
        return self


MlpPolicy = FlowMapPolicy


class CnnPolicy(FlowMapPolicy):
    """Flow map policy for image observations, see :class:`FlowMapPolicy`."""

    default_features_extractor = NatureCNN


class MultiInputPolicy(FlowMapPolicy):
    """Flow map policy for Dict observations, see :class:`FlowMapPolicy`."""

    default_features_extractor = CombinedExtractor
