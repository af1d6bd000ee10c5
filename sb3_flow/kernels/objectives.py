"""The loss that the native update minimises, and the optimiser that does it."""

import math
from typing import NamedTuple

CLIP, DUAL_CLIP, GSPO, GSPO_TOKEN, DECOUPLED = range(5)
POLICY_LOSSES = {"clip": CLIP, "dual_clip": DUAL_CLIP, "gspo": GSPO, "gspo_token": GSPO_TOKEN, "decoupled": DECOUPLED}


class Objective(NamedTuple):
    """Made by :func:`describe_objective`."""

    policy_loss: int
    normalize_advantage: bool
    clip_range: float
    clip_range_high: float
    dual_clip: float
    rho_bar: float
    clip_range_vf: float
    vf_coef: float
    ent_coef: float
    kl_coef: float
    target_kl: float


class Adam(NamedTuple):
    """Arguments of the optimiser, and the norm that gradients are clipped at before. All floats."""

    learning_rate: float
    max_grad_norm: float
    beta1: float
    beta2: float
    eps: float


def describe_objective(
    policy_loss: str = "clip",
    *,
    clip_range: float = 0.2,
    clip_range_high: float | None = None,
    dual_clip: float = 3.0,
    rho_bar: float = math.inf,
    clip_range_vf: float | None = None,
    vf_coef: float = 0.5,
    ent_coef: float = 0.0,
    kl_coef: float = 0.0,
    normalize_advantage: bool = True,
    target_kl: float | None = None,
) -> Objective:
    """
    Arguments as those of ``sb3_flow.PPO`` and ``sb3_flow.losses``, at their present values.

    :return: the loss that :func:`ppo_epoch` minimises
    """
    return Objective(
        policy_loss=POLICY_LOSSES[policy_loss],
        normalize_advantage=bool(normalize_advantage),
        clip_range=float(clip_range),
        clip_range_high=float(clip_range if clip_range_high is None else clip_range_high),
        dual_clip=float(dual_clip),
        rho_bar=float(rho_bar),
        clip_range_vf=-1.0 if clip_range_vf is None else float(clip_range_vf),
        vf_coef=float(vf_coef),
        ent_coef=float(ent_coef),
        kl_coef=float(kl_coef),
        target_kl=math.inf if target_kl is None else float(target_kl),
    )
