"""Diffusion Steering via RL (DSRL), A. Wagenmaker, M. Nakamoto, Y. Zhang et al., arXiv 2506.15799, with noise aliasing."""

from typing import Any, ClassVar

import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, Schedule

from sb3_flow.common.backends import Backend
from sb3_flow.common.checks import arguments_in, check_minimum, check_number, check_whole, warn_without_effect
from sb3_flow.common.ranks import own_rows
from sb3_flow.data import ChunkSamples, OfflineDataset
from sb3_flow.data.residence import Storage
from sb3_flow.data.table import Sampling
from sb3_flow.dsrl.policies import CnnPolicy, DSRLPolicy, MlpPolicy, MultiInputPolicy
from sb3_flow.execution import Execution
from sb3_flow.losses import flow_matching_loss, pessimistic_mean, td_loss
from sb3_flow.offline_to_online.acting import ActingMode
from sb3_flow.offline_to_online.actors import FlowActor, GenerativeActor
from sb3_flow.offline_to_online.algorithm import OfflineToOnlineAlgorithm
from sb3_flow.offline_to_online.decoders import Decoder, FlowRecipe
from sb3_flow.offline_to_online.gaussian_actor import GaussianActor, HasEntropyCoefficient, check_entropy, why_not_learned
from sb3_flow.offline_to_online.moving_average import MovingAverage
from sb3_flow.offline_to_online.values import ActionValue


class DSRL(HasEntropyCoefficient, OfflineToOnlineAlgorithm):
    """
    Diffusion Steering via RL: soft actor-critic on the noise of a flow that clones the data (DSRL-NA, with noise aliasing).

    The flow mu_theta(s, z) carries noise z to an action chunk by F Euler steps along u_theta. It learns from data alone,

        L_flow = ||u_theta(s, x_t, t) - (a - x_0)||^2,   x_t = (1 - t) x_0 + t a                               (1)

    and its slowly moving average decodes, mu(s, z) = clip(mu_theta_bar(s, z), -1, 1). The actor pi(w | s) is a tanh-Gaussian,
    as SAC's, over noise in [-1, 1], and acts by a = mu(s, b w) with the bound b. The critics value actions,

        y = R_h + gamma^h m (mean_k - rho std_k) Q_bar_k(s_{+h}, mu(s_{+h}, b w')),   w' ~ pi(s_{+h})          (2)

    Many noises mean the same action (noise aliasing). So the latent critics, which value noise, are not trained on returns,
    but on what the critics say about the action of fresh noise,

        L_latent = (Q^z_k(s, z) - Q_k(s, mu(s, z)))^2,   z ~ N(0, I)                                           (3)

    and the actor climbs the latent critics, with SAC's coefficient alpha of the entropy: no gradient passes through the flow,
    nor through an action,

        L_actor = alpha log pi(w | s) - mean_k Q^z_k(s, b w),   w ~ pi(s)                                      (4)

    The paper steers a policy that was trained before; ``decoder`` gives one: then mu is frozen, and there is no L_flow.
    Without it the flow is trained beside everything else, as in the implementation whose offline-to-online results are
    published (github.com/ColinQiyangLi/qam, agents/dsrl.py), which DSRL follows wherever it and the paper's own code
    (github.com/ajwagen/dsrl) differ, but for alpha, which is learned by SB3's loss: targets have no entropy bonus, and the
    pessimistic mean of 10 critics in place of the minimum of 2; the entropy's target is -A / 2, not -A; a gradient step is one
    step of every network. In windows that reach beyond their trajectory L_flow and the critics' loss leave out the whole
    window; L_latent and L_actor, which compare no logged actions, leave out nothing.

    ``OfflineToOnlineAlgorithm`` describes the other arguments.

    :param policy: The policy model to use (MlpPolicy, CnnPolicy, MultiInputPolicy; FlowPolicy is MlpPolicy)
    :param learning_rate: learning rate of all Adam optimisers
    :param learning_starts: environment steps before the first online update (published: 5,000); after an offline phase the
        policy acts in these steps, otherwise they are random
    :param tau: rate of the targets Q_bar and of the flow's average
    :param gamma: discount factor per environment step (published: 0.99; 0.995 for the longest mazes)
    :param horizon_length: h, actions decided at once (published: 1 for locomotion, 5 for manipulation)
    :param execution_horizon: actions of a decision that are executed before the next decision (default: all)
    :param noise_scale: b, bound of each component of the noise; the parameter to tune. The larger b, the farther actions may
        leave the data's (published: 0.4 to 1.4)
    :param flow_steps: F, Euler steps of the flow
    :param decoder: a flow that is trained already: a model or a policy of sb3_flow, or a file with either (RQL's actor, FMQ's
        flow map, FQL's cloned flow). It is copied, frozen, and saved with the model. Its spaces and ``horizon_length`` must be
        the model's, and it must have learned from observations that are normalised alike
    :param rho: pessimism, standard deviations of the critics subtracted in the target (published: 0.5 or 0)
    :param ent_coef: alpha, as SAC has it: ``"auto"`` learns it from 1, ``"auto_0.1"`` from 0.1, a number keeps it
    :param target_entropy: entropy that a learned alpha aims at: a number, or ``"auto_0.5"`` for -0.5 A (published); SAC's
        ``"auto"`` is -A
    :param n_critics: K (or in ``policy_kwargs``, as SB3 has it)
    :param n_candidates: N (published: 1): targets, the online phase and ``acting_mode="best_of_n"`` take the best of N
        actions by the live critics
    :param acting_mode: ``"sample"``, ``"zero"`` (the mode of pi) or ``"best_of_n"``: how ``predict`` finds actions, see
        ``ActingPolicy``; saved with the model. By default ``"sample"`` if N is 1, else ``"best_of_n"``
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpPolicy,
        "FlowPolicy": MlpPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
    }
    policy_arguments = (
        *("execution_horizon", "noise_scale", "flow_steps", "decoder", "ent_coef", "target_entropy"),
        *("n_critics", "n_candidates"),
    )
    window_rule = "q_chunking"
    policy: DSRLPolicy
    actor: GaussianActor
    critic: ActionValue
    critic_target: ActionValue
    latent_critic: ActionValue
    bc_flow: GenerativeActor
    bc_flow_target: GenerativeActor
    noise_scale: float
    flow_steps: int
    decoder: Decoder | FlowRecipe | None
    rho: float
    ent_coef: str | float
    target_entropy: str | float
    n_critics: int
    n_candidates: int

    def __init__(
        self,
        policy: str | type[DSRLPolicy],
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
        noise_scale: float = 1.0,
        flow_steps: int = 10,
        decoder: Decoder | None = None,
        rho: float = 0.5,
        ent_coef: str | float = "auto",
        target_entropy: str | float = "auto_0.5",
        n_critics: int = 10,
        n_candidates: int = 1,
        acting_mode: ActingMode | None = None,
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
        Compute y = R_h + gamma^h m (mean_k - rho std_k) Q_bar_k(s_{+h}, a') (Eq. 2), a' the best of N decoded samples of pi by
        the live critics.

        :param noise: reparameterisation noise of the samples, shape ``(B, N, A)``
        :return: shape ``(B, 1)``
        """
        samples = self.policy.samples(batch.next_observations, noise)
        a = self.policy.best_of(batch.next_observations, samples)
        q_values = self.critic_target.bind(batch.next_observations)(a).unsqueeze(-1)  # (K, B, 1)
        return batch.rewards + batch.discounts * pessimistic_mean(q_values, self.rho)

    def latent_loss(self, batch: ChunkSamples, noise: th.Tensor) -> th.Tensor:
        """
        Compute the mean squared error of the latent critics (Eq. 3): each learns one critic's values. Gradients reach the
        latent critics alone.

        :param noise: z ~ N(0, I), shape ``(B, A)``
        :return: L_latent, scalar
        """
        with th.no_grad():
            a = self.policy.flow.act(batch.observations, noise.unsqueeze(1))[:, 0]
            q_values = self.critic.bind(batch.observations)(a)  # (K, B)
        return (self.latent_critic.bind(batch.observations)(noise) - q_values).square().mean()

    def actor_loss(self, batch: ChunkSamples, noise: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """
        Compute alpha log pi(w | s) - mean_k Q^z_k(s, b w) (Eq. 4). Gradients reach pi alone.

        :param noise: reparameterisation noise of w, shape ``(B, 1, A)``
        :return: L_actor, scalar, and log pi(w | s), shape ``(B, 1)``
        """
        w, log_prob = self.actor.gaussian(batch.observations).sample(noise)
        q_values = self.latent_critic.bind(batch.observations, frozen=True)(self.noise_scale * w[:, 0])  # (K, B)
        alpha = self.entropy_coefficient()
        return (alpha * log_prob[:, 0] - q_values.mean(dim=0)).mean(), log_prob

    def flow_loss(self, flow: FlowActor, batch: ChunkSamples, noise: th.Tensor, time: th.Tensor) -> th.Tensor:
        """
        Compute flow matching of the data chunks (Eq. 1); windows that reach beyond their trajectory count as zeros.

        :param flow: the flow to train
        :param noise: x_0 ~ N(0, I), shape ``(B, A)``
        :param time: t ~ U[0, 1), shape ``(B, 1)``
        :return: L_flow, scalar
        """
        x_t = (1 - time) * noise + time * batch.actions
        u = flow.velocity(batch.observations)(x_t, time)
        return flow_matching_loss(u, noise, batch.actions, batch.valid)

    def update(self, batch: ChunkSamples, generator: th.Generator) -> dict[str, th.Tensor]:
        """Make one step of L_Q + L_latent + L_actor + L_alpha + L_flow; see the base class."""
        device, (batch_size, chunk_dim) = batch.actions.device, batch.actions.shape
        time = th.rand(batch_size, 1, generator=generator, device=device)
        noise, latent_noise, actor_noise = th.randn(3, batch_size, chunk_dim, generator=generator, device=device)
        next_noise = th.randn(batch_size, self.n_candidates, chunk_dim, generator=generator, device=device)
        draws = (time, noise, latent_noise, actor_noise, next_noise)
        batch, time, noise, latent_noise, actor_noise, next_noise = own_rows((batch, *draws))
        with th.no_grad():
            target = self.td_target(batch, next_noise)
        q_values = self.critic.bind(batch.observations)(batch.actions)
        critic_loss = td_loss(q_values, target, self.row_weights(batch, q_values, target))
        latent_loss = self.latent_loss(batch, latent_noise)
        actor_loss, log_prob = self.actor_loss(batch, actor_noise.unsqueeze(1))
        ent_coef_loss = self.entropy_coefficient.loss(log_prob)
        metrics = {
            "actor_loss": actor_loss,
            "critic_loss": critic_loss,
            "latent_loss": latent_loss,
            "ent_coef": self.entropy_coefficient(),
            "ent_coef_loss": ent_coef_loss,
            "entropy": -log_prob.detach().mean(),
            "q_mean": q_values.detach().mean(),
            "target_mean": target.mean(),
        }
        loss = critic_loss + latent_loss + actor_loss + ent_coef_loss
        if self._flow_average is None:
            self.descend(loss)
            return metrics
        assert isinstance(self.bc_flow, FlowActor)
        flow_loss = self.flow_loss(self.bc_flow, batch, noise, time)
        self.descend(loss + flow_loss, (self._flow_average, self.tau))
        return {**metrics, "flow_loss": flow_loss}

    def _check_arguments(self) -> None:
        super()._check_arguments()
        check_whole(1, flow_steps=self.flow_steps, n_candidates=self.n_candidates, n_critics=self.n_critics)
        check_minimum(0.0, rho=self.rho)
        check_number(rho=self.rho)
        check_entropy(self.ent_coef, self.target_entropy)
        if self.random_streams is not None and not isinstance(self.decoder, FlowRecipe | None):
            raise ValueError("`decoder` was given to `load`, but a saved model has its flow: make a new model with `decoder`.")
        given = None if self.decoder is None else "the flow is the one of `decoder`"
        warn_without_effect(self, flow_steps=given, target_entropy=why_not_learned(self.ent_coef))

    def _setup_model(self) -> None:
        super()._setup_model()
        self.acting_mode, self.decoder = self.policy.acting_mode, self.policy.decoder
        trained = self.policy.trains_flow
        self._flow_average = MovingAverage(self.bc_flow, self.bc_flow_target) if trained else None
