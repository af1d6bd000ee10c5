"""Group-relative policy optimisation (GRPO) for environments."""

import warnings
from typing import Any, ClassVar, Literal, TypeVar, get_args

import numpy as np
import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.vec_env import VecEnv

from sb3_flow.common.backends import Backend
from sb3_flow.common.checks import arguments_in, check_choice, check_whole, warn_without_effect
from sb3_flow.compiled.policy_losses import PolicyLoss
from sb3_flow.execution import Execution
from sb3_flow.grpo.grouped_starts import check_groups, group_starts
from sb3_flow.grpo.policies import CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_flow.on_policy.grouping import Aggregation, Baseline, Credit, Groups, Scale
from sb3_flow.on_policy.reference import ReferencePolicy
from sb3_flow.on_policy.rollout_buffer import EstimatedRollouts
from sb3_flow.ppo import PPO

SelfGRPO = TypeVar("SelfGRPO", bound="GRPO")
GroupBy = Literal["start", "none"]


class GRPO(PPO):
    """
    Train by PPO without a critic: a comparison with peers gives the advantage of an action (GRPO, arXiv 2402.03300; Dr. GRPO,
    arXiv 2503.20783; RLOO), in a form made for control. The G environments of a group start an episode in the same state. At
    each step, the return from this step on is compared with the returns of the peers that are still alive
    (``credit="return_to_go"``). The published form, ``credit="outcome"``, gives all steps of an episode the same advantage,
    and learns far more slowly in control.

    The starts are shared by a wrapper inside the environments::

        env = make_vec_env("CartPole-v1", n_envs=16, wrapper_class=GroupedStart)
        model = GRPO("MlpPolicy", env, group_size=8)

    Rollouts are whole episodes: all environments are reset, and each plays an episode of at most ``n_steps`` steps. An
    environment that finishes early steps on until the last environment has finished; these steps count as time steps, but
    nothing is learned from them (``rollout/alive_share`` is the share of the other steps). Nothing is bootstrapped, so GRPO
    maximises the return within the time limit.

    :class:`sb3_flow.PPO` explains the arguments that are not listed here. ``gae_lambda`` and ``clip_range_vf`` have no effect
    without a critic; they exist so that a script for PPO runs.

    :param n_steps: longest episode, in steps; longer episodes are cut off, with a warning if a rollout cuts all of them off
    :param gamma: discount factor of the compared returns; ``credit="outcome"`` and "process" do not discount
    :param vf_coef: weight of the value loss, with ``baseline="critic"`` only
    :param group_size: G, members of a group, at least 2; must divide the number of environments
    :param group_by: "start" (the members of a group share the start, which needs the wrapper) or "none" (all environments
        are peers, for environments that cannot be seeded)
    :param credit: "return_to_go", "outcome" (the episode's undiscounted return for each of its steps), "pooled"
        (return-to-go against all environments), or "process" (step rewards by the group's mean and deviation, summed over
        the later steps)
    :param baseline: subtracted from the returns: "loo" (mean of the other members, which leaves the gradient unbiased),
        "mean", "median", "min", or "critic": a value function is learned, and its errors are compared by "loo"
    :param scale: divide by the standard deviation of the "batch" or of the "group" (GRPO), or by "none" (Dr. GRPO)
    :param ddof: delta degrees of freedom of the standard deviation, 0 or 1
    :param aggregation: "step": all steps have the same weight (DAPO); "episode": all episodes have the same weight (GRPO);
        "constant": the sum over an episode's steps, divided by ``n_steps`` (Dr. GRPO)
    :param shared_noise: let the members share the random numbers after the start, too, so that only their actions differ
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": MlpPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
    }

    def __init__(
        self,
        policy: str | type[ActorCriticPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 1e-3,
        n_steps: int = 1000,
        batch_size: int = 512,
        n_epochs: int = 10,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        clip_range: float | Schedule = 0.2,
        clip_range_vf: float | Schedule | None = None,
        normalize_advantage: bool = False,
        ent_coef: float = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float = 0.5,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        rollout_buffer_class: type[RolloutBuffer] | None = None,
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        target_kl: float | None = None,
        group_size: int = 8,
        group_by: GroupBy = "start",
        credit: Credit = "return_to_go",
        baseline: Baseline = "loo",
        scale: Scale = "batch",
        ddof: Literal[0, 1] = 0,
        aggregation: Aggregation = "step",
        shared_noise: bool = False,
        policy_loss: PolicyLoss = "clip",
        clip_range_high: float | Schedule | None = None,
        dual_clip: float = 3.0,
        kl_coef: float = 0.0,
        reference_policy: ReferencePolicy = None,
        backend: Backend = "auto",
        execution: Execution = "auto",
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
    ):
        own = "group_size", "group_by", "credit", "baseline", "scale", "ddof", "aggregation", "shared_noise"
        given = arguments_in(locals(), "own", *own)
        given["vf_coef"] = vf_coef if baseline == "critic" else 0.0
        self.group_size, self.group_by, self.shared_noise = group_size, group_by, shared_noise
        self.credit, self.baseline, self.scale, self.ddof, self.aggregation = credit, baseline, scale, ddof, aggregation
        self._starts: np.random.Generator | None = None
        if baseline == "critic":
            self.policy_aliases = PPO.policy_aliases  # type: ignore[misc]
        with warnings.catch_warnings():
            # SB3 advises that the minibatch divide the rollout, but episodes decide the length of these rollouts
            warnings.filterwarnings("ignore", message="You have specified a mini-batch size")
            super().__init__(advantage="group", **given)

    def _check_options(self) -> None:
        check_whole(2, group_size=self.group_size)
        check_choice(get_args(GroupBy), group_by=self.group_by)
        check_choice(get_args(Credit), credit=self.credit)
        check_choice(get_args(Baseline), baseline=self.baseline)
        check_choice(get_args(Scale), scale=self.scale)
        check_choice(get_args(Aggregation), aggregation=self.aggregation)
        check_choice((0, 1), ddof=self.ddof)
        if self.credit == "process" and self.baseline == "critic":
            raise ValueError(
                '`baseline` is "critic", but `credit` "process" compares step rewards, which a critic does not foresee.'
            )
        if self.policy_loss in ("gspo", "gspo_token") and self.aggregation != "step":
            raise ValueError(
                f'`aggregation` is "{self.aggregation}", but "{self.policy_loss}" is a mean over episodes by itself; "step" '
                "was expected."
            )
        critic = getattr(self.policy_class, "has_critic", True)
        if self.baseline == "critic" and not critic:
            raise ValueError(f'`baseline` is "critic", but {self.policy_class.__name__} has no value function.')
        no_groups = '`group_by` is "none"' if self.group_by == "none" else None
        process = '`credit` "process" has a baseline and a scale of its own' if self.credit == "process" else None
        unscaled = '`scale` is "none"' if self.scale == "none" and self.credit != "process" else None
        warn_without_effect(self, group_size=no_groups, shared_noise=no_groups, baseline=process, scale=process, ddof=unscaled)

    def _setup_model(self) -> None:
        self._check_options()  # here, since `load` sets attributes, too
        starts = self._starts  # a loaded model goes on with its own generator
        size = self.group_size if self.group_by == "start" else None
        self.groups = Groups(size, self.credit, self.baseline, self.scale, self.ddof, self.aggregation)
        if self.group_by == "start" and self.env is not None:
            check_groups(self.env, self.group_size)
        super()._setup_model()
        self._starts = starts or self._starts

    def set_random_seed(self, seed: int | None = None) -> None:
        """
        Set the seed of the pseudo-random generators (python, numpy, pytorch, gym, action space), and of the groups' starts.

        :param seed: None: the starts are seeded from NumPy's global generator
        """
        super().set_random_seed(seed)
        self._starts = np.random.default_rng(np.random.randint(2**31) if seed is None else seed)

    def _begin_rollout(self, env: VecEnv, rollout_buffer: EstimatedRollouts, use_masking: bool) -> None:
        if self.group_by == "start":
            assert self._starts is not None
            seeds = self._starts.integers(2**31, size=env.num_envs // self.group_size)
            group_starts(env, seeds, self.group_size, self.shared_noise)
        super()._begin_rollout(env, rollout_buffer, use_masking)

    def learn(
        self: SelfGRPO,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str | None = None,
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfGRPO:
        """Learn as SB3's PPO does; ``total_timesteps`` is reached at the end of a rollout of whole episodes."""
        tb_log_name = tb_log_name or type(self).__name__
        return super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)
