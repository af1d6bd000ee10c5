"""Reward statistics and ratios against NumPy and values computed by hand; wrong arguments."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_flow.kernels import (
    apply_gspo_clipping,
    auto_scale_rewards,
    clip_rewards,
    compute_gspo_importance_ratios,
    compute_ppo_surrogate,
    compute_reward_statistics,
    exponential_moving_average,
    normalize_rewards,
    shape_rewards,
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=6), min_size=1, max_size=5))
def test_normalisation_in_batches_has_the_statistics_of_all(batches):
    mean, variance, count = 0.0, 1.0, 0
    for batch in batches:
        normalised, mean, variance, count = normalize_rewards(batch, mean, variance, count)
        if batch:
            np.testing.assert_allclose(normalised, (np.array(batch) - mean) / np.sqrt(variance + 1e-8), rtol=1e-9, atol=1e-9)
    together = np.concatenate(batches)
    assert count == together.size
    if count:
        assert mean == pytest.approx(together.mean(), abs=1e-9)
        assert variance == pytest.approx(together.var(), rel=1e-6, abs=1e-9)


def test_normalisation_keeps_float32():
    rewards = np.array([1, 2, 3, 6], np.float32)
    normalised, mean, variance, count = normalize_rewards(rewards, running_mean=9.0, running_var=4.0)
    assert normalised.dtype == np.float32 and (mean, variance, count) == (3.0, 3.5, 4)  # what came before has no weight
    np.testing.assert_allclose(normalised, [-1.069045, -0.534522, 0, 1.603567], atol=1e-6)
    assert normalize_rewards([5.0], epsilon=0.0)[0].tolist() == [0.0]


def test_clip_and_statistics():
    rewards = [1.0, 2.0, 3.0, 6.0]
    assert clip_rewards(rewards, 1.5, 3).tolist() == [1.5, 2, 3, 3]
    assert clip_rewards(np.float32(rewards), -np.inf, 2).dtype == np.float32
    expected = {"mean": 3.0, "std": np.sqrt(3.5), "min": 1.0, "max": 6.0, "median": 2.5, "count": 4}
    assert compute_reward_statistics(rewards) == pytest.approx(expected)


def test_shaping_telescopes_where_terminal_states_have_no_potential():
    rng = np.random.default_rng(0)
    rewards, potentials = rng.standard_normal(6), rng.standard_normal(7)
    terminated = np.arange(6) == 5
    shaped = shape_rewards(rewards, potentials[:-1], potentials[1:], 0.9, terminated)
    discounts = 0.9 ** np.arange(6)
    assert discounts @ shaped == pytest.approx(discounts @ rewards - potentials[0])
    assert shape_rewards([1.0], [2.0], [4.0], 0.5).tolist() == [1.0]


def test_moving_average_and_scaling():
    np.testing.assert_allclose(exponential_moving_average([1.0, 3.0, 5.0], 0.5), [1, 2, 3.5])
    assert exponential_moving_average(np.zeros(0, np.float32), 0.5).dtype == np.float32
    np.testing.assert_allclose(auto_scale_rewards([1.0, 2.0, 5.0], -1, 1), [-1, -0.5, 1])
    np.testing.assert_array_equal(auto_scale_rewards([7.0, 7.0], -1, 2), 0.5)
    assert auto_scale_rewards([], 0, 1).size == 0


def test_ratios():
    new, old = np.array([-0.1, -0.2, -0.4]), np.array([-0.3, -0.1, -0.2])
    assert compute_gspo_importance_ratios([new.sum()], [old.sum()], [3])[0] == pytest.approx(0.96721610, abs=1e-8)
    np.testing.assert_allclose(compute_gspo_importance_ratios(new, old, [1, 1, 1]), [1.221403, 0.904837, 0.818731], atol=1e-6)
    extreme = compute_gspo_importance_ratios(np.float32([1e6, -1e6]), np.float32([0, 0]), [1, 1])
    assert extreme.dtype == np.float32 and np.isfinite(extreme).all() and extreme[1] == 0


def test_clipped_objectives():
    w, a = np.array([1.5, 1.5, 0.5, 0.5, 1.0]), np.array([1.0, -1, 1, -1, 2])
    np.testing.assert_allclose(compute_ppo_surrogate(w, a), [1.2, -1.5, 0.5, -0.8, 2])
    np.testing.assert_allclose(apply_gspo_clipping(w, a, 0.1, 0.3), [1.3, -1.5, 0.5, -0.9, 2])
    np.testing.assert_allclose(apply_gspo_clipping(w, a), [1.03, -1.5, 0.5, -0.98, 2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: normalize_rewards([1.0, np.inf]), "`rewards` must be finite"),
        (lambda: normalize_rewards([1.0], running_var=-1), "`running_var` must be in"),
        (lambda: normalize_rewards([1.0], running_mean=np.nan), "`running_mean` must be in"),
        (lambda: clip_rewards([1.0], 2, 1), "`minimum` must not exceed `maximum`, but 2 and 1"),
        (lambda: clip_rewards([1.0], np.nan, 1), "`minimum` must not exceed"),
        (lambda: clip_rewards([np.nan], 0, 1), "`rewards` must be finite"),
        (lambda: compute_reward_statistics([]), "at least one reward"),
        (lambda: compute_reward_statistics([np.nan]), "`rewards` must be finite"),
        (lambda: shape_rewards([1.0], [1.0, 2.0], [1.0], 0.9), r"`potentials` must have shape \(1,\)"),
        (lambda: shape_rewards([1.0], [1.0], [1.0], 1.9), "`gamma` must be in"),
        (lambda: exponential_moving_average([1.0], -0.1), "`alpha` must be in"),
        (lambda: auto_scale_rewards([1.0], 2, 1), "`target_min` must not exceed"),
        (lambda: compute_gspo_importance_ratios([1.0], [1.0], [0]), "`lengths` must be at least 1, but 0"),
        (lambda: compute_gspo_importance_ratios([1.0, 2.0], [1.0], [1]), r"`old_log_probs` must have shape \(2,\)"),
        (lambda: compute_gspo_importance_ratios([1.0], [np.nan], [1]), "`old_log_probs` must be finite"),
        (lambda: apply_gspo_clipping([1.0], [1.0, 2.0]), r"`advantages` must have shape \(1,\)"),
        (lambda: compute_ppo_surrogate([1.0], [1.0], 0.0), "`clip_range` must be positive"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
