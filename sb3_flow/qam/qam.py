"""Q-learning with Adjoint Matching (QAM), Q. Li, S. Levine, arXiv 2601.14234."""

from typing import Any, ClassVar

import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, PyTorchObs, Schedule

from sb3_flow.common.backends import Backend
from sb3_flow.common.checks import arguments_in, check_minimum, check_number, check_whole, warn_without_effect
from sb3_flow.common.ranks import own_rows
from sb3_flow.data import ChunkSamples, OfflineDataset
from sb3_flow.data.residence import Storage
from sb3_flow.data.table import Sampling
from sb3_flow.execution import Execution
from sb3_flow.flow import action_gradient
from sb3_flow.losses import flow_matching_loss, pessimistic_mean, td_loss
from sb3_flow.offline_to_online.acting import ActingMode
from sb3_flow.offline_to_online.actors import FlowActor
from sb3_flow.offline_to_online.algorithm import OfflineToOnlineAlgorithm
from sb3_flow.offline_to_online.gaussian_actor import GaussianActor, HasEntropyCoefficient, why_not_learned
from sb3_flow.offline_to_online.moving_average import MovingAverage
from sb3_flow.offline_to_online.values import ActionValue
from sb3_flow.qam.policies import CnnPolicy, MlpPolicy, MultiInputPolicy, QAMPolicy


class QAM(HasEntropyCoefficient, OfflineToOnlineAlgorithm):
    """
    Q-learning with Adjoint Matching: a flow is fine-tuned by the critic's action gradient, without backpropagation through it.

    A behaviour flow v_beta clones the data by flow matching, and v_beta_bar is its moving average:

        L_flow = ||v_beta(s, x_t, t) - (a - x_0)||^2,   x_t = (1 - t) x_0 + t a                                (1)

    The fine-tuned flow v_theta acts: Euler steps of size h = 1 / F lead from noise to an action. It is trained towards the
    distribution of actions proportional to that of v_beta times exp(inv_temp Q), on paths of the SDE that has the flow's
    marginals and forgets where it began (memoryless). The last step of a path is a step of v_beta_bar without noise:

        x_{t+h} = x_t + h (2 v_theta(s, x_t, t) - x_t / (t + h)) + sqrt(h) sigma_t z,
        sigma_t^2 = 2 (1 - t + h) / (t + h)                                                                    (2)

    A path's action gradient is carried back along v_beta_bar by vector-Jacobian products (the lean adjoint):

        g_1 = -inv_temp grad_x mean_k Q_bar_k(s, clip(x_1)),
        g_t = g_{t+h} + h (d/dx_t (2 v_beta_bar(s, x_t, t + h) - x_t / (t + h)))^T g_{t+h}                     (3)

    and says at each point of the path how v_theta has to differ from v_beta_bar:

        L_adjoint = sum_t ||2 / sigma_t (v_theta - v_beta_bar)(s, x_t, t) + sigma_t g_t||^2                    (4)

    With ``edit_scale > 0`` (QAM-E) a tanh-Gaussian policy edits the flow's action a to clip(a + edit_scale e), e ~ pi(s, a),
    in the target, in acting and exploring. It is trained as the actor of SAC, with a learned coefficient alpha:

        L_edit = alpha log pi(e | s, a) - mean_k Q_k(s, clip(a + edit_scale e))                                (5)

    The critics' target has the action a' of the policy, and the standard deviation of the K critics:

        y = R_h + gamma^h m (mean_k - rho std_k) Q_bar_k(s_{+h}, a')                                           (6)

    QAM follows the reference implementation (github.com/ColinQiyangLi/qam) with its settings of the published runs: one
    gradient step on the sum of all losses, whose gradient has a norm of at most 1 over all networks; Q_bar instead of Q
    (``use_target_grad``) and a clipped action (``clip_adj``) in Eq. 3; h in sigma_t and in the drift, so that nothing is
    infinite; the Jacobian of Eq. 3 at time t + h, though the point belongs to t; L_flow a mean over components, L_adjoint a
    sum (published values of ``inv_temp`` refer to that); L_flow and the critics' loss without windows that reach beyond
    their trajectory. It deviates in three points: the noise of a path is independent everywhere (in the
    reference the first point is drawn with the key from which the keys of the steps are split), log(alpha) instead of alpha
    in the loss of alpha, as in SB3's SAC, and with ``inv_temp=0`` the fine-tuned flow acts, not v_beta. The distilled actor of
    QAM-F and best-of-n in the target, which the published runs of QAM and QAM-E do not use, are left out.

    ``OfflineToOnlineAlgorithm`` describes the other arguments.

    :param policy: The policy model to use (MlpPolicy, CnnPolicy, MultiInputPolicy; FlowPolicy is MlpPolicy)
    :param learning_rate: learning rate of all Adam optimisers
    :param learning_starts: environment steps before the first online update (published: 5,000)
    :param tau: rate of the targets Q_bar and of v_beta_bar
    :param gamma: discount factor per environment step (published: 0.99; 0.995 for humanoidmaze and antmaze-giant)
    :param horizon_length: h, actions decided at once (published: 1 for mazes, 5 for manipulation)
    :param execution_horizon: actions of a decision that are executed before the next decision (default: all)
    :param flow_steps: F, Euler steps of the flows
    :param inv_temp: how much the fine-tuned flow prefers actions of a larger Q, the parameter to tune; in the order of the
        inverse of the values' differences (published: 0.1 to 30, mostly 1 and 3)
    :param edit_scale: largest edit of a component of an action in [-1, 1]; 0 for QAM without edits (published: 0.1 for most
        tasks, 0.9 for puzzle-4x4)
    :param ent_coef: alpha, ``"auto"`` to learn it, ``"auto_0.1"`` to start with 0.1, or a number; see ``EntropyCoefficient``
    :param target_entropy: of edits; ``"auto"`` is -A for chunks of A numbers, ``"auto_0.5"`` (published) -0.5 A, or a number
    :param n_critics: K (or in ``policy_kwargs``, as SB3 has it)
    :param rho: pessimism, standard deviations of the critics subtracted in the target (published: 0.5; 0 for humanoidmaze)
    :param max_grad_norm: largest norm of the gradient of all networks together, or ``None``
    :param n_candidates: n of ``acting_mode="best_of_n"``
    :param acting_mode: ``"sample"`` (published), ``"zero"``, ``"best_of_n"`` or ``"qgbs"``: how ``predict`` finds actions, see
        ``ActingPolicy``; saved with the model. ``"qgbs"`` searches along the flow, which is not all of a policy with edits
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpPolicy,
        "FlowPolicy": MlpPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
    }
    policy_arguments = (
        *("execution_horizon", "flow_steps", "edit_scale", "ent_coef", "target_entropy"),
        *("n_critics", "n_candidates"),
    )
    window_rule = "q_chunking"
    policy: QAMPolicy
    actor: FlowActor
    behaviour: FlowActor
    behaviour_target: FlowActor
    edit_actor: GaussianActor
    critic: ActionValue
    critic_target: ActionValue
    flow_steps: int
    inv_temp: float
    edit_scale: float
    ent_coef: str | float
    target_entropy: str | float
    n_critics: int
    rho: float
    max_grad_norm: float | None
    n_candidates: int

    def __init__(
        self,
        policy: str | type[QAMPolicy],
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
        ent_coef: str | float = "auto",
        target_entropy: str | float = "auto_0.5",
        horizon_length: int = 1,
        execution_horizon: int | None = None,
        flow_steps: int = 10,
        inv_temp: float = 1.0,
        edit_scale: float = 0.0,
        n_critics: int = 10,
        rho: float = 0.5,
        max_grad_norm: float | None = 1.0,
        n_candidates: int = 32,
        acting_mode: ActingMode = "sample",
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
        Compute y = R_h + gamma^h m (mean_k - rho std_k) Q_bar_k(s_{+h}, a') (Eq. 6), a' a sample of the policy.

        :param noise: of the decisions, shape ``(B, 1, noise_dim)``
        :return: shape ``(B, 1)``
        """
        actions = self.policy.samples(batch.next_observations, noise)
        q_values = self.critic_target.bind(batch.next_observations)(actions)  # (K, B, 1)
        return batch.rewards + batch.discounts * pessimistic_mean(q_values, self.rho)

    def flow_loss(self, batch: ChunkSamples, noise: th.Tensor, time: th.Tensor) -> th.Tensor:
        """
        Compute flow matching of the data chunks (Eq. 1); windows that reach beyond their trajectory count as zeros.

        :param noise: x_0 ~ N(0, I), shape ``(B, A)``
        :param time: t ~ U[0, 1), shape ``(B, 1)``
        :return: L_flow, scalar
        """
        x_t = (1 - time) * noise + time * batch.actions
        v = self.behaviour.velocity(batch.observations)(x_t, time)
        return flow_matching_loss(v, noise, batch.actions, batch.valid)

    @th.no_grad()
    def memoryless_path(self, observation: PyTorchObs, noise: th.Tensor) -> list[th.Tensor]:
        """
        Follow the SDE of the fine-tuned flow (Eq. 2); the last step is the behaviour flow's and has no noise.

        :param noise: x_0 and the noise of the F - 1 steps after it, shape ``(F, B, A)``
        :return: the F + 1 points, each of the shape ``(B, A)``
        """
        h, points = 1 / self.flow_steps, [noise[0]]
        v_theta, v_beta = self.actor.velocity(observation), self.behaviour_target.velocity(observation)
        for i, z in enumerate(noise[1:]):
            x, time = points[-1], noise.new_full((noise.shape[1], 1), i * h)
            drift = 2 * v_theta(x, time) - x / (i * h + h)
            points.append(x + h * drift + h**0.5 * self.sigma(time) * z)
        time = noise.new_full((noise.shape[1], 1), 1 - h)
        return [*points, points[-1] + h * v_beta(points[-1], time)]

    def sigma(self, time: th.Tensor) -> th.Tensor:
        """Compute sigma_t = sqrt(2 (1 - t + h) / (t + h)) (Eq. 2) of times of any shape."""
        h = 1 / self.flow_steps
        return (2 * (1 - time + h) / (time + h)).sqrt()

    @th.no_grad()
    def lean_adjoint(self, observation: PyTorchObs, points: list[th.Tensor]) -> list[th.Tensor]:
        """
        Carry the action gradient of the critics' targets back along the behaviour flow (Eq. 3).

        :param points: of a path, see :meth:`memoryless_path`
        :return: g_t at all points, each of the shape ``(B, A)``
        """
        h, q = 1 / self.flow_steps, self.critic_target.bind(observation)
        _, gradient = action_gradient(lambda x: q(x.clamp(-1, 1)), points[-1], "mean")
        adjoints, v_beta = [-self.inv_temp * gradient], self.behaviour_target.velocity(observation)
        for i in reversed(range(self.flow_steps)):
            g, time = adjoints[-1], gradient.new_full((len(gradient), 1), i * h + h)
            with th.enable_grad():  # of x alone: the average has no gradients
                x = points[i].detach().requires_grad_()
                (product,) = th.autograd.grad(v_beta(x, time), x, g)
            adjoints.append(g + h * (2 * product - g / (i * h + h)))
        return adjoints[::-1]

    def adjoint_loss(self, batch: ChunkSamples, noise: th.Tensor) -> tuple[th.Tensor, dict[str, th.Tensor]]:
        """
        Compute adjoint matching (Eq. 4) at the F points of a path in one evaluation. Gradients reach v_theta alone.

        :param noise: see :meth:`memoryless_path`
        :return: L_adjoint and metrics, scalars
        """
        path = self.memoryless_path(batch.observations, noise)
        adjoints = self.lean_adjoint(batch.observations, path)
        steps = self.flow_steps
        x, g = (th.stack(of_path[:steps], dim=1).flatten(0, 1) for of_path in (path, adjoints))  # (B, F, A) -> (B F, A)
        time = (th.arange(steps, device=x.device, dtype=x.dtype) / steps).repeat(noise.shape[1]).unsqueeze(1)
        with th.no_grad():
            v_beta = self.behaviour_target.velocity(batch.observations, steps)(x, time)
        v_theta, sigma = self.actor.velocity(batch.observations, steps)(x, time), self.sigma(time)
        error = (2 / sigma) * (v_theta - v_beta) + sigma * g
        loss = error.square().sum(dim=1).mean() * steps
        return loss, {"adjoint_loss": loss, "adjoint_size": adjoints[-1].abs().mean()}

    def edit_loss(self, batch: ChunkSamples, noise: th.Tensor) -> tuple[th.Tensor, dict[str, th.Tensor]]:
        """
        Compute alpha log pi - mean_k Q_k of edited actions (Eq. 5), whose gradient reaches pi alone, and the loss of alpha.

        :param noise: of decisions, shape ``(B, 1, noise_dim)``
        :return: the sum of both and metrics, scalars
        """
        of_flow, of_edit = self.policy.split_noise(noise)
        with th.no_grad():
            actions = self.actor.act(batch.observations, of_flow)
        edits, log_prob = self.edit_actor.gaussian(batch.observations, actions).sample(of_edit)
        q = self.critic.bind(batch.observations, frozen=True)(self.policy.edited(actions, edits)).mean(dim=0)  # (B, 1)
        alpha = self.entropy_coefficient()
        edit_loss, ent_coef_loss = (alpha * log_prob - q).mean(), self.entropy_coefficient.loss(log_prob)
        metrics = {"edit_loss": edit_loss, "ent_coef": alpha, "ent_coef_loss": ent_coef_loss}
        return edit_loss + ent_coef_loss, metrics

    def update(self, batch: ChunkSamples, generator: th.Generator) -> dict[str, th.Tensor]:
        """Make one step of L_Q + L_flow + L_adjoint, with edits + L_edit; see the base class."""
        device, (batch_size, chunk_dim) = batch.actions.device, batch.actions.shape
        time = th.rand(batch_size, 1, generator=generator, device=device)
        noise = th.randn(self.flow_steps + 1, batch_size, chunk_dim, generator=generator, device=device)
        decisions = th.randn(2, batch_size, 1, self.policy.noise_dim, generator=generator, device=device)
        (batch, time), (noise, decisions) = own_rows((batch, time)), own_rows((noise, decisions), dim=1)
        with th.no_grad():
            target = self.td_target(batch, decisions[0])
        q_values = self.critic.bind(batch.observations)(batch.actions)
        critic_loss = td_loss(q_values, target, self.row_weights(batch, q_values, target))
        flow_loss = self.flow_loss(batch, noise[0], time)
        adjoint_loss, parts = self.adjoint_loss(batch, noise[1:])
        actor_loss = flow_loss + adjoint_loss
        if self.policy.edits:
            edit_loss, of_edit = self.edit_loss(batch, decisions[1])
            actor_loss, parts = actor_loss + edit_loss, {**parts, **of_edit}
        self.descend(critic_loss + actor_loss, (self._behaviour_average, self.tau), max_grad_norm=self.max_grad_norm)
        return {
            "actor_loss": actor_loss,
            "critic_loss": critic_loss,
            "flow_loss": flow_loss,
            **parts,
            "q_mean": q_values.detach().mean(),
            "target_mean": target.mean(),
        }

    def _check_arguments(self) -> None:
        super()._check_arguments()
        check_whole(1, flow_steps=self.flow_steps, n_candidates=self.n_candidates, n_critics=self.n_critics)
        check_minimum(0.0, inv_temp=self.inv_temp, rho=self.rho)
        check_number(inv_temp=self.inv_temp, rho=self.rho)
        if self.max_grad_norm is not None:
            check_number(max_grad_norm=self.max_grad_norm)
            check_minimum(0.0, max_grad_norm=self.max_grad_norm)
        unedited = None if self.edit_scale else "`edit_scale` is 0, so there is no edit policy"
        warn_without_effect(self, ent_coef=unedited, target_entropy=unedited or why_not_learned(self.ent_coef))

    def _setup_model(self) -> None:
        super()._setup_model()
        self._behaviour_average = MovingAverage(self.behaviour, self.behaviour_target)
