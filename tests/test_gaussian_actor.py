"""The tanh-Gaussian actor and its entropy coefficient against SB3's and against NumPy in float64."""

import copy

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from network_references import as_float64, gaussian_np, log_density_np
from stable_baselines3.common.distributions import SquashedDiagGaussianDistribution
from stable_baselines3.common.torch_layers import FlattenExtractor

from sb3_flow.offline_to_online.gaussian_actor import EntropyCoefficient, GaussianActor

B, N, D, ACTION_DIM, HORIZON, C = 6, 4, 3, 2, 2, 5
A = ACTION_DIM * HORIZON


def build(condition_dim=0, action_dim=ACTION_DIM, horizon_length=HORIZON):
    space = spaces.Box(-np.inf, np.inf, (D,))
    th.manual_seed(0)
    actor = GaussianActor(
        space,
        spaces.Box(-1, 1, (action_dim,)),
        [16, 16],
        FlattenExtractor(space),
        D,
        horizon_length=horizon_length,
        noise_seed=1,
        condition_dim=condition_dim,
    )
    for parameter in actor.parameters():
        parameter.data += 0.3 * th.randn(parameter.shape)
    return actor


@pytest.fixture(scope="module")
def draws():
    generator = th.Generator().manual_seed(2)
    shapes = {"s": (B, D), "z": (B, N, A), "condition": (B, N, C)}
    return {name: th.randn(shape, generator=generator) for name, shape in shapes.items()}


def reference(actor, s, z, condition=None):
    """:return: actions and log-probabilities in float64"""
    weights, n = as_float64(actor), z.shape[1]
    inputs = s.repeat(n, 0) if condition is None else np.concatenate([s.repeat(n, 0), condition.reshape(-1, C)], axis=1)
    mean, log_std = gaussian_np(weights, inputs)
    u = mean + np.exp(log_std) * z.reshape(-1, A)
    return np.tanh(u).reshape(z.shape), log_density_np(mean, log_std, u).reshape(-1, n)


# ------------------------------------------------------------------ the actor


@pytest.mark.parametrize("conditioned", [False, True])
def test_samples_equal_the_transcription(conditioned, draws):
    actor = build(C if conditioned else 0)
    condition = draws["condition"] if conditioned else None
    actions, log_prob = actor.gaussian(draws["s"], condition).sample(draws["z"])
    assert (actions.shape, log_prob.shape) == ((B, N, A), (B, N))
    arrays = [None if part is None else part.double().numpy() for part in (draws["s"], draws["z"], condition)]
    expected = reference(actor, *arrays)
    np.testing.assert_allclose(actions.detach(), expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(log_prob.detach(), expected[1], rtol=1e-5, atol=1e-5)
    th.testing.assert_close(actor.act(draws["s"], draws["z"], condition), actions)
    given = actions.detach().clamp(-0.999, 0.999)
    mean, log_std = (
        part.expand(-1, N, -1).double().flatten(0, 1).detach().numpy() for part in actor.gaussian(draws["s"], condition)
    )
    expected = log_density_np(mean, log_std, np.arctanh(given.double().numpy()).reshape(-1, A))
    np.testing.assert_allclose(
        actor.gaussian(draws["s"], condition).log_prob(given).detach().flatten(), expected, rtol=1e-4, atol=1e-3
    )


def in_float64(actor):
    actor = actor.double()
    actor.extract_features = lambda observation, _: observation  # SB3 makes float32 of every observation
    return actor


def test_samples_equal_sb3(draws):
    actor = in_float64(build())
    s, z = draws["s"].double(), draws["z"].double()
    mean, log_std = (part.expand(-1, N, -1).flatten(0, 1) for part in actor.gaussian(s))
    distribution = SquashedDiagGaussianDistribution(A, epsilon=0.0).proba_distribution(mean, log_std)
    actions, log_prob = actor.gaussian(s).sample(z)
    gaussian = mean + log_std.exp() * z.flatten(0, 1)
    th.testing.assert_close(actions.flatten(0, 1), th.tanh(gaussian))
    expected = distribution.log_prob(th.tanh(gaussian), gaussian)
    th.testing.assert_close(log_prob.flatten(), expected, rtol=1e-9, atol=1e-9)
    th.testing.assert_close(actor.act(s, 0 * z), distribution.mode().view(B, N, A))  # zeros are the mode
    gradients = [th.autograd.grad(loss.sum(), list(actor.parameters()), retain_graph=True) for loss in (log_prob, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        th.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)


def test_the_probabilities_of_all_actions_add_up_to_one():
    actor = in_float64(build(action_dim=1, horizon_length=1))
    z = th.linspace(-7, 7, 4001, dtype=th.double)
    actions, log_prob = actor.gaussian(th.zeros(1, D, dtype=th.double)).sample(z.view(1, -1, 1))
    total = np.trapezoid(log_prob[0].exp().detach(), actions[0, :, 0].detach())
    assert total == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_far_actions_have_finite_probabilities_and_gradients(size, draws):
    actor = build()
    actor.network.layers[-1].bias.data[:A] = size
    actor.network.layers[-1].bias.data[A:] = -100  # clamped to -20
    actions, log_prob = actor.gaussian(draws["s"]).sample(draws["z"])
    assert actions.abs().max() <= 1 and log_prob.isfinite().all()
    log_prob.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in actor.parameters())
    _, log_std = actor.gaussian(draws["s"])
    assert (log_std == -20).all()
    actor.network.layers[-1].bias.data[A:] = 100
    assert (actor.gaussian(draws["s"])[1] == 2).all()


def test_kernels_agree_with_torch(draws):
    actor = build(C)
    s, z, condition = (draws[name].repeat(40, *[1] * (draws[name].dim() - 1)) for name in ("s", "z", "condition"))
    found = []
    for native in (True, False):
        actor.network.native = native
        actor.zero_grad()
        actions, log_prob = actor.gaussian(s, condition).sample(z)
        (actions.sum() + log_prob.sum()).backward()
        found.append([actions, log_prob, *(parameter.grad for parameter in actor.parameters())])
    for ours, theirs in zip(*found, strict=True):
        th.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


def test_the_constructor_is_remembered():
    actor = build(C)
    again = GaussianActor(**actor._get_constructor_parameters())
    assert (again.condition_dim, again.horizon_length, again.noise_seed) == (C, HORIZON, 1)
    again.load_state_dict(actor.state_dict())


def test_keyed_noise_depends_on_the_observation_alone(draws):
    actor = build()
    chunks = [actor.predict_chunk(draws["s"], deterministic=True) for _ in range(2)]
    th.testing.assert_close(chunks[0], chunks[1], rtol=0, atol=0)
    th.testing.assert_close(actor.predict_chunk(draws["s"][2:3], deterministic=True), chunks[0][2:3])


# ----------------------------------------------------- the entropy coefficient


def learned(ent_coef="auto", target_entropy="auto"):
    return EntropyCoefficient(ent_coef, target_entropy, A, lambda _: 1e-2)


@pytest.mark.parametrize(
    ("ent_coef", "alpha", "is_learned"), [("auto", 1.0, True), ("auto_0.1", 0.1, True), (0.2, 0.2, False), ("0.3", 0.3, False)]
)
def test_the_forms_of_ent_coef(ent_coef, alpha, is_learned):
    coefficient = learned(ent_coef)
    assert coefficient().item() == pytest.approx(alpha)
    assert not coefficient().requires_grad
    assert coefficient.is_learned == is_learned == ("optimizer" in vars(coefficient))
    assert bool(list(coefficient.parameters())) == is_learned
    twin = learned("auto_5" if is_learned else 5.0)
    twin.load_state_dict(coefficient.state_dict())
    assert twin().item() == pytest.approx(alpha if is_learned else 5.0)  # a constant is an argument
    with pytest.raises(RuntimeError, match=r"`ent_coef` was (learned|constant) when the model was saved: give"):
        learned(5.0 if is_learned else "auto").load_state_dict(coefficient.state_dict())
    if not is_learned:  # older files have the constant
        twin.load_state_dict({"ent_coef": th.tensor(alpha)})
        assert twin().item() == 5.0
    # as torch does, and SB3's `set_parameters(..., exact_match=False)`
    other = learned(0.7 if is_learned else "auto_0.7")
    other.load_state_dict(coefficient.state_dict(), strict=False)
    assert other().item() == pytest.approx(0.7)


@pytest.mark.parametrize(("given", "entropy"), [("auto", -A), ("auto_0.5", -A / 2), (-3, -3), ("-1.5", -1.5), (0.0, 0.0)])
def test_the_forms_of_target_entropy(given, entropy):
    assert learned(target_entropy=given).target_entropy == entropy


def test_the_loss_is_sb3s(draws):
    coefficient = learned("auto_0.5")
    log_prob = draws["z"][..., 0].clone().requires_grad_()
    loss = coefficient.loss(log_prob)
    expected = -(np.log(0.5) * (log_prob.detach().double().numpy() - A)).mean()
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    loss.backward()
    assert log_prob.grad is None
    assert coefficient.log_ent_coef.grad.item() == pytest.approx(-(log_prob.detach().numpy() - A).mean(), rel=1e-5)
    constant = learned(0.5).loss(log_prob)
    assert constant.item() == 0 and not constant.requires_grad


def test_alpha_rises_where_there_is_too_little_entropy():
    for log_prob, direction in ((A + 1.0, 1), (A - 1.0, -1)):
        coefficient = learned()
        coefficient.loss(th.full((3, 1), log_prob)).backward()
        coefficient.optimizer.step()
        assert np.sign(coefficient().item() - 1) == direction


def test_a_copy_of_the_coefficient_has_its_own_parameter():
    coefficient = learned()
    copied = copy.deepcopy(coefficient)
    copied.log_ent_coef.data += 1
    assert coefficient().item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("ent_coef", "automatic", '`ent_coef` must be "auto", "auto_<number>" or a number, but \'automatic\' was given'),
        ("ent_coef", "auto_x", '`ent_coef` must be "auto"'),
        ("ent_coef", None, '`ent_coef` must be "auto"'),
        ("ent_coef", -0.1, "`ent_coef` must be at least 0, but -0.1"),
        ("ent_coef", "auto_0", "`ent_coef` must be greater than 0 where it is learned, but 'auto_0'"),
        ("ent_coef", float("nan"), "`ent_coef` must be a finite number"),
        ("target_entropy", "low", '`target_entropy` must be "auto"'),
        ("target_entropy", float("inf"), "`target_entropy` must be a finite number"),
    ],
)
def test_wrong_coefficients(name, given, message):
    with pytest.raises(ValueError, match=message):
        learned(**{name: given})
