"""The tree of sums against its plain twin: a cumulative sum that is searched."""

import numpy as np
import pytest
import torch as th
from hypothesis import given, settings
from hypothesis import strategies as st

from sb3_flow.data.sum_tree import FAN_OUT, SumTree

CPU = th.device("cpu")


def found_by_twin(priorities, mass):
    """The first number whose part of the line ends after the point."""
    return np.searchsorted(np.cumsum(priorities), mass, side="right")


def tree_of(priorities):
    tree = SumTree(len(priorities), CPU)
    tree.set_all(th.as_tensor(priorities, dtype=th.float64))
    return tree


@settings(max_examples=60, deadline=None)
@given(
    n=st.sampled_from([1, 2, 127, 128, 129, 1000, FAN_OUT**2 - 1, FAN_OUT**2, FAN_OUT**2 + 1, 40_000]),
    share=st.sampled_from([0.01, 0.5, 1.0]),
    rounds=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_the_tree_finds_what_its_twin_finds(n, share, rounds, seed):
    """Whole numbers, whose sums are exact in any order."""
    rng = np.random.default_rng(seed)
    priorities = rng.integers(1, 1000, n) * (rng.random(n) < share).astype(float)
    tree = tree_of(priorities)
    for _ in range(rounds):
        numbers = rng.integers(0, n, 50)
        new = rng.integers(0, 1000, 50).astype(float)
        tree.set(th.as_tensor(numbers), th.as_tensor(new))
        priorities[numbers] = 0.0
        np.maximum.at(priorities, numbers, new)
    assert np.array_equal(tree.priorities, priorities) and float(tree.total) == priorities.sum()
    if priorities.sum() == 0:
        return
    mass = np.concatenate([rng.integers(0, int(priorities.sum()), 200), [0, priorities.sum() - 1]]).astype(float)
    assert np.array_equal(tree.find(th.as_tensor(mass)), found_by_twin(priorities, mass))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 300), seed=st.integers(0, 1000), spread=st.sampled_from([0, 8, 16, 30]))
def test_no_number_without_priority_is_found(n, seed, spread):
    """At the edges of rounding, beyond the end, and beside numbers that are many orders of magnitude larger."""
    rng = np.random.default_rng(seed)
    priorities = 10.0 ** rng.uniform(-spread / 2, spread / 2, n) * (rng.random(n) < 0.5)
    priorities[rng.integers(n)] = 1e-12
    tree = tree_of(priorities)
    edges = np.concatenate([np.cumsum(priorities), [0.0, float(tree.total), 1.1 * float(tree.total)]])
    mass = np.concatenate([edges, np.nextafter(edges, np.inf), np.nextafter(edges, 0.0)])
    assert (priorities[tree.find(th.as_tensor(mass))] > 0).all()


def test_sums_do_not_drift():
    """After changes over twelve orders of magnitude each sum is as if it were computed anew."""
    rng = np.random.default_rng(0)
    tree = tree_of(np.ones(20_000))
    for _ in range(300):
        numbers = th.as_tensor(rng.integers(0, 20_000, 256))
        tree.set(numbers, th.as_tensor(10.0 ** rng.uniform(-6, 6, 256)))
    tree.set(th.arange(20_000), th.full((20_000,), 1e-6, dtype=th.float64))
    fresh = tree_of(np.full(20_000, 1e-6))
    assert all(th.equal(one, other) for one, other in zip(tree._levels, fresh._levels, strict=True))


def test_numbers_without_priority_and_of_others_keep_zero():
    tree = tree_of(np.array([0.0, 2.0, 3.0]))
    new = th.tensor([5.0, 7.0, 9.0], dtype=th.float64)
    tree.change(th.tensor([0, 1, 2]), new, th.tensor([True, True, False]))
    assert tree.priorities.tolist() == [0.0, 7.0, 3.0] and float(tree.total) == 10.0


@pytest.mark.parametrize("mistake", ["proportional", "squared", "last block left out"])
def test_draws_are_in_proportion(mistake):
    """The chi-square statistic of 200,000 draws; each mistake is far outside."""
    rng = np.random.default_rng(1)
    n = 300
    priorities = rng.random(n) + 0.1
    expected = {"proportional": priorities, "squared": priorities**2, "last block left out": priorities * (np.arange(n) < 256)}
    shares = expected[mistake] / expected[mistake].sum()
    drawn = tree_of(priorities).find(th.as_tensor(rng.random(200_000) * priorities.sum()))
    counts = np.bincount(drawn, minlength=n)
    statistic = ((counts - 200_000 * shares) ** 2 / np.maximum(200_000 * shares, 1.0)).sum()
    # of 299 degrees of freedom: mean 299, standard deviation 24.5
    assert (statistic < 299 + 5 * 24.5) == (mistake == "proportional"), statistic
