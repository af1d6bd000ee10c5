"""Surrogates and value losses against SB3's expressions, published values and their gradients."""

import math

import pytest
import torch as th
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from sb3_flow.losses import (
    clipped_surrogate,
    decoupled_surrogate,
    gspo_loss,
    gspo_token_loss,
    segment_mean,
    sequence_log_ratio,
    value_loss,
)

B = 64
DTYPES = pytest.mark.parametrize("dtype", [th.float32, th.float64])


def normal(*shape, seed=0, dtype=th.float64):
    return th.randn(*shape, generator=th.Generator().manual_seed(seed), dtype=dtype)


def gradient(function, x):
    """Value of ``function`` at x, and the gradient of the value's sum."""
    x = x.detach().clone().requires_grad_()
    value = function(x)
    return value.detach(), th.autograd.grad(value.sum(), x)[0]


def identical(actual, expected):
    th.testing.assert_close(actual, expected, rtol=0, atol=0)


# ---------------------------------------------------------------------- SB3


@DTYPES
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rows", [1, 7, B, 1000])
def test_surrogate_is_that_of_sb3(dtype, seed, rows):
    log_prob, old, advantages = normal(3, rows, seed=seed, dtype=dtype)

    def sb3(log_prob, clip_range=0.2):
        ratio = th.exp(log_prob - old)
        policy_loss_1 = advantages * ratio
        policy_loss_2 = advantages * th.clamp(ratio, 1 - clip_range, 1 + clip_range)
        return -th.min(policy_loss_1, policy_loss_2).mean()

    ours = gradient(lambda x: clipped_surrogate(th.exp(x - old), advantages, 0.2).mean(), log_prob)
    identical(ours, gradient(sb3, log_prob))


@DTYPES
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("clip_range_vf", [None, 0.3])
def test_value_loss_is_that_of_sb3(dtype, seed, clip_range_vf):
    values, old_values, returns = normal(3, B, seed=seed, dtype=dtype)

    def sb3(values):
        if clip_range_vf is None:
            values_pred = values
        else:
            values_pred = old_values + th.clamp(values - old_values, -clip_range_vf, clip_range_vf)
        return F.mse_loss(returns, values_pred)

    identical(gradient(lambda v: value_loss(v, returns, old_values, clip_range_vf), values), gradient(sb3, values))


def test_value_loss_by_hand():
    # unclipped, moved up beyond the range towards the return, moved up away from it
    values, old = th.tensor([0.1, 1.0, 1.0]), th.zeros(3)
    returns = th.tensor([0.0, 2.0, -1.0])
    expected = {"sb3": [0.01, 1.5**2, 1.5**2], "max": [0.01, 1.5**2, 2.0**2]}
    for clipping, errors in expected.items():
        value, grad = gradient(lambda v, kind=clipping: value_loss(v, returns, old, 0.5, clipping=kind), values)
        assert value.item() == pytest.approx(sum(errors) / 3)
        # only the maximum pulls a clipped value back that is on its way from the return
        assert grad.tolist() == pytest.approx([0.2 / 3, 0.0, 4 / 3 if clipping == "max" else 0.0])


# ----------------------------------------------------------------- clipping

ratios = st.floats(0.05, 5.0)
signed = st.one_of(st.floats(-3.0, -0.01), st.just(0.0), st.floats(0.01, 3.0))


@settings(max_examples=200, deadline=None)
@given(ratios, signed, st.floats(0.01, 0.5), st.one_of(st.none(), st.floats(0.01, 0.9)))
def test_gradient_is_masked(ratio, advantage, low, high):
    log_ratio, a = th.tensor([math.log(ratio)], dtype=th.float64), th.tensor([advantage], dtype=th.float64)
    w = log_ratio.exp()
    upper = low if high is None else high
    value, grad = gradient(lambda x: clipped_surrogate(x.exp(), a, low, high), log_ratio)
    passes = (a >= 0) & (w <= 1 + upper) | (a < 0) & (w >= 1 - low)
    th.testing.assert_close(grad, th.where(passes, -a * w, 0.0))
    bound = th.where(a >= 0, w.clamp(max=1 + upper), w.clamp(min=1 - low))
    th.testing.assert_close(value, -a * bound)


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize(
    ("ratio", "low", "high"), [(0.7, True, False), (0.9, False, False), (1.1, False, False), (1.5, False, True)]
)
def test_clipping_by_hand(advantage, ratio, low, high):
    value, grad = gradient(lambda w: clipped_surrogate(w, th.tensor([advantage]), 0.2), th.tensor([ratio]))
    clipped = (high and advantage > 0) or (low and advantage < 0)
    assert grad.item() == (0.0 if clipped else -advantage)
    assert value.item() == pytest.approx(-advantage * (min(max(ratio, 0.8), 1.2) if clipped else ratio))


def test_clip_higher_moves_the_upper_bound_only():
    ratio, advantages = th.tensor([1.25, 1.5, 0.5]), th.tensor([1.0, 1.0, -1.0])
    th.testing.assert_close(clipped_surrogate(ratio, advantages, 0.2, 0.28), th.tensor([-1.25, -1.28, 0.8]))
    identical(clipped_surrogate(ratio, advantages, 0.2, 0.2), clipped_surrogate(ratio, advantages, 0.2))
    # zero is a range, not "not given"
    th.testing.assert_close(clipped_surrogate(ratio, advantages, 0.2, 0.0), th.tensor([-1.0, -1.0, 0.8]))


def test_dual_clip_bounds_the_loss_of_bad_actions():
    ratio, advantages = th.tensor([10.0, 2.0, 10.0, 0.5]), th.tensor([-1.0, -1.0, 1.0, -2.0])
    value, grad = gradient(lambda w: clipped_surrogate(w, advantages, 0.2, dual_clip=3.0), ratio)
    th.testing.assert_close(value, th.tensor([3.0, 2.0, -1.2, 1.6]))
    assert grad.tolist() == [0.0, 1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="dual_clip"):
        clipped_surrogate(ratio, advantages, 0.2, dual_clip=1.0)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.floats(1.5, 5.0))
def test_dual_clip_changes_nothing_but_large_losses(seed, dual_clip):
    ratio, advantages = 2 * normal(B, seed=seed).exp(), normal(B, seed=seed + 1)
    plain = clipped_surrogate(ratio, advantages, 0.2)
    dual = clipped_surrogate(ratio, advantages, 0.2, dual_clip=dual_clip)
    identical(dual, th.where(advantages < 0, plain.minimum(-dual_clip * advantages), plain))


# --------------------------------------------------------------------- GSPO

NEW, OLD = [-0.1, -0.2, -0.4], [-0.3, -0.1, -0.2]


@DTYPES
def test_gspo_ratio(dtype):
    new, old = th.tensor(NEW, dtype=dtype), th.tensor(OLD, dtype=dtype)
    segments = th.zeros(3, dtype=th.int64)
    assert sequence_log_ratio(new, old, segments, 1).exp().tolist() == pytest.approx([0.96721610], abs=1e-6)
    assert (new - old).exp().tolist() == pytest.approx([1.221403, 0.904837, 0.818731], abs=1e-6)
    for loss in (gspo_loss, gspo_token_loss):
        assert loss(new, old, th.ones(3, dtype=dtype), segments, 1, 0.2).tolist() == pytest.approx([-0.96721610], abs=1e-6)
        # beyond a clip range of 0.03
        clipped = loss(new, old, -th.ones(3, dtype=dtype), segments, 1, 0.03)
        assert clipped.tolist() == pytest.approx([0.97], abs=1e-6)


def test_segment_mean_of_rows_in_any_order():
    x, segments = th.tensor([1.0, 10.0, 3.0, 5.0]), th.tensor([3, 0, 3, 3])
    assert segment_mean(x, segments, 5).tolist() == [10.0, 0.0, 0.0, 3.0, 0.0]


@pytest.fixture
def trajectories():
    """Six trajectories of one to many rows, shuffled, and one without rows."""
    segments = th.tensor([0] * 1 + [1] * 2 + [2] * 5 + [3] * 9 + [5] * 20 + [6] * 7)
    segments = segments[th.randperm(len(segments), generator=th.Generator().manual_seed(0))]
    new, old, advantages = normal(3, len(segments))
    return old + 0.3 * new, old, advantages, segments, 7


@pytest.mark.parametrize("clip_range", [0.02, 0.2, 10.0])
def test_gspo_by_a_loop(trajectories, clip_range):
    new, old, advantages, segments, n = trajectories
    loss = gspo_loss(new, old, advantages, segments, n, clip_range, 1.5 * clip_range)
    token_loss = gspo_token_loss(new, old, advantages, segments, n, clip_range, 1.5 * clip_range)
    for i in range(n):
        rows = segments == i
        if not rows.any():
            assert loss[i] == token_loss[i] == 0.0
            continue
        s = (new - old)[rows].mean().exp()
        clipped = s.clamp(1 - clip_range, 1 + 1.5 * clip_range)
        a = advantages[rows]
        assert loss[i].item() == pytest.approx(-min(s * a.mean(), clipped * a.mean()).item())
        assert token_loss[i].item() == pytest.approx(-th.min(s * a, clipped * a).mean().item())


@pytest.mark.parametrize("clip_range", [0.02, 10.0])
def test_gspo_token_is_gspo_where_advantages_are_constant(trajectories, clip_range):
    new, old, advantages, segments, n = trajectories
    constant = segment_mean(advantages, segments, n)[segments]

    def both(advantages):
        return [
            gradient(lambda x, f=f: f(x, old, advantages, segments, n, clip_range), new) for f in (gspo_loss, gspo_token_loss)
        ]

    th.testing.assert_close(*both(constant))
    (_, sequence), (_, token) = both(advantages)
    assert (sequence - token).abs().max() > 1e-3
    if clip_range == 0.02:
        assert (sequence == 0).any() and (sequence != 0).any()


def test_gspo_gradient_is_the_mean_score(trajectories):
    # unclipped: -A s d(mean log pi)
    new, old, advantages, segments, n = trajectories
    _, grad = gradient(lambda x: gspo_loss(x, old, advantages, segments, n, 100.0), new)
    s, a = sequence_log_ratio(new, old, segments, n).exp(), segment_mean(advantages, segments, n)
    th.testing.assert_close(grad, -(a * s / segments.bincount(minlength=n).clamp(min=1))[segments])


# ---------------------------------------------------------------- decoupled


def test_decoupled_is_the_clipped_surrogate_if_nothing_is_stale():
    log_prob, old, advantages = normal(3, B)
    plain = gradient(lambda x: clipped_surrogate(th.exp(x - old), advantages, 0.2, 0.3), log_prob)
    identical(gradient(lambda x: decoupled_surrogate(x, old, old, advantages, 0.2, 0.3), log_prob), plain)


@pytest.mark.parametrize("rho_bar", [0.5, 1.0, 3.0, math.inf])
def test_decoupled_weights(rho_bar):
    log_prob, proximal, old, advantages = normal(4, B)
    proximal.requires_grad_()
    value, grad = gradient(lambda x: decoupled_surrogate(x, proximal, old, advantages, 0.2, rho_bar=rho_bar), log_prob)
    fixed = proximal.detach()
    weight = (fixed - old).exp().clamp(max=rho_bar)
    plain, plain_grad = gradient(lambda x: clipped_surrogate((x - fixed).exp(), advantages, 0.2), log_prob)
    th.testing.assert_close(value, weight * plain)
    th.testing.assert_close(grad, weight * plain_grad)
    loss = decoupled_surrogate(log_prob, proximal, old, advantages, 0.2, rho_bar=rho_bar)
    assert not loss.requires_grad  # neither through the weight nor through the ratio


# -------------------------------------------------------- what can go wrong


@DTYPES
def test_ratios_do_not_overflow(dtype):
    zero, far = th.zeros(2, dtype=dtype), th.tensor([1e4, -1e4], dtype=dtype)
    for a in (th.ones(2, dtype=dtype), -th.ones(2, dtype=dtype)):
        losses = [
            lambda x, a=a: decoupled_surrogate(x, zero, zero, a, 0.2),
            lambda x, a=a: decoupled_surrogate(x, far, zero, a, 0.2, rho_bar=math.inf),
            lambda x, a=a: gspo_loss(x, zero, a, th.arange(2), 2, 0.2),
            lambda x, a=a: gspo_token_loss(x, zero, a, th.arange(2), 2, 0.2),
        ]
        for loss in losses:
            value, grad = gradient(loss, far)
            assert value.isfinite().all() and grad.isfinite().all()


def test_nan_is_not_hidden():
    nan, one = th.tensor([th.nan]), th.ones(1)
    segments = th.zeros(1, dtype=th.int64)
    for loss in (
        clipped_surrogate(nan, one, 0.2, dual_clip=2.0),
        clipped_surrogate(one, nan, 0.2),
        decoupled_surrogate(nan, one, one, one, 0.2),
        decoupled_surrogate(one, one, nan, one, 0.2),
        gspo_loss(nan, one, one, segments, 1, 0.2),
        value_loss(nan, one, one, 0.2, clipping="max"),
    ):
        assert loss.isnan().all()


def test_columns_beside_rows_are_refused():
    row, column, segments = th.ones(3), th.ones(3, 1), th.zeros(3, dtype=th.int64)
    calls = [
        lambda: clipped_surrogate(row, column, 0.2),
        lambda: decoupled_surrogate(row, row, column, row, 0.2),
        lambda: segment_mean(column, segments, 1),
        lambda: sequence_log_ratio(row, column, segments, 1),
        lambda: gspo_token_loss(row, row, column, segments, 1, 0.2),
        lambda: value_loss(column, row),
        lambda: value_loss(row, row, column, 0.2),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"\(3, 1\)"):
            call()


def test_options_of_the_value_loss():
    with pytest.raises(ValueError, match="old_values"):
        value_loss(th.ones(3), th.ones(3), clip_range_vf=0.2)
    with pytest.raises(ValueError, match="clipping"):
        value_loss(th.ones(3), th.ones(3), clipping="both")
