"""Group-relative advantages: golden vectors, slow loops, properties, and wrong arguments."""

import numpy as np
import pytest
from golden_tables import GROUP, GROUP_ADVANTAGES
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_references import group_returns_to_go, process_advantages, returns_to_go

from sb3_flow.kernels import (
    compute_group_advantages,
    compute_group_returns_to_go,
    compute_process_advantages,
    compute_returns_to_go,
)

BASELINES, SCALES = ("loo", "mean", "median", "min"), ("group", "batch", "none")
PROPERTIES = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 2**32 - 1)


def group_rollout(seed, n_steps=9, n_groups=3, size=4, dtype=np.float64):
    """Rewards, and members that die at different times, a few at once or never."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, n_steps + 3, (n_groups, size))
    alive = np.arange(n_steps)[:, None, None] < lengths
    return rng.standard_normal((n_steps, n_groups, size)).astype(dtype), alive


@pytest.mark.parametrize(("options", "expected"), GROUP_ADVANTAGES)
def test_golden(options, expected):
    np.testing.assert_allclose(compute_group_advantages(GROUP, 4, **options), expected, atol=1e-6)
    flat = compute_group_advantages(np.array(GROUP * 2, np.float32), 4, **options)
    square = compute_group_advantages(np.array([GROUP] * 2, np.float32), **options)
    assert flat.dtype == square.dtype == np.float32 and square.shape == (2, 4)
    np.testing.assert_allclose(flat.reshape(2, 4), [expected] * 2, atol=1e-6)
    np.testing.assert_array_equal(flat.reshape(2, 4), square)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_rewards(baseline, scale, dtype):
    constant = np.full((3, 7), 0.1, dtype)
    constant[1], constant[2] = -1e6 / 3, 0
    np.testing.assert_array_equal(compute_group_advantages(constant, baseline=baseline, scale=scale), 0)
    for level in (0.1, 1e8 / 3, 0.0):
        same = np.full((4, 3, 7), level, dtype)
        np.testing.assert_array_equal(compute_group_returns_to_go(same, baseline=baseline, scale=scale)[0], 0)
        np.testing.assert_array_equal(compute_process_advantages(same), 0)


def test_rounding_is_not_scaled_up():
    almost = np.array([[0.1 + 0.2, 0.3, 0.3, 0.3], [1e6, 1e6, 1e6, 1e6 + 0.01]])
    np.testing.assert_array_equal(compute_group_advantages(almost), 0)
    # while a tiny scale of the rewards is none of rounding
    np.testing.assert_allclose(
        compute_group_advantages(np.array([1e-9, 2e-9, 3e-9, 6e-9]), 4, eps=0), [-1.069045, -0.534522, 0, 1.603567], atol=1e-6
    )


@PROPERTIES
@given(seeds, st.integers(1, 5), st.integers(2, 9), st.sampled_from(SCALES), st.sampled_from([0, 1]))
def test_leave_one_out_is_the_mean_scaled(seed, n_groups, size, scale, ddof):
    rewards = np.random.default_rng(seed).standard_normal((n_groups, size))
    mean = compute_group_advantages(rewards, scale=scale, ddof=ddof)
    loo = compute_group_advantages(rewards, scale=scale, ddof=ddof, baseline="loo")
    np.testing.assert_allclose(loo, mean * size / (size - 1), rtol=1e-10, atol=1e-12)


@PROPERTIES
@given(seeds, st.integers(1, 5), st.integers(2, 9), st.sampled_from(SCALES), st.sampled_from(BASELINES))
def test_group_advantages_against_numpy(seed, n_groups, size, scale, baseline):
    rewards = np.random.default_rng(seed).standard_normal((n_groups, size))
    others = {
        "loo": (rewards.sum(1, keepdims=True) - rewards) / (size - 1),
        "mean": rewards.mean(1, keepdims=True),
        "median": np.median(rewards, axis=1, keepdims=True),
        "min": rewards.min(1, keepdims=True),
    }
    divisor = {"group": rewards.std(1, keepdims=True) + 1e-8, "batch": rewards.std() + 1e-8, "none": 1.0}
    np.testing.assert_allclose(
        compute_group_advantages(rewards, baseline=baseline, scale=scale),
        (rewards - others[baseline]) / divisor[scale],
        rtol=1e-10,
        atol=1e-12,
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1,), (30,), (9, 5), (6, 3, 4)])
def test_returns_to_go(shape, dtype):
    rng = np.random.default_rng(0)
    rewards, alive = rng.standard_normal(shape).astype(dtype), rng.random(shape) < 0.8
    result = compute_returns_to_go(rewards, alive, 0.9)
    assert result.dtype == dtype
    np.testing.assert_allclose(result, returns_to_go(rewards, alive, 0.9), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        compute_returns_to_go(rewards, gamma=1), np.cumsum(rewards[::-1], axis=0)[::-1], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("few_peers", ["pooled", "zero"])
@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("baseline", BASELINES)
def test_group_returns_to_go_against_loops(baseline, scale, critic, few_peers):
    for seed in range(5):
        rewards, alive = group_rollout(seed)
        values = np.random.default_rng(seed + 100).standard_normal(rewards.shape) if critic else None
        options = {"baseline": baseline, "scale": scale, "few_peers": few_peers, "ddof": seed % 2}
        advantages, returns = compute_group_returns_to_go(rewards, alive, 0.9, values=values, **options)
        expected, expected_returns = group_returns_to_go(rewards, alive, 0.9, values=values, **options)
        np.testing.assert_allclose(advantages, expected, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(returns, expected_returns, rtol=1e-12, atol=1e-12)
        assert not advantages[~alive].any() and not returns[~alive].any()


def test_few_peers():
    rewards = np.zeros((3, 2, 2))
    rewards[:, 0], rewards[:, 1] = [1, 3], [5, 11]
    alive = np.ones((3, 2, 2), bool)
    alive[1:, 0, 0], alive[2, 1] = False, False
    options = {"gamma": 0.0, "scale": "none"}
    pooled, _ = compute_group_returns_to_go(rewards, alive, **options)
    np.testing.assert_allclose(pooled, [[[-2, 2], [-6, 6]], [[0, 3 - 8], [-6, 6]], [[0, 0], [0, 0]]])
    zero, _ = compute_group_returns_to_go(rewards, alive, **options, few_peers="zero")
    np.testing.assert_allclose(zero, [[[-2, 2], [-6, 6]], [[0, 0], [-6, 6]], [[0, 0], [0, 0]]])


def test_the_dead_are_not_looked_at():
    rewards, alive = group_rollout(3)
    expected = compute_group_returns_to_go(rewards, alive), compute_process_advantages(rewards, alive)
    rewards[~alive] = np.nan
    values = np.where(alive, 0.0, np.nan)
    np.testing.assert_array_equal(compute_group_returns_to_go(rewards, alive, values=values)[0], expected[0][0])
    np.testing.assert_array_equal(compute_process_advantages(rewards, alive), expected[1])
    nobody = np.zeros_like(alive)
    for result in (*compute_group_returns_to_go(rewards, nobody), compute_process_advantages(rewards, nobody)):
        np.testing.assert_array_equal(result, 0)


@pytest.mark.parametrize("ddof", [0, 1])
def test_process_advantages_against_loops(ddof):
    rewards, alive = group_rollout(1)
    alive[:3] = True
    np.testing.assert_allclose(
        compute_process_advantages(rewards, alive, ddof=ddof), process_advantages(rewards, alive, ddof), rtol=1e-9, atol=1e-10
    )
    single = compute_process_advantages(rewards.astype(np.float32), alive, ddof=ddof)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, process_advantages(rewards, alive, ddof), rtol=1e-4, atol=1e-5)


def test_one_step_of_process_supervision_is_the_outcome():
    rewards = np.random.default_rng(0).standard_normal((1, 3, 5))
    np.testing.assert_allclose(compute_process_advantages(rewards)[0], compute_group_advantages(rewards[0]), rtol=1e-10)


def test_layouts():
    rewards, alive = group_rollout(0)
    expected = compute_group_returns_to_go(rewards, alive)[0]
    np.testing.assert_array_equal(
        compute_group_returns_to_go(np.asfortranarray(rewards), alive[:, ::-1][:, ::-1])[0], expected
    )
    narrow = compute_group_returns_to_go(rewards.astype(np.float32), alive)[0]
    assert narrow.dtype == np.float32
    np.testing.assert_allclose(narrow, expected, rtol=1e-4, atol=1e-5)
    wide = np.random.default_rng(0).standard_normal((8, 6))
    np.testing.assert_array_equal(compute_group_advantages(wide[::2, ::2]), compute_group_advantages(wide[::2, ::2].copy()))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1.0, 2.0, 3.0],), {}, "`group_size` must be given for flat rewards"),
        (([1.0, 2.0, 3.0], 2), {}, "`rewards` must hold whole groups of 2, but 3"),
        (([1.0, 2.0, 3.0], 1), {}, "`group_size` must be at least 2"),
        ((np.zeros((3, 1)),), {}, "`group_size` must be at least 2"),
        ((np.zeros((3, 2)), 3), {}, "`group_size` must be the number of columns, 2, but 3"),
        (([1.0, np.nan], 2), {}, r"`rewards` must be finite, but nan was given at \(1,\)"),
        ((["a", "b"], 2), {}, "`rewards` must hold numbers"),
        ((np.zeros((2, 2, 2)),), {}, r"`rewards` must have 1 or 2 dimension"),
        (([1.0, 2.0], 2), {"baseline": "max"}, "`baseline` must be one of 'loo', 'mean', 'median', 'min', but 'max'"),
        (([1.0, 2.0], 2), {"scale": "std"}, "`scale` must be one of 'group', 'batch', 'none', but 'std'"),
        (([1.0, 2.0], 2), {"ddof": 2}, "`ddof` must be 0 or 1, but 2"),
        (([1.0, 2.0], 2), {"eps": -1.0}, "`eps` must be positive"),
    ],
)
def test_wrong_groups(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        compute_group_advantages(*arguments, **options)


def test_wrong_rollouts():
    rewards, alive = group_rollout(0)
    back = alive.copy()
    back[:, 0, 0] = True
    back[4, 0, 0] = False
    bad = np.where(np.arange(9)[:, None, None] == 2, np.inf, rewards)
    everyone = np.ones_like(alive)
    for compute in (compute_group_returns_to_go, compute_process_advantages):
        for arguments, message in (
            ((rewards[0],), r"`rewards` must have shape \(T, K, G\)"),
            ((rewards[..., :1],), "at least 2 members"),
            ((rewards, alive[1:]), r"`alive` must have shape \(9, 3, 4\), but \(8, 3, 4\)"),
            ((rewards, back), r"`alive` must stay False once it is, but \(5, 0, 0\)"),
            ((bad, everyone), r"`rewards` must be finite, but inf was given at \(2, 0, 0\)"),
        ):
            with pytest.raises(ValueError, match=message):
                compute(*arguments)
    with pytest.raises(ValueError, match="`values` must have shape"):
        compute_group_returns_to_go(rewards, values=rewards[0])
    with pytest.raises(ValueError, match="`values` must be finite"):
        compute_group_returns_to_go(rewards, values=np.full_like(rewards, np.nan))
    with pytest.raises(ValueError, match="`few_peers` must be one of 'pooled', 'zero', but 'mean'"):
        compute_group_returns_to_go(rewards, few_peers="mean")
    with pytest.raises(ValueError, match="`gamma` must be in"):
        compute_returns_to_go(rewards, gamma=2)
