"""
rlox and stateset_rl_core as oracles where they are right, and one test per fault of theirs that shows what ours does instead.

Both raise PanicException, a BaseException, where Rust code fails.
"""

import numpy as np
import pytest
import rlox
import stateset_rl_core as stateset
import torch as th
from rlox.collectors import RolloutCollector

from sb3_flow import kernels

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_stateset_gae(rng):
    lengths = (1, 7, 50)
    rewards, values = [rng.standard_normal(n) for n in lengths], [rng.standard_normal(n + 1) for n in lengths]
    for r, v in zip(rewards, values, strict=True):
        np.testing.assert_allclose(kernels.compute_gae(r, v)[0], stateset.compute_gae(r, v, 0.99, 0.95), **CLOSE)
    ours, _ = kernels.batch_compute_gae(rewards, values, 0.9, 0.8)
    for mine, theirs in zip(ours, stateset.batch_compute_gae(rewards, values, 0.9, 0.8), strict=True):
        np.testing.assert_allclose(mine, theirs, **CLOSE)


def test_stateset_groups(rng):
    rewards = rng.standard_normal((5, 6))
    theirs = stateset.compute_group_advantages(rewards, "mean", True)
    np.testing.assert_allclose(kernels.compute_group_advantages(rewards).ravel(), theirs, **CLOSE)
    for baseline in ("mean", "median", "min"):
        theirs = stateset.compute_group_advantages(rewards, baseline, False)
        ours = kernels.compute_group_advantages(rewards, baseline=baseline, scale="none")
        np.testing.assert_allclose(ours.ravel(), theirs, **CLOSE)


def test_stateset_rewards_and_ratios(rng):
    r = rng.standard_normal(20)
    ours, theirs = (f(r, 0.5, 2.0, 7) for f in (kernels.normalize_rewards, stateset.normalize_rewards))
    np.testing.assert_allclose(ours[0], theirs[0], **CLOSE)
    assert ours[1:] == pytest.approx(theirs[1:], rel=1e-12)
    np.testing.assert_array_equal(kernels.clip_rewards(r, -1, 0.5), stateset.clip_rewards_py(r, -1, 0.5))
    assert kernels.compute_reward_statistics(r) == pytest.approx(stateset.compute_reward_statistics(r), rel=1e-12)
    old, lengths, a = rng.standard_normal(20), rng.integers(1, 9, 20), rng.standard_normal(20)
    ratios = kernels.compute_gspo_importance_ratios(r, old, lengths)
    np.testing.assert_allclose(ratios, stateset.compute_gspo_importance_ratios(r, old, lengths), **CLOSE)
    np.testing.assert_allclose(
        kernels.apply_gspo_clipping(ratios, a, 3e-4, 4e-4), stateset.apply_gspo_clipping(ratios, a, 3e-4, 4e-4), **CLOSE
    )
    np.testing.assert_allclose(kernels.compute_ppo_surrogate(ratios, a), stateset.compute_ppo_surrogate(ratios, a), **CLOSE)


def test_rlox_gae(rng):
    rewards, values = rng.standard_normal((30, 4)), rng.standard_normal((30, 4))
    dones, last_values = rng.random((30, 4)) < 0.2, rng.standard_normal(4)
    ours = kernels.compute_gae(rewards, values, last_values=last_values, terminated=dones)
    flat = [x.T.ravel() for x in (rewards, values, dones.astype(float))]
    for mine, theirs in zip(ours, rlox.compute_gae_batched(*flat, last_values, 30, 0.99, 0.95), strict=True):
        np.testing.assert_allclose(mine.T.ravel(), theirs, **CLOSE)


def test_rlox_vtrace(rng):
    log_rhos, rewards, values = (rng.standard_normal(30).astype(np.float32) for _ in range(3))
    dones = rng.random(30) < 0.2
    theirs = rlox.compute_vtrace(log_rhos, rewards, values, dones.astype(np.float32), 0.7, 0.9)
    vs, _, advantages = kernels.compute_vtrace(log_rhos, rewards, values, last_values=0.7, terminated=dones, gamma=0.9)
    np.testing.assert_allclose(vs, theirs[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(advantages, theirs[1], rtol=1e-4, atol=1e-5)


def test_rlox_groups(rng):
    rewards = rng.standard_normal((5, 6))
    ours = kernels.compute_group_advantages(rewards, eps=0)
    np.testing.assert_allclose(ours.ravel(), rlox.compute_batch_group_advantages(rewards.ravel(), 6), **CLOSE)


def test_rlox_shaping(rng):
    rewards, before, after = (rng.standard_normal(9) for _ in range(3))
    theirs = rlox.shape_rewards_pbrs(rewards, before, after, 0.9, np.zeros(9))
    np.testing.assert_allclose(kernels.shape_rewards(rewards, before, after, 0.9), theirs, **CLOSE)


class TimeLimit:
    """Reward 0.1; an episode is cut after the second step."""

    action_space = None

    def __init__(self):
        self.t = 0

    def reset_all(self):
        return np.zeros((1, 1), np.float32)

    def step_all(self, actions):
        self.t += 1
        observation = np.zeros((1, 1), np.float32)
        return {
            "obs": observation,
            "rewards": np.array([0.1]),
            "terminated": np.array([False]),
            "truncated": np.array([self.t == 2]),
            "terminal_obs": [observation[0]],
        }


class TenEverywhere(th.nn.Module):
    def get_action_and_logprob(self, observation):
        return th.zeros(len(observation)), th.zeros(len(observation))

    def get_value(self, observation):
        return th.full((len(observation),), 10.0)


def test_fault_rlox_collector_bootstraps_a_time_limit_twice():
    theirs = RolloutCollector("any", env=TimeLimit(), gamma=0.99, gae_lambda=0.95).collect(TenEverywhere(), 2)
    np.testing.assert_allclose(theirs.advantages.flatten(), [9.31095, 9.9], atol=1e-4)
    truncated, values = np.array([False, True]), np.full(2, 10.0)
    ours, _ = kernels.compute_gae(np.full(2, 0.1), values, truncated=truncated, final_values=values)
    np.testing.assert_allclose(ours, 0, atol=1e-12)


def test_fault_rlox_merges_time_limits_into_dones():
    r, v, truncated = np.full(2, 0.1), np.full(2, 10.0), np.array([False, True])
    theirs, _ = rlox.compute_gae(r, v, truncated.astype(float), 10.0, 0.99, 0.95)
    np.testing.assert_allclose(theirs, [-9.31095, -9.9])
    np.testing.assert_allclose(kernels.compute_gae(r, v, truncated=truncated, final_values=v)[0], 0, atol=1e-12)


def test_fault_rlox_amplifies_rounding():
    rewards = np.array([1e6, 1e6, 1e6, 1e6 + 1e-3])
    assert np.abs(rlox.compute_group_advantages(rewards)).max() > 1.7
    np.testing.assert_array_equal(kernels.compute_group_advantages(rewards, 4), 0)


def test_fault_rlox_swallows_nan_ratios():
    log_rhos, x = np.full(4, np.nan, np.float32), np.ones(4, np.float32)
    assert np.isfinite(rlox.compute_vtrace(log_rhos, x, x, 0 * x, 0.0, 0.9)).all()
    with pytest.raises(ValueError, match="`log_rhos` must not be NaN"):
        kernels.compute_vtrace(log_rhos, x, x, last_values=0.0)


def test_fault_rlox_panics_at_short_values():
    r = np.ones(4)
    with pytest.raises(BaseException, match="out of bounds") as error:
        rlox.compute_gae(r, r[:2], 0 * r, 0.0, 0.9, 0.9)
    assert not isinstance(error.value, Exception)
    with pytest.raises(ValueError, match=r"`values` must have shape \(4,\), but \(2,\)"):
        kernels.compute_gae(r, r[:2], last_values=0.0)


def test_fault_rlox_does_not_shape_the_last_step():
    # leaving out -Phi(s) there pays whoever ends in a state of high potential
    one, end = np.ones(1), np.array([True])
    assert rlox.shape_rewards_pbrs(one, 5 * one, 7 * one, 0.9, end.astype(float)) == 1.0
    assert kernels.shape_rewards(one, 5 * one, 7 * one, 0.9, end) == -4.0


def test_fault_stateset_median_and_min_have_no_effect():
    rewards = np.array([[1.0, 2, 3, 6]])
    for baseline in ("median", "min"):
        theirs = stateset.compute_group_advantages(rewards, baseline, True)
        np.testing.assert_array_equal(theirs, stateset.compute_group_advantages(rewards, "mean", True))
        ours = kernels.compute_group_advantages(rewards, baseline=baseline)
        assert np.abs(ours - kernels.compute_group_advantages(rewards)).min() > 0.2


def test_fault_stateset_accepts_unknown_baselines_and_flattens():
    rewards = np.array([[1.0, 2], [3, 6]])
    theirs = stateset.compute_group_advantages(rewards, "typo", False)
    assert theirs.shape == (4,) and kernels.compute_group_advantages(rewards).shape == (2, 2)
    with pytest.raises(ValueError, match="`baseline` must be one of"):
        kernels.compute_group_advantages(rewards, baseline="typo")


def test_fault_stateset_truncates_silently():
    r, v = np.ones(3), np.ones(4)
    assert len(stateset.batch_compute_gae([r, r], [v])) == 1
    with pytest.raises(ValueError, match="`values` must have one entry per trajectory, 2, but 1"):
        kernels.batch_compute_gae([r, r], [v])
    assert stateset.compute_ppo_surrogate(r, np.ones(1)).shape == (1,)
    with pytest.raises(ValueError, match="`advantages` must have shape"):
        kernels.compute_ppo_surrogate(r, np.ones(1))
    assert stateset.compute_gspo_importance_ratios(r, np.ones(1), np.ones(3, int)).shape == (1,)
    with pytest.raises(ValueError, match="`old_log_probs` must have shape"):
        kernels.compute_gspo_importance_ratios(r, np.ones(1), np.ones(3, int))


def test_fault_stateset_loses_strided_trajectories():
    strided, values = np.ones(6)[::2], np.ones(4)
    assert stateset.batch_compute_gae([strided], [values])[0].size == 0
    np.testing.assert_allclose(
        kernels.batch_compute_gae([strided], [values])[0][0], kernels.compute_gae(strided.copy(), values)[0]
    )


def test_fault_stateset_takes_missing_bootstrap_values_for_zero():
    r = np.ones(3)
    assert stateset.compute_gae(r, r, 0.9, 0.9)[-1] == 0.0
    with pytest.raises(ValueError, match="`last_values` must be given"):
        kernels.compute_gae(r, r)


def test_fault_stateset_knows_no_ends_of_episodes():
    r, v, ends = np.ones(3), np.full(4, 5.0), np.array([False, True, False])
    with pytest.raises(TypeError):
        stateset.compute_gae(r, v, 0.9, 0.9, ends)
    np.testing.assert_allclose(kernels.compute_gae(r, v, terminated=ends)[0][1], -4)


def test_fault_stateset_float32():
    r, v = np.ones(3, np.float32), np.ones(4, np.float32)
    with pytest.raises(TypeError):
        stateset.compute_gae(r, v)
    assert kernels.compute_gae(r, v)[0].dtype == np.float32


def test_fault_stateset_ratios_overflow_and_ignore_lengths():
    new, old = np.array([1e6]), np.array([0.0])
    assert np.isinf(stateset.compute_gspo_importance_ratios(new, old, np.array([1])))
    assert np.isfinite(kernels.compute_gspo_importance_ratios(new, old, [1]))
    assert stateset.compute_gspo_importance_ratios(new, old, np.array([0])) == 1.0
    with pytest.raises(ValueError, match="`lengths` must be at least 1"):
        kernels.compute_gspo_importance_ratios(new, old, [0])


def test_fault_stateset_panics():
    with pytest.raises(BaseException, match="min > max") as error:
        stateset.clip_rewards_py(np.ones(2), 2.0, 1.0)
    assert not isinstance(error.value, Exception)
    with pytest.raises(ValueError, match="`minimum` must not exceed `maximum`"):
        kernels.clip_rewards(np.ones(2), 2.0, 1.0)
    with pytest.raises(BaseException, match="unwrap") as error:
        stateset.compute_reward_statistics(np.array([1.0, np.nan]))
    assert not isinstance(error.value, Exception)
    with pytest.raises(ValueError, match="`rewards` must be finite"):
        kernels.compute_reward_statistics(np.array([1.0, np.nan]))


def test_fault_stateset_statistics_of_nothing_lack_the_count():
    assert "count" not in stateset.compute_reward_statistics(np.zeros(0))
    with pytest.raises(ValueError, match="at least one reward"):
        kernels.compute_reward_statistics(np.zeros(0))
