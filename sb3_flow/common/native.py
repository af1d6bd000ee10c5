"""Which policies the compiled loops cover, and how their networks lie in flat vectors."""

from dataclasses import dataclass

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common import distributions
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import FlattenExtractor, MlpExtractor
from torch import nn

DISTRIBUTIONS = (
    distributions.CategoricalDistribution,
    distributions.MultiCategoricalDistribution,
    distributions.BernoulliDistribution,
    distributions.DiagGaussianDistribution,
)
# what a subclass may not have changed
METHODS = ("forward", "evaluate_actions", "predict_values", "extract_features", "_get_action_dist_from_latent")


def not_covered(policy: ActorCriticPolicy) -> str | None:
    """
    :param policy: of SB3's PPO
    :return: why the compiled loops do not cover this policy, None if they do
    """
    space = policy.observation_space
    optimizer = policy.optimizer
    if any(getattr(type(policy), name) is not getattr(ActorCriticPolicy, name) for name in METHODS):
        return f"{type(policy).__name__} computes in its own way"
    if policy.device.type != "cpu":
        return f"it is on {policy.device}"
    if isinstance(space, spaces.Dict) or is_image_space(space) or type(policy.features_extractor) is not FlattenExtractor:
        return f"of its features extractor {type(policy.features_extractor).__name__} of {type(space).__name__} observations"
    if type(policy.action_dist) not in DISTRIBUTIONS:
        return f"of its distribution {type(policy.action_dist).__name__}"
    if type(policy.mlp_extractor) is not MlpExtractor or policy.activation_fn not in (nn.Tanh, nn.ReLU):
        return f"of its networks ({policy.activation_fn.__name__})"
    if type(optimizer) is not th.optim.Adam or len(optimizer.param_groups) != 1:
        return f"of its optimizer {type(optimizer).__name__}"
    group = optimizer.param_groups[0]
    if group["amsgrad"] or group["maximize"] or group["weight_decay"] or isinstance(group["lr"], th.Tensor):
        return "of its optimizer's options"
    if any(parameter.dtype != th.float32 or not parameter.requires_grad for parameter in policy.parameters()):
        return "of parameters that are frozen or not float32"
    return None


def features(policy: ActorCriticPolicy, observations: np.ndarray) -> np.ndarray:
    """
    :param policy: a covered policy
    :param observations: a batch as the environment gives it
    :return: what the first layer sees, float32, shape ``(B, size)``
    """
    if isinstance(policy.observation_space, spaces.Box):
        return np.ascontiguousarray(observations, dtype=np.float32).reshape(len(observations), -1)
    with th.no_grad():
        tensor, _ = policy.obs_to_tensor(observations)
        return policy.extract_features(tensor).numpy()  # type: ignore[union-attr]


@dataclass
class Layers:
    """Linear layers of a covered policy by trunk, the heads last."""

    actor: list[nn.Linear]
    critic: list[nn.Linear]

    @classmethod
    def of(cls, policy: ActorCriticPolicy) -> "Layers":
        """:param policy: a covered policy"""

        def linear(module: nn.Module) -> list[nn.Linear]:
            return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]

        actor = linear(policy.mlp_extractor.policy_net) + linear(policy.action_net)
        critic = linear(policy.mlp_extractor.value_net) + linear(policy.value_net)
        return cls(actor, critic)
