"""Refusal of numbers that are not finite: no environment gets such actions, and a pass that meets such numbers is undone."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.policies import ActorCriticPolicy

_sum = partial(np.add.reduce, axis=None)
"""Sum of an array, which is finite only if all entries are, and faster than a look at each entry."""


def _broken(**arrays: Any) -> list[str]:
    """List the names of the arrays (or dictionaries of arrays) that hold a number that is not finite."""

    def finite(array: Any) -> bool:
        if isinstance(array, dict):
            return all(map(finite, array.values()))
        return bool((th.isfinite if isinstance(array, th.Tensor) else np.isfinite)(array).all())

    return [name.replace("_", " ") for name, array in arrays.items() if not finite(array)]


def flat_weights(policy: ActorCriticPolicy) -> np.ndarray:
    """Concatenate all parameters of a policy."""
    return th.cat([parameter.detach().flatten() for parameter in policy.parameters()]).cpu().numpy()


def decide(act: Callable[[], tuple[Any, ...]], policy: ActorCriticPolicy, observations: Any) -> tuple[Any, ...]:
    """
    Act, and refuse actions that are not finite before an environment gets them.

    :param act: returns actions, values and log-probabilities as tensors, and any further objects
    :param policy: the policy that acts
    :param observations: the policy's observations, for the error's message
    :return: the objects that ``act`` returned, with actions as an array
    :raises FloatingPointError: if an action, or its log-probability, is not finite
    """
    try:
        actions, values, log_probs, *more = act()
        actions = actions.cpu().numpy()
        probabilities = log_probs.cpu().numpy()
        # integers are always finite, but a broken distribution gives them a probability that is not
        if math.isfinite(_sum(probabilities)) and math.isfinite(_sum(actions)):
            return actions, values, log_probs, *more
        found = _broken(actions=actions, log_probabilities=probabilities)
        if not found:  # only the sums overflowed
            return actions, values, log_probs, *more
        error: Exception | None = None
    except (ValueError, RuntimeError) as failure:  # torch's distributions and samplers check their arguments
        found, error = ["distribution"], failure
    causes = _broken(observations=observations, weights=flat_weights(policy))
    if error is not None and not causes:
        raise error
    raise FloatingPointError(
        f"{type(policy).__name__} decided on actions that are not finite ({', '.join(found)}), so that no environment was "
        f"stepped. Not finite before that: {', '.join(causes) or 'nothing; the networks overflow'}."
    ) from error


def check_pass(number: int, losses: np.ndarray, finite: bool, rollout: Any) -> None:
    """
    Refuse a pass whose losses or weights are not finite.

    :param number: number of the pass, from 1 on
    :param losses: losses of the minibatches that were learned from
    :param finite: the weights are finite after the pass
    :param rollout: the rollout buffer, for the error's message
    :raises FloatingPointError: if a number is not finite
    """
    if not np.isfinite(losses).all():
        place = int(np.argmin(np.isfinite(losses)))
        finding = f"The loss of minibatch {place + 1} of {len(losses)} is {losses[place]}"
    elif not finite:
        finding = "The weights are not finite after it"
    else:
        return
    names = ("observations", "actions", "rewards", "values", "log_probs", "advantages", "returns")
    causes = _broken(**{name: getattr(rollout, name) for name in names})
    raise FloatingPointError(
        f"Pass {number} over a rollout broke. {finding}; not finite in the rollout: {', '.join(causes) or 'nothing'}. The "
        "weights and the optimizer's state are as before this pass."
    )
