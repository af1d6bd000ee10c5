"""Advantages, V-trace, groups, ratios and rewards of NumPy arrays, in compiled loops or, without numba, in plain Python."""

from sb3_flow.kernels.advantages import batch_compute_gae, compute_gae, compute_gae_sb3, compute_lambda_returns
from sb3_flow.kernels.groups import (
    compute_group_advantages,
    compute_group_returns_to_go,
    compute_process_advantages,
    compute_returns_to_go,
)
from sb3_flow.kernels.ratios import apply_gspo_clipping, compute_gspo_importance_ratios, compute_ppo_surrogate
from sb3_flow.kernels.rewards import (
    auto_scale_rewards,
    clip_rewards,
    compute_reward_statistics,
    exponential_moving_average,
    normalize_rewards,
    shape_rewards,
)
from sb3_flow.kernels.vtrace import compute_vtrace

__all__ = [
    "apply_gspo_clipping",
    "auto_scale_rewards",
    "batch_compute_gae",
    "clip_rewards",
    "compute_gae",
    "compute_gae_sb3",
    "compute_group_advantages",
    "compute_group_returns_to_go",
    "compute_gspo_importance_ratios",
    "compute_lambda_returns",
    "compute_ppo_surrogate",
    "compute_process_advantages",
    "compute_returns_to_go",
    "compute_reward_statistics",
    "compute_vtrace",
    "exponential_moving_average",
    "normalize_rewards",
    "shape_rewards",
]
