"""A frozen policy, close to which training stays."""

import copy
from pathlib import Path
from typing import Any, Literal

import torch as th
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.type_aliases import TensorDict

from sb3_flow.losses import exact_kl
from sb3_flow.on_policy.collection import RolloutCollection
from sb3_flow.on_policy.flat_parameters import own_tensors

ReferencePolicy = Literal["initial"] | str | Path | BaseAlgorithm | BasePolicy | None
"""Type of the argument ``reference_policy``: "initial", the path of a saved model, a model, a policy, or None."""


def kl_divergence(present: Distribution, reference: Distribution) -> th.Tensor:
    """
    Compute ``KL(present || reference)`` of two of SB3's (or sb3-contrib's) action distributions exactly, summed over the
    action's dimensions. Squashed Gaussians diverge as much as the Gaussians before tanh do.

    :param present: distributions of a batch of states
    :param reference: distributions of the same type
    :return: shape ``(B,)``
    """
    p, q = (getattr(both, "distributions", None) or both.distribution for both in (present, reference))
    return exact_kl(p, q)


def make_reference(source: Any, policy: ActorCriticPolicy) -> ActorCriticPolicy:
    """
    Make a frozen policy, in evaluation mode.

    :param source: "initial" (the policy as it is now), the path of a saved model, a model, or a policy
    :param policy: the policy that is trained
    :return: a copy of ``policy``, on the same device, with the source's weights
    :raises ValueError: if the source is something else, or its networks are not the policy's
    """
    # gSDE's distribution holds noise with a history, which cannot be copied deeply and is not needed
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
            f"{policy.observation_space} and {policy.action_space}), but other networks were given: {error}"
        ) from error
    reference.requires_grad_(False)
    reference.set_training_mode(False)
    return reference


class WithReference(RolloutCollection):
    """Make, compare, save and load the frozen reference policy that a model may keep."""

    reference_policy: ReferencePolicy
    reference: ActorCriticPolicy | None
    _has_reference: bool
    _reference_of: str | None

    def _set_up_reference(self) -> None:
        if self.reference_policy is None and not self._has_reference:
            return
        if self._has_reference and self.reference_policy is not None and self.reference_policy != self._reference_of:
            raise ValueError(
                f"`reference_policy` is {self.reference_policy!r}, but this model was saved with a reference of its own, "
                "which it keeps; None was expected."
            )
        # the weights of a loaded model's reference come with its parameters
        source = "initial" if self._has_reference else self.reference_policy
        self.reference = make_reference(source, self.policy)
        self._has_reference = True
        self._reference_of = self.reference_policy if isinstance(self.reference_policy, str) else None

    def _distribution(self, policy: Any, data: Any) -> Distribution:
        """Compute action distributions of ``policy`` (the present or the reference) in the states of ``data``."""
        found: Distribution = policy.get_distribution(data.observations)
        return found

    def _kl_to_reference(self, data: Any) -> th.Tensor:
        with th.no_grad():
            reference = self._distribution(self.reference, data)
        return kl_divergence(self._distribution(self.policy, data), reference)

    def get_parameters(self) -> dict[str, dict[str, Any]]:
        """Copy the parameters of policy and optimizer, by which another model may go on learning, as SB3's state dicts."""
        parameters: dict[str, dict[str, Any]] = own_tensors(super().get_parameters())
        return parameters

    def set_parameters(
        self, load_path_or_dict: str | TensorDict, exact_match: bool = True, device: th.device | str = "auto"
    ) -> None:
        """
        Load parameters from a file or a dictionary, as SB3 does; the dictionary is not changed. After parameters of a model
        without a reference policy, the "initial" reference is the loaded policy, and any other reference stays.

        :param load_path_or_dict: path of a saved model, or parameters of :meth:`get_parameters`
        :param exact_match: the parameters must cover all networks and optimizers
        :param device: device to which a file is loaded
        """
        parameters: Any = load_path_or_dict
        if not isinstance(parameters, dict):
            parameters = load_from_zip_file(parameters, device=device, load_data=False)[1]
        if self.reference is not None and "reference" not in parameters and "policy" in parameters:
            initial = isinstance(self.reference_policy, str) and self.reference_policy == "initial"
            parameters = parameters | {"reference": parameters["policy"] if initial else self.reference.state_dict()}
        super().set_parameters(own_tensors(parameters), exact_match, device)

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        names, tensors = super()._get_torch_save_params()
        return [*names, "reference"] if self._has_reference else names, tensors

    def _excluded_save_params(self) -> list[str]:
        excluded = [*super()._excluded_save_params(), "reference"]
        # a model that was given as the reference is not saved, but its weights are
        return excluded if isinstance(self.reference_policy, str) else [*excluded, "reference_policy"]
