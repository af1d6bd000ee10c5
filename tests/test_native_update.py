"""The native update and forward pass beside torch: gradients, Adam, metrics, sampling."""

import itertools
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
import torch as th
from native import ACTIONS, TorchUpdate, describe, flat, in_float64, make_policy, make_rollout, reference_of
from torch import nn

from sb3_flow.kernels import (
    compute_gae,
    compute_gae_sb3,
    compute_group_returns_to_go,
    compute_process_advantages,
    compute_vtrace,
    exponential_moving_average,
)
from sb3_flow.losses import clipped_surrogate, decoupled_surrogate, gspo_loss, gspo_token_loss, value_loss
from sb3_flow.native import (
    METRICS,
    Adam,
    describe_objective,
    policy_evaluate,
    policy_forward,
    policy_outputs,
    policy_values,
    ppo_epoch,
)
from sb3_flow.native.adam import adam_step, clip_norm
from sb3_flow.native.layers import _activate
from sb3_flow.native.network_layout import TANH
from sb3_flow.native.surrogate_loops import clipped_objective, rowwise_loss, sequence_loss, squared_error

LOSSES = ("clip", "dual_clip", "gspo", "gspo_token", "decoupled")
ARCHITECTURES = [
    [],
    [16],
    {"pi": [16, 9], "vf": [8]},
    {"pi": [], "vf": [33]},
    {"pi": [7, 20, 32], "vf": []},
    [64, 64],
    {"pi": [1], "vf": [2, 1]},
]
STILL = Adam(0.0, np.inf, 0.9, 0.999, 1e-8)  # the gradient as it is, and no step
TOLERANCE = {np.dtype(np.float32): 1e-5, np.dtype(np.float64): 1e-10}


def one_gradient(policy, objective, rollout, rows, segments=None, reference=None, known=None):
    """:return: gradients and metrics, ours and torch's, which works in float64: its own float32 may be off by 1e-5"""
    network, params = describe(policy)
    grad, first, second = np.full((3, params.size), 7.0, params.dtype) * [[1], [0], [0]]
    arrays = [x.astype(params.dtype) for x in (grad, first, second)]
    starts = np.array([0, len(rows)])
    before = params.copy()
    metrics, step, stopped = ppo_epoch(
        *(network, describe_objective(**objective), STILL, params, *arrays, 0, rows, starts),
        **(rollout | {"segments": segments} | (known or {})),
    )
    assert (step, stopped, len(metrics)) == (1, False, 1)
    np.testing.assert_array_equal(params, before)
    policy, reference = in_float64(policy), None if reference is None else in_float64(reference)
    rollout = {name: array.astype(np.float64) for name, array in rollout.items()}
    loss, found = TorchUpdate(policy, objective, reference).of_rows(rollout, rows, segments)
    theirs = th.autograd.grad(loss, list(policy.parameters()), materialize_grads=True)
    return arrays[0], dict(zip(METRICS, metrics[0], strict=True)), theirs, found


def assert_equal_gradients(policy, ours, theirs):
    """Relative to the norm of each parameter's gradient, unless that is tiny beside the whole."""
    at, whole = 0, float(th.cat([x.flatten() for x in theirs]).norm())
    assert np.linalg.norm(ours - flat(theirs)) <= TOLERANCE[ours.dtype] * whole
    for (name, parameter), other in zip(policy.named_parameters(), theirs, strict=True):
        mine = ours[at : at + parameter.numel()].reshape(parameter.shape)
        at += parameter.numel()
        norm = max(float(other.norm()), whole / 100)  # what is smaller is rounded like the rest
        error = np.linalg.norm(mine - other.numpy())
        assert error <= TOLERANCE[ours.dtype] * norm, f"{name}: {error / norm}"


def assert_equal_metrics(ours, theirs, dtype):
    assert {name for name, value in ours.items() if not np.isnan(value)} == set(theirs)
    for name, value in theirs.items():
        tolerance = 1e-5 if dtype == np.float32 else 1e-10
        tolerance = 1e-6 if name == "clip_fraction" else tolerance  # of float32 in any case
        np.testing.assert_allclose(ours[name], value.item(), rtol=tolerance, atol=tolerance, err_msg=name)


CASES = list(itertools.product(ACTIONS, LOSSES, (th.float32, th.float64)))


@pytest.mark.parametrize(("actions", "policy_loss", "dtype"), CASES, ids=lambda value: str(value).replace("torch.", ""))
def test_gradients_and_metrics_are_autograds(actions, policy_loss, dtype):
    number = CASES.index((actions, policy_loss, dtype))
    scale = 0.2 if policy_loss.startswith("gspo") else 1.0  # ratios of sequences vary less
    clipped = []
    # net architectures, activations and options go round, so that each meets each loss and distribution
    for variant in range(4):
        i = 4 * number + variant
        n = (37, 1, 150, 2)[variant] if variant else 37
        critic = i % 5 != 4
        policy = make_policy(
            actions, dtype, ARCHITECTURES[i % len(ARCHITECTURES)], (nn.Tanh, nn.ReLU)[(i // 2) % 2], critic=critic, seed=i
        )
        objective = {
            "policy_loss": policy_loss,
            "clip_range": 0.15 * scale,
            "clip_range_high": (None, 0.3 * scale)[i % 2],
            "dual_clip": 1.4,
            "rho_bar": (float("inf"), 1.1)[i % 2],
            "clip_range_vf": (None, 0.2)[variant % 2],
            "vf_coef": 0.7,
            "ent_coef": (0.05, 0.0)[variant // 3],
            "kl_coef": (0.0, 0.3)[variant % 2],
            "normalize_advantage": variant != 2,
        }
        rollout = make_rollout(policy, 200, seed=i)
        reference, known = reference_of(policy, rollout)
        rows = np.random.default_rng(i).permutation(200)[:n]
        # not in order, and sequence 1 without rows
        segments = np.arange(n) % 5 // 2 * 2 if policy_loss.startswith("gspo") else None
        ours, metrics, theirs, found = one_gradient(policy, objective, rollout, rows, segments, reference, known)
        assert_equal_gradients(policy, ours, theirs)
        assert_equal_metrics(metrics, found, ours.dtype)
        clipped.append(found["clip_fraction"])
    assert 0 < np.mean(clipped) < 1


@pytest.mark.parametrize(
    "broken",
    [{"clip_range": 0.18}, {"vf_coef": 0.701}, {"ent_coef": 0.0501}, {"normalize_advantage": False}, {"kl_coef": 0.3003}],
    ids=str,
)
def test_a_wrong_gradient_is_noticed(broken):
    policy = make_policy("gaussian", th.float32)
    objective = {"clip_range": 0.15, "vf_coef": 0.7, "ent_coef": 0.05, "kl_coef": 0.3}
    rollout = make_rollout(policy, 150)
    reference, known = reference_of(policy, rollout)
    _, _, theirs, _ = one_gradient(policy, objective, rollout, np.arange(150), None, reference, known)
    ours, _, _, _ = one_gradient(policy, objective | broken, rollout, np.arange(150), None, reference, known)
    with pytest.raises(AssertionError):
        assert_equal_gradients(policy, ours, theirs)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_boundaries_are_autograds(dtype):
    low, high = dtype(1 - 0.2), dtype(1 + 0.3)
    edges = [
        low,
        high,
        dtype(1),
        *(np.nextafter(edge, dtype(to)) for edge in (low, high) for to in (0, 9)),
        dtype(3),
        dtype(0.1),
    ]
    tiny = np.finfo(dtype).smallest_subnormal  # two different ratios, one product
    for advantage in (dtype(1), dtype(-1), dtype(0), dtype(2.7), dtype(-2.7), dtype(tiny), dtype(-tiny)):
        for dual_clip in (None, 3.0):
            ratio = th.tensor(np.array(edges), requires_grad=True)
            advantages = th.full_like(ratio, advantage).detach()
            theirs = clipped_surrogate(ratio, advantages, 0.2, 0.3, dual_clip)
            slopes = th.autograd.grad(theirs.sum(), ratio)[0]
            for i, edge in enumerate(edges):
                objective, slope = clipped_objective(edge, advantage, low, high, dtype(dual_clip or 0))
                assert -objective == theirs[i].item() and -slope == slopes[i].item(), (advantage, dual_clip, edge)


def test_ratios_beyond_all_bounds():
    log_probs = np.array([25.0, 20.0, 3.0, -30.0, 1.0, 30.0])
    old, proximal = np.zeros(6), np.array([0.0, 0.0, 2.0, -1.0, 25.0, 30.0])
    advantages = np.array([-1.0, -1.0, 1.0, 1.0, -1.0, -2.0])
    tensor, slopes = th.tensor(log_probs, requires_grad=True), np.empty(6)
    others = [th.tensor(x) for x in (old, advantages)]
    loss = decoupled_surrogate(tensor, th.tensor(proximal), *others, 0.2, rho_bar=np.inf).mean()
    found, _ = rowwise_loss(4, log_probs, old, proximal, advantages, 0.2, 0.2, 3.0, np.inf, slopes)
    np.testing.assert_allclose(found, loss.item(), rtol=1e-12)
    np.testing.assert_allclose(slopes, th.autograd.grad(loss, tensor)[0], rtol=1e-12)
    segments = np.array([0, 1, 0, 2, 1, 3])
    for kind, of in ((2, gspo_loss), (3, gspo_token_loss)):
        loss = of(tensor, *others, th.tensor(segments), 4, 0.2).mean()
        found = sequence_loss(kind, log_probs, old, advantages, segments, np.empty((4, 6)), 0.2, 0.2, slopes)[0]
        np.testing.assert_allclose(found, loss.item(), rtol=1e-12)
        np.testing.assert_allclose(slopes, th.autograd.grad(loss, tensor)[0], rtol=1e-12, atol=1e-300)


def test_clipped_values_are_autograds():
    values = np.array([0.5, -0.5, 0.5 + 1e-9, -0.5 - 1e-9, 0.1, 2.0])
    returns, old, slopes = np.full(6, 1.0), np.zeros(6), np.empty(6)
    for clip in (0.5, 0.0, None):
        tensor = th.tensor(values, requires_grad=True)
        loss = value_loss(tensor, th.tensor(returns), th.tensor(old), clip)
        found = squared_error(values, returns, old, -1.0 if clip is None else clip, slopes)
        np.testing.assert_allclose(found, loss.item(), rtol=1e-14)
        np.testing.assert_allclose(slopes, th.autograd.grad(loss, tensor)[0], rtol=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_adam_and_norm_clip_are_torchs(dtype):
    rng = np.random.default_rng(0)
    params = rng.standard_normal(1003).astype(dtype)
    theirs = nn.Parameter(th.tensor(params))
    optimizer = th.optim.Adam([theirs], lr=3e-3, eps=1e-5, betas=(0.8, 0.99))
    first, second = np.zeros_like(params), np.zeros_like(params)
    for step in range(1, 101):
        grad = (rng.standard_normal(1003) * 10.0 ** rng.uniform(-4, 1)).astype(dtype)
        theirs.grad = th.tensor(grad)
        th.nn.utils.clip_grad_norm_([theirs], 0.5)
        optimizer.step()
        clip_norm(grad, 0.5)
        np.testing.assert_allclose(grad, theirs.grad, rtol=TOLERANCE[grad.dtype])
        adam_step(params, grad, first, second, step, 3e-3, 0.8, 0.99, 1e-5)
    error = np.abs(params - theirs.detach().numpy())
    assert (error <= TOLERANCE[params.dtype] * np.maximum(np.abs(params), 0.1)).all()
    state = optimizer.state[theirs]
    np.testing.assert_allclose(first, state["exp_avg"], rtol=TOLERANCE[grad.dtype], atol=1e-6 * abs(first).max())
    np.testing.assert_allclose(second, state["exp_avg_sq"], rtol=TOLERANCE[grad.dtype])


def test_hundred_steps_are_torchs():
    policy = make_policy("multi_categorical", net_arch=[16, 16])
    objective = {"policy_loss": "dual_clip", "ent_coef": 0.01, "clip_range_vf": 0.5}
    rollout = make_rollout(policy, 200)
    network, params = describe(policy)
    optimizer = th.optim.Adam(policy.parameters(), lr=3e-3, eps=1e-5)
    state, step, update = np.zeros((3, params.size)), 0, TorchUpdate(policy, objective)
    starts, rng = np.array([0, 64, 128, 192, 200]), np.random.default_rng(0)
    for _ in range(25):
        order = rng.permutation(200)
        metrics, step, _ = ppo_epoch(
            *(network, describe_objective(**objective), Adam(3e-3, 0.5, 0.9, 0.999, 1e-5), params, *state),
            *(step, order, starts),
            **rollout,
        )
        for row, rows in zip(metrics, np.split(order, starts[1:-1]), strict=True):
            loss, found = update.of_rows(rollout, rows)
            assert_equal_metrics(dict(zip(METRICS, row, strict=True)), found, np.float32)
            optimizer.zero_grad()
            loss.backward()
            th.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
    assert step == 100
    np.testing.assert_allclose(params, flat(policy.parameters()), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(state[0], flat(parameter.grad for parameter in policy.parameters()), rtol=1e-5, atol=1e-8)


def test_it_stops_before_the_step_that_follows_a_large_divergence():
    policy = make_policy("gaussian")
    rollout = make_rollout(policy, 192, spread=0.01)
    rollout["old_log_probs"][64:128] -= 0.5
    network, params = describe(policy)
    state, starts = np.zeros((3, params.size)), np.array([0, 64, 128, 192])
    objective, adam = describe_objective(target_kl=0.05), Adam(1e-5, 0.5, 0.9, 0.999, 1e-5)
    metrics, step, stopped = ppo_epoch(network, objective, adam, params, *state, 3, np.arange(192), starts, **rollout)
    assert (len(metrics), step, stopped) == (2, 4, True)
    kl = metrics[:, METRICS.index("approx_kl")]
    assert kl[0] < 0.075 < kl[1]
    alone, moments = describe(policy)[1], np.zeros((3, params.size))
    ppo_epoch(network, objective, adam, alone, *moments, 3, np.arange(64), starts[:2], **rollout)
    np.testing.assert_array_equal(params, alone)


@pytest.mark.parametrize("where", ["params", "observations", "advantages"])
def test_nan_does_not_hide(where):
    policy = make_policy("categorical", th.float32)
    rollout = make_rollout(policy, 64)
    network, params = describe(policy)
    if where == "params":
        params[network.actor[0, 0]] = np.nan
    else:
        rollout[where].ravel()[5] = np.nan
    state, adam = np.zeros((3, params.size), np.float32), Adam(1e-3, 0.5, 0.9, 0.999, 1e-5)
    ppo_epoch(network, describe_objective(), adam, params, *state, 0, np.arange(64), np.array([0, 64]), **rollout)
    assert np.isnan(params).all()


def test_tanh():
    x = np.concatenate([-np.logspace(-30, 2, 4001), np.logspace(-30, 2, 4001), [0, np.inf, -np.inf, np.nan]])
    for dtype, ulps in ((np.float32, 5), (np.float64, 2)):
        given = x.astype(dtype)
        out = given.copy()
        _activate(out, TANH)
        expected = np.tanh(given.astype(np.float64))
        error = np.abs(out - expected) / np.spacing(np.abs(expected.astype(dtype)))
        assert np.isnan(out[-1]) and error[:-1].max() <= ulps


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("dtype", [th.float32, th.float64], ids=str)
def test_forward_is_torchs(actions, dtype):
    for i, (n, net_arch) in enumerate(zip((1, 8, 130, 16, 300, 128, 129), ARCHITECTURES, strict=True)):
        policy = make_policy(actions, dtype, net_arch, (nn.Tanh, nn.ReLU)[i % 2], seed=i)
        network, params = describe(policy)
        observations = th.randn(n, 5, dtype=dtype)
        for rng in (np.random.default_rng(i), None):
            found, values, log_probs = policy_forward(network, params, observations.numpy(), rng)
            assert found.shape == (n, len(network.components)) and {x.dtype for x in (found, values, log_probs)} == {
                params.dtype
            }
            taken = th.as_tensor(found)
            if actions == "categorical":
                taken = taken.long().flatten()
            with th.no_grad():
                their_values, their_log_probs, _ = policy.evaluate_actions(observations, taken)
                likeliest = policy.get_distribution(observations).mode().reshape(n, -1)
            tolerance = TOLERANCE[params.dtype]
            np.testing.assert_allclose(values, their_values.flatten(), rtol=tolerance, atol=tolerance)
            np.testing.assert_allclose(log_probs, their_log_probs, rtol=tolerance, atol=tolerance)
            np.testing.assert_array_equal(values, policy_values(network, params, observations.numpy()))
            values, log_probs = policy_evaluate(network, params, observations.numpy(), found)
            np.testing.assert_allclose(values, their_values.flatten(), rtol=tolerance, atol=tolerance)
            np.testing.assert_allclose(log_probs, their_log_probs, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(found, likeliest, rtol=tolerance, atol=tolerance)
        outputs = policy.action_net(policy.mlp_extractor.forward_actor(observations)).detach()
        ours = policy_outputs(network, params, observations.numpy())
        np.testing.assert_allclose(ours, outputs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [th.float32, th.float64], ids=str)
def test_few_rows_are_those_of_many(dtype):
    for i, net_arch in enumerate(ARCHITECTURES):
        network, params = describe(make_policy("gaussian", dtype, net_arch, (nn.Tanh, nn.ReLU)[i % 2], seed=i))
        observations = th.randn(40, 5, dtype=dtype).numpy()
        actions, many, _ = policy_forward(network, params, observations)
        for n in (1, 2, 3, 4, 5, 16, 17, 33):
            found, values, _ = policy_forward(network, params, observations[:n])
            np.testing.assert_allclose(found, actions[:n], rtol=0, atol=TOLERANCE[params.dtype])
            np.testing.assert_allclose(values, many[:n], rtol=0, atol=TOLERANCE[params.dtype])
            np.testing.assert_array_equal(values, policy_values(network, params, observations[:n]))


def test_no_python_runs_within_a_loop():
    """A KeyboardInterrupt there becomes a SystemError: of each array that a loop returns, numba's wrapper asks Python."""
    policy = make_policy("gaussian", th.float32)
    (network, params), rollout, row = describe(policy), make_rollout(policy, 8), np.zeros(8, np.float32)
    observations, rows, group = rollout["observations"], np.zeros((8, 1), np.float32), np.zeros((4, 1, 2))
    state = np.zeros((3, params.size), np.float32)

    def all_loops():
        policy_forward(network, params, observations, np.random.default_rng(0))
        policy_values(network, params, observations)
        policy_outputs(network, params, observations)
        policy_evaluate(network, params, observations, rollout["actions"])
        ppo_epoch(network, describe_objective(), STILL, params, *state, 0, np.arange(8), np.array([0, 8]), **rollout)
        compute_gae(rows, rows, last_values=row[:1])
        compute_gae_sb3(rows, rows, rows, row[:1], row[:1], 0.99, 0.95)
        compute_vtrace(rows, rows, rows, last_values=row[:1])
        compute_group_returns_to_go(group)
        compute_process_advantages(group)
        exponential_moving_average(row, 0.5)

    called, folder = [], str(Path(numba.__file__).parent)

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            called.append(frame.f_code.co_name)

    all_loops()  # compiles
    sys.setprofile(note)
    try:
        all_loops()
    finally:
        sys.setprofile(None)
    assert called == []


@pytest.mark.parametrize("actions", ACTIONS)
def test_samples_have_their_distribution(actions):
    policy = make_policy(actions, th.float32, [8])
    network, params = describe(policy)
    n, observation = 40_000, th.randn(1, 5)
    rng = np.random.default_rng(3)
    found, _, _ = policy_forward(network, params, observation.expand(n, -1).numpy(), rng)
    again, _, _ = policy_forward(network, params, observation.expand(n, -1).numpy(), np.random.default_rng(3))
    np.testing.assert_array_equal(found, again)
    other, _, _ = policy_forward(network, params, observation.expand(n, -1).numpy(), rng)
    assert (found != other).any()
    with th.no_grad():
        distribution = policy.get_distribution(observation).distribution
    if actions == "gaussian":
        mean, std = distribution.mean[0].numpy(), distribution.stddev[0].numpy()
        assert (np.abs(found.mean(0) - mean) < 5 * std / n**0.5).all()
        assert (np.abs(found.std(0) / std - 1) < 5 / (2 * n) ** 0.5).all()
        assert np.abs(np.corrcoef(found.T) - np.eye(3)).max() < 5 / n**0.5
        return
    if actions == "bernoulli":
        expected = [np.array([1 - p, p]) for p in distribution.probs[0].tolist()]
    else:
        parts = distribution if isinstance(distribution, list) else [distribution]
        expected = [part.probs[0].numpy() for part in parts]
    for column, probabilities in zip(found.T, expected, strict=True):
        frequencies = np.bincount(column.astype(int), minlength=len(probabilities)) / n
        assert (np.abs(frequencies - probabilities) < 5 * np.sqrt(probabilities * (1 - probabilities) / n) + 1e-6).all()
    if len(expected) > 1:
        assert np.abs(np.corrcoef(found.T) - np.eye(len(expected))).max() < 5 / n**0.5
