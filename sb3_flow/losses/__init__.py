"""Losses: torch tensors in, torch tensors out."""

from sb3_flow.losses.flow import flow_matching_loss
from sb3_flow.losses.value import expectile_loss, pessimistic_mean

__all__ = ["expectile_loss", "flow_matching_loss", "pessimistic_mean"]
