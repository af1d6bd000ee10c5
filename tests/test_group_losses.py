"""Group-relative advantages against published values and plain loops."""

import math
from statistics import median

import pytest
import torch as th
from golden_tables import GROUP, GROUP_ADVANTAGES
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_flow.losses import group_advantages, group_returns_to_go

BASELINES, SCALES = ["mean", "loo", "median", "min"], ["group", "batch", "none"]
DTYPES = pytest.mark.parametrize("dtype", [th.float32, th.float64])


def normal(*shape, seed=0):
    return th.randn(*shape, generator=th.Generator().manual_seed(seed), dtype=th.float64)


@DTYPES
@pytest.mark.parametrize(("options", "expected"), GROUP_ADVANTAGES)
def test_published_values(options, expected, dtype):
    advantages = group_advantages(th.tensor([GROUP, [2, 2, 2, 2]], dtype=dtype), **options)
    assert advantages.dtype == dtype
    assert advantages[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert advantages[1].tolist() == [0.0] * 4


@DTYPES
@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", ["group", "batch"])
@pytest.mark.parametrize("value", [0.1, -1e5 / 3, 1e-9, 0.0])
def test_equal_rewards_do_not_become_noise(baseline, scale, value, dtype):
    # 0.1 is not exact, so its mean over seven members need not be 0.1
    rewards = th.full((3, 7), value, dtype=dtype)
    assert not group_advantages(rewards, baseline, scale).any()
    alive = th.ones(5, 3, 7, dtype=th.bool)
    assert not group_returns_to_go(rewards.expand(5, 3, 7), alive, 0.97, baseline, scale).advantages.any()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("shape", [(1, 2), (3, 5), (4, 8)])
def test_outcomes_against_a_loop(shape, baseline, scale, ddof):
    rewards = normal(*shape)
    rows = [[x - b for x, b in zip(row, baselines(row, baseline), strict=True)] for row in rewards.tolist()]
    if scale == "group":
        rows = [[a / deviation(row, ddof) for a in centred] for centred, row in zip(rows, rewards.tolist(), strict=True)]
    elif scale == "batch":
        std = deviation([a for row in rows for a in row], ddof)
        rows = [[a / std for a in centred] for centred in rows]
    th.testing.assert_close(group_advantages(rewards, baseline, scale, ddof, eps=0.0), th.tensor(rows, dtype=th.float64))


def baselines(peers, kind):
    """The baseline of every peer."""
    if kind == "loo":
        return [(sum(peers) - x) / (len(peers) - 1) for x in peers]
    return [{"mean": lambda p: sum(p) / len(p), "median": median, "min": min}[kind](peers)] * len(peers)


def deviation(numbers, ddof):
    mean = sum(numbers) / len(numbers)
    return math.sqrt(sum((x - mean) ** 2 for x in numbers) / (len(numbers) - ddof))


def test_loo_is_the_mean_form_rescaled():
    rewards = normal(5, 6)
    th.testing.assert_close(group_advantages(rewards, "loo", "none"), 6 / 5 * group_advantages(rewards, "mean", "none"))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.1, 100.0), st.floats(-10.0, 10.0), st.sampled_from(BASELINES))
def test_scaled_advantages_know_neither_unit_nor_origin(seed, unit, origin, baseline):
    rewards = normal(4, 6, seed=seed)
    for scale in ("group", "batch"):
        changed = group_advantages(unit * rewards + origin, baseline, scale, eps=0.0)
        th.testing.assert_close(changed, group_advantages(rewards, baseline, scale, eps=0.0))


# ---------------------------------------------------------- returns-to-go


def episodes(shape, seed=0):
    """Rewards, and a mask of episodes of random length (some of length zero); the rewards of dead steps are NaN."""
    steps, groups, members = shape
    lengths = th.randint(0, steps + 1, (groups, members), generator=th.Generator().manual_seed(seed))
    alive = th.arange(steps)[:, None, None] < lengths
    return th.where(alive, normal(*shape, seed=seed + 1), math.nan), alive


def returns_to_go_by_a_loop(rewards, alive, gamma, baseline, scale, few_peers, ddof):
    steps, groups, members = rewards.shape
    returns, advantages = th.zeros(2, *rewards.shape, dtype=th.float64)
    for t in reversed(range(steps)):
        for k in range(groups):
            for g in range(members):
                if alive[t, k, g]:
                    returns[t, k, g] = rewards[t, k, g] + (gamma * returns[t + 1, k, g] if t + 1 < steps else 0.0)
    for t in range(steps):
        for k in range(groups):
            mine = alive[t, k]
            peers = returns[t, k][mine].tolist()
            everyone = returns[t][alive[t]].tolist()
            own = list(peers)
            if len(peers) < 2:
                if few_peers == "zero" or len(everyone) < 2 or not peers:
                    continue
                peers = everyone
            by_value = dict(zip(peers, baselines(peers, baseline), strict=True))
            std = deviation(peers, ddof) if scale == "group" else 1.0
            advantages[t, k][mine] = th.tensor([(x - by_value[x]) / std for x in own], dtype=th.float64)
    if scale == "batch":
        advantages = advantages / deviation(advantages[alive].tolist(), ddof)
    return advantages.masked_fill(~alive, 0.0), returns


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("few_peers", ["pooled", "zero"])
@pytest.mark.parametrize(("shape", "ddof"), [((1, 2, 3), 0), ((7, 3, 4), 0), ((12, 1, 2), 1), ((20, 4, 5), 1)])
def test_returns_to_go_against_a_loop(shape, ddof, baseline, scale, few_peers):
    rewards, alive = episodes(shape)
    expected = returns_to_go_by_a_loop(rewards, alive, 0.97, baseline, scale, few_peers, ddof)
    actual = group_returns_to_go(rewards, alive, 0.97, baseline, scale, few_peers, ddof, eps=0.0)
    th.testing.assert_close(tuple(actual), expected)
    assert not actual.advantages[~alive].any() and not actual.returns[~alive].any()


def test_one_step_is_the_outcome():
    rewards = normal(4, 6)
    alive = th.ones(1, 4, 6, dtype=th.bool)
    for scale in SCALES:
        steps = group_returns_to_go(rewards[None], alive, 0.9, "mean", scale).advantages
        th.testing.assert_close(steps[0], group_advantages(rewards, "mean", scale))


def test_lonely_survivors():
    # at step 1 only one member of each group lives on
    rewards = th.ones(2, 2, 2, dtype=th.float64)
    rewards[1, 0, 0], rewards[1, 1, 1] = 3.0, 7.0
    alive = th.ones(2, 2, 2, dtype=th.bool)
    alive[1, 0, 1] = alive[1, 1, 0] = False
    pooled = group_returns_to_go(rewards, alive, 1.0, "loo", "none")
    assert pooled.advantages[1].tolist() == [[-4.0, 0.0], [0.0, 4.0]]
    assert pooled.returns.tolist() == [[[4.0, 1.0], [1.0, 8.0]], [[3.0, 0.0], [0.0, 7.0]]]
    zero = group_returns_to_go(rewards, alive, 1.0, "loo", "none", few_peers="zero")
    assert not zero.advantages[1].any()
    th.testing.assert_close(zero.advantages[0], pooled.advantages[0])
    alive[1, 1, 1] = False  # nobody left to compare with
    assert not group_returns_to_go(rewards, alive, 1.0, "loo", "none").advantages[1].any()


def test_nobody_alive():
    nothing = th.full((3, 2, 2), math.nan)
    for baseline in BASELINES:
        for scale in SCALES:
            result = group_returns_to_go(nothing, th.zeros(3, 2, 2, dtype=th.bool), 0.9, baseline, scale, ddof=1)
            assert not result.advantages.any() and not result.returns.any()


def test_a_return_does_not_cross_a_dead_step():
    rewards, alive = th.ones(5, 1, 2).double(), th.ones(5, 1, 2, dtype=th.bool)
    alive[2] = False
    assert group_returns_to_go(rewards, alive, 1.0).returns[:, 0, 0].tolist() == [2, 1, 0, 2, 1]


def test_batch_scale_is_one_over_all_steps_alive():
    rewards, alive = episodes((20, 4, 5))
    advantages = group_returns_to_go(rewards, alive, 0.97).advantages
    assert advantages[alive].std(correction=0).item() == pytest.approx(1.0)
    raw = group_returns_to_go(rewards, alive, 0.97, scale="none").advantages
    ratio = (advantages / raw)[raw != 0]
    th.testing.assert_close(ratio, ratio[:1].expand_as(ratio))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(baseline="max"), "baseline"),
        (dict(scale="std"), "scale"),
        (dict(ddof=2), "ddof"),
        (dict(few_peers="none"), "few_peers"),
    ],
)
def test_unknown_options_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        group_returns_to_go(th.ones(2, 2, 2), th.ones(2, 2, 2, dtype=th.bool), 0.9, **options)
    if "few_peers" not in options:
        with pytest.raises(ValueError, match=match):
            group_advantages(th.ones(2, 2), **options)


def test_groups_have_at_least_two_members():
    for rewards in (th.ones(4, 1), th.ones(4)):
        with pytest.raises(ValueError, match="at least 2 members"):
            group_advantages(rewards)
    with pytest.raises(ValueError, match="at least 2 members"):
        group_returns_to_go(th.ones(3, 4, 1), th.ones(3, 4, 1, dtype=th.bool), 0.9)
    with pytest.raises(ValueError, match="shapes"):
        group_returns_to_go(th.ones(3, 4, 2), th.ones(3, 8, dtype=th.bool), 0.9)
