"""MaskablePPO with a choice of advantages and losses."""

from typing import Any

import numpy as np
import torch as th
from sb3_contrib import MaskablePPO as ContribMaskablePPO
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.type_aliases import GymEnv, Schedule
from stable_baselines3.common.vec_env import VecEnv

from sb3_flow.common.checks import arguments_in
from sb3_flow.compiled.policy_losses import PolicyLoss
from sb3_flow.on_policy.arguments import Recomputation
from sb3_flow.on_policy.estimators import Advantage
from sb3_flow.on_policy.policy_gradient import PolicyGradient
from sb3_flow.on_policy.reference import ReferencePolicy
from sb3_flow.on_policy.rollout_buffer import EstimatedRollouts


def masks_of(env: VecEnv, use_masking: bool) -> np.ndarray | None:
    """Ask environments for the masks of their actions, shape ``(n_envs, n_choices)``; None without masking."""
    return get_action_masks(env) if use_masking else None


def check_masking(env: VecEnv, use_masking: bool) -> None:
    """
    Refuse environments without action masks.

    :raises ValueError: if masks are used and the environments have none
    """
    if use_masking and not is_masking_supported(env):
        raise ValueError("Environment does not support action masking. Consider using ActionMasker wrapper")


class MaskablePPO(PolicyGradient, ContribMaskablePPO):  # type: ignore[misc]
    """
    Extend sb3-contrib's MaskablePPO (arXiv 2006.14171) by the choices of :class:`sb3_flow.PPO`, whose docstring explains the
    arguments from ``advantage`` to ``recompute_advantages``; all other arguments are sb3-contrib's.
    """

    buffer_classes = MaskableRolloutBuffer, MaskableDictRolloutBuffer

    def __init__(
        self,
        policy: str | type[MaskableActorCriticPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 3e-4,
        n_steps: int = 2048,
        batch_size: int | None = 64,
        n_epochs: int = 10,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        clip_range: float | Schedule = 0.2,
        clip_range_vf: float | Schedule | None = None,
        normalize_advantage: bool = True,
        ent_coef: float = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float = 0.5,
        rollout_buffer_class: type[RolloutBuffer] | None = None,
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        target_kl: float | None = None,
        advantage: Advantage = "gae",
        policy_loss: PolicyLoss = "clip",
        clip_range_high: float | Schedule | None = None,
        dual_clip: float = 3.0,
        rho_bar: float = 1.0,
        c_bar: float = 1.0,
        kl_coef: float = 0.0,
        reference_policy: ReferencePolicy = None,
        recompute_advantages: Recomputation = "auto",
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
    ):
        super().__init__(**arguments_in(locals()))

    def _begin_rollout(self, env: VecEnv, rollout_buffer: EstimatedRollouts, use_masking: bool) -> None:
        check_masking(env, use_masking)
        super()._begin_rollout(env, rollout_buffer, use_masking)

    def _act(self, env: VecEnv, use_masking: bool) -> tuple[th.Tensor, th.Tensor, th.Tensor, dict[str, Any]]:
        action_masks = masks_of(env, use_masking)
        return *self.policy(self._last_observations(), action_masks=action_masks), {"action_masks": action_masks}

    def _evaluate(self, data: Any) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        return self.policy.evaluate_actions(data.observations, self._actions(data), action_masks=data.action_masks)

    def _distribution(self, policy: Any, data: Any) -> Distribution:
        found: Distribution = policy.get_distribution(data.observations, data.action_masks)
        return found
