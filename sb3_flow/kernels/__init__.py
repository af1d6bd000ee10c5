"""Compiled loops over NumPy arrays (numba): advantages, groups, ratios and rewards; and between matrix products."""

from sb3_flow.kernels.advantages import batch_compute_gae, compute_gae, compute_gae_sb3, compute_lambda_returns
from sb3_flow.kernels.vtrace import compute_vtrace

__all__ = [
    "batch_compute_gae",
    "compute_gae",
    "compute_gae_sb3",
    "compute_lambda_returns",
    "compute_vtrace",
]
