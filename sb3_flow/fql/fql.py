"""Flow Q-Learning (FQL), S. Park, Q. Li, S. Levine, arXiv 2502.02538, with the chunks of Q-chunking (arXiv 2507.07969)."""

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
from sb3_flow.flow import aggregate_q
from sb3_flow.fql.policies import ActorType, CnnPolicy, FQLPolicy, MlpPolicy, MultiInputPolicy, OneStepActor
from sb3_flow.losses import flow_matching_loss, regression_loss, td_loss
from sb3_flow.offline_to_online.acting import ActingMode
from sb3_flow.offline_to_online.actors import FlowActor
from sb3_flow.offline_to_online.algorithm import OfflineToOnlineAlgorithm
from sb3_flow.offline_to_online.values import ActionValue


class FQL(OfflineToOnlineAlgorithm):
    """
    Flow Q-Learning: a flow clones the data, and a critic improves on it without a gradient through the flow's steps.

    The flow mu_theta(s, z) carries noise z to an action chunk by F Euler steps along u_theta. It learns from data alone,

        L_flow = ||u_theta(s, x_t, t) - (a - x_0)||^2,   x_t = (1 - t) x_0 + t a                               (1)

    The critics are trained on actions of the actor, whose target is the same in both phases,

        y = R_h + gamma^h m agg_k Q_bar_k(s_{+h}, a')                                                          (2)

    With ``actor_type="distilled"`` (FQL; QC-FQL with chunks) the actor is a network mu_omega(s, z) of one step, and a' its
    answer to fresh noise. It climbs the critics and stays near the flow's answer to the same noise,

        L_actor = -mean_k Q_k(s, mu_omega(s, z)) + alpha ||mu_omega(s, z) - mu_theta(s, z)||^2                 (3)

    With ``actor_type="best_of_n"`` (QC with chunks, BFN without) the flow itself acts: a' is the best of N of its samples by
    the live critics, and so are the actions of ``predict`` and of the online phase. L_actor is zero.

    Where the papers and their reference implementations (github.com/seohongpark/fql, github.com/ColinQiyangLi/qc) differ, FQL
    follows the implementations. Squared distances are means over components, not sums (published values of alpha refer to
    that). The flow's answer is clipped to [-1, 1]; mu_omega is clipped for the critics, but not in the distance. L_actor has
    the mean of the critics also if ``q_aggregation`` is ``"min"``. Of windows that reach beyond their trajectory flow
    matching leaves out the steps beyond it and the critics' loss the whole window; L_actor leaves out nothing.

    ``OfflineToOnlineAlgorithm`` describes the other arguments.

    :param policy: The policy model to use (MlpPolicy, CnnPolicy, MultiInputPolicy; FlowPolicy is MlpPolicy)
    :param learning_rate: learning rate of all Adam optimisers
    :param learning_starts: environment steps before the first online update (Q-chunking: 5,000); after an offline phase the
        policy acts in these steps, otherwise they are random
    :param tau: rate of the targets Q_bar
    :param gamma: discount factor per environment step (published: 0.99; 0.995 for the longest mazes)
    :param horizon_length: h, actions decided at once (FQL: 1; Q-chunking: 5)
    :param execution_horizon: actions of a decision that are executed before the next decision (default: all)
    :param actor_type: ``"distilled"`` or ``"best_of_n"``
    :param flow_steps: F, Euler steps of the flow
    :param alpha: weight of distillation against the critics; the parameter to tune, in the order of the values' scale over the
        actions' (published: 3 to 1000 in OGBench and mazes, QC-FQL: 100; with ``normalize_q_loss`` 0.03 to 10 are advised)
    :param normalize_q_loss: divide the critics' term of L_actor by the batch mean of ``|mean_k Q_k|``, so that ``alpha`` does
        not depend on the scale of rewards (the reference implementation of FQL advises this for new tasks, the papers do not)
    :param q_aggregation: ``"mean"`` or ``"min"`` over the critics in the target and in the choice among samples (published:
        the mean, but the minimum for antmaze-large and antmaze-giant)
    :param n_critics: K (or in ``policy_kwargs``, as SB3 has it)
    :param n_candidates: N of ``actor_type="best_of_n"`` (Q-chunking: 32, or 4 with ``horizon_length=1``) and of
        ``acting_mode="best_of_n"``
    :param acting_mode: ``"zero"``, ``"sample"``, ``"best_of_n"`` or ``"qgbs"``: how ``predict`` finds actions, see
        ``ActingPolicy``; saved with the model. By default as published: ``"sample"`` for the distilled actor, which has no
        flow for ``"qgbs"``, and ``"best_of_n"`` for ``actor_type="best_of_n"``
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpPolicy,
        "FlowPolicy": MlpPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
    }
    policy_arguments = ("execution_horizon", "actor_type", "flow_steps", "n_critics", "n_candidates", "q_aggregation")
    window_rule = "q_chunking"
    policy: FQLPolicy
    actor: OneStepActor | FlowActor
    teacher: FlowActor
    critic: ActionValue
    critic_target: ActionValue
    actor_type: ActorType
    flow_steps: int
    alpha: float
    normalize_q_loss: bool
    q_aggregation: Literal["mean", "min"]
    n_critics: int
    n_candidates: int

    def __init__(
        self,
        policy: str | type[FQLPolicy],
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
        actor_type: ActorType = "distilled",
        flow_steps: int = 10,
        alpha: float = 10.0,
        normalize_q_loss: bool = False,
        q_aggregation: Literal["mean", "min"] = "mean",
        n_critics: int = 2,
        n_candidates: int = 32,
        acting_mode: ActingMode | None = None,
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
        super().__init__(**arguments_in(locals()))

    def td_target(self, batch: ChunkSamples, noise: th.Tensor) -> th.Tensor:
        """
        Compute y = R_h + gamma^h m agg_k Q_bar_k(s_{+h}, a') (Eq. 2), a' the best of N samples by the live critics.

        :param noise: starting points of the samples, shape ``(B, N, A)``; N = 1 for the distilled actor
        :return: shape ``(B, 1)``
        """
        samples = self.actor.act(batch.next_observations, noise)
        a = self.policy.best_of(batch.next_observations, samples, self.q_aggregation)
        q_values = aggregate_q(self.critic_target.bind(batch.next_observations)(a), self.q_aggregation)
        return batch.rewards + batch.discounts * q_values.unsqueeze(1)

    def flow_loss(self, batch: ChunkSamples, noise: th.Tensor, time: th.Tensor) -> th.Tensor:
        """
        Compute flow matching of the data chunks (Eq. 1).

        :param noise: x_0 ~ N(0, I), shape ``(B, A)``
        :param time: t ~ U[0, 1), shape ``(B, 1)``
        :return: L_flow, scalar
        """
        x_t = (1 - time) * noise + time * batch.actions
        u = self.policy.flow.velocity(batch.observations)(x_t, time)
        return flow_matching_loss(u, noise, batch.actions, batch.action_mask)

    def actor_loss(
        self, student: OneStepActor, batch: ChunkSamples, noise: th.Tensor
    ) -> tuple[th.Tensor, dict[str, th.Tensor]]:
        """
        Compute -mean_k Q_k(s, mu_omega) + alpha ||mu_omega - mu_theta||^2 of the distilled actor (Eq. 3). Gradients reach
        mu_omega alone.

        :param student: mu_omega
        :param noise: z ~ N(0, I) of both actors, shape ``(B, 1, A)``
        :return: L_actor and metrics, scalars
        """
        with th.no_grad():
            taught = self.teacher.act(batch.observations, noise)[:, 0]  # (B, A), clipped
        mu = student.unclipped(batch.observations, noise)[:, 0]  # (B, A)
        distillation_loss = regression_loss(mu, taught)
        q = self.critic.bind(batch.observations, frozen=True)(mu.clamp(-1, 1)).mean(dim=0)  # (K, B) -> (B,)
        q_loss = -q.mean()
        if self.normalize_q_loss:
            q_loss = q_loss / mean_over_ranks(q.detach().abs().mean())
        loss = q_loss + self.alpha * distillation_loss
        return loss, {"distillation_loss": distillation_loss, "actor_q": q.detach().mean()}

    def update(self, batch: ChunkSamples, generator: th.Generator) -> dict[str, th.Tensor]:
        """Make one step of L_Q + L_flow + L_actor; see the base class."""
        device, (batch_size, chunk_dim) = batch.actions.device, batch.actions.shape
        time = th.rand(batch_size, 1, generator=generator, device=device)
        noise, student_noise = th.randn(2, batch_size, chunk_dim, generator=generator, device=device)
        next_noise = th.randn(batch_size, self.policy.samples_of_a_decision, chunk_dim, generator=generator, device=device)
        batch, time, noise, student_noise, next_noise = own_rows((batch, time, noise, student_noise, next_noise))
        with th.no_grad():
            target = self.td_target(batch, next_noise)
        q_values = self.critic.bind(batch.observations)(batch.actions)
        critic_loss = td_loss(q_values, target, self.row_weights(batch, q_values, target))
        flow_loss = self.flow_loss(batch, noise, time)
        actor_loss, parts = flow_loss, {"flow_loss": flow_loss}
        if isinstance(self.actor, OneStepActor):
            loss, of_student = self.actor_loss(self.actor, batch, student_noise.unsqueeze(1))
            actor_loss, parts = flow_loss + loss, {**parts, **of_student}
        self.descend(critic_loss + actor_loss)
        return {
            "actor_loss": actor_loss,
            "critic_loss": critic_loss,
            **parts,
            "q_mean": q_values.detach().mean(),
            "target_mean": target.mean(),
        }

    def _check_arguments(self) -> None:
        super()._check_arguments()
        check_whole(1, flow_steps=self.flow_steps, n_candidates=self.n_candidates, n_critics=self.n_critics)
        check_minimum(0.0, alpha=self.alpha)
        check_number(alpha=self.alpha)
        check_choice((True, False), normalize_q_loss=self.normalize_q_loss)
        undistilled = None if self.actor_type == "distilled" else f'`actor_type` is "{self.actor_type}", not "distilled"'
        unsearched = None if undistilled else '`actor_type` is "distilled", whose actor has no flow to search along'
        warn_without_effect(self, alpha=undistilled, normalize_q_loss=undistilled, search=unsearched)

    def _setup_model(self) -> None:
        super()._setup_model()
        self.acting_mode = self.policy.acting_mode
