"""The policies that the compiled loops of PPO, GRPO and GSPO cover, and the sizes at which the loops are faster than torch."""

from collections.abc import Sequence
from typing import Any

import torch as th
from stable_baselines3.common import distributions
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, MlpExtractor
from torch import nn

from sb3_flow.on_policy.gradient_steps import OPTIONS, has_plain_steps

DISTRIBUTIONS = (
    distributions.CategoricalDistribution,
    distributions.MultiCategoricalDistribution,
    distributions.BernoulliDistribution,
    distributions.DiagGaussianDistribution,
)
# the loops do not cover a subclass that has changed one of these
METHODS = ("forward", "evaluate_actions", "predict_values", "extract_features", "_get_action_dist_from_latent")

ONE_THREAD, TWO_THREADS = 600e6, 100e6
"""Weights times rows of a minibatch up to which the loops, on their single thread, are faster than torch on 1 or 2 threads."""
ALWAYS = 8e6
"""The same limit for any number of threads: torch spends more time on preparing its operations than the loops take."""


def torch_is_faster(layers: Sequence[tuple[int, int]], batch_size: int, n_envs: int, threads: int) -> str | None:
    """
    Decide which backend is faster, by a rule that is fitted to ``tests/benchmarks/backend_choice.py`` on a processor where
    torch's products are the fastest. Torch takes about the same time to prepare the operations of any network, and is faster
    where there is much to multiply.

    :param layers: inputs and outputs of the linear layers of actor and critic
    :param batch_size: rows of a minibatch
    :param n_envs: number of environments
    :param threads: number of torch's threads
    :return: the reason why torch is faster, None if compiled loops are
    """
    weights = sum(n_in * n_out for n_in, n_out in layers)
    limit = ONE_THREAD if threads == 1 else max(ALWAYS, TWO_THREADS / (threads - 1))
    rows = max(batch_size, n_envs // 2)  # acting is a forward pass alone
    if weights * rows <= limit:
        return None
    on = "one thread" if threads == 1 else f"{threads} threads"
    units = max(map(max, layers))
    return (
        f"layers have up to {units} units, minibatches {batch_size} rows, there are {n_envs} environments, and torch has {on}"
    )


def linear_layers(policy: ActorCriticPolicy) -> list[tuple[int, int]]:
    """List inputs and outputs of a policy's linear layers."""
    return [(layer.in_features, layer.out_features) for layer in policy.modules() if isinstance(layer, nn.Linear)]


def not_covered(policy: ActorCriticPolicy) -> str | None:
    """
    Look for a reason why the compiled loops do not cover a policy of SB3's PPO.

    :return: the reason, a sentence without its full stop; None if the loops cover the policy
    """
    space = policy.observation_space
    optimizer: Any = policy.optimizer
    if any(getattr(type(policy), name) is not getattr(ActorCriticPolicy, name) for name in METHODS):
        return f"{type(policy).__name__} computes in its own way"
    if policy.device.type != "cpu":
        return f"the policy is on {policy.device}, and the compiled loops run on the CPU"
    if is_image_space(space) or not _only_flattens(policy.features_extractor):
        encoder = type(policy.features_extractor).__name__
        return f"{encoder} encodes the {type(space).__name__} observations, and the compiled loops take flat observations"
    if type(policy.action_dist) not in DISTRIBUTIONS:
        return f"the compiled loops do not draw actions from a {type(policy.action_dist).__name__}"
    if type(policy.mlp_extractor) is not MlpExtractor or policy.activation_fn not in (nn.Tanh, nn.ReLU):
        own, activation = type(policy.mlp_extractor).__name__, policy.activation_fn.__name__
        return f"the networks are {own} with {activation}, and the compiled loops cover an MlpExtractor with Tanh or ReLU"
    if type(optimizer) is not th.optim.Adam or len(optimizer.param_groups) != 1:
        groups = len(optimizer.param_groups)
        given = type(optimizer).__name__ + (f" with {groups} groups of parameters" if groups > 1 else "")
        return f"the optimizer is {given}, and the compiled loops cover Adam with one group"
    if any(parameter.dtype != th.float32 or not parameter.requires_grad for parameter in policy.parameters()):
        return "some parameters are frozen or not float32"
    if not has_plain_steps(optimizer):
        given = ", ".join(name for name in OPTIONS if optimizer.param_groups[0][name]) or "hooks or a rate that is a tensor"
        return f"the optimizer has options that the compiled loops do not cover ({given})"
    return None


def _only_flattens(extractor: nn.Module) -> bool:
    parts = extractor.extractors.values() if type(extractor) is CombinedExtractor else [extractor]
    return all(type(part) in (FlattenExtractor, nn.Flatten) for part in parts)
