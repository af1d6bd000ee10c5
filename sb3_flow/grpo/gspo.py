"""Group sequence policy optimisation (GSPO) for environments."""

from typing import Any, Literal

import torch as th
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import GymEnv, Schedule

from sb3_flow.common.backends import Backend
from sb3_flow.common.checks import arguments_in, check_choice
from sb3_flow.execution import Execution
from sb3_flow.grpo.grpo import GRPO, GroupBy
from sb3_flow.on_policy.grouping import Aggregation, Baseline, Credit, Scale
from sb3_flow.on_policy.reference import ReferencePolicy


class GSPO(GRPO):
    """
    Train by GRPO with the same importance ratio for all steps of an episode, ``s = exp(mean_t log w_t)`` (arXiv 2507.18071).
    Minibatches are whole episodes, together at least ``batch_size`` steps. This is experimental in control, since an update
    takes few gradient steps.

    **The clip ranges are scaled for control.** The published 3e-4 and 4e-4 suit answers of thousands of tokens, and stop all
    learning on control tasks. The mean of L independent log-ratios is smaller than a single log-ratio by sqrt(L). So
    ``clip_range`` and ``clip_range_high`` are given as for PPO, and divided by the square root of the rollout's mean episode
    length, unless ``length_scaled_clip=False``.

    :class:`sb3_flow.GRPO` explains the arguments that are not listed here.

    :param credit: "outcome" as published; "gspo" averages step-wise credits over the episode, which go well with
        ``policy_loss="gspo_token"``
    :param policy_loss: "gspo" or "gspo_token"
    :param length_scaled_clip: divide the clip ranges by the square root of the mean episode length
    """

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
        credit: Credit = "outcome",
        baseline: Baseline = "loo",
        scale: Scale = "batch",
        ddof: Literal[0, 1] = 0,
        aggregation: Aggregation = "step",
        shared_noise: bool = False,
        policy_loss: Literal["gspo", "gspo_token"] = "gspo",
        clip_range_high: float | Schedule | None = 0.28,
        length_scaled_clip: bool = True,
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
        given = arguments_in(locals(), "length_scaled_clip")
        check_choice(("gspo", "gspo_token"), policy_loss=policy_loss)
        self.length_scaled_clip = length_scaled_clip
        super().__init__(**given)
