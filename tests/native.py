"""SB3's policies as the native update sees them, and PolicyGradient's loss on made-up minibatches."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import BernoulliDistribution, DiagGaussianDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn

from sb3_flow.grpo.policies import ActorPolicy
from sb3_flow.native import BERNOULLI, CATEGORICAL, GAUSSIAN, RELU, TANH, Network, describe_network
from sb3_flow.on_policy.minibatches import Minibatch
from sb3_flow.on_policy.policy_gradient import PolicyGradient

ACTIONS = {
    "categorical": spaces.Discrete(4),
    "multi_categorical": spaces.MultiDiscrete([2, 3, 5]),
    "bernoulli": spaces.MultiBinary(3),
    "gaussian": spaces.Box(-1, 1, (3,), np.float32),
}


def make_policy(
    actions: str,
    dtype: th.dtype = th.float64,
    net_arch: Any = None,
    activation: type[nn.Module] = nn.Tanh,
    features: int = 5,
    critic: bool = True,
    seed: int = 0,
) -> ActorCriticPolicy:
    """:return: a policy with larger weights than SB3's, so that its distributions and slopes vary"""
    th.manual_seed(seed)
    policy = (ActorCriticPolicy if critic else ActorPolicy)(
        spaces.Box(-10, 10, (features,), np.float32),
        ACTIONS[actions],
        lambda _: 1e-3,
        net_arch=net_arch,
        activation_fn=activation,
    ).to(dtype)
    _keep_dtype(policy)
    with th.no_grad():
        for parameter in policy.parameters():
            parameter += 0.3 * th.randn_like(parameter)
    return policy


def _keep_dtype(policy: ActorCriticPolicy) -> None:
    """SB3's feature extraction casts to float32."""
    policy.extract_features = lambda obs, *_: obs.flatten(1)
    policy.get_distribution = lambda obs: policy._get_action_dist_from_latent(policy.mlp_extractor.forward_actor(obs))


def describe(policy: ActorCriticPolicy) -> tuple[Network, np.ndarray]:
    """:return: the network, and its parameters as one vector"""
    offsets, at = {}, 0
    for parameter in policy.parameters():
        offsets[id(parameter)] = at
        at += parameter.numel()

    def rows(*modules: nn.Module) -> list[tuple[int, ...]]:
        layers = [layer for module in modules for layer in module.modules() if isinstance(layer, nn.Linear)]
        return [(offsets[id(x.weight)], offsets[id(x.bias)], x.in_features, x.out_features) for x in layers]

    kind, components = CATEGORICAL, [getattr(policy.action_space, "n", 0)]
    if isinstance(policy.action_dist, DiagGaussianDistribution):
        kind, components = GAUSSIAN, [1] * policy.action_net.out_features
    elif isinstance(policy.action_dist, BernoulliDistribution):
        kind, components = BERNOULLI, [1] * policy.action_net.out_features
    elif isinstance(policy.action_space, spaces.MultiDiscrete):
        components = policy.action_space.nvec
    network = describe_network(
        rows(policy.mlp_extractor.policy_net, policy.action_net),
        rows(policy.mlp_extractor.value_net, policy.value_net),
        components,
        kind,
        RELU if policy.activation_fn is nn.ReLU else TANH,
        at,
        offsets[id(policy.log_std)] if kind == GAUSSIAN else -1,
    )
    return network, flat(policy.parameters())


def in_float64(policy: ActorCriticPolicy) -> ActorCriticPolicy:
    """:return: a copy with the same numbers"""
    other = copy.deepcopy(policy).double()
    _keep_dtype(other)
    return other


def flat(tensors: Any) -> np.ndarray:
    """:return: the tensors, one after the other"""
    return np.concatenate([tensor.detach().numpy().ravel() for tensor in tensors])


def make_rollout(policy: ActorCriticPolicy, n: int, seed: int = 0, spread: float = 0.4) -> dict[str, np.ndarray]:
    """:return: rows whose ratios are spread around 1, as ``ppo_epoch`` takes them"""
    th.manual_seed(seed)
    dtype = next(policy.parameters()).dtype
    observations = th.randn(n, policy.observation_space.shape[0], dtype=dtype)
    with th.no_grad():
        actions, values, log_probs = policy(observations)
    noise = spread * th.randn(6, n, dtype=dtype)
    return {
        "observations": observations.numpy(),
        "actions": actions.numpy().reshape(n, -1).astype(observations.numpy().dtype),
        "old_log_probs": (log_probs + noise[0]).numpy(),
        "advantages": (3 * noise[1] + 0.1).numpy(),
        "returns": (values.flatten() + noise[2]).numpy(),
        "old_values": (values.flatten() + noise[3]).numpy(),
        "proximal_log_probs": (log_probs + noise[4]).numpy(),
    }


class TorchUpdate(PolicyGradient):
    """The loss alone, without an algorithm around it."""

    def __init__(self, policy: ActorCriticPolicy, objective: dict[str, Any], reference: ActorCriticPolicy | None = None):
        self.policy, self.reference = policy, reference
        self.action_space = policy.action_space
        objective = {"rho_bar": float("inf"), "dual_clip": 3.0, "policy_loss": "clip", "normalize_advantage": True} | objective
        objective = {"vf_coef": 0.5, "ent_coef": 0.0, "kl_coef": 0.0} | objective
        self.clips = {name: objective.pop(name) for name in list(objective) if name.startswith("clip_range")}
        self.clips.setdefault("clip_range", 0.2)
        vars(self).update(objective)

    def of_rows(
        self, rollout: dict[str, np.ndarray], rows: np.ndarray, segments: np.ndarray | None = None
    ) -> tuple[th.Tensor, dict[str, th.Tensor]]:
        """:return: loss and metrics of a minibatch"""
        part = {name: th.as_tensor(array[rows]) for name, array in rollout.items() if not name.startswith("reference")}
        names = {"observations": "observations", "actions": "actions", "old_log_prob": "old_log_probs"}
        names |= {name: name for name in ("advantages", "returns", "old_values")}
        data = SimpleNamespace(**{name: part[source] for name, source in names.items()})
        number = None if segments is None else th.as_tensor(segments)
        count = 0 if segments is None else int(segments.max()) + 1
        return self.loss(Minibatch(data, None, number, count, part["proximal_log_probs"]), **self.clips)

    def _actions(self, data: Any) -> th.Tensor:
        if isinstance(self.action_space, spaces.Discrete):
            return data.actions.long().flatten()
        return data.actions


def reference_of(policy: ActorCriticPolicy, rollout: dict[str, np.ndarray]) -> tuple[ActorCriticPolicy, dict[str, np.ndarray]]:
    """:return: another policy, and what ``ppo_epoch`` needs to know of it"""
    other = copy.deepcopy(policy)
    _keep_dtype(other)
    with th.no_grad():
        for parameter in other.parameters():
            parameter += 0.2 * th.randn_like(parameter)
        latent = other.mlp_extractor.forward_actor(th.as_tensor(rollout["observations"]))
        known = {"reference": other.action_net(latent).numpy()}
    if hasattr(other, "log_std"):
        known["reference_log_std"] = other.log_std.detach().numpy()
    return other, known
