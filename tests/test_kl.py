"""Exact divergences against samples, and what the estimates of samples are worth as losses."""

import pytest
import torch as th
from stable_baselines3.common import distributions as sb3
from torch.distributions import (
    Bernoulli,
    Categorical,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
)

from sb3_flow.losses import exact_kl, kl_k1, kl_k2, kl_k3

B, A, SAMPLES = 3, 2, 200_000


@pytest.fixture(autouse=True)
def seed():
    th.manual_seed(0)


def normals(shift=0.0):
    return Normal(th.randn(B, A).double() + shift, th.rand(B, A).double() + 0.5)


def categorical(n=4):
    return Categorical(logits=th.randn(B, n).double())


def squashed():
    return TransformedDistribution(normals(), [TanhTransform(cache_size=1)])


PAIRS = {
    "Categorical": categorical,
    "Bernoulli": lambda: Bernoulli(logits=th.randn(B, A).double()),
    "Normal": normals,
    "Independent": lambda: Independent(normals(), 1),
    "squashed": squashed,
    "MultiCategorical": lambda: [categorical(2), categorical(3), categorical(5)],
}


def sampled_kl(p, q):
    """Mean of log p - log q over samples of p, and its standard error; per state."""
    if isinstance(p, list):
        parts = [sampled_kl(*pair) for pair in zip(p, q, strict=True)]
        return sum(mean for mean, _ in parts), sum(error for _, error in parts)
    x = p.sample((SAMPLES,))
    difference = p.log_prob(x) - q.log_prob(x)
    difference = difference.reshape(SAMPLES, B, -1).sum(-1)
    return difference.mean(0), difference.std(0) / SAMPLES**0.5


@pytest.mark.parametrize("name", PAIRS)
def test_exact_kl_against_samples(name):
    p, q = PAIRS[name](), PAIRS[name]()
    kl = exact_kl(p, q)
    mean, error = sampled_kl(p, q)
    assert kl.shape == (B,) and kl.dtype == th.float64
    assert ((kl - mean).abs() < 5 * error).all()
    assert (kl > 0.01).all() and (kl - exact_kl(q, p)).abs().max() > 0.01
    th.testing.assert_close(exact_kl(p, p), th.zeros(B).double())


def test_exact_kl_of_gaussians_by_hand():
    p, q = Normal(th.tensor([[1.0, 0.0]]), th.tensor([[1.0, 2.0]])), Normal(th.zeros(1, 2), th.ones(1, 2))
    assert exact_kl(p, q).item() == pytest.approx(0.5 + (0.5 * 4 - 0.5 - th.tensor(2.0).log().item()))


SB3_DISTRIBUTIONS = {
    "Categorical": lambda: sb3.CategoricalDistribution(4).proba_distribution(th.randn(B, 4)),
    "MultiCategorical": lambda: sb3.MultiCategoricalDistribution([2, 3]).proba_distribution(th.randn(B, 5)),
    "Bernoulli": lambda: sb3.BernoulliDistribution(A).proba_distribution(th.randn(B, A)),
    "DiagGaussian": lambda: sb3.DiagGaussianDistribution(A).proba_distribution(th.randn(B, A), th.randn(A)),
    "Squashed": lambda: sb3.SquashedDiagGaussianDistribution(A).proba_distribution(th.randn(B, A), th.randn(A)),
}


@pytest.mark.parametrize("name", SB3_DISTRIBUTIONS)
def test_distributions_of_sb3(name):
    p, q = SB3_DISTRIBUTIONS[name](), SB3_DISTRIBUTIONS[name]()
    expected = sb3.kl_divergence(p, q)
    th.testing.assert_close(exact_kl(p.distribution, q.distribution), expected.reshape(B, -1).sum(1))


@pytest.mark.parametrize("p, q", [([0.0, 0.0], [0.0, -300.0]), ([0.0, -300.0], [0.0, 0.0]), ([0.0, -300.0], [-300.0, 0.0])])
def test_probabilities_that_underflow(p, q):
    # in float32 exp(-300) is zero
    p, q = th.tensor([p], requires_grad=True), th.tensor([q], requires_grad=True)
    expected = exact_kl(Categorical(logits=p.detach().double()), Categorical(logits=q.detach().double()))
    kl = exact_kl(Categorical(logits=p), Categorical(logits=q))
    th.testing.assert_close(kl.double(), expected)
    assert all(x.isfinite().all() for x in th.autograd.grad(kl.sum(), (p, q)))
    # the same two policies as coins
    p, q = p[:, 1:] - p[:, :1], q[:, 1:] - q[:, :1]
    kl = exact_kl(Bernoulli(logits=p), Bernoulli(logits=q))
    th.testing.assert_close(kl.double(), expected)
    assert all(x.isfinite().all() for x in th.autograd.grad(kl.sum(), (p, q)))


def test_forbidden_actions():
    p = th.tensor([[1.0, -th.inf, 0.0]], requires_grad=True)
    q = th.tensor([[0.0, -th.inf, 1.0]])
    kl = exact_kl(Categorical(logits=p), Categorical(logits=q))
    th.testing.assert_close(kl, exact_kl(Categorical(logits=p[:, ::2]), Categorical(logits=q[:, ::2])))
    assert th.autograd.grad(kl.sum(), p)[0].isfinite().all()
    assert exact_kl(Categorical(logits=th.zeros(1, 3)), Categorical(logits=q)).item() == th.inf


def test_pairs_that_do_not_fit():
    with pytest.raises(ValueError, match="sequences"):
        exact_kl([categorical()], categorical())
    with pytest.raises(ValueError, match="zip"):
        exact_kl([categorical()], [categorical(), categorical()])
    with pytest.raises(NotImplementedError):
        exact_kl(categorical(), normals())


# ------------------------------------------- estimates of samples, enumerated

NEW, OLD = th.tensor([-0.1, -0.2, -0.4]), th.tensor([-0.3, -0.1, -0.2])


def test_published_values():
    x = (NEW - OLD).double()
    assert kl_k1(-x).mean().item() == pytest.approx(0.0333333, abs=1e-6)
    assert kl_k1(x).mean().item() == pytest.approx(-0.0333333, abs=1e-6)
    assert kl_k2(x).mean().item() == pytest.approx(0.015, abs=1e-6)
    assert kl_k3(x).mean().item() == pytest.approx(0.01510148, abs=1e-6)
    assert kl_k3(-x).mean().item() == pytest.approx(0.01499031, abs=1e-6)


@pytest.fixture
def logits():
    return th.randn(3, 5).double()


def enumerate_actions(logits, estimate, behaviour=None, weight_has_gradient=False):
    """Expected estimate over all actions of pi (or of the behaviour policy, weighted), and its gradient "as a loss":
    the actions are given, the probabilities with which they come have no gradient."""
    pi, ref = logits[0].clone().requires_grad_(), logits[1].log_softmax(-1)
    log_pi = pi.log_softmax(-1)
    if behaviour is None:
        frequency, weight = log_pi.detach().exp(), None
    else:
        frequency = behaviour.softmax(-1)
        weight = log_pi.exp() / frequency
        weight = weight if weight_has_gradient else weight.detach()
    loss = (frequency * estimate(log_pi - ref, weight)).sum()
    return loss.detach(), th.autograd.grad(loss, pi)[0]


def kl_gradient(logits, p, q):
    """KL(p || q) of two rows of logits, and its gradient with respect to the first row."""
    pi = logits[0].clone().requires_grad_()
    rows = [pi, logits[1]]
    kl = exact_kl(Categorical(logits=rows[p]), Categorical(logits=rows[q]))
    return kl.detach(), th.autograd.grad(kl, pi)[0]


@pytest.mark.parametrize("off_policy", [False, True])
def test_estimates_as_losses(logits, off_policy):
    behaviour = logits[2] if off_policy else None
    forward, forward_gradient = kl_gradient(logits, 0, 1)
    _, other_gradient = kl_gradient(logits, 1, 0)

    value, gradient = enumerate_actions(logits, kl_k1, behaviour)
    th.testing.assert_close(value, forward)
    th.testing.assert_close(gradient, th.zeros(5).double())

    value, gradient = enumerate_actions(logits, kl_k2, behaviour)
    th.testing.assert_close(gradient, forward_gradient)
    assert abs(value - forward) > 1e-3

    value, gradient = enumerate_actions(logits, kl_k3, behaviour)
    th.testing.assert_close(value, forward)
    th.testing.assert_close(gradient, other_gradient)
    assert (other_gradient - forward_gradient).abs().max() > 1e-2


@pytest.mark.parametrize("estimate", [kl_k1, kl_k3])
def test_weights_with_gradient_repair_unbiased_estimates(logits, estimate):
    _, gradient = enumerate_actions(logits, estimate, logits[2], weight_has_gradient=True)
    th.testing.assert_close(gradient, kl_gradient(logits, 0, 1)[1])


def test_k3_is_the_kl_that_sb3_logs():
    log_ratio = NEW - OLD
    expected = th.mean((th.exp(log_ratio) - 1) - log_ratio)
    th.testing.assert_close(kl_k3(OLD - NEW).mean(), expected)


@pytest.mark.parametrize("dtype", [th.float32, th.float64])
def test_k3_is_never_negative_and_does_not_overflow(dtype):
    x = th.cat((th.linspace(-1e-3, 1e-3, 1001, dtype=dtype), th.tensor([-1e4, -100.0, 1e4], dtype=dtype))).requires_grad_()
    k3 = kl_k3(x)
    assert (k3 >= 0).all() and k3.isfinite().all()
    assert th.autograd.grad(k3.sum(), x)[0].isfinite().all()
    assert kl_k3(th.tensor([th.nan])).isnan().all()
