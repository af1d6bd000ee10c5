"""RLPD, reinforcement learning with prior data, P. J. Ball, L. Smith, I. Kostrikov, S. Levine, arXiv 2302.02948."""

from collections.abc import Hashable
from typing import Any, ClassVar

import torch as th
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, Schedule

from sb3_flow.common.backends import Backend
from sb3_flow.common.checks import arguments_in, check_choice, check_minimum, check_number, check_whole, warn_without_effect
from sb3_flow.common.ranks import own_rows
from sb3_flow.data import ChunkSamples, OfflineDataset
from sb3_flow.data.residence import Storage
from sb3_flow.data.rows import ACTION_MARGIN
from sb3_flow.data.table import Sampling
from sb3_flow.execution import Execution
from sb3_flow.losses import pessimistic_mean, td_loss
from sb3_flow.offline_to_online.acting import ActingMode
from sb3_flow.offline_to_online.algorithm import OfflineToOnlineAlgorithm
from sb3_flow.offline_to_online.gaussian_actor import (
    GaussianActor,
    HasEntropyCoefficient,
    TanhGaussian,
    check_entropy,
    why_not_learned,
)
from sb3_flow.offline_to_online.values import ActionValue
from sb3_flow.rlpd.policies import CnnPolicy, MlpPolicy, MultiInputPolicy, RLPDPolicy


class RLPD(HasEntropyCoefficient, OfflineToOnlineAlgorithm):
    """
    Reinforcement learning with prior data: SAC from the first online step on, with half of every batch from a dataset.

    The method has no offline phase: give ``offline_dataset`` and call ``learn``. Without a dataset RLPD is SAC with an
    ensemble of LayerNorm critics. ``learn_offline`` trains SAC on the dataset alone, which is not the method: nothing keeps
    the actor near the data there, unless ``bc_alpha`` does.

    The actor is a tanh-Gaussian pi over action chunks. The critics are trained on its actions a' at s_{+h},

        y = R_h + gamma^h m (min_{k in M} Q_bar_k(s_{+h}, a') - alpha log pi(a' | s_{+h}))                     (1)

    where M are ``n_min_critics`` critics that are drawn anew for each update. The actor climbs the mean of all critics, and
    the coefficient alpha keeps its entropy near the target H,

        L_actor = alpha log pi(a | s) - mean_k Q_k(s, a),   a ~ pi(s)                                          (2)
        L_alpha = -log(alpha) (log pi(a | s) + H)                                                              (3)

    There are two published versions: the authors' (github.com/ikostrikov/rlpd, "paper"), and one with action chunks
    (github.com/ColinQiyangLi/qam, "QAM") in which the published results on OGBench were found. The defaults are the
    paper's; ``rho=0.5, backup_entropy=False`` is QAM's. They differ in the target and the actor's objective (QAM: mean_k - rho
    std_k of all critics in both), in the entropy in the target (paper: yes, but not for sparse rewards and images; QAM: no),
    and in imitation (QAM: ``bc_alpha``, for some domains). RLPD differs from both: alpha is learned by SB3's loss (3), where
    they have alpha for log(alpha), and all networks make one step from the same weights (QAM), not one after the other
    (paper). Critics have linear, GELU, LayerNorm (QAM), not linear, LayerNorm, ReLU (paper). Of windows that reach beyond
    their trajectory the critics' loss and the imitation leave out the whole window, and the rest of L_actor nothing.

    With ``n_critics=2, rho=1.0, target_entropy="auto"`` targets and losses are those of SB3's SAC.

    ``OfflineToOnlineAlgorithm`` describes the other arguments.

    :param policy: The policy model to use (MlpPolicy, CnnPolicy, MultiInputPolicy)
    :param learning_starts: random environment steps before the first update (published: 5,000)
    :param tau: rate of the targets Q_bar
    :param gamma: discount factor per environment step
    :param gradient_steps: gradient steps after each rollout (paper: 20, with ``policy_delay=20``; QAM: 1)
    :param horizon_length: h, actions decided at once (paper: 1; QAM: 5 for manipulation)
    :param execution_horizon: actions of a decision that are executed before the next decision (default: all)
    :param n_critics: K (or in ``policy_kwargs``, as SB3 has it)
    :param n_min_critics: size of M in Eq. 1, at most K (paper: 2, but 1 for antmazes and images)
    :param rho: use mean_k - rho std_k in place of the minimum in Eq. 1 and of the mean in Eq. 2 (QAM: 0.5, but 0 for
        humanoids); None for the paper's rule
    :param backup_entropy: have the entropy in Eq. 1
    :param ent_coef: alpha; ``"auto"`` learns alpha from 1, ``"auto_0.1"`` from 0.1; a number keeps alpha constant
    :param target_entropy: H; ``"auto_0.5"`` is minus half the number of a chunk's components (both published versions),
        ``"auto"`` minus this number (SB3's SAC), or a number
    :param policy_delay: the actor and alpha are updated at every ``policy_delay``-th gradient step
    :param bc_alpha: weight of -log pi of the batch's actions in L_actor (QAM: 0 to 0.3; the paper has no such term)
    :param n_candidates: samples of ``acting_mode="best_of_n"``
    :param acting_mode: ``"zero"`` (the mode, as the paper evaluates), ``"sample"`` (as QAM evaluates) or ``"best_of_n"``: how
        ``predict`` finds actions, see ``ActingPolicy``; saved with the model. The online phase collects samples
    :param offline_fraction: share of the dataset in the batches of the online phase
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
    }
    policy_arguments = ("execution_horizon", "n_critics", "n_candidates", "ent_coef", "target_entropy")
    window_rule = "q_chunking"
    policy: RLPDPolicy
    actor: GaussianActor
    critic: ActionValue
    critic_target: ActionValue
    n_critics: int
    n_min_critics: int
    n_candidates: int
    rho: float | None
    backup_entropy: bool
    ent_coef: str | float
    target_entropy: str | float
    policy_delay: int
    bc_alpha: float

    def __init__(
        self,
        policy: str | type[RLPDPolicy],
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
        ent_coef: str | float = "auto",
        target_entropy: str | float = "auto_0.5",
        backup_entropy: bool = True,
        n_critics: int = 10,
        n_min_critics: int = 2,
        rho: float | None = None,
        policy_delay: int = 1,
        bc_alpha: float = 0.0,
        n_candidates: int = 32,
        acting_mode: ActingMode = "zero",
        offline_dataset: OfflineDataset | str | None = None,
        offline_steps: int = 0,
        offline_fraction: float | None = 0.5,
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

    def td_target(self, batch: ChunkSamples, noise: th.Tensor, members: th.Tensor) -> th.Tensor:
        """
        Compute y of Eq. 1.

        :param noise: z ~ N(0, I) of the actions a', shape ``(B, 1, A)``
        :param members: indices of the critics M, shape ``(n_min_critics,)``
        :return: shape ``(B, 1)``
        """
        a, log_prob = self.actor.gaussian(batch.next_observations).sample(noise)  # (B, 1, A), (B, 1)
        q = self.critic_target.bind(batch.next_observations)(a)  # (K, B, 1)
        q = q[members].amin(dim=0) if self.rho is None else pessimistic_mean(q, self.rho)
        if self.backup_entropy:
            q = q - self.entropy_coefficient() * log_prob
        return batch.rewards + batch.discounts * q

    def actor_loss(self, batch: ChunkSamples, pi: TanhGaussian, noise: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """
        Compute L_actor of Eq. 2. Gradients reach the actor alone.

        :param pi: pi(. | s) of the batch's observations
        :param noise: z ~ N(0, I) of the actions, shape ``(B, 1, A)``
        :return: L_actor, scalar, and log pi(a | s), shape ``(B, 1)``
        """
        a, log_prob = pi.sample(noise)  # (B, 1, A), (B, 1)
        q = pessimistic_mean(self.critic.bind(batch.observations, frozen=True)(a), self.rho or 0.0)  # (K, B, 1) -> (B, 1)
        return (self.entropy_coefficient() * log_prob - q).mean(), log_prob

    def bc_loss(self, batch: ChunkSamples, pi: TanhGaussian) -> th.Tensor:
        """Compute -log pi(a | s) of the batch's whole windows, scalar."""
        limit = 1 - ACTION_MARGIN  # tanh reaches 1 nowhere
        actions = batch.actions.clamp(-limit, limit).unsqueeze(1)
        return -(batch.valid * pi.log_prob(actions)).mean()

    def update(self, batch: ChunkSamples, generator: th.Generator) -> dict[str, th.Tensor]:
        """Make one step of L_Q + L_actor + L_alpha; see the base class."""
        device, (batch_size, chunk_dim) = batch.actions.device, batch.actions.shape
        noise, next_noise = th.randn(2, batch_size, 1, chunk_dim, generator=generator, device=device)
        members = th.randperm(self.n_critics, generator=generator, device=device)[: self.n_min_critics]
        batch, noise, next_noise = own_rows((batch, noise, next_noise))
        with th.no_grad():
            target = self.td_target(batch, next_noise, members)
        q_values = self.critic.bind(batch.observations)(batch.actions)
        loss = critic_loss = td_loss(q_values, target, self.row_weights(batch, q_values, target))
        metrics = {"critic_loss": critic_loss, "q_mean": q_values.detach().mean(), "target_mean": target.mean()}
        if (self._n_updates + 1) % self.policy_delay == 0:
            pi = self.actor.gaussian(batch.observations)
            actor_loss, log_prob = self.actor_loss(batch, pi, noise)
            metrics |= {"ent_coef": self.entropy_coefficient(), "entropy": -log_prob.detach().mean()}
            if self.bc_alpha > 0:
                metrics["bc_loss"] = self.bc_loss(batch, pi)
                actor_loss = actor_loss + self.bc_alpha * metrics["bc_loss"]
            if self.entropy_coefficient.is_learned:
                metrics["ent_coef_loss"] = self.entropy_coefficient.loss(log_prob)
                loss = loss + metrics["ent_coef_loss"]
            metrics["actor_loss"] = actor_loss
            loss = loss + actor_loss
        self.descend(loss)
        return metrics

    def kind_of_update(self) -> Hashable:
        return super().kind_of_update(), (self._n_updates + 1) % self.policy_delay == 0

    def _check_arguments(self) -> None:
        super()._check_arguments()
        check_whole(1, n_candidates=self.n_candidates, n_critics=self.n_critics)
        check_whole(1, n_min_critics=self.n_min_critics, policy_delay=self.policy_delay)
        check_number(rho=self.rho, bc_alpha=self.bc_alpha)
        check_minimum(0.0, bc_alpha=self.bc_alpha, **({} if self.rho is None else {"rho": self.rho}))
        check_choice((True, False), backup_entropy=self.backup_entropy)
        check_entropy(self.ent_coef, self.target_entropy)
        if self.n_min_critics > max(self.n_critics, 2):  # the default does for one critic, too
            raise ValueError(
                f"`n_min_critics` must be at most `n_critics={self.n_critics}`, but {self.n_min_critics} was given."
            )
        of_rho = None if self.rho is None else "`rho` takes the place of the minimum"
        warn_without_effect(self, n_min_critics=of_rho, target_entropy=why_not_learned(self.ent_coef))
