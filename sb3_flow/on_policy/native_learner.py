"""Acting and learning of SB3's MLP policies in compiled loops."""

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common import distributions
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.preprocessing import get_action_dim
from stable_baselines3.common.utils import obs_as_tensor
from torch import nn

from sb3_flow.native.network_layout import BERNOULLI, CATEGORICAL, GAUSSIAN, RELU, TANH, describe_network
from sb3_flow.native.objectives import GSPO, GSPO_TOKEN, Adam, Objective
from sb3_flow.native.policy_forward import policy_forward, policy_outputs, policy_values
from sb3_flow.native.policy_update import METRICS, policy_evaluate, ppo_epoch
from sb3_flow.on_policy.finite import check_pass
from sb3_flow.on_policy.flat_parameters import FlatParameters
from sb3_flow.on_policy.rollout_buffer import EstimatedRollouts

KINDS = {
    distributions.CategoricalDistribution: CATEGORICAL,
    distributions.MultiCategoricalDistribution: CATEGORICAL,
    distributions.BernoulliDistribution: BERNOULLI,
    distributions.DiagGaussianDistribution: GAUSSIAN,
}
"""The kind of output of every distribution that ``backend_choice.DISTRIBUTIONS`` lists."""


def features(policy: ActorCriticPolicy, observations: Any) -> np.ndarray:
    """
    Encode a batch of an environment's observations as the policy does.

    :return: inputs of the first layer, float32, shape ``(B, size)``
    """
    if isinstance(policy.observation_space, spaces.Box):
        return np.ascontiguousarray(observations, dtype=np.float32).reshape(len(observations), -1)
    tensors = obs_as_tensor(observations, policy.device)
    with th.no_grad():
        found = super(ActorCriticPolicy, policy).extract_features(tensors, policy.features_extractor)
    return np.ascontiguousarray(found.numpy(), dtype=np.float32)


class NativeLoops:
    """
    Act by a policy in compiled loops. The policy's parameters, gradients and Adam's moments become views of flat vectors, so
    that torch sees every step; see :class:`FlatParameters`.

    :param policy: a covered policy, see :func:`sb3_flow.on_policy.backend_choice.not_covered`
    """

    def __init__(self, policy: ActorCriticPolicy):
        self.policy: Any = policy
        self.flat = FlatParameters(policy, policy.optimizer)

        def rows(*modules: nn.Module) -> list[tuple[int, int, int, int]]:
            layers = [layer for module in modules for layer in module.modules() if isinstance(layer, nn.Linear)]
            offsets = self.flat.offsets
            return [(offsets[layer.weight], offsets[layer.bias], layer.in_features, layer.out_features) for layer in layers]

        space = policy.action_space
        kind = KINDS[type(policy.action_dist)]
        components = [1] * get_action_dim(space)
        if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            components = [int(space.n)] if isinstance(space, spaces.Discrete) else space.nvec.tolist()
        self.network = describe_network(
            actor=rows(policy.mlp_extractor.policy_net, policy.action_net),
            critic=rows(policy.mlp_extractor.value_net, policy.value_net) if getattr(policy, "has_critic", True) else [],
            components=components,
            distribution=kind,
            activation=TANH if policy.activation_fn is nn.Tanh else RELU,
            size=len(self.flat.values),
            log_std=self.flat.offsets[self.policy.log_std] if kind == GAUSSIAN else -1,
        )
        self.parameters = self.flat.values.numpy()
        self.action_dtype = np.float32 if isinstance(space, (spaces.Box, spaces.MultiBinary)) else np.int64
        self.flat.link()

    def __reduce__(self) -> tuple[Any, ...]:
        # a copy is made from the copied policy, since copied views of the flat vectors would be arrays of their own
        return NativeLoops, (self.policy,)

    def act(self, observations: Any, generator: np.random.Generator) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """
        Sample actions for a batch of an environment's observations.

        :return: actions, values and log-probabilities, of the shapes of the policy's ``forward``
        """
        actions, values, log_probs = policy_forward(
            self.network, self.parameters, features(self.policy, observations), generator
        )
        shaped = actions.reshape(-1, *self.policy.action_space.shape).astype(self.action_dtype, copy=False)
        return th.from_numpy(shaped), th.from_numpy(values)[:, None], th.from_numpy(log_probs)

    def values(self, observations: Any) -> th.Tensor:
        """Compute values, shape ``(B, 1)``."""
        return th.from_numpy(policy_values(self.network, self.parameters, features(self.policy, observations)))[:, None]

    def evaluate(self, rollout: EstimatedRollouts) -> tuple[np.ndarray, np.ndarray]:
        """Compute present values and log-probabilities of a rollout, in the order of a flat buffer."""
        return policy_evaluate(self.network, self.parameters, *self._inputs(rollout.flat()))

    def _inputs(self, rollout: EstimatedRollouts) -> tuple[np.ndarray, np.ndarray]:
        actions = rollout.actions.reshape(len(rollout.actions), -1)
        return features(self.policy, rollout.observations), actions.astype(np.float32, copy=False)


class NativeLearner:
    """
    Pass over a rollout, by a single call that takes every minibatch's gradient step.

    :param loops: loops of the policy that learns
    :param rollout: buffer to learn from
    :param objective: the loss
    :param max_grad_norm: norm at which gradients are clipped
    :param reference: frozen policy of the same networks, for a KL term
    """

    def __init__(
        self, loops: NativeLoops, rollout: EstimatedRollouts, objective: Objective, max_grad_norm: float, reference: Any
    ):
        rollout.prepare()
        self.loops, self.rollout, self.objective = loops, rollout, objective
        self.steps = loops.flat.link()
        # copies of weights and moments when a pass begins; the system is slow to give new memory for each pass
        self.before = [th.empty_like(loops.flat.values) for _ in range(3)]
        group = loops.policy.optimizer.param_groups[0]
        beta1, beta2 = group["betas"]
        self.adam = Adam(group["lr"], max_grad_norm, beta1, beta2, group["eps"])
        observations, actions = loops._inputs(rollout)
        self.fixed: dict[str, Any] = {
            "observations": observations,
            "actions": actions,
            "old_log_probs": rollout.log_probs.ravel(),
            "old_values": rollout.values.ravel(),
            "proximal_log_probs": rollout.proximal_log_probs,
        }
        self.without = set() if objective.policy_loss in (GSPO, GSPO_TOKEN) else {"sequence_ratio_mean", "sequence_ratio_max"}
        self.without |= set() if len(loops.network.critic) else {"value_loss"}
        self.without |= set() if objective.kl_coef > 0 else {"kl_reference"}
        if objective.kl_coef > 0:
            weights = nn.utils.parameters_to_vector(reference.parameters()).numpy()
            self.fixed["reference"] = policy_outputs(loops.network, weights, self.fixed["observations"])
            if loops.network.log_std >= 0:
                self.fixed["reference_log_std"] = reference.log_std.detach().numpy()

    def epoch(self, batch_size: int | None, by_episode: bool, number: int = 1) -> tuple[dict[str, np.ndarray], bool]:
        """
        Learn from the rollout once.

        :param batch_size: rows of a minibatch
        :param by_episode: keep episodes together
        :param number: number of the pass, for the error's message
        :return: metrics by name, shape ``(minibatches,)``; True if ``target_kl`` ended the pass
        :raises FloatingPointError: if a number is not finite; weights and moments are then as before the pass
        """
        batches = list(self.rollout.batches_of_rows(batch_size, by_episode))
        if not batches:
            return {}, False
        rows, segments = zip(*batches, strict=True)
        flat = self.loops.flat
        state = flat.values, flat.exp_avg, flat.exp_avg_sq
        for before, present in zip(self.before, state, strict=True):
            before.copy_(present)
        table, steps, stopped = ppo_epoch(
            network=self.loops.network,
            objective=self.objective,
            adam=self.adam,
            params=self.loops.parameters,
            grad=flat.gradients.numpy(),
            exp_avg=flat.exp_avg.numpy(),
            exp_avg_sq=flat.exp_avg_sq.numpy(),
            step=self.steps,
            order=np.concatenate(rows),
            starts=np.cumsum([0, *map(len, rows)]),
            segments=np.concatenate(segments) if by_episode else None,
            advantages=self.rollout.advantages.ravel(),
            returns=self.rollout.returns.ravel(),
            **self.fixed,
        )
        metrics = {name: column for name, column in zip(METRICS, table.T, strict=True) if name not in self.without}
        try:
            finite = bool(np.isfinite(self.loops.parameters).all())
            check_pass(number, metrics["loss"][: len(table) - stopped], finite, self.rollout)
        except FloatingPointError:
            for present, before in zip(state, self.before, strict=True):
                present.copy_(before)
            raise
        self.steps = steps
        flat.stepped(steps)
        return metrics, stopped
