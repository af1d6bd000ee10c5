"""Policies in compiled loops: descriptions of networks, acting, values, and PPO's passes over a rollout."""

from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.distributions import make_proba_distribution
from torch import nn

from sb3_flow.native import (
    BERNOULLI,
    CATEGORICAL,
    GAUSSIAN,
    METRICS,
    RELU,
    TANH,
    Adam,
    describe_network,
    describe_objective,
    policy_evaluate,
    policy_forward,
    policy_outputs,
    policy_values,
    ppo_epoch,
)
from sb3_flow.on_policy.reference import kl_divergence
from tests.attack.engine import Entry
from tests.attack.memory import guarded_array
from tests.native import TorchUpdate, describe, in_float64, make_policy, make_rollout, reference_of

ROWS = (0, 1, 2, 5, 31, 33, 127, 128, 129, 300)
LOSSES = ("clip", "dual_clip", "gspo", "gspo_token", "decoupled")
Arguments = dict[str, Any]


def _description(rng: np.random.Generator) -> Arguments:
    """:return: arguments of describe_network: parts of the vector in any order, with gaps"""
    distribution = int(rng.integers(3))
    parts = int(rng.integers(1, 5))
    components = rng.integers(1, 6, parts) if distribution == CATEGORICAL else np.ones(parts, np.int64)
    features = int(rng.integers(0, 10))

    def sizes(last: int) -> list[int]:
        return [features, *map(int, rng.choice((0, 1, 2, 7, 16, 33, 40), rng.integers(0, 4))), last]

    networks = [sizes(int(components.sum())), sizes(1) if rng.random() < 0.8 else []]
    lengths: list[int] = []
    for network in networks:
        for n_in, n_out in pairwise(network):
            lengths += [n_in * n_out, n_out]
    lengths.append(parts)  # log_std
    places = np.zeros(len(lengths), np.int64)
    at = 0
    for i in rng.permutation(len(lengths)):
        at += int(rng.integers(3))
        places[i] = at
        at += lengths[i]
    tables, offsets = [], iter(places.tolist())
    for network in networks:
        rows = [(next(offsets), next(offsets), a, b) for a, b in pairwise(network)]
        tables.append(np.array(rows, np.int64).reshape(-1, 4))
    return {
        "actor": tables[0],
        "critic": tables[1],
        "components": components,
        "distribution": distribution,
        "activation": int(rng.integers(2)),
        "size": at + int(rng.integers(3)),
        "log_std": int(places[-1]) if distribution == GAUSSIAN else -1,
    }


@wraps(describe_network)
def _describe(**arguments: Any) -> tuple[Any, ...]:
    network = describe_network(**arguments)
    if network.size < 10**5:  # what was taken must be safe to run
        params = guarded_array(np.zeros(network.size))
        policy_forward(network, params, np.zeros((3, int(network.actor[0, 2]))), np.random.default_rng(0))
    return tuple(network)


def _valid(actor, critic, components, distribution, activation, size, log_std):  # type: ignore[no-untyped-def]
    """:return: the network's fields if they are right, by other means: every index is listed"""
    tables = [np.asarray(table).reshape(-1, 4) if np.size(table) else np.empty((0, 4)) for table in (actor, critic)]
    parts = np.asarray(components)
    if any(np.asarray(x).dtype.kind == "f" and np.size(x) for x in (actor, critic, components)) or parts.ndim != 1:
        raise ValueError("no integers")
    if distribution not in (CATEGORICAL, BERNOULLI, GAUSSIAN) or activation not in (TANH, RELU) or size != int(size):
        raise ValueError("codes")
    if any(np.size(table) and np.shape(table)[1:] != (4,) for table in (actor, critic)) or not len(tables[0]):
        raise ValueError("table")
    if (parts < 1).any() or not len(parts) or (distribution != CATEGORICAL and (parts > 1).any()):
        raise ValueError("components")
    for table, last in zip(tables, (sum(parts.tolist()), 1), strict=True):
        width = int(tables[0][0, 2])
        for weight, bias, inputs, outputs in table.tolist():
            if inputs != width or min(weight, bias, inputs, outputs) < 0:
                raise ValueError("layer")
            if max(weight + inputs * outputs, bias + outputs) > size:
                raise ValueError("out of range")
            width = outputs
        if len(table) and width != last:
            raise ValueError("outputs")
    if (log_std >= 0) != (distribution == GAUSSIAN) or log_std < -1 or log_std + len(parts) > size:
        raise ValueError("log_std")
    return *tables, parts, distribution, activation, log_std, size


def _acting(rng: np.random.Generator) -> Arguments:
    network = describe_network(**_description(rng))
    dtype = (np.float32, np.float64)[rng.integers(2)]
    n = int(rng.choice(ROWS))
    params = (0.5 * rng.standard_normal(network.size)).astype(dtype)
    observations = rng.standard_normal((n, int(network.actor[0, 2]))).astype((np.float32, np.float64)[rng.integers(2)])
    return {"network": network, "params": params, "observations": observations}


def _layers(params: np.ndarray, table: np.ndarray, activation: int, x: np.ndarray) -> np.ndarray:
    for i, (weight, bias, n_in, n_out) in enumerate(table.tolist()):
        x = x @ params[weight : weight + n_in * n_out].reshape(n_out, n_in).T + params[bias : bias + n_out]
        if i + 1 < len(table):
            x = np.tanh(x) if activation == TANH else np.maximum(x, 0)
    return x


def _check(network, params, observations):  # type: ignore[no-untyped-def]
    if params.shape != (network.size,) or observations.ndim != 2 or observations.shape[1] != network.actor[0, 2]:
        raise ValueError("shapes")


def _values(network, params, observations):  # type: ignore[no-untyped-def]
    _check(network, params, observations)
    if not len(network.critic):
        return np.zeros(len(observations))
    return _layers(params, network.critic, network.activation, observations)[:, 0]


def _outputs(network, params, observations):  # type: ignore[no-untyped-def]
    _check(network, params, observations)
    return _layers(params, network.actor, network.activation, observations)


def _log_probs(network, params, outputs, actions):  # type: ignore[no-untyped-def]
    if network.distribution == GAUSSIAN:
        log_std = params[network.log_std : network.log_std + len(network.components)]
        z = (actions - outputs) * np.exp(-log_std)
        return (-0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(1)
    actions = actions.astype(np.float32)  # as SB3's rollout buffers keep choices
    if network.distribution == BERNOULLI:
        if not np.isin(actions, (0, 1)).all():
            raise ValueError("choices")
        return -(np.logaddexp(0, outputs) * (1 - actions) + np.logaddexp(0, -outputs) * actions).sum(1)
    total, at = np.zeros(len(outputs)), 0
    for part, size in enumerate(network.components.tolist()):
        logits, chosen = outputs[:, at : at + size], actions[:, part].astype(int)
        if not np.isin(actions[:, part], range(size)).all():
            raise ValueError("choices")
        total += logits[np.arange(len(logits)), chosen] - np.logaddexp.reduce(logits, 1)
        at += size
    return total


@wraps(policy_forward)
def _forward(network, params, observations, rng):  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(rng) if isinstance(rng, int) and 0 <= rng < 99 else rng
    actions, values, log_probs = policy_forward(network, params, observations, rng)
    again = policy_evaluate(network, params, observations, actions)[1]
    alike = (log_probs == again) | (np.isnan(log_probs) & np.isnan(again))  # also where log_std is infinite
    return values, np.where(alike, 0, log_probs - again)


def _forward_arguments(rng: np.random.Generator) -> Arguments:
    return {**_acting(rng), "rng": int(rng.integers(99)) if rng.random() < 0.7 else None}


def _forward_reference(network, params, observations, rng):  # type: ignore[no-untyped-def]
    if rng is not None and not 0 <= rng < 99:
        raise ValueError("no generator")
    return _values(network, params, observations), 0 * _outputs(network, params, observations).sum(1)


def _evaluate_arguments(rng: np.random.Generator) -> Arguments:
    arguments = _acting(rng)
    network, n = arguments["network"], len(arguments["observations"])
    actions = rng.standard_normal((n, len(network.components)))
    if network.distribution == BERNOULLI:
        actions = np.round(rng.random(actions.shape))
    elif network.distribution == CATEGORICAL:
        actions = np.floor(rng.random(actions.shape) * network.components)
    return {**arguments, "actions": actions.astype((np.float32, np.float64)[rng.integers(2)])}


def _evaluate_reference(network, params, observations, actions):  # type: ignore[no-untyped-def]
    outputs = _outputs(network, params, observations)
    if actions.shape != (len(observations), len(network.components)):
        raise ValueError("shapes")
    return _values(network, params, observations), _log_probs(network, params, outputs, actions)


def _epoch_arguments(rng: np.random.Generator) -> Arguments:
    dtype = (th.float32, th.float64)[rng.integers(2)]
    kind = ("categorical", "multi_categorical", "bernoulli", "gaussian")[rng.integers(4)]
    arch = {name: [int(x) for x in rng.integers(0, 20, rng.integers(0, 3))] for name in ("pi", "vf")}
    policy = make_policy(
        *(kind, dtype, arch, (nn.Tanh, nn.ReLU)[rng.integers(2)], int(rng.integers(1, 9))),
        critic=bool(rng.random() < 0.8),
        seed=int(rng.integers(2**31)),
    )
    n = int(rng.choice(ROWS[1:]))
    rollout = make_rollout(policy, n, seed=int(rng.integers(2**31)), spread=0.2)
    loss = LOSSES[rng.integers(5)]
    options: Arguments = {
        "policy_loss": loss,
        "clip_range": float(0.05 + 0.2 * rng.random()),
        "clip_range_vf": (None, 0.2)[rng.integers(2)],
        "ent_coef": (0.0, 0.05)[rng.integers(2)],
        "kl_coef": (0.0, 0.3)[rng.integers(2)],
        "normalize_advantage": bool(rng.integers(2)),
    }
    network, params = describe(policy)
    other, known = reference_of(policy, rollout) if options["kl_coef"] else (None, {})
    order = rng.permutation(n)[: int(rng.integers(1, n + 1))]
    cuts = rng.choice(np.arange(1, len(order)), min(int(rng.integers(0, 4)), len(order) - 1), replace=False)
    starts = np.array([0, *np.sort(cuts), len(order)])
    segments = None
    if loss.startswith("gspo"):
        segments = np.concatenate([rng.integers(0, size, size) for size in np.diff(starts)])
    moments = 0.1 * rng.standard_normal((2, params.size)).astype(params.dtype)
    return {
        "policy": policy,
        "frozen": other,
        "objective": options,
        "network": network,
        "adam": Adam(1e-2, (0.5, np.inf)[rng.integers(2)], 0.9, 0.99, 1e-2),
        "params": params,
        "grad": np.full_like(params, 7),
        "exp_avg": moments[0],
        "exp_avg_sq": moments[1] ** 2,
        "step": int(rng.integers(0, 9)),
        "order": order,
        "starts": starts,
        "segments": segments,
        **rollout,
        **known,
    }


class _Twin(TorchUpdate):
    """With the reference policy's outputs as they are given."""

    known: list[Any]

    def _kl_to_reference(self, data: Any) -> th.Tensor:
        arguments = [th.from_numpy(array) for array in self.known if array is not None]
        reference = make_proba_distribution(self.policy.action_space).proba_distribution(*arguments)
        return kl_divergence(self._distribution(self.policy, data), reference)


@wraps(ppo_epoch)
def _epoch(policy, frozen, objective, params, grad, exp_avg, exp_avg_sq, **others):  # type: ignore[no-untyped-def]
    state = {"params": params, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    metrics, step, stopped = ppo_epoch(objective=describe_objective(**objective), **state, **others)
    return *state.values(), metrics, step, stopped


def _epoch_reference(
    policy, frozen, objective, network, adam, params, grad, exp_avg, exp_avg_sq, step, order, starts, **others
):  # type: ignore[no-untyped-def]
    """Torch's gradients, and Adam's formula."""
    segments = others.pop("segments", None)
    if any(np.asarray(x).dtype.kind == "f" and np.size(x) for x in (order, starts)) or np.ndim(order) != 1:
        raise ValueError("no integers")
    order, starts = np.asarray(order, int), np.asarray(starts, int)
    if (order < 0).any() or starts.min() < 0 or starts.max() > len(order) or (np.diff(starts) < 1).any() or len(starts) < 2:
        raise ValueError("indices")
    if order.size and order.max() >= len(others["observations"]):
        raise ValueError("indices")
    if any(x.shape != (network.size,) for x in (params, grad, exp_avg, exp_avg_sq)):
        raise ValueError("shapes")
    policy = in_float64(policy)
    rows = len(others["observations"])
    if any(np.shape(others[name])[:1] != (rows,) for name in others if name != "reference_log_std"):
        raise ValueError("shapes")
    state = params, exp_avg, exp_avg_sq
    unknown = np.full(network.size, np.nan)
    nothing = *[unknown] * 4, np.full((len(starts) - 1, len(METRICS)), np.nan), np.nan, np.nan
    if not all(np.isfinite(x).all() for x in (*state, *others.values()) if x is not None):
        return nothing
    if network.distribution == BERNOULLI and not np.isin(others["actions"], (0, 1)).all():
        raise ValueError("choices")
    others = {name: np.asarray(array, float) for name, array in others.items()}
    others |= {name: np.zeros(rows) for name in ("returns", "old_values", "proximal_log_probs") if name not in others}
    update = _Twin(policy, objective, policy)
    exp_avg, exp_avg_sq, params, table = exp_avg.copy(), exp_avg_sq.copy(), params.copy(), []
    rollout = {name: array for name, array in others.items() if not name.startswith("reference")}
    for first, last in pairwise(starts):
        nn.utils.vector_to_parameters(th.from_numpy(params), policy.parameters())
        numbers = None if segments is None else segments[first:last]
        if frozen is not None:
            update.known = [others["reference"][order[first:last]], others.get("reference_log_std")]
        try:
            loss, found = update.of_rows(rollout, order[first:last], numbers)
        except ValueError as error:
            if "found invalid values" not in str(error):
                raise
            return nothing  # torch's distributions refuse NaN, here of numbers that overflow
        gradients = th.autograd.grad(loss, list(policy.parameters()), materialize_grads=True)
        grad = np.concatenate([part.numpy().ravel() for part in gradients])
        grad = grad * min(1.0, adam.max_grad_norm / (np.linalg.norm(grad) + 1e-6))
        step += 1
        exp_avg = exp_avg + (1 - adam.beta1) * (grad - exp_avg)
        exp_avg_sq = adam.beta2 * exp_avg_sq + (1 - adam.beta2) * grad**2
        root = np.sqrt(exp_avg_sq) / np.sqrt(1 - adam.beta2**step) + adam.eps
        params = params - adam.learning_rate / (1 - adam.beta1**step) * exp_avg / root
        table.append([float(found[name]) if name in found else np.nan for name in METRICS])
    return params, grad, exp_avg, exp_avg_sq, np.array(table), step, False


def _ignored(arguments: Arguments) -> list[str]:
    """:return: what an epoch does not need"""
    objective, critic = arguments["objective"], len(getattr(arguments["network"], "critic", [1])) > 0
    needed = {
        "returns": critic,
        "old_values": critic and objective["clip_range_vf"] is not None,
        "proximal_log_probs": objective["policy_loss"] == "decoupled",
        "segments": objective["policy_loss"].startswith("gspo"),
    }
    return [name for name, is_needed in needed.items() if not is_needed]


def _twin(function: Callable[..., Any], reference: Callable[..., Any], make: Callable[..., Any], **options: Any) -> Entry:
    return Entry(function.__name__, function, make, reference, finite=False, **options)


STATE = ("params", "grad", "exp_avg", "exp_avg_sq")
ENTRIES = [
    _twin(_describe, _valid, _description),
    _twin(_forward, _forward_reference, _forward_arguments),
    _twin(policy_values, _values, _acting),
    _twin(policy_outputs, _outputs, _acting),
    _twin(policy_evaluate, _evaluate_reference, _evaluate_arguments),
    _twin(
        *(_epoch, _epoch_reference, _epoch_arguments),
        in_place=STATE,
        constants=("policy", "frozen", "objective"),
        ignored=_ignored,
        errors=(FloatingPointError,),
    ),
]
