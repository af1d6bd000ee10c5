"""Compiled loops over NumPy arrays (numba): advantages, groups, ratios and rewards; and whole networks."""

from typing import TYPE_CHECKING, Any

from sb3_flow.compiled import unavailable
from sb3_flow.kernels.advantages import batch_compute_gae, compute_gae, compute_gae_sb3, compute_lambda_returns
from sb3_flow.kernels.groups import (
    compute_group_advantages,
    compute_group_returns_to_go,
    compute_process_advantages,
    compute_returns_to_go,
)
from sb3_flow.kernels.networks import BERNOULLI, CATEGORICAL, GAUSSIAN, RELU, TANH, Network, describe_network
from sb3_flow.kernels.objectives import Adam, Objective, describe_objective
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

if TYPE_CHECKING or unavailable() is None:
    from sb3_flow.kernels.policy_forward import policy_forward, policy_outputs, policy_values
    from sb3_flow.kernels.policy_update import METRICS, policy_evaluate, ppo_epoch

__all__ = [
    "BERNOULLI",
    "CATEGORICAL",
    "GAUSSIAN",
    "METRICS",
    "RELU",
    "TANH",
    "Adam",
    "Network",
    "Objective",
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
    "describe_network",
    "describe_objective",
    "exponential_moving_average",
    "normalize_rewards",
    "policy_evaluate",
    "policy_forward",
    "policy_outputs",
    "policy_values",
    "ppo_epoch",
    "shape_rewards",
]


def __getattr__(name: str) -> Any:
    if name in __all__:  # networks need numba; the rest runs without
        raise ImportError(f"`{name}` needs compiled code, but {unavailable()}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
