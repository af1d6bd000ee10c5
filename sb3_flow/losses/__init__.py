"""Losses: torch tensors in, torch tensors out."""

from sb3_flow.losses.flow import flow_matching_loss
from sb3_flow.losses.flow_map import (
    diagonal_loss,
    eulerian_loss,
    lagrangian_loss,
    progressive_loss,
    regression_loss,
)
from sb3_flow.losses.value import expectile_loss, pessimistic_mean

__all__ = [
    "diagonal_loss",
    "eulerian_loss",
    "expectile_loss",
    "flow_matching_loss",
    "lagrangian_loss",
    "pessimistic_mean",
    "progressive_loss",
    "regression_loss",
]
