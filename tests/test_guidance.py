"""Trust-region projection, effective radius, best-of-n, Q-guided beam search and guided Euler steps."""

import math

import numpy as np
import pytest
import torch as th
from flow_map_reference import beam_search_np, radius_np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from network_references import as_float64

from sb3_flow.flow import (
    EnsembleMLP,
    FlowMapNetwork,
    action_gradient,
    aggregate_q,
    beam_search,
    best_of_n,
    effective_radius,
    euler_forward,
    flow_map_sample,
    guided_euler,
    q_guided_projection,
)
from sb3_flow.losses import regression_loss

S, A, E, M, BRANCHES, FOURIER = 3, 4, 5, 3, 2, 16


# -------------------------------------------------------------- projection

numbers = st.floats(-1e3, 1e3, width=32)


@given(arrays(np.float32, (6, 4), elements=numbers), arrays(np.float32, (6, 4), elements=numbers), st.floats(0, 10))
@settings(max_examples=100, deadline=None)
def test_projection_stays_in_the_ball_and_never_lowers_a_linear_q(u, g, eta):
    u, g = th.as_tensor(u).double(), th.as_tensor(g).double()
    change = q_guided_projection(u, g, eta) - u
    assert (change.norm(dim=1) <= eta * (1 + 1e-6) + 1e-9).all()
    assert ((change * g).sum(dim=1) >= -1e-9 * (1 + g.norm(dim=1))).all()


def test_projection_of_a_linear_q():
    c = th.randn(A, dtype=th.float64)
    u, eta = th.randn(E, A, dtype=th.float64), th.rand(E, dtype=th.float64)
    for scale in (0.1, 1.0, 50.0):
        _, g = action_gradient(lambda a, scale=scale: (scale * a @ c)[None], u)
        target = q_guided_projection(u, g, eta)
        th.testing.assert_close(target - u, eta[:, None] * c / c.norm(), rtol=1e-6, atol=1e-6)
        th.testing.assert_close((target - u).norm(dim=1), eta, rtol=1e-6, atol=1e-6)
        # nothing else in the ball is better
        others = th.nn.functional.normalize(th.randn(1000, E, A, dtype=th.float64), dim=-1) * eta[:, None]
        assert ((u + others) @ c <= target @ c + 1e-9).all()


def test_projection_without_a_gradient_is_the_reference():
    u = th.randn(E, A)
    assert th.equal(q_guided_projection(u, th.zeros(E, A), 0.5), u)
    assert th.equal(q_guided_projection(u, th.randn(E, A), 0.0), u)


def test_one_radius_for_all_coordinates_together():
    step = q_guided_projection(th.zeros(1, 4), th.full((1, 4), 7.0), 0.5)
    th.testing.assert_close(step, th.full((1, 4), 0.25))  # not 0.5 each


def test_loss_of_an_actor_that_is_still_its_anchor():
    """FMQ's first online step: the actor is the reference, so only the radius is left of the regression."""
    u, g, eta = th.randn(E, A), th.randn(E, A), th.rand(E)
    mask = (th.rand(E, A) > 0.3).float()
    target = q_guided_projection(u, g, eta)
    assert regression_loss(u, target).item() == pytest.approx(eta.square().mean().item() / A, rel=1e-5)
    unit = g / g.norm(dim=1, keepdim=True)
    expected = (mask * (eta[:, None] * unit).square()).mean()
    th.testing.assert_close(regression_loss(u, target, mask), expected)


# --------------------------------------------------------- effective radius


def test_radius_equals_the_transcription():
    q = 10 * th.randn(2, 64, generator=th.Generator().manual_seed(0))
    q1, q2 = q.double().tolist()
    np.testing.assert_allclose(effective_radius(q, 0.3, 0.5), radius_np(q1, q2, 0.3, 1.0), rtol=1e-5)
    published = effective_radius(q, 0.3, 0.5, numerator="published")
    np.testing.assert_allclose(published, radius_np(q1, q2, 0.3, 0.5), rtol=1e-5)
    assert not np.allclose(published, radius_np(q1, q2, -0.3, 0.5), rtol=1e-2)
    # normalising each sample by itself, as a known port does, gives one constant radius
    assert published.std() > 0.01


def test_radius_of_equal_critics():
    q = th.randn(1, 8).expand(2, -1)
    th.testing.assert_close(effective_radius(q, 0.3, 0.5), th.ones(8))
    th.testing.assert_close(effective_radius(q, 0.3, 0.5, numerator="published"), th.full((8,), 0.5))


@given(arrays(np.float64, (2, 7), elements=st.floats(-100, 100)), st.floats(0, 5), st.floats(0.1, 1000))
@settings(max_examples=100, deadline=None)
def test_radius_is_bounded_and_free_of_scale(q, beta, scale):
    q = th.as_tensor(q)
    radius = effective_radius(q, beta, 0.5, numerator="published")
    assert radius.shape == (7,)
    assert ((radius > 0) & (radius <= 0.5)).all()
    if q.std(dim=0, correction=0).mean() > 1e-3:
        th.testing.assert_close(effective_radius(scale * q, beta, 0.5, numerator="published"), radius, rtol=1e-3, atol=0)


# -------------------------------------------------------- aggregation, best of n


def test_aggregations():
    q = th.tensor([[1.0, 5.0], [3.0, 2.0]])
    assert aggregate_q(q, "first").tolist() == [1.0, 5.0]
    assert aggregate_q(q, "min").tolist() == [1.0, 2.0]
    assert aggregate_q(q, "mean").tolist() == [2.0, 3.5]
    with pytest.raises(ValueError, match="aggregation"):
        aggregate_q(q, "max")


def test_best_of_n_by_the_minimum():
    candidates = th.arange(12.0).reshape(2, 3, 2)
    q = th.tensor([[[9.0, 3.0, 2.0], [1.0, 2.0, 3.0]], [[0.0, 2.0, 9.0], [3.0, 2.5, 2.0]]])
    assert best_of_n(candidates, q).tolist() == [candidates[0, 1].tolist(), candidates[1, 1].tolist()]
    assert best_of_n(candidates, q, "mean").tolist() == [candidates[0, 2].tolist(), candidates[1, 2].tolist()]


def test_action_gradient_leaves_no_trace(critic_net):
    weights = critic_net.weights[0]
    actions = th.randn(E, A, requires_grad=True)
    s = th.randn(E, S)
    with th.no_grad():
        q, g = action_gradient(lambda a: critic_net(th.cat([s, a], -1)).squeeze(-1), actions, "min")
    assert q.shape == (2, E)
    assert not q.requires_grad
    assert not g.requires_grad
    assert weights.grad is None
    assert actions.grad is None


# ------------------------------------------------------- guided Euler steps


def flow(x, t):
    """A velocity that tells points and times apart."""
    return th.sin(3 * x) - 2 * t


def partial_values(x, t):
    """Values of two members, shape ``(2, B, 1)``, whose gradient depends on the time."""
    return th.stack([(x**3).sum(-1, keepdim=True) + t, 5 * (t * x**2).sum(-1, keepdim=True)])


def guided_np(x, steps, weight, at="after", members=np.mean):
    """Transcription in NumPy; ``at`` and ``members`` make wrong variants."""
    d = 1 / steps
    for i in range(steps):
        y = x + d * (np.sin(3 * x) - 2 * i * d)
        place, t = (y, (i + 1) * d) if at == "after" else (x, i * d) if at == "before" else (y, i * d)
        x = y + d * weight * members([3 * place**2, 10 * t * place], axis=0)
    return x


def test_guided_euler_steps_equal_the_transcription():
    x = th.randn(6, 3, generator=th.Generator().manual_seed(0), dtype=th.float64)
    with th.no_grad():
        found = guided_euler(flow, partial_values, x, 4, 0.3).numpy()
    np.testing.assert_allclose(found, guided_np(x.numpy(), 4, 0.3), rtol=1e-6)
    for wrong in ({"at": "before"}, {"at": "early"}, {"members": np.sum}, {"members": np.min}):
        assert np.abs(found - guided_np(x.numpy(), 4, 0.3, **wrong)).max() > 1e-2
    th.testing.assert_close(guided_euler(flow, partial_values, x, 4, 0.0), euler_forward(flow, x, 4))


# -------------------------------------------------------------- beam search


@pytest.fixture(scope="module")
def actor_net():
    th.manual_seed(0)
    net = FlowMapNetwork(S, A, [16, 16], fourier_dim=FOURIER)
    for parameter in net.parameters():
        parameter.data += 0.1 * th.randn_like(parameter)
    return net


@pytest.fixture(scope="module")
def critic_net():
    th.manual_seed(1)
    net = EnsembleMLP(2, S + A, [16, 16])
    for parameter in net.parameters():
        parameter.data += 0.1 * th.randn_like(parameter)
    return net


@pytest.fixture(scope="module")
def features():
    return th.randn(E, S, generator=th.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def noise():
    return th.randn(E, M, A, generator=th.Generator().manual_seed(3))


@pytest.fixture
def counted(actor_net, critic_net, features):
    """Velocity and critic for candidates of shape (E, n, A), counting the rows of every evaluation of the velocity."""
    rows = []
    bound = actor_net.bind(features.unsqueeze(1))

    def velocity(a, r, t):
        rows.append(a.shape[1])
        return bound(a, r, t)

    def critic(a):
        s = features.unsqueeze(1).expand(-1, a.shape[1], -1)
        return critic_net(th.cat([s, a], -1).flatten(0, 1), frozen=True).squeeze(-1).unflatten(1, a.shape[:2])

    return velocity, critic, rows


def source(noise, generator=None):
    """Starting points first, then the noise of branches."""
    points = [noise]

    def draw(n):
        return points.pop() if points else th.randn(len(noise), n, A, generator=generator)

    return draw


def transcribed(actor_net, critic_net, features, noise, iterations, completion, **others):
    generator = th.Generator().manual_seed(4)
    draws = [th.randn(E, M * BRANCHES, A, generator=generator).double().numpy() for _ in range(iterations)]
    nets = as_float64(actor_net), as_float64(critic_net)
    arguments = dict(eta=0.3, rho=1.5) | others
    return beam_search_np(
        *nets,
        features.double().numpy(),
        noise.double().numpy(),
        np.array(draws),
        iterations,
        completion=completion,
        **arguments,
    )


@pytest.mark.parametrize("completion", ["diagonal", "average"])
@pytest.mark.parametrize("iterations", [0, 1, 3])
def test_beam_search_equals_the_transcription(actor_net, critic_net, features, noise, counted, completion, iterations):
    velocity, critic, _ = counted
    generator = th.Generator().manual_seed(4)
    ours = beam_search(
        velocity,
        critic,
        source(noise, generator),
        beam_width=M,
        branches=BRANCHES,
        iterations=iterations,
        completion=completion,
    ).numpy()
    nets = actor_net, critic_net, features, noise
    np.testing.assert_allclose(ours, transcribed(*nets, iterations, completion), rtol=1e-5, atol=1e-5)
    # and not what a mistake would give
    assert not np.allclose(ours, transcribed(*nets, iterations, completion, eta=-0.3), atol=1e-3)
    assert not np.allclose(ours, transcribed(*nets, iterations, completion, guide=lambda q: q[0]), atol=1e-3)
    if iterations:
        other = "average" if completion == "diagonal" else "diagonal"
        assert not np.allclose(ours, transcribed(*nets, iterations, other), atol=1e-3)
        assert not np.allclose(ours, transcribed(*nets, iterations, completion, rho=1 / 1.5), atol=1e-3)


@pytest.mark.parametrize("completion", ["diagonal", "average"])
@pytest.mark.parametrize(("branches", "iterations"), [(4, 1), (2, 3), (4, 0)])
def test_number_of_function_evaluations(counted, noise, completion, branches, iterations):
    velocity, critic, rows = counted
    arguments = dict(branches=branches, iterations=iterations, completion=completion)
    actions = beam_search(velocity, critic, source(noise), beam_width=M, **arguments)
    assert actions.shape == (E, A)
    assert (actions.abs() <= 1).all()
    assert sum(rows) == M * (1 + iterations * branches)
    assert len(rows) == 1 + iterations  # all branches of all observations at once


def test_without_iterations_and_radius_it_is_best_of_m(counted, noise):
    velocity, critic, _ = counted
    samples = flow_map_sample(velocity, noise).clamp(-1, 1)
    expected = best_of_n(samples, critic(samples))
    # to rounding: calls of few rows are torch's, others the kernels'
    found = beam_search(velocity, critic, source(noise), beam_width=M, iterations=0, eta=0.0)
    th.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert (beam_search(velocity, critic, source(noise), beam_width=M, iterations=0, eta=0.3) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("completion", ["diagonal", "average"])
def test_without_noise_branches_equal_their_parents(counted, noise, completion):
    velocity, critic, _ = counted
    samples = flow_map_sample(velocity, noise).clamp(-1, 1)
    still = beam_search(
        velocity, critic, source(noise), beam_width=M, branches=2, eta=0.0, rho=math.inf, completion=completion
    )
    assert ((still[:, None] - samples).norm(dim=-1).amin(dim=1) <= 1e-6).all()
    moved = beam_search(
        velocity, critic, source(noise), beam_width=M, branches=2, eta=0.1, rho=math.inf, completion=completion
    )
    distances = (moved[:, None] - samples).norm(dim=-1).amin(dim=1)
    assert (distances <= 0.1 + 1e-6).all()
    assert (distances > 1e-3).all()


def test_signal_to_noise_ratio_sets_the_time():
    times = []

    def velocity(a, r, t):
        times.append((r.unique().item(), t.unique().item()))
        return th.zeros_like(a)

    def critic(a):
        return a.sum(-1)[None]

    for completion in ("diagonal", "average"):
        beam_search(velocity, critic, source(th.zeros(2, 2, A)), beam_width=2, rho=1.5, completion=completion)
    np.testing.assert_allclose(times, [(0, 1), (0.6, 0.6), (0, 1), (0.6, 1)], rtol=1e-6)


def test_more_search_finds_better_actions(counted, noise):
    velocity, critic, _ = counted

    def score(**arguments):
        actions = beam_search(velocity, critic, source(noise, th.Generator().manual_seed(0)), beam_width=M, **arguments)
        return critic(actions.unsqueeze(1)).amin(dim=0).mean().item()

    plain = score(iterations=0, eta=0.0)
    assert score(iterations=0) > plain
    assert score(iterations=2) > plain


def test_own_stream_of_noise(counted, noise):
    velocity, critic, _ = counted
    before = th.random.get_rng_state()
    first, second, other = (
        beam_search(velocity, critic, source(noise, th.Generator().manual_seed(seed)), beam_width=M) for seed in (0, 0, 1)
    )
    assert th.equal(first, second)
    assert not th.equal(first, other)
    assert th.equal(before, th.random.get_rng_state())


def test_unknown_options_are_refused(counted, noise):
    velocity, critic, _ = counted
    with pytest.raises(ValueError, match="completion"):
        beam_search(velocity, critic, source(noise), beam_width=M, completion="euler")
    with pytest.raises(ValueError, match="numerator"):
        effective_radius(th.zeros(2, 3), 0.3, 0.5, numerator="eta")
