"""A frozen policy that training is kept close to."""

import copy
from pathlib import Path
from typing import Any

import torch as th
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.save_util import load_from_zip_file

from sb3_flow.losses import exact_kl


def kl_divergence(present: Distribution, reference: Distribution) -> th.Tensor:
    """
    Exact ``KL(present || reference)`` of two of SB3's (or sb3-contrib's) action distributions, summed over the action's
    dimensions. For squashed Gaussians it is that of the Gaussians before tanh, which is the same number.

    :param present: distributions of a batch of states
    :param reference: of the same type
    :return: shape ``(B,)``
    """
    p, q = (getattr(one, "distributions", None) or one.distribution for one in (present, reference))
    return exact_kl(p, q)


def make_reference(source: Any, policy: ActorCriticPolicy) -> ActorCriticPolicy:
    """
    :param source: "initial" (the policy as it is now), the path of a saved model, a model, or a policy
    :param policy: the policy that is trained
    :return: a frozen policy with the source's weights, in evaluation mode, on the policy's device
    :raises ValueError: if the source is something else, or its networks are not the policy's
    """
    # gSDE's distribution holds noise with a history, which cannot be copied deeply, and need not be
    reference = copy.deepcopy(policy, {id(policy.action_dist): copy.copy(policy.action_dist)})
    if isinstance(source, BaseAlgorithm):
        source = source.policy
    if isinstance(source, BasePolicy):
        weights: Any = source.state_dict()
    elif isinstance(source, (str, Path)) and source != "initial":
        _, parameters, _ = load_from_zip_file(source, device=policy.device, load_data=False)
        weights = parameters["policy"]
    elif source == "initial":
        weights = policy.state_dict()
    else:
        raise ValueError(f'`reference_policy` must be "initial", a path, a model or a policy, but {source!r} was given.')
    if not getattr(policy, "has_critic", True):
        weights = {name: weight for name, weight in weights.items() if "value_net" not in name}  # only actors are compared
    try:
        reference.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(
            f"`reference_policy` must have the networks of the policy that is trained ({type(policy).__name__} for "
            f"{policy.observation_space} and {policy.action_space}), but what was given has others: {error}"
        ) from error
    reference.requires_grad_(False)
    reference.set_training_mode(False)
    return reference
