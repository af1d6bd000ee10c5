"""Losses and the targets they are taken against: torch tensors in, torch tensors out."""

from sb3_flow.losses.advantage_scans import Advantages, VTrace, gae_scan, vtrace_scan
from sb3_flow.losses.flow_matching import flow_matching_loss
from sb3_flow.losses.group_advantages import group_advantages, group_returns_to_go
from sb3_flow.losses.kl import exact_kl, kl_k1, kl_k2, kl_k3
from sb3_flow.losses.self_distillation import diagonal_loss, eulerian_loss, lagrangian_loss, progressive_loss, regression_loss
from sb3_flow.losses.surrogates import (
    clipped_surrogate,
    decoupled_surrogate,
    gspo_loss,
    gspo_token_loss,
    segment_mean,
    sequence_log_ratio,
    value_loss,
)
from sb3_flow.losses.value import expectile_loss, pessimistic_mean, td_loss

__all__ = [
    "Advantages",
    "VTrace",
    "clipped_surrogate",
    "decoupled_surrogate",
    "diagonal_loss",
    "eulerian_loss",
    "exact_kl",
    "expectile_loss",
    "flow_matching_loss",
    "gae_scan",
    "group_advantages",
    "group_returns_to_go",
    "gspo_loss",
    "gspo_token_loss",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "lagrangian_loss",
    "pessimistic_mean",
    "progressive_loss",
    "regression_loss",
    "segment_mean",
    "sequence_log_ratio",
    "td_loss",
    "value_loss",
    "vtrace_scan",
]
