"""Flow integration, networks and time sampling; golden values from closed forms."""

import numpy as np
import pytest
import torch as th

from sb3_flow.flow import EnsembleMLP, VelocityNetwork, euler_forward, euler_reverse, sample_depths

ONE = th.ones(1, 1, dtype=th.float64)


def depth(value):
    return th.full((1, 1), value, dtype=th.float64)


@pytest.mark.parametrize(("d", "x", "t"), [(1.0, 0.45, 0.0), (0.35, 0.705125, 0.65), (0.0, 1.0, 1.0)])
def test_reverse_of_velocity_t(d, x, t):
    reversed_x, reversed_t = euler_reverse(lambda x, t: t, ONE, depth(d), steps=10)
    assert reversed_x.item() == pytest.approx(x, abs=1e-12)
    assert reversed_t.item() == pytest.approx(t, abs=1e-12)


def test_forward_of_velocity_t():
    assert euler_forward(lambda x, t: t, 0 * ONE, steps=10).item() == pytest.approx(0.45, abs=1e-6)


@pytest.mark.parametrize(("c", "backward", "forward"), [(0.5, 0.5987369, 1.6288946), (1.0, 0.3486784, 2.5937425)])
def test_linear_velocity(c, backward, forward):
    assert euler_reverse(lambda x, t: c * x, ONE, depth(1.0), steps=10)[0].item() == pytest.approx(backward, abs=1e-7)
    assert euler_forward(lambda x, t: c * x, ONE, steps=10).item() == pytest.approx(forward, abs=1e-7)


def test_reverse_has_one_depth_per_sample():
    x = th.ones(3, 2, dtype=th.float64)
    d = th.tensor([[0.0], [0.35], [1.0]], dtype=th.float64)
    result, t = euler_reverse(lambda x, t: t.expand_as(x), x, d, steps=10)
    np.testing.assert_allclose(result[:, 0], [1.0, 0.705125, 0.45], atol=1e-12)
    np.testing.assert_allclose(t[:, 0], [1.0, 0.65, 0.0], atol=1e-12)


@pytest.mark.parametrize("batch_size", [256, 7, 1])
def test_depths_half_continuous_half_on_the_grid(batch_size):
    depths = sample_depths(batch_size, 10, th.Generator().manual_seed(0), th.device("cpu"))
    assert depths.shape == (batch_size, 1)
    assert ((depths >= 0) & (depths <= 1)).all()
    on_grid = th.isclose(depths * 10, (depths * 10).round(), atol=1e-6)
    assert on_grid.sum().item() == batch_size // 2
    # in every part of the batch: its first rows may be offline, its last ones online
    assert abs(on_grid[: batch_size // 2].sum().item() - batch_size // 4) <= 1


def test_depths_reach_both_ends_of_the_grid():
    depths = sample_depths(20_000, 10, th.Generator().manual_seed(0), th.device("cpu"))
    for end in (0.0, 1.0):
        # probability 1 / 22 each
        assert (depths == end).float().mean().item() == pytest.approx(1 / 22, abs=0.005)
    assert depths.mean().item() == pytest.approx(0.5, abs=0.01)


def test_bound_velocity_equals_network_on_concatenated_input():
    network = VelocityNetwork(features_dim=5, action_dim=3, net_arch=[8, 8])
    s, x, t = th.randn(4, 5), th.randn(4, 3), th.rand(4, 1)
    hidden = th.cat([s, x, t], dim=1)
    for layer in network.layers[:-1]:
        hidden = th.nn.functional.gelu(layer(hidden), approximate="tanh")
    th.testing.assert_close(network(s, x, t), network.layers[-1](hidden))


def test_ensemble_equals_its_members_one_by_one():
    ensemble = EnsembleMLP(n_members=3, input_dim=4, net_arch=[8, 6])
    for parameter in [*ensemble.scales, *ensemble.shifts, *ensemble.biases]:
        parameter.data.normal_()
    inputs = th.randn(5, 4)
    outputs = ensemble(inputs)
    assert outputs.shape == (3, 5, 1)
    for k in range(3):
        hidden = inputs
        for layer in range(2):
            hidden = hidden @ ensemble.weights[layer][k] + ensemble.biases[layer][k]
            hidden = th.nn.functional.gelu(hidden, approximate="tanh")
            scale, shift = ensemble.scales[layer][k, 0], ensemble.shifts[layer][k, 0]
            hidden = th.nn.functional.layer_norm(hidden, hidden.shape[-1:], scale, shift, eps=1e-6)
        th.testing.assert_close(outputs[k], hidden @ ensemble.weights[-1][k] + ensemble.biases[-1][k])


def test_ensemble_members_differ_and_are_glorot_uniform():
    ensemble = EnsembleMLP(n_members=4, input_dim=100, net_arch=[200])
    first = ensemble.weights[0]
    assert not th.allclose(first[0], first[1])
    bound = (6 / 300) ** 0.5
    assert first.abs().max() <= bound
    assert first.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert not ensemble.biases[0].any()


def test_frozen_ensemble_passes_gradients_to_its_input_alone():
    ensemble = EnsembleMLP(n_members=2, input_dim=3, net_arch=[8])
    inputs = th.randn(4, 3, requires_grad=True)
    ensemble(inputs, frozen=True).sum().backward()
    assert inputs.grad is not None
    assert inputs.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in ensemble.parameters())
    th.testing.assert_close(ensemble(inputs, frozen=True), ensemble(inputs))
