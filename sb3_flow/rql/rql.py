"""Reversal Q-Learning (RQL), A. Oberai, S. Park, S. Levine, arXiv 2606.17551."""

from typing import Any, ClassVar, Literal

import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, Schedule

from sb3_flow.common.backends import Backend
from sb3_flow.common.checks import arguments_in, check_fraction, check_minimum, check_number, check_whole
from sb3_flow.common.ranks import own_rows
from sb3_flow.data import ChunkSamples, OfflineDataset, PrioritizedReplayBuffer
from sb3_flow.data.residence import Storage
from sb3_flow.data.table import Sampling
from sb3_flow.execution import Execution
from sb3_flow.flow import Velocity, euler_reverse, sample_depths
from sb3_flow.losses import expectile_loss, flow_matching_loss, pessimistic_mean
from sb3_flow.offline_to_online.acting import ActingMode
from sb3_flow.offline_to_online.actors import FlowActor
from sb3_flow.offline_to_online.algorithm import OfflineToOnlineAlgorithm
from sb3_flow.offline_to_online.moving_average import MovingAverage
from sb3_flow.rql.policies import CnnPolicy, MlpPolicy, MultiInputPolicy, PartialActionValue, RQLPolicy, Value


class RQL(OfflineToOnlineAlgorithm):
    """
    Reversal Q-Learning: offline and offline-to-online RL for flow policies.

    The F refinement steps from noise x^0 to an action x^F become steps of an expanded MDP, and V(s, x, t) values a
    partial action x at flow time t. Data contain actions but not the noise they came from: integrating the *current*
    flow backwards from a data action gives the path this policy would have taken to it. Refinement is deterministic,
    free of reward and undiscounted, so every point of that path may be trained on the same one-step target

        y = R_h + gamma^h m (mean_k - rho std_k) V_bar_k(s_{+h}, x', 0),   x' ~ N(0, I)        (Eqs. 8, 14, 17)

    without running the policy and without backups over refinement steps. The policy is improved at each refinement step
    alone, by the gradient of V at the step's end: no backpropagation through time.

    Where paper and reference implementation differ, RQL follows the implementation, which reproduces the published
    scores: the policy's value term is taken at the noise-data interpolation points of the flow matching loss, velocity
    is per unit of flow time, and flow matching averages over components (published values of alpha refer to that).

    ``OfflineToOnlineAlgorithm`` describes the other arguments.

    :param policy: The policy model to use (MlpPolicy, CnnPolicy, MultiInputPolicy; FlowPolicy is MlpPolicy)
    :param learning_rate: learning rate of both Adam optimisers
    :param tau: rate of the target V_bar
    :param gamma: discount factor per environment step (published: 0.99; 0.995 for the longest mazes)
    :param horizon_length: h, actions decided at once (published: 1 for locomotion, 5 for manipulation)
    :param flow_steps: F, Euler steps of the flow
    :param alpha: weight of flow matching (behaviour cloning) against the value term; the parameter to tune, in the
        order of the values' scale (published: 0.1 to 10)
    :param expectile: kappa of the value loss; above 0.5 the value leans towards the best noise (published: 0.5 to 0.9)
    :param n_critics: K, members of the value ensemble (or in ``policy_kwargs``, as SB3 has it); results drop below 5
    :param rho: pessimism, standard deviations of the ensemble subtracted in the target (published: 0.5 or 0)
    :param ema_decay: decay of the actor's moving average, which acts in evaluation
    :param objective: ``"rql"``, or as a baseline ``"bc"``, behaviour cloning with the same policy (flow matching alone, the
        value function is not trained)
    :param acting_mode: ``"sample"`` (the paper's protocol), ``"zero"``, ``"best_of_n"``, ``"qgbs"`` or ``"guided"``: how
        ``predict`` finds actions, see ``ActingPolicy``; saved with the model
    :param n_candidates: n of ``"best_of_n"``
    :param guidance: strength of ``"guided"``, relative to what the value term adds to the velocity in training, see
        ``RQLPolicy.guided_samples``
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpPolicy,
        "FlowPolicy": MlpPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
    }
    policy_arguments = ("flow_steps", "n_critics", "n_candidates", "alpha", "guidance", "objective")
    policy: RQLPolicy
    actor: FlowActor
    actor_ema: FlowActor
    critic: PartialActionValue
    critic_target: PartialActionValue
    flow_steps: int
    alpha: float
    expectile: float
    n_critics: int
    n_candidates: int
    guidance: float
    rho: float
    ema_decay: float
    objective: Literal["rql", "bc"]

    def __init__(
        self,
        policy: str | type[RQLPolicy],
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
        flow_steps: int = 10,
        alpha: float = 1.0,
        expectile: float = 0.5,
        n_critics: int = 10,
        rho: float = 0.5,
        ema_decay: float = 0.999,
        objective: Literal["rql", "bc"] = "rql",
        acting_mode: ActingMode = "sample",
        n_candidates: int = 32,
        guidance: float = 0.5,
        search: dict[str, Any] | None = None,
        offline_dataset: OfflineDataset | str | None = None,
        offline_steps: int = 0,
        offline_fraction: float | None = None,
        sampling: Sampling = "trajectory",
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
        Compute y = R_h + gamma^h m (mean_k - rho std_k) V_bar_k(s_{+h}, x', 0), the target of all partial actions of a sample.

        :param noise: x' ~ N(0, I), shape ``(B, A)``
        :return: shape ``(B, 1)``
        """
        values = self.critic_target.bind(batch.next_observations)(noise, th.zeros_like(noise[:, :1]))
        return batch.rewards + batch.discounts * pessimistic_mean(values, self.rho)

    def value_loss(
        self, value: Value, velocity: Velocity, batch: ChunkSamples, target: th.Tensor, depth: th.Tensor
    ) -> tuple[th.Tensor, th.Tensor]:
        """
        Compute the expectile loss of V_k at the data action, reversed by ``depth`` along the current flow.

        :param target: y, shape ``(B, 1)``
        :param depth: how far each sample is reversed, shape ``(B, 1)``
        :return: L_V and the values, scalar and shape ``(K, B, 1)``
        """
        with th.no_grad():
            x, t = euler_reverse(velocity, batch.actions, depth, self.flow_steps)
        values = value(x, t)
        weights = self.row_weights(batch, values.squeeze(-1), target)
        return (weights * expectile_loss(target - values, self.expectile)).mean(), values

    def policy_loss(
        self, value: Value | None, velocity: Velocity, batch: ChunkSamples, noise: th.Tensor, time: th.Tensor
    ) -> tuple[th.Tensor, th.Tensor]:
        """
        Compute L_Q + alpha L_BC with one evaluation of the velocity at x_t = (1 - t) x_0 + t a: the value after one Euler
        step of the policy (the value function is frozen), and flow matching.

        :param value: ``None`` leaves out the value term
        :param noise: x_0 ~ N(0, I), shape ``(B, A)``
        :param time: t ~ U[0, 1), shape ``(B, 1)``
        :return: the loss and L_BC, scalars
        """
        x_t = (1 - time) * noise + time * batch.actions
        u = velocity(x_t, time)
        bc_loss = flow_matching_loss(u, noise, batch.actions, batch.action_mask)
        if value is None:
            return bc_loss, bc_loss
        step = (1 - time).clamp(max=1 / self.flow_steps)
        x_plus, t_plus = x_t + step * u, (time + 1 / self.flow_steps).clamp(max=1.0)
        q_loss = -(batch.valid * value(x_plus, t_plus, frozen=True).mean(dim=0)).mean()
        return q_loss + self.alpha * bc_loss, bc_loss

    def update(self, batch: ChunkSamples, generator: th.Generator) -> dict[str, th.Tensor]:
        """Make one step of L = L_V + L_Q + alpha L_BC; see the base class."""
        actions = batch.actions
        device, (batch_size, chunk_dim) = actions.device, actions.shape
        time = th.rand(batch_size, 1, generator=generator, device=device)
        noise, next_noise = th.randn(2, batch_size, chunk_dim, generator=generator, device=device)
        batch, time, noise, next_noise = own_rows((batch, time, noise, next_noise))
        velocity = self.actor.velocity(batch.observations)
        actor_average = (self._actor_average, 1.0 - self.ema_decay)
        if self.objective == "bc":
            loss, bc_loss = self.policy_loss(None, velocity, batch, noise, time)
            self.descend(loss, actor_average)
            return {"actor_loss": loss, "flow_loss": bc_loss}

        depth = own_rows(sample_depths(batch_size, self.flow_steps, generator, device))
        with th.no_grad():
            target = self.td_target(batch, next_noise)
        value = self.critic.bind(batch.observations)
        value_loss, values = self.value_loss(value, velocity, batch, target, depth)
        policy_loss, bc_loss = self.policy_loss(value, velocity, batch, noise, time)
        self.descend(value_loss + policy_loss, actor_average)
        return {
            "actor_loss": policy_loss,
            "critic_loss": value_loss,
            "flow_loss": bc_loss,
            "value_mean": values.detach().mean(),
            "value_std": values.detach().std(dim=0, correction=0).mean() if len(values) > 1 else th.zeros_like(bc_loss),
            "target_mean": target.mean(),
        }

    @property
    def optimizers(self) -> list[th.optim.Optimizer]:
        return super().optimizers if self.objective == "rql" else [self.actor.optimizer]

    def _check_arguments(self) -> None:
        super()._check_arguments()
        check_whole(1, flow_steps=self.flow_steps, n_candidates=self.n_candidates, n_critics=self.n_critics)
        check_minimum(0.0, alpha=self.alpha, guidance=self.guidance, rho=self.rho)
        check_number(alpha=self.alpha, guidance=self.guidance, rho=self.rho)
        check_fraction(ema_decay=self.ema_decay)
        prioritized = self.replay_buffer_class is not None and issubclass(self.replay_buffer_class, PrioritizedReplayBuffer)
        if prioritized and self.objective == "bc":
            raise ValueError(
                '`replay_buffer_class=PrioritizedReplayBuffer` draws by the errors of a value, but `objective="bc"` trains '
                "none: leave `replay_buffer_class` at its default."
            )
        if not 0.0 < self.expectile < 1.0:
            raise ValueError(f"`expectile` must be in (0, 1), but {self.expectile} was given.")

    def _setup_model(self) -> None:
        super()._setup_model()
        self._actor_average = MovingAverage(self.actor, self.actor_ema)
