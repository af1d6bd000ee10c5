"""The off-policy algorithms with options that lead through all branches of their updates."""

from typing import Any

from sb3_flow import DSRL, FMQ, FQL, QAM, RLPD, RQL

VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "RQL": (RQL, {}),
    "RQL, bc": (RQL, {"objective": "bc"}),
    "FMQ, mf": (FMQ, {"warmup_steps": 2, "anneal_end_step": 6}),
    "FMQ, lsd": (FMQ, {"distillation": "lsd", "warmup_steps": 2}),
    "FMQ, psd": (FMQ, {"distillation": "psd", "warmup_steps": 2}),
    "FQL": (FQL, {"normalize_q_loss": True}),
    "FQL, best of n": (FQL, {"actor_type": "best_of_n", "n_candidates": 4}),
    "RLPD": (RLPD, {"policy_delay": 3}),
    "RLPD, QAM's": (RLPD, {"rho": 0.5, "backup_entropy": False, "bc_alpha": 0.1}),
    "DSRL": (DSRL, {"n_candidates": 2}),
    "QAM": (QAM, {}),
    "QAM, edits": (QAM, {"edit_scale": 0.1}),
}
