"""The loss that the native update minimises, and its optimiser."""

import math
from typing import NamedTuple, get_args

from sb3_flow.compiled.choices import check_choice, shown
from sb3_flow.compiled.policy_losses import PolicyLoss
from sb3_flow.kernels.array_arguments import number

POLICY_LOSSES = {name: code for code, name in enumerate(get_args(PolicyLoss))}
CLIP, DUAL_CLIP, GSPO, GSPO_TOKEN, DECOUPLED = POLICY_LOSSES.values()


class Objective(NamedTuple):
    """Hold the numbers of a loss, see :func:`describe_objective`, which makes it."""

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
    """Hold the arguments of the optimiser, and the norm at which gradients are clipped before a step."""

    learning_rate: float
    max_grad_norm: float
    beta1: float
    beta2: float
    eps: float


def describe_objective(
    policy_loss: PolicyLoss = "clip",
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
    Describe the loss by the arguments of ``sb3_flow.PPO`` and ``sb3_flow.losses``, at their present values.

    :return: the loss that :func:`ppo_epoch` minimises
    :raises ValueError: if the loss is unknown, or another argument is not a number
    """
    check_choice(tuple(POLICY_LOSSES), policy_loss=policy_loss)
    clip_range = number("clip_range", clip_range)
    return Objective(
        policy_loss=POLICY_LOSSES[policy_loss],
        normalize_advantage=bool(normalize_advantage),
        clip_range=clip_range,
        clip_range_high=clip_range if clip_range_high is None else number("clip_range_high", clip_range_high),
        dual_clip=number("dual_clip", dual_clip),
        rho_bar=number("rho_bar", rho_bar),
        clip_range_vf=-1.0 if clip_range_vf is None else number("clip_range_vf", clip_range_vf),
        vf_coef=number("vf_coef", vf_coef),
        ent_coef=number("ent_coef", ent_coef),
        kl_coef=number("kl_coef", kl_coef),
        target_kl=math.inf if target_kl is None else number("target_kl", target_kl),
    )


def check_settings(objective: Objective, adam: Adam) -> tuple[Objective, Adam]:
    """
    Check the numbers of a loss and of its optimiser.

    :return: both with the types for which the loops are compiled
    :raises ValueError: if a field is not a number, or the loss is unknown
    """
    if not isinstance(objective, Objective) or objective.policy_loss not in POLICY_LOSSES.values():
        raise ValueError(f"`objective` must be made by `describe_objective`, but {shown(objective)} was given.")
    if not isinstance(adam, Adam):
        raise ValueError(f"`adam` must be an `Adam`, but {shown(adam)} was given.")
    kind, normalize, *others = objective
    factors = [number(f"objective.{name}", value) for name, value in zip(Objective._fields[2:], others, strict=True)]
    arguments = [number(f"adam.{name}", value) for name, value in zip(Adam._fields, adam, strict=True)]
    return Objective(int(kind), bool(normalize), *factors), Adam(*arguments)
