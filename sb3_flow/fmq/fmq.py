"""Flow Map Q-Guidance (FMQ), C. Ziakas, A. Russo, A. J. Bose, arXiv 2605.12416."""

from typing import Any, ClassVar, Literal

import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, Schedule

from sb3_flow.common.backends import Backend
from sb3_flow.common.checks import arguments_in, check_choice, check_minimum, check_number, check_whole, warn_without_effect
from sb3_flow.common.ranks import mean_over_ranks, own_rows
from sb3_flow.data import ChunkSamples, OfflineDataset
from sb3_flow.data.residence import Storage
from sb3_flow.data.table import Sampling
from sb3_flow.execution import Execution
from sb3_flow.flow import AverageVelocity, action_gradient, aggregate_q, effective_radius, q_guided_projection
from sb3_flow.flow.guidance import Aggregation
from sb3_flow.fmq.policies import (
    CnnPolicy,
    Distillation,
    FlowMapActor,
    FlowMapPolicy,
    ImitationDraws,
    LsdGradient,
    MlpPolicy,
    MultiInputPolicy,
)
from sb3_flow.losses import regression_loss, td_loss
from sb3_flow.offline_to_online.acting import ActingMode
from sb3_flow.offline_to_online.algorithm import OfflineToOnlineAlgorithm
from sb3_flow.offline_to_online.values import ActionValue

ActorDraws = tuple[tuple[th.Tensor, th.Tensor] | None, ImitationDraws | None]


class FMQ(OfflineToOnlineAlgorithm):
    """
    Flow Map Q-Guidance: offline-to-online RL for policies that act in one evaluation of their network.

    The actor is a flow map: u_{r,t}(s, a_r) is the average velocity from flow time r to t, an action is a_0 + u_{0,1}(s, a_0).

    Offline it imitates the data (flow matching and self-distillation) beside a critic on action chunks,

        y = R_h + gamma^h m agg_j Q_bar_j(s_{+h}, a'),   a' the best of N samples                     (Eq. 8)

    At the switch the actor is copied to the anchor u^off. Online the actor follows the closed-form maximiser of the linearised
    Q in a ball around the anchor's velocity,

        u* = u^off_{r,1}(a_r) + eta_eff g / ||g||,   g = grad_a Q_1(s, a_r + (1 - r) u^off)          (Theorem 3.2, Eqs. 11-13)

    so that it improves on the data policy but stays within eta_eff of it. Actions are the best of N samples by the critics.

    Where paper and released implementation differ, the defaults are the released values.

    ``OfflineToOnlineAlgorithm`` describes the other arguments.

    :param policy: The policy model to use (MlpPolicy, CnnPolicy, MultiInputPolicy; FlowMapPolicy is MlpPolicy)
    :param learning_rate: learning rate of both Adam optimisers
    :param learning_starts: environment steps before the first online update (released: 5,000); after an offline phase the
        policy acts in these steps, otherwise they are random
    :param tau: rate of the targets Q_bar
    :param horizon_length: h, actions decided at once (released: 5)
    :param execution_horizon: actions of a decision that are executed before the next decision (default: all)
    :param n_candidates: N of best-of-n, in acting online, in the target and in ``acting_mode="best_of_n"``; 1 for single
        samples
    :param q_aggregation: ``"mean"`` or ``"min"`` over the critics offline; online it is the minimum
    :param distillation: self-distillation loss of the offline phase, ``"mf"``, ``"lsd"`` or ``"psd"``, see
        :class:`FlowMapPolicy` (as for ``lsd_gradient``, ``warmup_steps``, ``anneal_end_step`` and ``n_sampling_steps``)
    :param online_rule: ``"fmq"``; or ``"bc"``, which goes on as offline, without guidance: best of n with imitation (MVP)
    :param eta: radius of the ball, in velocity, without ``adaptive_radius`` or with ``radius="published"``; otherwise, as by
        default, eta has no effect, and a warning says so if it is given
    :param adaptive_radius: shrink the radius where the critics disagree (Eq. 13)
    :param beta: strength of that shrinking
    :param radius: numerator of the adaptive radius: ``"released"`` has 1, ``"published"`` eta
    :param guidance_critic: the Q that is climbed: ``"first"``, ``"min"`` or ``"mean"``
    :param guidance_at: point where the gradient of Q is taken: the action of the ``"anchor"`` or of the ``"actor"``
    :param normalize_gradient: go the whole radius; else eta_eff g, farther where the slope is steeper
    :param distillation_weight: weight of self-distillation in the online phase
    :param diagonal_weight: weight of flow matching in the online phase
    :param reanchor_every: gradient steps of the online phase between two copies of the actor to the anchor; 0 for never, as
        published. The default is 0 after an offline phase. Without an offline phase the default is 1, an ascent from the
        present actor: an anchor with random weights would hold the actor near these weights
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpPolicy,
        "FlowMapPolicy": MlpPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
    }
    policy_arguments = (
        *("execution_horizon", "n_candidates", "n_sampling_steps", "distillation"),
        *("lsd_gradient", "warmup_steps", "anneal_end_step"),
    )
    window_rule = "q_chunking"
    policy: FlowMapPolicy
    actor: FlowMapActor
    anchor: FlowMapActor
    critic: ActionValue
    critic_target: ActionValue
    n_candidates: int
    q_aggregation: Literal["mean", "min"]
    online_rule: Literal["fmq", "bc"]
    eta: float
    adaptive_radius: bool
    beta: float
    radius: Literal["released", "published"]
    guidance_critic: Aggregation
    guidance_at: Literal["anchor", "actor"]
    normalize_gradient: bool
    distillation_weight: float
    diagonal_weight: float
    reanchor_every: int | None

    def __init__(
        self,
        policy: str | type[FlowMapPolicy],
        env: GymEnv | str | None,
        learning_rate: float | Schedule = 3e-4,
        buffer_size: int = 1_000_000,
        learning_starts: int = 100,
        batch_size: int = 256,
        tau: float = 0.005,
        gamma: float = 0.99,
        train_freq: int | tuple[int, str] = 1,
        gradient_steps: int = 1,
        action_noise: ActionNoise | None = None,
        replay_buffer_class: type[ReplayBuffer] | None = None,
        replay_buffer_kwargs: dict[str, Any] | None = None,
        optimize_memory_usage: bool = False,
        n_steps: int = 1,
        horizon_length: int = 1,
        execution_horizon: int | None = None,
        n_candidates: int = 32,
        q_aggregation: Literal["mean", "min"] = "mean",
        distillation: Distillation = "mf",
        lsd_gradient: LsdGradient = "jump",
        warmup_steps: int = 5_000,
        anneal_end_step: int = 50_000,
        online_rule: Literal["fmq", "bc"] = "fmq",
        eta: float = 0.5,
        adaptive_radius: bool = True,
        beta: float = 0.3,
        radius: Literal["released", "published"] = "released",
        guidance_critic: Aggregation = "first",
        guidance_at: Literal["anchor", "actor"] = "anchor",
        normalize_gradient: bool = True,
        distillation_weight: float = 0.0,
        diagonal_weight: float = 0.0,
        reanchor_every: int | None = None,
        acting_mode: ActingMode = "best_of_n",
        n_sampling_steps: int = 1,
        search: dict[str, Any] | None = None,
        offline_dataset: OfflineDataset | str | None = None,
        offline_steps: int = 0,
        offline_fraction: float | None = None,
        sampling: Sampling = "transition",
        storage: Storage = "auto",
        backend: Backend = "auto",
        execution: Execution = "auto",
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
    ) -> None:
        self.anchored_at = 0  # offline updates of the actor that is the anchor
        super().__init__(**arguments_in(locals()))

    def td_target(self, batch: ChunkSamples, noise: th.Tensor) -> th.Tensor:
        """
        Compute y = R_h + gamma^h m agg_j Q_bar_j(s_{+h}, a'), a' the best of N samples by the live actor and critics (Eq. 8).

        :param noise: starting points of the samples, shape ``(B, N, A)``
        :return: shape ``(B, 1)``
        """
        samples = self.actor.act(batch.next_observations, noise)
        a = self.policy.best_of(batch.next_observations, samples, self._aggregation)
        q_values = aggregate_q(self.critic_target.bind(batch.next_observations)(a), self._aggregation)
        return batch.rewards + batch.discounts * q_values.unsqueeze(1)

    def guided_velocity(
        self, batch: ChunkSamples, a_r: th.Tensor, r: th.Tensor, u: th.Tensor
    ) -> tuple[th.Tensor, dict[str, th.Tensor]]:
        """
        Compute u* = u^off + eta_eff g / ||g||, the target of the actor's velocity (Eqs. 11 and 13).

        :param a_r: points at flow time r, shape ``(B, A)``
        :param r: shape ``(B, 1)``
        :param u: the actor's velocity u_{r,1}(a_r), shape ``(B, A)``
        :return: u*, shape ``(B, A)``, and metrics; no gradients
        """
        with th.no_grad():
            u_off = self.anchor.velocity(batch.observations)(a_r, r, th.ones_like(r))
            u_at = u_off if self.guidance_at == "anchor" else u.detach()
            a = (a_r + (1 - r) * u_at).clamp(-1, 1)
            q_values, g = action_gradient(self.critic.bind(batch.observations, frozen=True), a, self.guidance_critic)
            eta: float | th.Tensor = self.eta
            if self.adaptive_radius:
                eta = effective_radius(q_values, self.beta, self.eta, numerator=self.radius, over_batch=mean_over_ranks)
            if self.normalize_gradient:
                target = q_guided_projection(u_off, g, eta)
            else:
                target = u_off + (eta.unsqueeze(1) if isinstance(eta, th.Tensor) else eta) * g
        return target, {
            "guidance_norm": g.norm(dim=1).mean(),
            "guidance_radius": eta.mean() if isinstance(eta, th.Tensor) else th.full_like(r[0, 0], eta),
            "drift": (u.detach() - u_off).square().sum(dim=1).mean(),
            "guided_q": q_values.amin(dim=0).mean(),
        }

    def guidance_loss(
        self, velocity: AverageVelocity, batch: ChunkSamples, noise: th.Tensor, r: th.Tensor
    ) -> dict[str, th.Tensor]:
        """
        Compute ||u_{r,1}(a_r) - sg[u*]||^2 at a_r = (1 - r) a_0 + r a of replayed chunks (Eq. 12).

        :param velocity: the actor, closed over the batch's observations
        :param noise: a_0 ~ N(0, I), shape ``(B, A)``
        :param r: r ~ U[0, 1), shape ``(B, 1)``
        :return: ``guidance_loss`` and metrics, scalars
        """
        a_r = (1 - r) * noise + r * batch.actions
        u = velocity(a_r, r, th.ones_like(r))
        target, metrics = self.guided_velocity(batch, a_r, r, u)
        return {**metrics, "guidance_loss": regression_loss(u, target, batch.action_mask)}

    def actor_draws(self, actions: th.Tensor, generator: th.Generator) -> ActorDraws:
        """Draw noise and times of L_actor: a_0 and r of guidance, and what imitation needs, where each is part of the loss."""
        guidance = imitation = None
        if self.guided:
            noise = th.randn(actions.shape, generator=generator, device=actions.device)
            guidance = noise, th.rand(len(noise), 1, generator=generator, device=noise.device)
        if not self.guided or self.diagonal_weight or self.distillation_weight:
            imitation = self.policy.imitation_draws(actions, generator)
        return guidance, imitation

    def actor_loss(
        self, velocity: AverageVelocity, batch: ChunkSamples, draws: ActorDraws
    ) -> tuple[th.Tensor, dict[str, th.Tensor]]:
        """
        Compute L_actor, imitation offline (Eqs. 3-6) and guidance online (Eq. 12).

        :param draws: see :meth:`actor_draws`
        :return: the loss and its parts, scalars
        """
        guidance, imitation = draws
        if guidance is None:
            assert imitation is not None
            parts = self.policy.behaviour_loss(velocity, batch, imitation)
            return parts["diagonal_loss"] + parts["distillation_loss"], parts
        parts = self.guidance_loss(velocity, batch, *guidance)
        loss = parts["guidance_loss"]
        if imitation is not None:
            parts = {**parts, **self.policy.behaviour_loss(velocity, batch, imitation)}
            weighted = self.diagonal_weight * parts["diagonal_loss"] + self.distillation_weight * parts["distillation_loss"]
            loss = loss + weighted
        return loss, parts

    def update(self, batch: ChunkSamples, generator: th.Generator) -> dict[str, th.Tensor]:
        """Make one step of L_Q + L_actor; see the base class."""
        self.policy.n_steps += 1
        batch_size, chunk_dim = batch.actions.shape
        next_noise = th.randn(batch_size, self.n_candidates, chunk_dim, generator=generator, device=batch.actions.device)
        batch, next_noise, draws = own_rows((batch, next_noise, self.actor_draws(batch.actions, generator)))
        with th.no_grad():
            target = self.td_target(batch, next_noise)
        q_values = self.critic.bind(batch.observations)(batch.actions)
        critic_loss = td_loss(q_values, target, self.row_weights(batch, q_values, target))
        actor_loss, parts = self.actor_loss(self.actor.velocity(batch.observations), batch, draws)
        self.descend(critic_loss + actor_loss)
        gradients = [p.grad for o in self.optimizers for p in o.param_groups[0]["params"] if p.grad is not None]
        return {
            "target_mean": target.mean(),
            "q_mean": q_values.detach().mean(),
            "critic_loss": critic_loss,
            **parts,
            "actor_loss": actor_loss,
            "gradient_norm": th.nn.utils.get_total_norm(gradients),
        }

    @property
    def guided(self) -> bool:
        """Say whether the critic guides updates now: in the online phase with the rule ``"fmq"``."""
        return self.online_rule == "fmq" and not self.is_offline

    @property
    def _aggregation(self) -> Aggregation:
        return self.q_aggregation if self.is_offline or self.online_rule == "bc" else "min"

    def _start_online(self) -> None:
        """Freeze the anchor, once for every offline phase."""
        if self.offline_updates != self.anchored_at:
            self.anchor.load_state_dict(self.actor.state_dict())
            self.anchored_at = self.offline_updates
            self.logger.info(f"Online phase ({self.online_rule}): anchored after {self.offline_updates} offline updates")

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        every = self.reanchor_every
        if every is None:
            every = 0 if self.offline_updates else 1
        for _ in range(gradient_steps):
            super().train(1, batch_size)
            if every and self.guided and self._n_updates % every == 0:
                self.anchor.load_state_dict(self.actor.state_dict())

    def _check_arguments(self) -> None:
        super()._check_arguments()
        check_whole(1, n_candidates=self.n_candidates)
        if self.reanchor_every is not None:
            check_whole(0, reanchor_every=self.reanchor_every)
        weights = {name: getattr(self, name) for name in ("eta", "beta", "distillation_weight", "diagonal_weight")}
        check_minimum(0.0, **weights)
        check_number(**weights)
        check_choice((True, False), adaptive_radius=self.adaptive_radius, normalize_gradient=self.normalize_gradient)
        constant = None if self.adaptive_radius else "`adaptive_radius` is False: the radius is `eta`"
        released = 'the adaptive radius of `radius="released"` has 1 in its place; `radius="published"` has `eta`'
        eta = released if self.adaptive_radius and self.radius == "released" else None
        warn_without_effect(self, eta=eta, beta=constant, radius=constant)

    def _setup_model(self) -> None:
        super()._setup_model()
        if self.policy.n_critics == 0:
            raise ValueError("`n_critics` must be at least 1 for FMQ, but 0 was given: `learn_behaviour` needs no critic.")
