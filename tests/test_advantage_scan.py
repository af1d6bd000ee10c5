"""GAE and V-trace by a scan against plain loops, published values and each other."""

import math
from types import SimpleNamespace

import pytest
import torch as th
from golden_tables import GAE, GAE_LAMBDA, RETURNS, ROLLOUT, VTRACE
from kernel_references import vtrace

from sb3_flow.losses import gae_scan, vtrace_scan
from sb3_flow.losses.advantage_scans import linear_scan

NAN = math.nan
SHAPES = [(1, 1), (1, 4), (2, 1), (3, 2), (5, 3), (8, 2), (17, 1), (64, 3), (127, 4), (200, 2)]
DTYPES = pytest.mark.parametrize("dtype", [th.float32, th.float64])
TOLERANCE = {th.float32: dict(rtol=1e-5, atol=1e-5), th.float64: dict(rtol=1e-10, atol=1e-10)}


def rollout(shape, seed=0, ends=0.2, dtype=th.float64):
    """A random rollout; ``final_values`` are NaN wherever they must not be read."""
    generator = th.Generator().manual_seed(seed)

    def normal(*shape):
        return th.randn(*shape, generator=generator, dtype=th.float64).to(dtype)

    terminated, truncated = (th.rand(*shape, generator=generator) < ends for _ in range(2))
    return SimpleNamespace(
        log_rhos=normal(*shape),
        rewards=normal(*shape),
        values=normal(*shape),
        last_values=normal(shape[1]),
        terminated=terminated,
        truncated=truncated,
        final_values=th.where(truncated & ~terminated, normal(*shape), NAN),
    )


def arguments(r):
    return r.rewards, r.values, r.last_values, r.terminated, r.truncated, r.final_values


def loop(r, gamma, lam, rho_bar=math.inf, c_bar=math.inf, rho_pg_bar=math.inf, on_policy=False):
    """V-trace by the reference in float64; with ``on_policy`` all ratios are 1."""
    arrays = {name: tensor.numpy() for name, tensor in vars(r).items()}
    if on_policy:
        arrays["log_rhos"] = 0 * arrays["log_rhos"]
    results = vtrace(**arrays, gamma=gamma, gae_lambda=lam, rho_bar=rho_bar, c_bar=c_bar, rho_pg_bar=rho_pg_bar)
    return [th.tensor(result) for result in results]


def close(actual, expected, dtype):
    assert actual.dtype == dtype and actual.shape == expected.shape
    th.testing.assert_close(actual.double(), expected, **TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ends", [0.0, 0.2, 1.0])
def test_gae_against_a_loop(shape, ends, dtype):
    r = rollout(shape, seed=shape[0], ends=ends, dtype=dtype)
    vs, q_minus_v, _ = loop(r, 0.97, 0.9, on_policy=True)
    advantages, returns = gae_scan(*arguments(r), 0.97, 0.9)
    close(advantages, q_minus_v, dtype)
    close(returns, vs, dtype)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("caps", [(1.0, 1.0, 1.0), (2.0, 0.7, 1.5), (0.5, 0.5, math.inf)])
def test_vtrace_against_a_loop(shape, caps, dtype):
    for lam in (1.0, 0.8, 0.0):
        r = rollout(shape, seed=shape[0], ends=0.1, dtype=dtype)
        for actual, expected in zip(
            vtrace_scan(r.log_rhos, *arguments(r), 0.97, lam, *caps), loop(r, 0.97, lam, *caps), strict=True
        ):
            close(actual, expected, dtype)


@pytest.mark.parametrize("lam", [0.0, 0.3, 0.95, 1.0])
def test_vtrace_on_policy_is_gae(lam):
    r = rollout((50, 4))
    advantages, returns = gae_scan(*arguments(r), 0.99, lam)
    vs, q_minus_v, pg = vtrace_scan(th.zeros_like(r.log_rhos), *arguments(r), 0.99, lam)
    for actual, expected in ((vs, returns), (q_minus_v, advantages), (pg, advantages)):
        th.testing.assert_close(actual, expected)


@pytest.mark.parametrize("seed", range(5))
def test_gae_is_that_of_sb3(seed):
    from gymnasium.spaces import Box
    from stable_baselines3.common.buffers import RolloutBuffer

    r = rollout((40, 3), seed=seed, dtype=th.float32)
    done = (r.terminated | r.truncated).numpy()
    buffer = RolloutBuffer(40, Box(0, 1), Box(0, 1), gae_lambda=0.9, gamma=0.97, n_envs=3)
    # what SB3 does while it collects
    buffer.rewards[:] = r.rewards + 0.97 * r.final_values.nan_to_num()
    buffer.values[:] = r.values
    buffer.episode_starts[1:] = done[:-1]
    buffer.compute_returns_and_advantage(r.last_values, done[-1])
    advantages, returns = gae_scan(*arguments(r), 0.97, 0.9)
    th.testing.assert_close(advantages, th.as_tensor(buffer.advantages), rtol=1e-4, atol=1e-5)
    th.testing.assert_close(returns, th.as_tensor(buffer.returns), rtol=1e-4, atol=1e-5)


# -------------------------------------------------------- published values


def golden_rollout(dtype):
    def column(name):
        numbers = ROLLOUT[name]
        return th.tensor(numbers, dtype=th.bool if isinstance(numbers[0], bool) else dtype).unsqueeze(1)

    columns = {name: column(name) for name in ROLLOUT if name not in ("last_values", "gamma")}
    return columns | {"last_values": th.tensor([ROLLOUT["last_values"]], dtype=dtype), "gamma": ROLLOUT["gamma"]}


@DTYPES
def test_published_gae(dtype):
    advantages, returns = gae_scan(**golden_rollout(dtype), gae_lambda=GAE_LAMBDA)
    assert advantages.flatten().tolist() == pytest.approx(GAE, abs=1e-6)
    assert returns.flatten().tolist() == pytest.approx(RETURNS, abs=1e-6)


@DTYPES
@pytest.mark.parametrize("case", VTRACE)
def test_published_vtrace(case, dtype):
    w, options, *expected = VTRACE[case]
    results = vtrace_scan(th.tensor(w, dtype=dtype).log().unsqueeze(1), **golden_rollout(dtype), **options)
    for actual, numbers in zip(results, expected, strict=True):
        if numbers is not None:
            assert actual.flatten().tolist() == pytest.approx(numbers, abs=1e-6)


def test_ratio_weighs_the_whole_td_error():
    # a well-known mistake of ports weighs the reward only: vs would be 1 + 0.5 * 0 + 3 - 1
    one = th.ones(1, 1).double()
    never = th.zeros(1, 1, dtype=th.bool)
    vs = vtrace_scan((0.5 * one).log(), 0 * one, one, 3 * one[0], never, never, one, 1.0).vs
    assert vs.item() == pytest.approx(1 + 0.5 * (3 - 1))


# ------------------------------------------------ time limits and boundaries


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_nothing_passes_the_end_of_an_episode(kind):
    def results(change):
        r = rollout((20, 2), ends=0.0)
        getattr(r, kind)[9] = True
        r.final_values[9] = 5.0
        if change:
            for x in (r.rewards, r.values, r.log_rhos):
                x[10:] += 100.0
            r.last_values += 100.0
        gae = gae_scan(*arguments(r), 0.99, 0.95)
        return th.stack([*gae, *vtrace_scan(r.log_rhos, *arguments(r), 0.99, 0.95, 1e6, 1e3, 1e6)])

    before, after = results(False), results(True)
    assert th.equal(before[:, :10], after[:, :10])
    assert not th.isclose(before[:, 10:], after[:, 10:]).any()


def test_bootstrap_at_a_time_limit_counts_once():
    # r = 0.1, V = 10 everywhere, truncated at step 1: no surprise at all but for gamma, at any step
    ten, one = th.full((4, 1), 10.0).double(), th.ones(4, 1).double()
    never, truncated = th.zeros(4, 1, dtype=th.bool), th.tensor([[False], [True], [False], [False]])
    advantages, _ = gae_scan(0.1 * one, ten, ten[0], never, truncated, ten, 0.99, 0.95)
    th.testing.assert_close(advantages, 0 * one)


def test_terminated_wins_over_truncated():
    r = rollout((10, 2))
    r.terminated[4] = r.truncated[4] = True
    r.final_values[4] = NAN
    both = gae_scan(*arguments(r), 0.99, 0.95)
    r.truncated[4] = False
    th.testing.assert_close(both, gae_scan(*arguments(r), 0.99, 0.95), rtol=0, atol=0)


def test_flags_may_be_floats():
    r = rollout((10, 2))
    expected = gae_scan(*arguments(r), 0.99, 0.95)
    r.terminated, r.truncated = r.terminated.float(), r.truncated.float()
    th.testing.assert_close(gae_scan(*arguments(r), 0.99, 0.95), expected, rtol=0, atol=0)


def test_targets_carry_no_gradient():
    r = rollout((10, 2))
    r.values.requires_grad_()
    r.log_rhos.requires_grad_()
    results = [*gae_scan(*arguments(r), 0.99, 0.95), *vtrace_scan(r.log_rhos, *arguments(r), 0.99)]
    assert not any(x.requires_grad for x in results)


def test_large_ratios_do_not_overflow():
    r = rollout((10, 2), dtype=th.float32)
    results = vtrace_scan(r.log_rhos + 1e4, *arguments(r), 0.99, rho_bar=math.inf, rho_pg_bar=math.inf)
    assert all(x.isfinite().all() for x in results)


def test_arguments_that_do_not_fit():
    r = rollout((10, 2))
    with pytest.raises(ValueError, match="c_bar"):
        vtrace_scan(r.log_rhos, *arguments(r), 0.99, rho_bar=1.0, c_bar=2.0)
    r.last_values = r.last_values.unsqueeze(0)
    with pytest.raises(ValueError, match="last_values"):
        gae_scan(*arguments(r), 0.99, 0.95)
    with pytest.raises(ValueError, match="truncated"):
        gae_scan(r.rewards, r.values, r.values[0], r.terminated, r.truncated[0], r.final_values, 0.99, 0.95)


@pytest.mark.parametrize("steps", [1, 2, 3, 31, 32, 33])
def test_linear_scan(steps):
    decay, increment = th.rand(2, steps, 3, 2, generator=th.Generator().manual_seed(0), dtype=th.float64)
    x, expected = th.zeros(3, 2).double(), []
    for t in reversed(range(steps)):
        x = increment[t] + decay[t] * x
        expected.append(x)
    th.testing.assert_close(linear_scan(decay, increment), th.stack(expected[::-1]))
