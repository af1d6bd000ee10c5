"""The table that windows are drawn from, against one that is made from scratch, and the distribution of the draws."""

import pickle
import warnings

import numpy as np
import pytest
import torch as th
from test_trajectory_replay import buffer_of, dataset_of, step_env

from sb3_flow.data import windows
from sb3_flow.data.windows import distinct


class PlainTrajectories:
    """Remembers every step that was ever added; :meth:`starts` walks through all of them."""

    def __init__(self, dataset, capacity, n_envs, h, rule):
        self.dataset, self.capacity, self.n_envs, self.h, self.rule = dataset, capacity, n_envs, h, rule
        self.steps = [[] for _ in range(n_envs)]  # number of the trajectory
        self.ends = {}  # of the trajectories that the task ended: whether in a terminal
        self.current = [(column, 0) for column in range(n_envs)]

    def step(self, dones, timeouts):
        for column, (done, timeout) in enumerate(zip(dones, timeouts, strict=True)):
            self.steps[column].append(self.current[column])
            if done:
                self.ends[self.current[column]] = not timeout
                self.next_trajectory(column)

    def next_trajectory(self, column):
        self.current[column] = (column, self.current[column][1] + 1)

    def starts(self, offline, online):
        """:return: (column, trajectory in the dataset, last step) of each trajectory, with its starts"""
        found = {}
        for number, (first, last) in enumerate(self.dataset.trajectories.tolist() if offline else []):
            found[-1, number, last] = self.allowed(list(range(first, last + 1)), True, self.dataset.terminated[last])
        for column, steps in enumerate(self.steps if online else []):
            stored = {}
            for clock in range(max(0, len(steps) - self.capacity), len(steps)):
                stored.setdefault(steps[clock], []).append(clock)
            for key, clocks in stored.items():
                found[column, -1, clocks[-1]] = self.allowed(clocks, key in self.ends, self.ends.get(key))
        return {key: starts for key, starts in found.items() if starts}

    def allowed(self, steps, complete, terminated):
        if not complete:  # whole windows; "rql" also wants the row after
            return steps[: max(len(steps) - self.h + (self.rule == "q_chunking"), 0)]
        return steps if self.rule == "q_chunking" or terminated else steps[:-1]


def drawn(starts, sampling):
    """All that can be drawn, each as often as there are numbers for it."""
    every = th.arange(starts.total)
    if sampling == "transition":
        return sorted(zip(*(part.tolist() for part in starts.by_start(every)), strict=True))
    earliest = starts.by_trajectory(every, th.zeros(starts.total, dtype=th.float64))
    latest = starts.by_trajectory(every, th.full((starts.total,), 1.0 - 2**-53, dtype=th.float64))
    return sorted(zip(*(part.tolist() for part in (*earliest, latest.start)), strict=True))


def expected(found, sampling):
    if sampling == "transition":
        return sorted((*key, start, starts[0]) for key, starts in found.items() for start in starts)
    return sorted((*key, starts[0], starts[0], starts[-1]) for key, starts in found.items())


@pytest.mark.parametrize("sampling", ["trajectory", "transition"])
@pytest.mark.parametrize("rule", ["rql", "q_chunking"])
@pytest.mark.parametrize("storage", ["cpu", "device"])
@pytest.mark.parametrize("seed", range(12))
def test_the_table_equals_one_made_from_scratch(sampling, rule, storage, seed):
    """Over random steps, ends, resets, wraps of the ring, datasets and moments at which one looks."""
    rng = np.random.default_rng(seed)
    n_envs, capacity, h = int(rng.integers(1, 5)), int(rng.choice([3, 10, 60, 400])), int(rng.integers(1, 5))
    p_done = rng.choice([0.02, 0.3, 0.8, 1.0], size=n_envs)  # environments with long episodes beside such with short ones
    p_look = rng.choice([0.02, 0.3, 1.0])
    dataset = dataset_of([5, 1, 9, 4, 7], terminated=[4, 5, 8]) if seed % 3 else None
    settings = {"horizon_length": h, "window_rule": rule, "storage": storage, "sampling": sampling}
    buffer = buffer_of(buffer_size=capacity * n_envs, n_envs=n_envs, **settings)
    plain = PlainTrajectories(dataset, capacity, n_envs, h, rule)
    warnings.simplefilter("ignore", UserWarning)
    if dataset is not None:
        buffer.set_offline(dataset)
    for clock in range(500):
        if rng.random() < 0.02:
            buffer.cut_trajectories()
            for column in range(n_envs):
                plain.next_trajectory(column)
        dones = rng.random(n_envs) < p_done
        timeouts = dones & (rng.random(n_envs) < 0.5)
        step_env(buffer, clock, dones.astype(np.float32), n_envs, timeouts)
        plain.step(dones, timeouts)
        if rng.random() > p_look or (clock % 20 and rng.random() < 0.8):
            buffer.can_sample()
            continue
        buffer.offline_only = bool(rng.random() < 0.2)
        buffer.offline_fraction = rng.choice([None, 0.5])
        sources = [drawn(starts, sampling) for starts in buffer._sources()]
        only_offline = buffer.offline_only and dataset is not None
        parts = [plain.starts(dataset is not None, False), plain.starts(False, not only_offline)]
        parts = [{**parts[0], **parts[1]}] if buffer.offline_fraction is None else parts
        assert sources == [expected(part, sampling) for part in parts if part], clock
        if rng.random() < 0.1 and sources:
            fresh = pickle.loads(pickle.dumps(buffer))
            fresh.offline_only = buffer.offline_only  # of the model's phase, no part of a pickle
            fresh.set_offline(dataset)
            buffer.generator, fresh.generator = (th.Generator().manual_seed(clock) for _ in range(2))
            assert all(map(th.equal, buffer.sample(8), fresh.sample(8)))


@pytest.mark.parametrize("n_envs", [1, 3])
def test_a_step_changes_few_rows_of_a_long_table(n_envs):
    buffer = buffer_of(dataset_of([2] * 3000), buffer_size=3000 * n_envs, n_envs=n_envs)
    changed = []
    for clock in range(9000):
        step_env(buffer, clock, np.full(n_envs, clock % 2, np.float32), n_envs)
        if clock > 6000:
            buffer.can_sample()
            changed.append(buffer._table.n_rows - buffer._table.unchanged)
    assert np.median(changed) <= 3 * n_envs
    assert np.mean(changed) < 10 * n_envs  # with the steps at which overwritten rows are forgotten
    assert len(buffer._table.rows) < 3000 + 4 * 1500 * n_envs


@pytest.mark.parametrize("sampling", ["trajectory", "transition"])
def test_a_batch_from_many_trajectories_needs_no_permutation_of_all(sampling, monkeypatch):
    shuffle = th.randperm
    sizes = []
    monkeypatch.setattr(th, "randperm", lambda n, **kwargs: sizes.append(n) or shuffle(n, **kwargs))
    buffer = buffer_of(dataset_of([2] * 2000), sampling=sampling)
    for clock in range(40):
        step_env(buffer, clock, np.float32([clock % 2]), 1)
    buffer.sample(8)
    assert max(sizes, default=0) <= windows.SHUFFLED_AS_A_WHOLE * 8


def chi_square(counts, shares):
    """Standardised: about 0 with a deviation of about 1 for independent draws, which fall into cells by these shares."""
    wanted = shares * counts.sum() / shares.sum()
    degrees = counts.size - 1
    return (((counts - wanted) ** 2 / wanted).sum() - degrees) / np.sqrt(2 * degrees)


@pytest.mark.parametrize("n_numbers", [64, 65, 1000])
@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_distinct_is_the_beginning_of_a_shuffle(n_numbers, n, monkeypatch):
    monkeypatch.setattr(windows, "SHUFFLED_AS_A_WHOLE", 0)
    for seed in range(30):
        places = th.rand(n, generator=th.Generator().manual_seed(seed), dtype=th.float64)
        numbers = list(range(n_numbers))
        for i, uniform in enumerate(places.tolist()):
            j = i + int(uniform * (n_numbers - i))
            numbers[i], numbers[j] = numbers[j], numbers[i]
        assert distinct(n_numbers, n, th.Generator().manual_seed(seed), th.device("cpu")).tolist() == numbers[:n]


@pytest.mark.parametrize("as_a_whole", [0, 64])
def test_every_choice_and_order_is_drawn_alike(as_a_whole, monkeypatch):
    monkeypatch.setattr(windows, "SHUFFLED_AS_A_WHOLE", as_a_whole)
    generator = th.Generator().manual_seed(0)
    counts = np.zeros((5, 5, 5))
    for _ in range(3000):
        counts[tuple(distinct(5, 3, generator, th.device("cpu")).tolist())] += 1
    i, j, k = np.indices(counts.shape)
    different = (i != j) & (j != k) & (i != k)
    assert counts[~different].sum() == 0
    assert abs(chi_square(counts[different], np.ones(60))) < 4


@pytest.mark.parametrize("sampling", ["trajectory", "transition"])
@pytest.mark.parametrize(("batch_size", "n_batches"), [(2, 3000), (100, 60), (400, 15)])  # partial, whole, with replacement
def test_draws_follow_their_distribution(sampling, batch_size, n_batches):
    """Trajectories of 2 and 4 steps, offline and in a ring that has wrapped: alike, or as many times as they have starts."""
    buffer = buffer_of(dataset_of([2, 4] * 50), buffer_size=300, sampling=sampling, window_rule="q_chunking")
    for clock in range(1200):
        step_env(buffer, clock, np.float32([clock % 6 in (1, 5)]), 1)
    (starts,) = buffer._sources()
    assert starts.total == (200 if sampling == "trajectory" else 600)
    counts, steps = np.zeros((2, 100)), np.zeros((2, 6))
    for _ in range(n_batches):
        column, trajectory, last, start, _ = (part.numpy() for part in starts.draw(batch_size, sampling, buffer.generator))
        which = np.where(column < 0, trajectory, (last - 900) // 6 * 2 + (last % 6 == 5))
        if sampling == "trajectory" and batch_size < starts.total:
            assert len(set(zip(column, which, strict=True))) == batch_size, "the same trajectory twice in a batch"
        np.add.at(counts, (column + 1, which), 1)
        np.add.at(steps, (column + 1, start % 6), 1)
    of_trajectories = np.tile([1, 1] if sampling == "trajectory" else [2, 4], (2, 50))
    of_steps = np.tile([2, 2, 1, 1, 1, 1] if sampling == "trajectory" else [1] * 6, (2, 1))
    # draws without replacement vary less than independent ones
    lowest = -np.inf if sampling == "trajectory" and batch_size < starts.total else -4
    assert lowest < chi_square(counts, of_trajectories) < 4
    assert lowest < chi_square(steps, of_steps) < 4
