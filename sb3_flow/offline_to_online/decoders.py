"""Flows that are trained already, taken out of models, policies and their files, for an algorithm that steers their noise."""

import zipfile
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.save_util import load_from_zip_file

from sb3_flow.common.checks import arguments_of
from sb3_flow.common.older_files import finding_moved_modules
from sb3_flow.common.saved_by import SAVED_VERSION, saved_data, warn_of_newer
from sb3_flow.common.wrapper_chain import unwrapped
from sb3_flow.offline_to_online.actors import GenerativeActor
from sb3_flow.offline_to_online.algorithm import OfflineToOnlineAlgorithm
from sb3_flow.offline_to_online.generative_policy import GenerativePolicy
from sb3_flow.offline_to_online.older_names import translate
from sb3_flow.offline_to_online.spaces import same_but_for_bounds


class FlowRecipe(NamedTuple):
    """
    How to build a flow without weights: what a model that has the flow saves beside its weights.

    :param policy_class: class of the policy that the flow comes from
    :param arguments: of its constructor
    """

    policy_class: type[GenerativePolicy]
    arguments: dict[str, Any]

    def build_policy(self) -> GenerativePolicy:
        """Build the policy, with weights that are to be replaced."""
        return self.policy_class(**self.arguments)


Decoder = str | PathLike[str] | GenerativePolicy | OfflineToOnlineAlgorithm
"""A model or a policy of sb3_flow, or a file with either."""


def take_flow(decoder: Decoder | FlowRecipe, target: Any) -> tuple[GenerativeActor, FlowRecipe]:
    """
    Take the flow out of a model, a policy or a file.

    :param decoder: where the flow is; with a recipe its weights are still to be loaded
    :param target: the policy that wants the flow, whose spaces and ``horizon_length`` it must have
    :return: a frozen copy of the flow, and its recipe
    :raises FileNotFoundError: if there is no such file
    :raises TypeError: if there is no policy of sb3_flow
    :raises ValueError: if the flow does not fit, or the file does not tell what it holds
    """
    if isinstance(decoder, FlowRecipe):
        return decoder.build_policy().frozen_flow(), decoder
    policy = _read(Path(decoder)) if isinstance(decoder, str | PathLike) else unwrapped(getattr(decoder, "policy", decoder))
    _check_class(type(policy))
    check_fit(policy, target)
    return policy.frozen_flow(), _recipe(type(policy), policy._get_constructor_parameters())


def _check_class(found: type) -> None:
    if not issubclass(found, GenerativePolicy):
        raise TypeError(
            "`decoder` must be a model or a policy of sb3_flow whose actor turns noise into actions (RQL, FMQ, FQL, DSRL, "
            f"FlowMapPolicy and others), or a file with either, but a {found.__name__} was given."
        )


def check_fit(policy: GenerativePolicy, target: Any) -> None:
    """
    Refuse a policy whose flow cannot decide the actions of another policy.

    :param policy: the policy that has the flow
    :param target: the policy that wants the flow
    :raises ValueError: naming what differs
    """
    theirs, ours = policy.observation_space, target.observation_space
    fits = {
        "observation_space": same_but_for_bounds(theirs, ours) or same_but_for_bounds(ours, theirs),
        "action_space": _same_actions(policy.action_space, target.action_space),
        "horizon_length": policy.horizon_length == target.horizon_length,
    }
    for name in (name for name, fit in fits.items() if not fit):
        raise ValueError(
            f"`decoder` must decide actions for `{name}={getattr(target, name)}`, as the model does, but it has "
            f"`{name}={getattr(policy, name)}`."
        )


def _same_actions(theirs: Any, ours: Any) -> bool:
    """Say whether chunks in [-1, 1] mean the same actions in two spaces."""
    if not (isinstance(theirs, spaces.Box) and isinstance(ours, spaces.Box)):
        return False
    return theirs.shape == ours.shape and np.allclose(theirs.low, ours.low) and np.allclose(theirs.high, ours.high)


def _recipe(policy_class: type[GenerativePolicy], arguments: dict[str, Any]) -> FlowRecipe:
    # whoever takes the flow chooses the backend of its networks; the recipe must be of use on every machine
    return FlowRecipe(policy_class, {**arguments, "backend": "torch"})


def _read(path: Path) -> Any:
    """Read the policy of a model's or a policy's file."""
    found = next((one for one in (path, path.with_name(f"{path.name}.zip")) if one.is_file()), None)
    if found is None:
        raise FileNotFoundError(f"`decoder` must be a saved model or policy, but there is no file {path}.")
    with finding_moved_modules():
        if not zipfile.is_zipfile(found) or "data" in zipfile.ZipFile(found).namelist():
            warn_of_newer(saved_data(found).get(SAVED_VERSION), found)
            return _read_model(found)
        saved = th.load(found, map_location="cpu", weights_only=False)
        warn_of_newer(saved.get(SAVED_VERSION), found)
    if "policy_class" not in saved:
        raise ValueError(
            f"`decoder` must be a file that names its class, but {found} was saved by an earlier version: load it by its own "
            "class, and give the policy, e.g. `decoder=FlowMapPolicy.load(...)`."
        )
    return _loaded(saved["policy_class"], saved["data"], saved["state_dict"])


def _read_model(path: Path) -> Any:
    """Build the policy of a saved model from what the constructors of algorithm and policy share."""
    data, parameters, _ = load_from_zip_file(path, device="cpu")
    assert data is not None
    policy_class = data["policy_class"]
    shared = {name: data[name] for name in arguments_of(policy_class) if name in data}
    return _loaded(policy_class, {**shared, **data["policy_kwargs"]}, parameters["policy"])


def _loaded(policy_class: Any, arguments: dict[str, Any], weights: Any) -> Any:
    _check_class(policy_class)
    translate(arguments)
    policy = _recipe(policy_class, arguments).build_policy()
    policy.load_state_dict(weights)
    return policy
