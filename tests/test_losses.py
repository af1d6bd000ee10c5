"""Losses against values computed by hand."""

import pytest
import torch as th

from sb3_flow.losses import expectile_loss, flow_matching_loss, pessimistic_mean


@pytest.mark.parametrize(("kappa", "above", "below"), [(0.5, 2.0, 2.0), (0.7, 2.8, 1.2), (0.9, 3.6, 0.4)])
def test_expectile_loss(kappa, above, below):
    # kappa weighs targets above the value; the other orientation is a known mistake of ports
    loss = expectile_loss(th.tensor([2.0, -2.0, 0.0]), kappa)
    assert loss.tolist() == pytest.approx([above, below, 0.0])


def test_pessimistic_mean_uses_the_population_deviation():
    values = th.tensor([1.0, 2.0, 3.0, 6.0], dtype=th.float64).reshape(4, 1, 1)
    assert pessimistic_mean(values, 0.5).item() == pytest.approx(2.0645857, abs=1e-7)
    assert pessimistic_mean(values, 0.0).item() == pytest.approx(3.0)


def test_flow_matching_loss_masks_components_but_keeps_the_divisor():
    velocity = th.tensor([[1.0, 2.0], [3.0, 4.0]])
    noise, actions = th.zeros(2, 2), th.tensor([[1.0, 1.0], [1.0, 1.0]])
    assert flow_matching_loss(velocity, noise, actions).item() == pytest.approx((0 + 1 + 4 + 9) / 4)
    mask = th.tensor([[1.0, 1.0], [1.0, 0.0]])
    assert flow_matching_loss(velocity, noise, actions, mask).item() == pytest.approx((0 + 1 + 4) / 4)


def test_flow_matching_recovers_a_gaussian_in_its_mean():
    # the minimiser at (x_t, t) is E[a - x_0 | x_t]; at t = 0 that is mean(a) - x_0
    generator = th.Generator().manual_seed(0)
    noise, actions = th.randn(100_000, 1, generator=generator), 2 + th.randn(100_000, 1, generator=generator)
    best = flow_matching_loss(2 - noise, noise, actions)
    worse = flow_matching_loss(2.2 - noise, noise, actions)
    assert best.item() == pytest.approx(1.0, abs=0.02)
    assert worse > best
