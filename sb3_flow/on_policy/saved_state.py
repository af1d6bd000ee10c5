"""Parameters and files of the on-policy algorithms."""

from typing import Any

import torch as th
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.type_aliases import TensorDict

from sb3_flow.on_policy.collection import RolloutCollection
from sb3_flow.on_policy.flat_parameters import own_tensors


class PersistentOnPolicy(RolloutCollection):
    """What is saved and loaded of the PPO family. Part of ``PolicyGradient``, which sets the attributes."""

    reference_policy: Any
    reference: Any
    _has_reference: bool

    def get_parameters(self) -> dict[str, dict]:
        """
        Parameters of the policy and its optimizer, as SB3's, but copies: another model that is given them may go on learning.

        :return: state dicts by name
        """
        return own_tensors(super().get_parameters())

    def set_parameters(
        self, load_path_or_dict: str | TensorDict, exact_match: bool = True, device: th.device | str = "auto"
    ) -> None:
        """
        Load parameters from a file or a dictionary, which is left as it is, as SB3 does; also those of a model without a
        reference policy: the "initial" one is then the policy that is loaded, any other stays.

        :param load_path_or_dict: path of a saved model, or parameters as :meth:`get_parameters` returns them
        :param exact_match: the parameters must be those of all networks and optimizers
        :param device: on which to load a file
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
        # `groups` is made anew by the constructor and `_setup_model`; a file without it opens where only SB3 is installed
        excluded = [*super()._excluded_save_params(), "reference", "native", "groups"]
        if not isinstance(self.reference_policy, str):
            excluded.append("reference_policy")  # its weights are saved
        return excluded
