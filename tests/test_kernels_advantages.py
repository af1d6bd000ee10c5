"""GAE and V-trace: golden vectors, SB3 to the last bit, slow loops, what must not leak, and wrong arguments."""

import re

import numpy as np
import pytest
import torch as th
from golden_tables import GAE, GAE_LAMBDA, RETURNS, ROLLOUT, VTRACE
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_references import gae, trajectories, vtrace
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_flow.kernels import batch_compute_gae, compute_gae, compute_gae_sb3, compute_lambda_returns, compute_vtrace

SHAPES = [(1, 1), (1, 5), (7, 1), (8, 1), (9, 1), (2100, 1), (33, 2), (19, 3), (21, 4), (40, 8), (300, 8), (5, 16), (700, 13)]
GOLDEN = {name: np.array(value) if isinstance(value, list) else value for name, value in ROLLOUT.items()}
PROPERTIES = settings(max_examples=40, deadline=None)
seeds, lambdas = st.integers(0, 2**32 - 1), st.floats(0, 1)


def tolerance(dtype):
    return {"rtol": 1e-11, "atol": 1e-11} if dtype == np.float64 else {"rtol": 1e-4, "atol": 1e-5}


def test_golden_gae():
    advantages, returns = compute_gae(**GOLDEN, gae_lambda=GAE_LAMBDA)
    np.testing.assert_allclose(advantages, GAE, atol=1e-6)
    np.testing.assert_allclose(returns, RETURNS, atol=1e-6)
    np.testing.assert_array_equal(compute_lambda_returns(**GOLDEN, gae_lambda=GAE_LAMBDA), returns)


@pytest.mark.parametrize("case", VTRACE)
def test_golden_vtrace(case):
    w, options, *expected = VTRACE[case]
    for result, numbers in zip(compute_vtrace(np.log(w), **GOLDEN, **options), expected, strict=True):
        if numbers is not None:
            np.testing.assert_allclose(result, numbers, atol=1e-6)


def test_truncation_arithmetic():
    # one time limit at step 1, V = 10 everywhere: nothing was better or worse than expected
    r, v = np.full(3, 0.1), np.full(3, 10.0)
    truncated = np.array([False, True, False])
    advantages, _ = compute_gae(r, v, last_values=10.0, truncated=truncated, final_values=v)
    np.testing.assert_allclose(advantages[:2], 0, atol=1e-12)
    merged, _ = compute_gae(r, v, last_values=10.0, terminated=truncated)
    np.testing.assert_allclose(merged[:2], [-9.31095, -9.9], atol=1e-6)
    twice, _ = compute_gae(r + 9.9 * truncated, v, last_values=10.0)
    np.testing.assert_allclose((twice - compute_gae(r, v, last_values=10.0)[0])[:2], [9.31095, 9.9], atol=1e-6)


def sb3(rewards, values, starts, last_values, dones, gamma, gae_lambda):
    n_steps, n_envs = rewards.shape
    box = spaces.Box(-1, 1, (1,))
    buffer = RolloutBuffer(n_steps, box, box, gae_lambda=gae_lambda, gamma=gamma, n_envs=n_envs)
    buffer.rewards, buffer.values, buffer.episode_starts = rewards, values, starts
    buffer.compute_returns_and_advantage(th.as_tensor(last_values), dones)
    return buffer.advantages, buffer.returns


@PROPERTIES
@given(seeds, st.integers(1, 40), st.integers(1, 20), st.sampled_from([0.0, 0.1, 1.0]), lambdas, lambdas)
def test_equal_to_sb3_to_the_last_bit(seed, n_steps, n_envs, done, gamma, gae_lambda):
    rng = np.random.default_rng(seed)
    rewards, values = (rng.standard_normal((n_steps, n_envs)).astype(np.float32) for _ in range(2))
    flags = rng.random((n_steps + 1, n_envs)) < done
    starts, dones = flags[:-1].astype(np.float32), flags[-1]
    last_values = rng.standard_normal(n_envs).astype(np.float32)
    arguments = rewards, values, starts, last_values, dones, gamma, gae_lambda
    ours, theirs = compute_gae_sb3(*arguments), sb3(*arguments)
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.dtype == expected.dtype == np.float32
        np.testing.assert_array_equal(mine.view(np.int32), expected.view(np.int32))
    ends = np.concatenate([starts[1:], dones[None]]).astype(bool)
    free = compute_gae(rewards, values, last_values=last_values, terminated=ends, gamma=gamma, gae_lambda=gae_lambda)
    np.testing.assert_allclose(free[0], theirs[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_loops(shape, dtype):
    rng = np.random.default_rng(sum(shape))
    arguments = trajectories(rng, *shape, dtype=dtype)
    log_rhos = rng.standard_normal(shape).astype(dtype)
    expected = gae(**arguments, gamma=0.97, gae_lambda=0.9)
    for mine, reference in zip(compute_gae(**arguments, gamma=0.97, gae_lambda=0.9), expected, strict=True):
        assert mine.dtype == dtype and mine.shape == shape
        np.testing.assert_allclose(mine, reference, **tolerance(dtype))
    options = {"gamma": 0.97, "gae_lambda": 0.9, "rho_bar": 1.5, "c_bar": 0.9, "rho_pg_bar": 2.0}
    expected = vtrace(log_rhos, **arguments, **options)
    for mine, reference in zip(compute_vtrace(log_rhos, **arguments, **options), expected, strict=True):
        assert mine.dtype == dtype and mine.shape == shape
        np.testing.assert_allclose(mine, reference, **tolerance(dtype))


@PROPERTIES
@given(seeds, st.integers(1, 30), st.integers(1, 10), lambdas, lambdas)
def test_on_policy_vtrace_is_gae(seed, n_steps, n_envs, gamma, gae_lambda):
    arguments = trajectories(np.random.default_rng(seed), n_steps, n_envs)
    factors = {"gamma": gamma, "gae_lambda": gae_lambda}
    advantages, returns = compute_gae(**arguments, **factors)
    vs, q_minus_v, policy = compute_vtrace(np.zeros((n_steps, n_envs)), **arguments, **factors)
    for mine, expected in ((vs, returns), (q_minus_v, advantages), (policy, advantages)):
        np.testing.assert_allclose(mine, expected, rtol=1e-11, atol=1e-11)


def test_a_ratio_on_the_reward_alone_is_noticed():
    rng = np.random.default_rng(0)
    arguments, log_rhos = trajectories(rng, 20, 3), rng.standard_normal((20, 3))
    vs = compute_vtrace(log_rhos, **arguments, gamma=0.9)[0]
    np.testing.assert_allclose(vs, vtrace(log_rhos, **arguments, gamma=0.9)[0])
    faulty = vtrace(log_rhos, **arguments, gamma=0.9, reward_only=True)[0]
    assert np.abs(vs - faulty).max() > 0.1
    # on-policy nobody would notice
    np.testing.assert_allclose(
        vtrace(0 * log_rhos, **arguments, gamma=0.9)[0], vtrace(0 * log_rhos, **arguments, gamma=0.9, reward_only=True)[0]
    )


@PROPERTIES
@given(seeds, st.integers(2, 40), st.integers(1, 9), st.booleans(), st.data())
def test_nothing_passes_the_end_of_an_episode(seed, n_steps, n_envs, truncation, data):
    rng = np.random.default_rng(seed)
    arguments = trajectories(rng, n_steps, n_envs, flags=0.1)
    end = data.draw(st.integers(0, n_steps - 2))
    arguments["terminated"][end], arguments["truncated"][end] = not truncation, truncation
    arguments["final_values"][end] = rng.standard_normal(n_envs)
    log_rhos = rng.standard_normal((n_steps, n_envs))
    before = *compute_gae(**arguments), *compute_vtrace(log_rhos, **arguments, gae_lambda=0.9)
    for name in ("rewards", "values"):
        arguments[name] = arguments[name].copy()
        arguments[name][end + 1 :] += 100 * rng.standard_normal((n_steps - end - 1, n_envs))
    log_rhos[end + 1 :] += 1
    arguments["last_values"] = arguments["last_values"] + 100
    after = *compute_gae(**arguments), *compute_vtrace(log_rhos, **arguments, gae_lambda=0.9)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a[: end + 1], b[: end + 1])


def test_both_flags_count_as_terminated():
    arguments = trajectories(np.random.default_rng(0), 12, 2)
    arguments["truncated"] |= arguments["terminated"]
    cleared = {**arguments, "truncated": arguments["truncated"] & ~arguments["terminated"]}
    np.testing.assert_array_equal(compute_gae(**arguments)[0], compute_gae(**cleared)[0])


def test_forms_of_the_same_input():
    arguments = trajectories(np.random.default_rng(0), 50, 6)
    expected = compute_gae(**arguments)
    log_rhos = np.random.default_rng(1).standard_normal((50, 6))
    expected_vtrace = compute_vtrace(log_rhos, **arguments)
    strided = {name: np.repeat(x, 2, axis=-1)[..., ::2] for name, x in arguments.items()}
    fortran = {name: np.asfortranarray(x) for name, x in arguments.items()}
    read_only = {name: x.copy() for name, x in arguments.items()}
    swapped = {name: x.astype(x.dtype.newbyteorder()) for name, x in arguments.items()}
    numeric = {**arguments, "terminated": arguments["terminated"].astype(np.uint8)}
    longer = {**arguments, "values": np.vstack([arguments["values"], arguments["last_values"]]), "last_values": None}
    for x in read_only.values():
        x.flags.writeable = False
    assert not strided["rewards"].flags.c_contiguous
    for form in (strided, fortran, read_only, swapped, numeric, longer):
        copies = {name: None if x is None else x.copy() for name, x in form.items()}
        for mine, reference in zip(compute_gae(**form), expected, strict=True):
            np.testing.assert_array_equal(mine, reference)
        for mine, reference in zip(compute_vtrace(log_rhos[:, ::-1][:, ::-1], **form), expected_vtrace, strict=True):
            np.testing.assert_array_equal(mine, reference)
        for name, x in form.items():
            np.testing.assert_array_equal(x, copies[name])
    for n in range(6):
        column = {name: x[..., n] for name, x in arguments.items()}
        np.testing.assert_allclose(compute_gae(**column)[0], expected[0][:, n], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(compute_vtrace(log_rhos[:, n], **column)[0], expected_vtrace[0][:, n], rtol=1e-12)


def test_batch_of_trajectories():
    rng = np.random.default_rng(0)
    lengths = [1, 5, 200, 3]
    rewards, values = [rng.standard_normal(n) for n in lengths], [rng.standard_normal(n + 1) for n in lengths]
    terminated = [False, True, False, True]
    advantages, returns = batch_compute_gae(rewards, values, 0.9, 0.8, terminated=terminated)
    again, _ = batch_compute_gae(
        rewards, [v[:-1] for v in values], 0.9, 0.8, terminated=terminated, last_values=[v[-1] for v in values]
    )
    for i, (r, v) in enumerate(zip(rewards, values, strict=True)):
        ends = np.zeros(len(r), bool)
        ends[-1] = terminated[i]
        expected = compute_gae(r, v, terminated=ends, gamma=0.9, gae_lambda=0.8)
        np.testing.assert_allclose(advantages[i], expected[0], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(returns[i], expected[1], rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(again[i], advantages[i])
    assert batch_compute_gae([], []) == ([], [])
    for bad, message in (
        ({"values": values[:3]}, "`values` must have one entry per trajectory, 4, but 3"),
        ({"values": [v[:-1] for v in values]}, "`last_values` must be given"),
        ({"values": [*values[:3], values[3][:-1]]}, r"`values\[3\]` must have shape \(4,\)"),
        ({"last_values": np.zeros(4)}, "`last_values` must be None"),
    ):
        with pytest.raises(ValueError, match=message):
            batch_compute_gae(**{"rewards": rewards, "values": values, **bad})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": [1.0, 2.0]}, "`rewards` must be a NumPy array of float32 or float64, but list"),
        ({"rewards": np.zeros((4, 3), int)}, "`rewards` must be a NumPy array of float32 or float64, but int64"),
        ({"rewards": np.zeros((0, 3))}, r"`rewards` must have shape \(T,\) or \(T, N\), neither of them 0"),
        ({"rewards": np.zeros((4, 3, 1))}, r"`rewards` must have shape"),
        ({"values": np.zeros((3, 3))}, r"`values` must have shape \(4, 3\), but \(3, 3\)"),
        ({"values": np.zeros((4, 3), np.float32)}, "`values` must be a NumPy array of float64, but float32"),
        ({"values": np.zeros((5, 3))}, "`last_values` must be None if `values` has T"),
        ({"last_values": None}, "`last_values` must be given"),
        ({"last_values": np.zeros(2)}, r"`last_values` must have shape \(3,\), but \(2,\)"),
        ({"terminated": np.zeros((4, 2), bool)}, r"`terminated` must have shape \(4, 3\)"),
        ({"terminated": np.full((4, 3), 0.5)}, "`terminated` must hold only 0 and 1"),
        ({"truncated": None}, "`truncated` must be given with `final_values`"),
        ({"final_values": None}, "`final_values` must be given with `truncated`"),
        ({"gamma": 1.1}, r"`gamma` must be in \[0, 1\], but 1.1"),
        ({"gae_lambda": float("nan")}, r"`gae_lambda` must be in \[0, 1\], but nan"),
    ],
)
def test_wrong_arguments(change, message):
    arguments = {**trajectories(np.random.default_rng(0), 4, 3), **change}
    with pytest.raises(ValueError, match=message):
        compute_gae(**arguments)
    with pytest.raises(ValueError, match=message):
        compute_vtrace(np.zeros((4, 3)), **arguments)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["rewards", "values", "last_values", "final_values"])
def test_numbers_must_be_finite(name, dtype, number):
    arguments = trajectories(np.random.default_rng(0), 9, 3, dtype=dtype)
    arguments["terminated"][:], arguments["truncated"][:] = False, False
    arguments["truncated"][4] = True
    arguments["final_values"][4] = 0
    place = (1,) if name == "last_values" else (4, 1)
    arguments[name][place] = number
    for compute in (compute_gae, lambda **given: compute_vtrace(np.zeros((9, 3), dtype), **given)):
        with pytest.raises(ValueError, match=re.escape(f"`{name}` must be finite, but {number} was given at {place}")):
            compute(**arguments)


def test_numbers_may_be_too_large():
    big = np.full((5, 1), 3e38, np.float32)
    with pytest.raises(ValueError, match="too large"):
        compute_gae(big, -big, last_values=big[0])


def test_log_ratios():
    arguments = trajectories(np.random.default_rng(0), 9, 3)
    extreme = np.full((9, 3), np.inf)
    extreme[::2] = -np.inf
    vs, _, advantages = compute_vtrace(extreme, **arguments, rho_bar=3, rho_pg_bar=5)
    np.testing.assert_array_equal(vs[::2], arguments["values"][::2])
    np.testing.assert_array_equal(advantages[::2], 0)
    np.testing.assert_array_equal(vs, compute_vtrace(np.clip(extreme, -800, 800), **arguments, rho_bar=3, rho_pg_bar=5)[0])
    extreme[3, 1] = np.nan
    with pytest.raises(ValueError, match="`log_rhos` must not be NaN, but 1 of its entries"):
        compute_vtrace(extreme, **arguments)
    with pytest.raises(ValueError, match=r"`log_rhos` must have shape \(9, 3\)"):
        compute_vtrace(np.zeros((9, 1)), **arguments)
    with pytest.raises(ValueError, match=r"`log_rhos` must be a NumPy array of float64, but float32"):
        compute_vtrace(np.zeros((9, 3), np.float32), **arguments)
    for options, message in (
        ({"rho_bar": 0.5}, "`rho_bar` must be at least `c_bar`, but 0.5 and 1.0"),
        ({"c_bar": 0.0}, "`c_bar` must be positive and finite"),
        ({"rho_pg_bar": np.inf}, "`rho_pg_bar` must be positive and finite"),
    ):
        with pytest.raises(ValueError, match=message):
            compute_vtrace(np.zeros((9, 3)), **arguments, **options)


def test_last_values_are_not_needed_if_everything_ends():
    arguments = trajectories(np.random.default_rng(0), 6, 2)
    arguments["terminated"][-1], arguments["truncated"][-1] = True, True
    np.testing.assert_array_equal(compute_gae(**{**arguments, "last_values": None})[0], compute_gae(**arguments)[0])


@pytest.mark.parametrize("name", ["rewards", "values", "episode_starts", "last_values", "dones"])
def test_wrong_arguments_of_the_sb3_form(name):
    arguments = {x: np.zeros((4, 3), np.float32) for x in ("rewards", "values", "episode_starts")}
    arguments |= {x: np.zeros(3, np.float32) for x in ("last_values", "dones")}
    short = {**arguments, name: np.zeros((4, 2, 1)[: arguments[name].ndim + (name == "rewards")], np.float32)}
    with pytest.raises(ValueError, match="must have shape"):
        compute_gae_sb3(**short, gamma=0.9, gae_lambda=0.9)
    arguments[name][...] = np.nan
    with pytest.raises(ValueError, match=f"`{name}` must be finite"):
        compute_gae_sb3(**arguments, gamma=0.9, gae_lambda=0.9)
