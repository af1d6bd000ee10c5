"""Checks of the on-policy algorithms' arguments."""

from typing import Any, Literal, get_args

import numpy as np

from sb3_flow.common.checks import (
    check_choice,
    check_fraction,
    check_layers,
    check_minimum,
    check_number,
    check_whole,
    warn_without_effect,
)
from sb3_flow.compiled.policy_losses import PolicyLoss
from sb3_flow.execution import Execution
from sb3_flow.on_policy.estimators import Advantage

Recomputation = Literal["auto", "never", "epoch", "minibatch"]


def check_choices(model: Any) -> None:
    """
    Refuse options that do not exist, and options that exclude each other.

    :raises ValueError: if an argument of the model is not among its choices, or two arguments do not go together
    """
    check_choice(get_args(Advantage), advantage=model.advantage)
    check_choice(get_args(PolicyLoss), policy_loss=model.policy_loss)
    check_choice(get_args(Recomputation), recompute_advantages=model.recompute_advantages)
    check_choice(get_args(Execution), execution=model.execution)
    check_number(kl_coef=model.kl_coef, clip_range_high=model.clip_range_high)
    check_minimum(0.0, kl_coef=model.kl_coef)
    caps = f"rho_bar={model.rho_bar} and c_bar={model.c_bar} were given"
    if not model.dual_clip > 1.0:
        raise ValueError(f"`dual_clip` must be above 1, but {model.dual_clip} was given.")
    if not model.rho_bar >= model.c_bar:
        raise ValueError(f"`rho_bar` must be at least `c_bar`, but {caps}.")
    if model.advantage == "vtrace" and not 0.0 < model.c_bar <= model.rho_bar < np.inf:
        raise ValueError(f"`rho_bar` and `c_bar` must be positive and finite for V-trace, but {caps}.")
    if model.kl_coef > 0 and model.reference_policy is None and not model._has_reference:
        raise ValueError(
            f'`kl_coef` is {model.kl_coef}, but `reference_policy` is None; "initial", a path or a model was expected.'
        )
    if model.advantage == "group" and model.recompute_advantages in ("epoch", "minibatch"):
        raise ValueError(
            f'`recompute_advantages` is "{model.recompute_advantages}", but group advantages do not depend on networks '
            'that change; "never" was expected.'
        )


def check_sizes(n_steps: int, batch_size: int | None) -> None:
    """Raise a ValueError if rollouts or minibatches have no rows; a batch size of None takes the whole rollout."""
    check_whole(1, n_steps=n_steps)
    if batch_size is not None:
        check_whole(1, batch_size=batch_size)


def check_numbers(model: Any) -> None:
    """
    Refuse numbers out of their range; schedules are checked when they are evaluated.

    :raises ValueError: if an argument of the model is not a number, or out of its range
    """
    check_sizes(model.n_steps, model.batch_size)
    check_whole(0, n_epochs=model.n_epochs)  # with 0, the model only collects
    check_layers(model.policy_kwargs.get("net_arch"))
    check_number(
        learning_rate=model.learning_rate,
        clip_range=model.clip_range,
        clip_range_vf=model.clip_range_vf,
        ent_coef=model.ent_coef,
        vf_coef=model.vf_coef,
    )
    not_negative = ("learning_rate", "clip_range", "clip_range_high", "vf_coef")
    numbers = {name: getattr(model, name) for name in not_negative}
    check_minimum(0.0, **{name: given for name, given in numbers.items() if given is not None and not callable(given)})
    check_fraction(gamma=model.gamma, gae_lambda=model.gae_lambda)
    check_minimum(0.0, max_grad_norm=model.max_grad_norm)  # infinity: gradients are not clipped
    if model.target_kl is not None:
        check_minimum(0.0, target_kl=model.target_kl)


def warn_of_idle_arguments(model: Any) -> None:
    """Warn of arguments of a model that have no effect beside its other arguments."""
    vtrace, decoupled = model.advantage == "vtrace", model.policy_loss == "decoupled"
    warn_without_effect(
        model,
        dual_clip=None if model.policy_loss == "dual_clip" else f'`policy_loss` is "{model.policy_loss}", not "dual_clip"',
        rho_bar=None if vtrace or decoupled else 'neither is `advantage` "vtrace" nor `policy_loss` "decoupled"',
        c_bar=None if vtrace else f'`advantage` is "{model.advantage}", not "vtrace"',
        reference_policy=None if model.kl_coef > 0 else "`kl_coef` is 0",
    )
