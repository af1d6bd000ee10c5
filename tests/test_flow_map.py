"""Flow maps: network, jumps, sampling, derivatives, time curriculum."""

import math

import numpy as np
import pytest
import torch as th
from flow_map_reference import (
    ExactGaussian,
    average_velocity_jvp_np,
    average_velocity_np,
    sample_r_t_np,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from network_references import as_float64

from sb3_flow.flow import FlowMapNetwork, TanhGELU, flow_map_jvp, flow_map_sample, jump, sample_r_t

S, A, B = 3, 4, 6


def network(fourier_dim=64, activation_fn=TanhGELU, seed=0):
    th.manual_seed(seed)
    net = FlowMapNetwork(S, A, [16, 16], activation_fn, fourier_dim=fourier_dim)
    for parameter in net.parameters():
        # biases must matter
        parameter.data += 0.1 * th.randn_like(parameter)
    return net


def points(dtype=th.float32):
    generator = th.Generator().manual_seed(1)
    s, a = th.randn(B, S, generator=generator, dtype=dtype), th.randn(B, A, generator=generator, dtype=dtype)
    r, t = th.rand(2, B, 1, generator=generator, dtype=dtype).sort(dim=0).values
    return s, a, r, t


# --------------------------------------------------------------- the network


@pytest.mark.parametrize("fourier_dim", [64, 0])
@pytest.mark.parametrize("dtype", [th.float32, th.float64])
@pytest.mark.parametrize("grad", [True, False])
def test_network_equals_the_transcription(fourier_dim, dtype, grad):
    net = network(fourier_dim).to(dtype)
    s, a, r, t = points(dtype)
    with th.set_grad_enabled(grad):
        u = net(s, a, r, t)
    expected = average_velocity_np(as_float64(net), *(x.double().numpy() for x in (s, a, r, t)), fourier_dim)
    np.testing.assert_allclose(u.detach().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_embedding_of_the_reference():
    net = network(64)
    r, t = th.tensor([[0.0]]), th.tensor([[1.0]])
    e = net.embed(r, t)[0]
    assert e.shape == (128,)
    np.testing.assert_allclose(e[:64], [1.0] * 32 + [0.0] * 32)
    # frequencies from 1 down to 1e-4, cosines first
    np.testing.assert_allclose(e[[64, 95, 96, 127]], [math.cos(1), math.cos(1e-4), math.sin(1), math.sin(1e-4)], rtol=1e-5)
    th.testing.assert_close(network(0).embed(r, t), th.tensor([[0.0, 1.0]]))


def test_initialisation():
    net = FlowMapNetwork(S, A, [200, 100])
    assert [layer.in_features for layer in net.layers] == [S + A + 128, 200, 100]
    for layer in net.layers:
        bound = (6 / (layer.in_features + layer.out_features)) ** 0.5
        assert layer.weight.abs().max() <= bound
        assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
        assert not layer.bias.any()
    assert set(net.state_dict()) == {f"layers.{i}.{name}" for i in range(3) for name in ("weight", "bias")}


def test_odd_embeddings_are_refused():
    with pytest.raises(ValueError, match="even"):
        FlowMapNetwork(S, A, [8], fourier_dim=3)


@pytest.mark.parametrize("activation_fn", [TanhGELU, th.nn.Tanh])
@pytest.mark.parametrize("grad", [True, False])
def test_candidates_broadcast_against_features(activation_fn, grad):
    net = network(activation_fn=activation_fn)
    s, _, r, t = points()
    a = th.randn(B, 5, A)
    with th.set_grad_enabled(grad):
        together = net.bind(s.unsqueeze(1))(a, r.unsqueeze(1).expand(-1, 5, -1), t.unsqueeze(1).expand(-1, 5, -1))
        repeated = net.bind(s.repeat_interleave(5, 0))(a.flatten(0, 1), r.repeat_interleave(5, 0), t.repeat_interleave(5, 0))
    th.testing.assert_close(together.flatten(0, 1), repeated)


@pytest.mark.parametrize("activation_fn", [TanhGELU, th.nn.Tanh])
def test_a_bound_network_serves_with_and_without_gradients(activation_fn):
    """A teacher without gradients is usually evaluated first: it must leave no constants behind for the student."""
    net = network(activation_fn=activation_fn)
    s, a, r, t = points()
    s.requires_grad_()
    velocity = net.bind(s)
    with th.no_grad():
        without = velocity(a, r, t)
        th.func.jvp(velocity, (a, r, t), (a, r, t))
    u = velocity(a, r, t)
    th.testing.assert_close(u, without)
    gradients = th.autograd.grad(u.square().sum(), [s, *net.parameters()])
    s2 = s.detach().clone().requires_grad_()
    again = th.autograd.grad(net(s2, a, r, t).square().sum(), [s2, *net.parameters()])
    for given_gradient, expected in zip(gradients, again, strict=True):
        th.testing.assert_close(given_gradient, expected)
    assert gradients[1][:, :S].abs().min() > 0


# ------------------------------------------------------------------- jumps


def test_jump_is_linear_in_the_average_velocity():
    _, a, r, t = points()
    u = th.randn(B, A)
    th.testing.assert_close(jump(lambda *_: u, a, r, t), a + (t - r) * u)
    th.testing.assert_close(jump(lambda *_: u, a, t, t), a)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_any_number_of_exact_jumps_carries_noise_to_data(steps):
    exact = ExactGaussian(mean=0.4, std=0.3)
    noise = th.randn(50, A, dtype=th.float64)
    th.testing.assert_close(flow_map_sample(exact.u, noise, steps), 0.4 + 0.3 * noise)


def test_sampling_visits_consecutive_intervals():
    seen = []

    def velocity(a, r, t):
        seen.append((r[0, 0].item(), t[0, 0].item()))
        assert r.shape == t.shape == (2, 1)
        return th.ones_like(a)

    np.testing.assert_allclose(flow_map_sample(velocity, th.zeros(2, A), 4), 1.0)
    np.testing.assert_allclose(seen, [(0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1)])


# -------------------------------------------------------------- derivatives


@pytest.mark.parametrize("fourier_dim", [64, 0])
def test_jvp_equals_double_backward_and_differences(fourier_dim):
    net = network(fourier_dim).double()
    s, a, r, t = points(th.float64)
    velocity = net.bind(s)
    directions = tuple(th.randn_like(x) for x in (a, r, t))
    u, derivative = flow_map_jvp(velocity, a, r, t, directions)
    th.testing.assert_close(u, velocity(a, r, t))

    _, double_backward = th.autograd.functional.jvp(velocity, (a, r, t), directions)
    th.testing.assert_close(derivative, double_backward, rtol=1e-10, atol=1e-12)

    h = 1e-6
    ahead, behind = (velocity(*(x + h * sign * d for x, d in zip((a, r, t), directions, strict=True))) for sign in (1, -1))
    th.testing.assert_close(derivative, (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-8)

    arrays = [x.numpy() for x in (s, a, r, t, *directions)]
    np.testing.assert_allclose(
        derivative.detach(), average_velocity_jvp_np(as_float64(net), *arrays, fourier_dim), rtol=1e-6, atol=1e-8
    )


def test_jvp_in_single_precision_where_differences_fail():
    """Forward differences with step 1e-4, as a port of the method takes them, lose three digits in float32."""
    net = network()
    s, a, r, t = points()
    directions = (th.randn_like(a), th.ones_like(r), th.zeros_like(t))
    exact = average_velocity_jvp_np(as_float64(net), *(x.double().numpy() for x in (s, a, r, t, *directions)), 64)
    velocity = net.bind(s)
    with th.no_grad():
        ours = flow_map_jvp(velocity, a, r, t, directions)[1].numpy()
        h = 1e-4
        differences = (velocity(a + h * directions[0], r + h, t) - velocity(a, r, t)).numpy() / h
    scale = np.abs(exact).max()
    assert np.abs(ours - exact).max() < 2e-6 * scale
    assert np.abs(differences - exact).max() > 1e-4 * scale


# -------------------------------------------------------------- flow times


@pytest.mark.parametrize("step", [1, 5_000, 20_000, 50_000, 10**6])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_times_equal_the_transcription(step, as_tensor):
    r, t = sample_r_t(64, th.tensor(step) if as_tensor else step, 5_000, 50_000, th.Generator().manual_seed(0))
    uniforms = th.rand(2, 64, 1, generator=th.Generator().manual_seed(0)).double().numpy()
    expected_r, expected_t = sample_r_t_np(*uniforms, step, 5_000, 50_000)
    np.testing.assert_allclose(r, expected_r, atol=1e-6)
    np.testing.assert_allclose(t, expected_t, atol=1e-6)


def test_times_at_the_end_of_the_curriculum():
    r, t = sample_r_t(200_000, 50_000, 5_000, 50_000, th.Generator().manual_seed(0))
    assert (t - r).mean().item() == pytest.approx(1 / 3, abs=0.003)
    assert (t - r > 0.9).float().mean().item() == pytest.approx(0.01, abs=0.001)
    assert r.mean().item() == pytest.approx(1 / 3, abs=0.003)


def test_times_are_equal_during_warmup():
    r, t = sample_r_t(1000, 4_999, 5_000, 50_000, th.Generator().manual_seed(0))
    assert th.equal(r, t)
    assert r.std().item() == pytest.approx((1 / 24) ** 0.5, abs=0.01)  # mean of two uniforms


@given(st.integers(0, 200), st.integers(0, 100), st.integers(0, 100), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_times_are_ordered_and_in_the_unit_interval(step, warmup, anneal, seed):
    r, t = sample_r_t(257, step, warmup, warmup + anneal, th.Generator().manual_seed(seed))
    assert r.shape == t.shape == (257, 1)
    assert ((r >= 0) & (r <= t) & (t <= 1)).all()


def test_draws_are_uniform_and_normal():
    """The uniforms of a known port are never in [0, 1), and its normals therefore NaN."""
    generator = th.Generator().manual_seed(0)
    r, t = sample_r_t(100_000, 10, 0, 10, generator)
    draws = th.cat([r, t])  # sorted pairs: together the uniforms themselves
    assert ((draws >= 0) & (draws < 1)).all()
    counts = th.histc(draws, bins=10, min=0, max=1) / len(draws)
    assert (counts - 0.1).abs().max() < 0.005
    normals = th.randn(100_000, generator=generator)
    assert normals.isfinite().all()
    assert abs(normals.mean()) < 0.02
    assert abs(normals.std() - 1) < 0.02
