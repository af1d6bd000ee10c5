"""Noise that is a function of the observation: its distribution, and that nothing else changes it."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from tasks import PointEnv

from sb3_flow import DSRL, FMQ, FQL, QAM, RLPD, RQL, FlowMapPolicy
from sb3_flow.flow import keyed_noise, multipliers
from sb3_flow.flow.noise import FIRST, GAMMA, SECOND, keyed_normal, mix, row_keys
from sb3_flow.fused import fusable
from sb3_flow.fused.keyed_normal import keyed_normal_rows

SMALL = {"policy_kwargs": {"net_arch": [16, 16], "n_critics": 2}, "seed": 0, "device": "cpu"}
MODES = ["sample", "best_of_n", "qgbs", "guided"]
ODD = multipliers(3)


def splitmix(x):
    """Of SplitMix64, transcribed with Python's integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def unsigned(x):
    return [int(one) % 2**64 for one in x]


def build(algorithm=RQL, mode="sample", **settings):
    return algorithm("MlpPolicy", PointEnv(), acting_mode=mode, n_candidates=4, **{**SMALL, **settings})


# ------------------------------------------------------------- the generator


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_integers_are_splitmix64s(library):
    x = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 1000)
    ours = mix(x if library == "numpy" else th.from_numpy(x))
    assert unsigned(ours) == [splitmix(one) for one in unsigned(x)]
    assert unsigned([GAMMA, FIRST, SECOND]) == [0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB]
    # the published first outputs of a generator that starts from 1234567
    states = np.array([1234567 + (i + 1) * 0x9E3779B97F4A7C15 for i in range(3)], dtype=object) % 2**64
    assert [splitmix(int(one)) for one in states] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_numpy_and_torch_agree():
    rows = th.randn(500, 3)
    keys = row_keys(rows, ODD, 7)
    assert np.array_equal(keys.numpy(), row_keys(rows.numpy(), ODD.numpy(), 7))
    ours, theirs = keyed_normal(keys, 2, 5), keyed_normal(keys.numpy(), 2, 5)
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=0, atol=1e-12)


def test_the_key_is_of_the_numbers():
    """Python's integers: 24 bits of mantissa and an exponent say which float32 it is."""
    row = np.array([[1.5, -2.0, 1e-40]], np.float32)
    parts = [math.frexp(float(one)) for one in row[0]]
    words = [int(mantissa * 2**24) * 1024 + exponent for mantissa, exponent in parts]
    products = sum(word * odd for word, odd in zip(words, unsigned(ODD), strict=True))
    assert unsigned(row_keys(row, ODD.numpy(), 3)) == [splitmix((products + 3 * GAMMA) % 2**64)]
    for seed in (0, -1, 2**31, 2**63, 2**70 + 5):
        assert -(2**63) <= int(row_keys(row, ODD.numpy(), seed)[0]) < 2**63


def one_bit_apart(n):
    """n observations of 2 numbers: walks in which each step changes one bit of the mantissas."""
    bits = np.zeros((n, 2), np.uint32) + np.float32(1.0).view(np.uint32)
    changed = np.random.default_rng(0).integers(46, size=n)
    flips = np.zeros((n, 2), np.uint32)
    flips[np.arange(n), changed % 2] = np.uint32(1) << (changed // 2).astype(np.uint32)
    return (bits ^ np.bitwise_xor.accumulate(flips, axis=0)).view(np.float32)


N, A = 100_000, 3
OBSERVATIONS = {
    "one bit apart": lambda: one_bit_apart(N),
    "a grid": lambda: np.stack(np.divmod(np.arange(N), 400), 1).astype(np.float32) / 16,
    "counts": lambda: np.stack([np.arange(N), np.zeros(N)], 1).astype(np.float32),
    "signs and scales": lambda: np.stack(
        [(-1.0) ** np.arange(N), 2.0 ** -(np.arange(N) % 100) * (1 + np.arange(N) // 100)], 1
    ),
}


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_over_observations_noise_is_gaussian(kind):
    """Nothing here is random: seed and observations are fixed."""
    rows = th.as_tensor(OBSERVATIONS[kind](), dtype=th.float32)
    noise = keyed_noise(rows, multipliers(2), 0, A)(1)[:, 0].double()
    distinct = th.unique(rows, dim=0)
    assert len(th.unique(noise[:, 0])) >= 0.999 * len(distinct)  # float32 noise may agree by chance
    noise = keyed_noise(distinct, multipliers(2), 0, A)(1)[:, 0].double()
    n = len(distinct)
    for column in noise.T:
        cumulative = th.special.ndtr(column.sort().values)
        steps = th.arange(n) / n
        distance = th.maximum((cumulative - steps).abs(), (cumulative - steps - 1 / n).abs()).max()
        assert distance * n**0.5 < 1.95  # Kolmogorov and Smirnov: p > .001
    bound = 4.5 / n**0.5
    standard = th.cat([noise, distinct.double()], 1)
    standard = (standard - standard.mean(0)) / standard.std(0).clamp(min=1e-12)
    correlations = standard[:, :A].T @ standard / n
    assert (correlations - th.eye(A, A + 2)).abs().max() < bound
    for lag in (1, 2, 3, 16, 400):  # neighbours in the grid, and along the walk
        assert (standard[lag:, :A].T @ standard[:-lag, :A] / n).abs().max() < bound
    squares = (noise**2 - 1) / 2**0.5
    assert (squares[1:].T @ squares[:-1] / n).abs().max() < bound
    assert (noise.T @ (noise**2 - 1) / n).abs().max() < 2 * bound


def test_numbers_of_one_observation_are_gaussian():
    noise = keyed_noise(th.zeros(1, 3), ODD, 0, 10)(20_000).double()[0]
    assert abs(noise.mean()) < 0.01 and abs(noise.var() - 1) < 0.015 and abs((noise**4).mean() - 3) < 0.1
    assert (th.corrcoef(noise.T) - th.eye(10)).abs().max() < 0.035


def test_what_changes_the_noise_and_what_does_not():
    rows, odd = th.randn(50, 3), ODD
    noise = keyed_noise(rows, odd, 0, 2)(4)
    assert noise.shape == (50, 4, 2) and noise.dtype == th.float32
    order = th.randperm(50, generator=th.Generator().manual_seed(0))
    assert th.equal(keyed_noise(rows[order], odd, 0, 2)(4), noise[order])
    assert th.equal(keyed_noise(rows[7:8], odd, 0, 2)(4), noise[7:8])
    assert th.equal(keyed_noise(rows.t().contiguous().t(), odd, 0, 2)(4), noise)  # another layout
    assert th.equal(keyed_noise(rows, odd, 0, 2)(9)[:, :4], noise)  # more candidates begin alike
    assert not th.equal(keyed_noise(rows, odd, 1, 2)(4), noise)
    source = keyed_noise(rows, odd, 0, 2)
    first, second = source(4), source(4)
    assert th.equal(first, noise) and (first - second).abs().min() > 0
    zero, negative = th.zeros(1, 3), th.zeros(1, 3).neg()
    assert negative.signbit().all() and th.equal(keyed_noise(zero, odd, 0, 2)(1), keyed_noise(negative, odd, 0, 2)(1))
    swapped = keyed_noise(th.tensor([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [-1.0, -2.0, 0.0]]), odd, 0, 2)(1)
    assert len({tuple(one) for one in swapped.flatten(1).tolist()}) == 3
    assert keyed_noise(th.zeros(0, 3), odd, 0, 2)(4).shape == (0, 4, 2)


@pytest.mark.parametrize("seed", [0, -3, 2**63, 2**70 + 5])
@pytest.mark.parametrize("size", [1, 4, 5])
def test_the_loop_numpy_and_torch_draw_the_same(monkeypatch, seed, size):
    rows = 10.0 ** th.linspace(-44, 38, 600).view(200, 3) * th.randn(200, 3).sign()
    rows[0] = th.tensor([0.0, -0.0, 1e-45])

    def draw():
        source = keyed_noise(rows, ODD, seed, size)
        return th.cat([source(3), source(2)], 1)

    compiled = draw()
    monkeypatch.setattr("sb3_flow.flow.noise.unavailable", lambda: "asked not to")
    in_numpy = draw()
    monkeypatch.setattr("sb3_flow.flow.noise.can_fuse", lambda *tensors: False)
    for other in (in_numpy, draw()):
        th.testing.assert_close(other, compiled, rtol=0, atol=1e-6)
    assert fusable.can_fuse(rows)


def test_the_loop_is_given_what_it_reads():
    rows, odd = np.zeros((2, 3), np.float32), ODD.numpy()
    for wrong in (
        (rows.astype(float), odd),
        (rows[:, :2], odd),
        (rows, odd.astype(np.int32)),
        (rows, odd[:2]),
        (rows[0], odd),
    ):
        with pytest.raises(ValueError, match="`rows` and `odd` must be contiguous"):
            keyed_normal_rows(*wrong, 0, 0, 4)


@pytest.mark.parametrize("given", [None, "4", 0.5, [4], np.array([1, 2]), 2**63, -(2**63) - 1], ids=repr)
@pytest.mark.parametrize("name", ["seed", "first", "n"])
def test_numbers_that_do_not_fit_the_loop_are_named(name, given):
    numbers = {"seed": 0, "first": 0, "n": 4, name: given}
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        keyed_normal_rows(np.ones((2, 3), np.float32), ODD.numpy(), **numbers)


def test_lists_are_no_rows():
    with pytest.raises(ValueError, match="`rows` and `odd` must be contiguous"):
        keyed_normal_rows([[1.0]], np.ones(1, np.int64), 0, 0, 4)


# ----------------------------------------------------------------- policies


UNSEARCHED = (DSRL, RLPD)
CASES = [
    (algorithm, mode)
    for algorithm in (RQL, FMQ, FQL, DSRL, QAM, RLPD)
    for mode in MODES
    if (mode != "qgbs" or algorithm not in UNSEARCHED) and (mode != "guided" or algorithm is RQL)
]


@pytest.mark.parametrize(("algorithm", "mode"), CASES)
def test_an_observation_has_one_action(algorithm, mode, tmp_path):
    own = {"actor_type": "best_of_n"} if algorithm is FQL and mode == "qgbs" else {}
    own |= {"edit_scale": 0.5} if algorithm is QAM and mode != "qgbs" else {}
    model = build(algorithm, mode, **own)
    observations = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)

    def act(model, observations):
        return model.predict(observations, deterministic=True)[0]

    actions = act(model, observations)
    model.predict(observations)  # draws from the generators
    th.rand(10)
    np.testing.assert_array_equal(act(model, observations), actions)
    # to rounding: products of few rows are computed otherwise
    np.testing.assert_allclose(np.concatenate([act(model, one[None]) for one in observations]), actions, rtol=0, atol=1e-4)
    np.testing.assert_allclose(act(model, observations[::-1]), actions[::-1], rtol=0, atol=1e-4)
    np.testing.assert_allclose(act(model, observations[5]), actions[5], rtol=0, atol=1e-4)
    model.save(tmp_path / "model")
    loaded = algorithm.load(tmp_path / "model", seed=99)  # the policy that was saved, whatever is drawn from now on
    np.testing.assert_array_equal(act(loaded, observations), actions)
    model.policy.save(tmp_path / "policy")
    np.testing.assert_array_equal(act(type(model.policy).load(tmp_path / "policy"), observations), actions)
    assert not np.array_equal(act(build(algorithm, mode, seed=1, **own), observations), actions)
    other = build(algorithm, mode, seed=1, **own)
    other.policy.load_state_dict(model.policy.state_dict())
    assert not np.allclose(act(other, observations), actions)  # another seed, the same weights
    other.set_random_seed(0)
    np.testing.assert_array_equal(act(other, observations), actions)


@pytest.mark.parametrize("algorithm", [RQL, FMQ, FQL, RLPD, DSRL, QAM])
def test_a_seed_that_was_not_given_is_drawn_once(algorithm, tmp_path):
    observations = np.zeros((3, 2), np.float32)
    model, other = build(algorithm, seed=None), build(algorithm, seed=None)
    assert model.noise_seed != other.noise_seed
    model.save(tmp_path / "model")
    for _ in range(2):
        loaded = algorithm.load(tmp_path / "model", env=PointEnv())
        assert loaded.noise_seed == loaded.policy.noise_seed == loaded.policy.acting_actor.noise_seed == model.noise_seed
        np.testing.assert_array_equal(*(one.predict(observations, deterministic=True)[0] for one in (model, loaded)))
    policy = FlowMapPolicy(spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (2,)), lambda _: 1e-3, n_critics=0, net_arch=[8])
    policy.save(tmp_path / "policy")
    again = FlowMapPolicy.load(tmp_path / "policy")
    assert again.noise_seed == policy.noise_seed
    np.testing.assert_array_equal(*(one.predict(observations, deterministic=True)[0] for one in (policy, again)))


def test_equal_observations_in_any_guise():
    model = build()
    single = np.array([[0.5, -0.25]], np.float32)
    expected = model.predict(single, deterministic=True)[0]
    for guise in (single.astype(np.float64), np.asfortranarray(single), single.astype(">f4").astype("<f4")):
        np.testing.assert_array_equal(model.predict(guise, deterministic=True)[0], expected)
    zeros = [model.predict(np.array([[zero, 1.0]], np.float32), deterministic=True)[0] for zero in (0.0, -0.0)]
    np.testing.assert_array_equal(*zeros)


def test_dict_observations_do_not_depend_on_the_order_of_keys():
    model = RQL("MultiInputPolicy", PointEnv("dict"), **SMALL)
    observation = model.get_env().reset()
    backwards = dict(reversed(observation.items()))
    assert list(backwards) != list(observation)
    np.testing.assert_array_equal(*(model.predict(one, deterministic=True)[0] for one in (observation, backwards)))
    for key in observation:  # every part counts
        changed = {**observation, key: np.array(observation[key])}
        changed[key].flat[0] += 1
        noise = [
            model.actor.noise({name: th.as_tensor(part) for name, part in one.items()}, keyed=True)(1)
            for one in (observation, changed)
        ]
        assert (noise[0] - noise[1]).abs().min() > 0


SCRIPT = """
import sys
import numpy as np
from sb3_flow import RQL
print(RQL.load(sys.argv[1]).predict(np.ones((2, 2), np.float32), deterministic=True)[0].tolist())
"""


def test_other_processes_act_alike(tmp_path):
    model = build()
    model.save(tmp_path / "model")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "model")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.strip() == str(model.predict(np.ones((2, 2), np.float32), deterministic=True)[0].tolist())


def test_the_distribution_of_actions_is_that_of_fresh_noise():
    """One state with a counter that the networks do not see: actions of keyed noise are actions of fresh noise."""
    model = build(mode="sample")
    for network in (model.policy.actor_ema.velocity_net,):
        network.layers[0].weight.data[:, 1] = 0  # blind for the second number
    counts = np.stack([np.zeros(4000), np.arange(4000)], 1).astype(np.float32)
    keyed, fresh = (model.predict(counts, deterministic=deterministic)[0] for deterministic in (True, False))
    grid = np.linspace(-2, 2, 41)
    for column in range(2):
        shares = [np.searchsorted(np.sort(actions[:, column]), grid) / 4000 for actions in (keyed, fresh)]
        assert np.abs(shares[0] - shares[1]).max() < 0.045  # Kolmogorov and Smirnov: p > .001
    assert np.abs(np.corrcoef(keyed.T) - np.corrcoef(fresh.T)).max() < 0.08


def test_the_models_seed_decides():
    with pytest.raises(ValueError, match="`noise_seed` is not for `policy_kwargs`"):
        RQL("MlpPolicy", PointEnv(), policy_kwargs={"noise_seed": 3})


def test_on_another_device_nothing_is_asked_of_the_data():
    """Tensors without numbers: no value is read, and all stays where the observations are."""
    rows, odd = th.empty(4, 3, device="meta"), th.empty(3, dtype=th.int64, device="meta")
    source = keyed_noise(rows, odd, 0, 5)
    for noise in (source(2), source(3)):
        assert noise.device.type == "meta" and noise.dtype == th.float32 and noise.shape[::2] == (4, 5)
