"""The prioritised replay buffer: which windows have which priority, how they are drawn and weighted."""

import pickle

import numpy as np
import pytest
import torch as th
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_flow.data import OfflineDataset, PrioritizedReplayBuffer
from tests.test_trajectory_replay import ACT, OBS, buffer_of, dataset_of, step_env

ALPHA, EPS = 0.6, 1e-6


def prioritized(dataset=None, buffer_size=100, n_envs=1, **kwargs):
    buffer = PrioritizedReplayBuffer(buffer_size, OBS, ACT, "cpu", n_envs, **kwargs)
    buffer.generator = th.Generator().manual_seed(0)
    if dataset is not None:
        buffer.set_offline(dataset)
    return buffer


def tell(buffer, samples, errors):
    buffer.update_priorities(samples.numbers, th.as_tensor(errors, dtype=th.float32), samples.valid[:, 0])


def online_priorities(buffer):
    """Of each window of the ring: environment, first step, last and first step of the trajectory, and the priority."""
    numbers = buffer._online.priorities.nonzero()[:, 0]
    column, _, last, start, first = buffer._online_windows(numbers)
    places = zip(column.tolist(), start.tolist(), last.tolist(), first.tolist(), strict=True)
    return dict(zip(places, buffer._online.priorities[numbers].tolist(), strict=True))


def windows_of_plain(buffer):
    """The windows that a buffer without priorities draws from, which are walked step by step in ``test_trajectory_replay``."""
    if not buffer.can_sample():
        return set()
    starts = buffer._sources()[0]
    column, _, last, start, first = starts.by_start(th.arange(starts.total))
    return set(zip(column.tolist(), start.tolist(), last.tolist(), first.tolist(), strict=True))


def wrap_without_forgetting(buffer):
    buffer._online.set = lambda places, priorities: type(buffer._online).set(
        buffer._online, *(part[priorities > 0] for part in (places, priorities))
    )


def count_anew(buffer):
    buffer._undecided[:] = 0


def forget_the_last_steps(buffer):
    buffer._bounds[1].zero_()


def forget_the_first_steps(buffer):
    buffer._bounds[0].zero_()


@settings(max_examples=80, deadline=None)
@given(
    n_envs=st.integers(1, 4),
    capacity=st.integers(3, 12),
    n_steps=st.integers(1, 60),
    h=st.integers(1, 4),
    rule=st.sampled_from(["rql", "q_chunking"]),
    often=st.sampled_from([0.2, 1.0]),
    seed=st.integers(0, 1000),
)
def test_priorities_follow_the_windows(n_envs, capacity, n_steps, h, rule, often, seed):
    differences(n_envs, capacity, n_steps, h, rule, often, seed, None)


@pytest.mark.parametrize("mistake", [wrap_without_forgetting, count_anew, forget_the_last_steps, forget_the_first_steps])
def test_mistakes_are_seen(mistake):
    """Priorities of overwritten windows stay, windows are new again and again, trajectories lose their ends."""
    with pytest.raises(AssertionError):
        for seed in range(20):
            differences(2, 6, 60, 2, "q_chunking", 0.5, seed, mistake)


def differences(n_envs, capacity, n_steps, h, rule, often, seed, mistake):
    """Compare with a buffer without priorities, and with priorities in a dictionary."""
    rng = np.random.default_rng(seed)
    settings = {"buffer_size": capacity * n_envs, "n_envs": n_envs, "horizon_length": h, "window_rule": rule}
    plain, buffer = buffer_of(sampling="transition", **settings), prioritized(**settings)
    known, greatest = {}, 1.0
    for clock in range(n_steps):
        if rng.random() < 0.1:
            plain.cut_trajectories()
            buffer.cut_trajectories()
        ended = (rng.random(n_envs) < 0.2).astype(np.float32)
        timeouts = ended * (rng.random(n_envs) < 0.5)
        for each in (plain, buffer):
            step_env(each, clock, ended, n_envs, timeouts)
        if rng.random() >= often:
            continue
        if mistake is not None:
            mistake(buffer)
        windows = windows_of_plain(plain)
        assert buffer.can_sample() == bool(windows)
        assert buffer._counts == (0, len(windows))
        known = {place: known.get(place[:2], greatest) for place in windows}
        assert online_priorities(buffer) == known
        known = {place[:2]: priority for place, priority in known.items()}
        if windows:
            samples = buffer.sample(8)
            errors = rng.exponential(10.0, 8).astype(np.float32)
            tell(buffer, samples, errors)
            mean = np.mean(list(known.values()))
            fresh = {}
            for b, (env, step) in enumerate(samples.observations.int().tolist()):
                is_valid = samples.valid[b].item() > 0
                priority = (errors[b] + EPS) ** ALPHA if is_valid else mean
                fresh[env, step] = max(priority, fresh.get((env, step), 0.0))
                greatest = max(greatest, priority if is_valid else 0.0)
            greatest = float(buffer._greatest) if greatest == pytest.approx(float(buffer._greatest)) else greatest
            found = {place[:2]: priority for place, priority in online_priorities(buffer).items()}
            assert found == pytest.approx(known | fresh)
            known = found


@pytest.mark.parametrize("fraction", [None, 0.25])
def test_draws_and_weights_by_hand(fraction):
    """Draws in proportion to p within each source, or in both together; weights (N p / sum p)^-beta over their maximum."""
    buffer = prioritized(dataset_of([5, 4]), 20, offline_fraction=fraction, window_rule="q_chunking", beta=0.5, final_beta=0.5)
    for clock in range(12):
        step_env(buffer, clock, np.float32([clock % 6 == 5]), 1)
    rng = np.random.default_rng(0)
    for _ in range(20):
        samples = buffer.sample(16)
        tell(buffer, samples, rng.exponential(3.0, 16))
    p = [buffer._offline.priorities.numpy(), buffer._online.priorities.numpy()[:12]]
    assert len(p[0]) == 9 and (p[1] > 0).all() and len({*p[0], *p[1]}) > 15
    if fraction is None:
        both = np.concatenate(p)
        shares, relative = both / both.sum(), both / both.mean()
    else:
        shares = np.concatenate([0.25 * p[0] / p[0].sum(), 0.75 * p[1] / p[1].sum()])
        relative = np.concatenate([p[0] / p[0].mean(), p[1] / p[1].mean()])
    counts, rounds = np.zeros(21), 4000
    for _ in range(rounds):
        samples = buffer.sample(16)
        np.add.at(counts, samples.numbers.numpy(), 1)
        if fraction is not None:
            assert (samples.numbers < 9).sum() == 4
        wanted = relative[samples.numbers] ** -0.5
        assert np.allclose(samples.weights[:, 0], wanted / wanted.max(), rtol=1e-6)
    expected = 16 * rounds * shares
    # draws in equal parts spread less than independent draws, whose statistic has mean 20
    assert ((counts - expected) ** 2 / expected).sum() < 20
    wrong = 16 * rounds * shares**2 / (shares**2).sum()
    assert ((counts - wrong) ** 2 / wrong).sum() > 1000


def test_the_numbers_are_the_windows():
    """Errors reach the windows that were drawn, of both sources: each error here tells its window."""
    buffer = prioritized(dataset_of([5, 4, 6]), 30, 2, offline_fraction=0.5, window_rule="q_chunking", alpha=1.0)
    for clock in range(40):
        step_env(buffer, clock, np.float32([clock % 6 == 5, clock % 7 == 6]), 2)

    def code(samples):
        first, second = samples.observations.T
        return 1 + first + 100 * second + 10_000 * (samples.actions[:, 0] == 0.25)

    for _ in range(60):
        samples = buffer.sample(32)
        tell(buffer, samples, code(samples))
    samples = buffer.sample(256)
    n_offline = buffer._offline.n
    found = th.cat([buffer._offline.priorities, buffer._online.priorities])[samples.numbers]
    assert th.allclose(found.float(), code(samples).float(), rtol=1e-4)
    assert (samples.numbers[:128] < n_offline).all() and (samples.numbers[128:] >= n_offline).all()


def test_windows_beyond_the_end_are_drawn_as_without_priorities():
    buffer = prioritized(dataset_of([2] * 50 + [8] * 50), horizon_length=4)
    assert buffer._offline.n == 400
    for _ in range(100):
        samples = buffer.sample(64)
        tell(buffer, samples, np.full(64, 0.01))
    drawn = th.cat([buffer.sample(64).valid[:, 0] for _ in range(200)])
    plain = buffer_of(dataset_of([2] * 50 + [8] * 50), horizon_length=4, sampling="transition")
    wanted = th.cat([plain.sample(64).valid[:, 0] for _ in range(200)])
    assert drawn.mean().item() == pytest.approx(wanted.mean().item(), abs=0.05)


def test_beta_follows_the_progress():
    buffer = prioritized(dataset_of([10] * 4), beta=0.4, final_beta=1.0, alpha=1.0)
    tell(buffer, buffer.sample(64), np.random.default_rng(0).exponential(1.0, 64))
    p = buffer._offline.priorities.numpy()
    for progress, beta in ((1.0, 0.4), (0.5, 0.7), (0.0, 1.0), (-3.0, 1.0)):  # SB3's last rollout goes beyond the end
        buffer.anneal(progress)
        samples = buffer.sample(32)
        weights = (p[samples.numbers] / p.mean()) ** -beta
        assert np.allclose(samples.weights[:, 0], weights / weights.max(), rtol=1e-6)


def test_with_beta_1_the_expected_loss_is_that_of_uniform_draws():
    buffer = prioritized(dataset_of([10] * 4), beta=1.0)
    tell(buffer, buffer.sample(512), np.random.default_rng(0).exponential(1.0, 512))
    p = buffer._offline.priorities.numpy()
    value = p + np.random.default_rng(1).normal(size=len(p))
    of_weighted, of_drawn = [], []
    for _ in range(2000):
        samples = buffer.sample(32)
        greatest = (p.mean() / p[samples.numbers]).max()  # by which the weights are divided
        of_weighted.append((greatest * samples.weights[:, 0].numpy() * value[samples.numbers]).mean())
        of_drawn.append(value[samples.numbers].mean())
    assert np.mean(of_weighted) == pytest.approx(value.mean(), abs=0.02) and np.mean(of_drawn) > value.mean() + 0.1


@pytest.mark.parametrize("fraction", [None, 0.5])
def test_a_pickle_goes_on(fraction):
    """Also with the dataset's priorities, if the same dataset is set again; another dataset begins anew."""
    dataset = dataset_of([10] * 5)
    buffer = prioritized(dataset, 16, 2, horizon_length=2, offline_fraction=fraction)
    rng = np.random.default_rng(0)
    for clock in range(60):
        step_env(buffer, clock, np.float32([clock % 5 == 4, clock % 7 == 6]), 2)
        if clock < 5:
            continue
        buffer.anneal(1 - clock / 60)
        tell(buffer, buffer.sample(8), rng.exponential(1.0, 8))
        fresh = pickle.loads(pickle.dumps(buffer))
        fresh.set_offline(dataset)
        buffer.generator, fresh.generator = (th.Generator().manual_seed(clock) for _ in range(2))
        for one, other in zip(buffer.sample(16), fresh.sample(16), strict=True):
            assert th.equal(one, other)
        if clock % 3 == 0:
            buffer = fresh
    fresh = pickle.loads(pickle.dumps(buffer))
    fresh.set_offline(dataset_of([10] * 5, seed=1))
    assert len(set(fresh._offline.priorities.tolist())) == 1 < len(set(buffer._offline.priorities.tolist()))


def test_reset_forgets_online_steps_only():
    buffer = prioritized(dataset_of([10] * 5), 16)
    for clock in range(30):
        step_env(buffer, clock, np.float32([clock % 5 == 4]), 1)
    tell(buffer, buffer.sample(64), np.arange(64))
    before = buffer._offline.priorities.clone()
    buffer.reset()
    assert th.equal(buffer._offline.priorities, before) and float(buffer._online.total) == 0
    step_env(buffer, 0, np.float32([0]), 1)
    step_env(buffer, 1, np.float32([1]), 1)
    assert buffer.sample(64).observations.isfinite().all() and len(online_priorities(buffer)) == 2


def test_alpha_0_draws_all_alike():
    buffer = prioritized(dataset_of([10] * 4), alpha=0.0)
    for _ in range(20):
        samples = buffer.sample(32)
        tell(buffer, samples, np.random.default_rng(0).exponential(1.0, 32))
        assert (samples.weights == 1).all()
    assert (buffer._offline.priorities == 1).all()


def test_errors_that_are_not_finite_spoil_nothing():
    buffer = prioritized(dataset_of([10] * 4))
    tell(buffer, buffer.sample(4), [np.nan, np.inf, -np.inf, 1.0])
    assert buffer._offline.priorities.isfinite().all() and float(buffer._greatest) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"alpha": 1.5}, "`alpha` must be in .* 1.5 was given"),
        ({"beta": -0.1}, "`beta` must be in .* -0.1 was given"),
        ({"final_beta": 2}, "`final_beta` must be in .* 2 was given"),
        ({"eps": 0.0}, "`eps` must be at least 1e-12, but 0.0 was given"),
        ({"alpha": "much"}, "`alpha` must be .*'much'"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises((ValueError, TypeError), match=message):
        prioritized(**kwargs)


def test_priorities_are_of_a_dataset_with_the_same_rewards():
    """Also where few rows differ, as between two tasks of the same log."""
    n = 40_000
    observations, ends = np.arange(n, dtype=np.float32)[:, None], np.zeros(n, bool)
    ends[99::100] = True

    def labelled(places):
        rewards = np.zeros(n, np.float32)
        rewards[places] = 1.0
        return OfflineDataset.from_arrays(
            observations, np.zeros((n, 1)), rewards, np.zeros(n, bool), ends, observations + 1, action_space=ACT
        )

    one, other = labelled(slice(99, None, 200)), labelled(slice(199, None, 200))
    buffer = PrioritizedReplayBuffer(1, one.observation_space, ACT, "cpu", window_rule="q_chunking")
    buffer.set_offline(one)
    tell(buffer, buffer.sample(64), th.arange(64.0))
    same, exchanged = (pickle.loads(pickle.dumps(buffer)) for _ in range(2))
    same.set_offline(labelled(slice(99, None, 200)))
    exchanged.set_offline(other)
    assert len(set(same.priorities_of_dataset()[0].tolist())) > 30
    assert len(set(exchanged.priorities_of_dataset()[0].tolist())) == 1


def test_shapes_of_errors_are_checked():
    buffer = prioritized(dataset_of([10] * 4))
    samples = buffer.sample(8)
    for errors, valid in ((th.ones(1), th.ones(8)), (th.ones(8), samples.valid)):
        with pytest.raises(ValueError, match=r"must have the same shape \(B,\), but \[\(8,\)"):
            buffer.update_priorities(samples.numbers, errors, valid)
