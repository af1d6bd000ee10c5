"""
DSRL's losses, targets and one whole update against a plain NumPy float64 transcription of the published formulas, on fixed
weights, noise, times and a batch with padded and terminal windows; and which weights each loss may touch.
"""

from functools import cached_property
from types import SimpleNamespace

import numpy as np
import pytest
import torch as th
from network_references import (
    as_float64,
    disturb,
    gaussian_np,
    log_density_np,
    q_np,
    two_trajectories,
    velocity_np,
    windows,
)

from sb3_flow import DSRL
from sb3_flow.dsrl import dsrl as module
from sb3_flow.losses import td_loss
from sb3_flow.offline_to_online.gaussian_actor import TanhGaussian

B, F, K, N, ACTION_DIM, HORIZON = 8, 3, 3, 4, 2, 2
A = ACTION_DIM * HORIZON
GAMMA, TAU, RATE, SCALE, RHO, ENTROPY = 0.99, 0.3, 0.1, 1.3, 0.5, -1.5
NETWORKS = ("actor", "critic", "critic_target", "latent_critic", "bc_flow", "bc_flow_target")


def build(net_arch=(8, 8), **given):
    sizes = {"horizon_length": HORIZON, "flow_steps": F, "n_critics": K, "n_candidates": N, "gamma": GAMMA, "tau": TAU}
    own = {"noise_scale": SCALE, "rho": RHO, "ent_coef": "auto_0.4", "target_entropy": ENTROPY, "learning_rate": RATE, **given}
    # with a large eps the first step of Adam depends on the size of the gradient
    networks = {"net_arch": list(net_arch), "optimizer_kwargs": {"eps": 1.0}}
    dataset = two_trajectories(ACTION_DIM)
    model = DSRL("MlpPolicy", None, **sizes, **own, policy_kwargs=networks, offline_dataset=dataset, backend="torch", seed=0)
    return disturb(model)


@pytest.fixture(scope="module")
def model():
    return build()


@pytest.fixture(scope="module")
def batch():
    return windows(B, ACTION_DIM, HORIZON, GAMMA)


@pytest.fixture(scope="module")
def draws():
    rng = np.random.default_rng(3)
    names = {"noise": (B, A), "latent_noise": (B, A), "actor_noise": (B, 1, A), "next_noise": (B, N, A)}
    return {name: rng.normal(size=shape) for name, shape in names.items()} | {"time": rng.uniform(size=(B, 1))}


# --------------------------------------------------------- the transcription


def decode_np(weights, s, z):
    """:return: the flow's action, clipped once, at the end"""
    x = z
    for i in range(F):
        x = x + velocity_np(weights, s, x, np.full((len(s), 1), i / F)) / F
    return np.clip(x, -1, 1)


class Reference:
    """The losses as functions of the weights, in float64."""

    def __init__(self, model, batch, draws):
        self.draws, self.log_alpha = draws, model.log_ent_coef.double().item()
        self.nets = {name: as_float64(getattr(model, name)) for name in NETWORKS}
        self.s, self.a, self.s_next, self.R, self.discounts, self.valid, _ = (part.double().numpy() for part in batch)

    @cached_property
    def target(self):
        chosen = np.empty((B, A))
        mean, log_std = gaussian_np(self.nets["actor"], self.s_next)
        for b in range(B):
            state, best = self.s_next[b : b + 1], -np.inf
            for eps in self.draws["next_noise"][b]:
                w = np.tanh(mean[b : b + 1] + np.exp(log_std[b : b + 1]) * eps)
                a = decode_np(self.nets["bc_flow_target"], state, SCALE * w)
                value = q_np(self.nets["critic"], state, a).sum() / K
                if value > best:
                    best, chosen[b] = value, a[0]
        q = q_np(self.nets["critic_target"], self.s_next, chosen)
        middle = q.sum(axis=0) / K
        deviation = np.sqrt(((q - middle) ** 2).sum(axis=0) / K)
        return (self.R[:, 0] + self.discounts[:, 0] * (middle - RHO * deviation))[:, None]

    @cached_property
    def taught(self):
        """:return: what the critics say about the actions of the latent noise, shape (K, B)"""
        a = decode_np(self.nets["bc_flow_target"], self.s, self.draws["latent_noise"])
        return q_np(self.nets["critic"], self.s, a)

    def critic_loss(self):
        loss = 0.0
        for member in q_np(self.nets["critic"], self.s, self.a):
            for b in range(B):
                loss += self.valid[b, 0] * (member[b] - self.target[b, 0]) ** 2 / (K * B)
        return loss

    def latent_loss(self):
        return ((q_np(self.nets["latent_critic"], self.s, self.draws["latent_noise"]) - self.taught) ** 2).sum() / (K * B)

    def _sample(self):
        mean, log_std = gaussian_np(self.nets["actor"], self.s)
        u = mean + np.exp(log_std) * self.draws["actor_noise"][:, 0]
        return np.tanh(u), log_density_np(mean, log_std, u)

    def log_prob(self):
        return self._sample()[1][:, None]

    def actor_loss(self):
        w, log_prob = self._sample()
        q = q_np(self.nets["latent_critic"], self.s, SCALE * w).sum(axis=0) / K
        return (np.exp(self.log_alpha) * log_prob - q).sum() / B

    def ent_coef_loss(self):
        return -self.log_alpha * (self.log_prob().mean() + ENTROPY)

    def flow_loss(self):
        x_0, t = self.draws["noise"], self.draws["time"]
        u = velocity_np(self.nets["bc_flow"], self.s, (1 - t) * x_0 + t * self.a, t)
        return (self.valid * (u - (self.a - x_0)) ** 2).sum() / (B * A)

    def terms(self):
        names = ("critic_loss", "latent_loss", "log_prob", "actor_loss", "ent_coef_loss", "flow_loss")
        return {"target": self.target} | {name: getattr(self, name)() for name in names}

    def gradient(self, loss, network):
        """:return: of every weight of a network, by central differences"""
        found = {}
        for name, weight in self.nets[network].items():
            gradient = np.empty_like(weight)
            for index in np.ndindex(weight.shape):
                middle, values = weight[index], []
                for step in (1e-5, -1e-5):
                    weight[index] = middle + step
                    values.append(loss())
                weight[index] = middle
                gradient[index] = (values[0] - values[1]) / 2e-5
            found[name] = gradient
        return found


def our_terms(model, batch, draws):
    tensors = {name: th.as_tensor(value, dtype=th.float32) for name, value in draws.items()}
    with th.no_grad():
        target = model.td_target(batch, tensors["next_noise"])
    actor_loss, log_prob = model.actor_loss(batch, tensors["actor_noise"])
    return {
        "target": target,
        "critic_loss": td_loss(model.critic.bind(batch.observations)(batch.actions), target, batch.valid),
        "latent_loss": model.latent_loss(batch, tensors["latent_noise"]),
        "log_prob": log_prob,
        "actor_loss": actor_loss,
        "ent_coef_loss": model.entropy_coefficient.loss(log_prob),
        "flow_loss": model.flow_loss(model.bc_flow, batch, tensors["noise"], tensors["time"]),
    }


def deviations(model, batch, draws, expected):
    """:return: by term the largest difference, over the largest number of the term"""
    given = our_terms(model, batch, draws)
    assert set(given) == set(expected)
    found = {name: np.abs(given[name].detach().numpy() - value) for name, value in expected.items()}
    return {name: float(found[name].max() / np.abs(value).max()) for name, value in expected.items()}


@pytest.fixture(scope="module")
def expected(model, batch, draws):
    return Reference(model, batch, draws).terms()


def test_terms_equal_the_transcription(model, batch, draws, expected):
    found = deviations(model, batch, draws, expected)
    assert max(found.values()) < 1e-5, found


def test_terms_of_the_compiled_networks(model, batch, draws, expected):
    model.policy.set_backend("auto")
    found = deviations(model, batch, draws, expected)
    model.policy.set_backend("torch")
    assert max(found.values()) < 1e-5, found


def test_what_the_cases_tell_apart(model, batch, draws):
    """Some actions lie at the bounds, and critics and targets choose different samples."""
    s, noise = batch.next_observations, th.as_tensor(draws["next_noise"], dtype=th.float32)
    with th.no_grad():
        samples = model.policy.samples(s, noise)
        choices = [critic.bind(s)(samples).mean(dim=0).argmax(dim=1) for critic in (model.critic, model.critic_target)]
    assert 0 < (samples.abs() == 1).float().mean() < 1
    assert not th.equal(*choices) and choices[0].any()


# ------------------------------------------------------------ a whole update


def weights_of(model):
    return {name: value.double().numpy().copy() for name, value in model.policy.state_dict().items()}


def test_the_weights_after_an_update_equal_the_transcriptions(batch):
    """One Adam step on the sum; both averages follow the weights from before it."""
    model = build(net_arch=[6])
    generator = th.Generator().manual_seed(5)
    time = th.rand(B, 1, generator=generator)
    noise, latent_noise, actor_noise = th.randn(3, B, A, generator=generator)
    draws = {"time": time, "noise": noise, "latent_noise": latent_noise, "actor_noise": actor_noise.unsqueeze(1)}
    draws = {name: value.double().numpy() for name, value in draws.items()}
    draws["next_noise"] = th.randn(B, N, A, generator=generator).double().numpy()
    reference, before = Reference(model, batch, draws), weights_of(model)
    expected = reference.terms()
    metrics = model.update(batch, generator.manual_seed(5))
    after = weights_of(model)

    losses = {"critic": "critic_loss", "latent_critic": "latent_loss", "actor": "actor_loss", "bc_flow": "flow_loss"}
    for network, loss in losses.items():
        for name, g in reference.gradient(getattr(reference, loss), network).items():
            name = f"{network}.{name}"
            np.testing.assert_allclose(after[name], before[name] - RATE * g / (np.abs(g) + 1.0), atol=1e-6, err_msg=name)
    slope = -(reference.log_prob().mean() + ENTROPY)
    log_alpha = after["entropy_coefficient.log_ent_coef"]
    np.testing.assert_allclose(log_alpha, reference.log_alpha - RATE * np.sign(slope), atol=1e-6)
    for name, old in before.items():
        if "_target." in name:
            np.testing.assert_allclose(after[name], (1 - TAU) * old + TAU * before[name.replace("_target.", ".")], atol=1e-6)
    for name in (*losses.values(), "ent_coef_loss"):
        assert metrics[name].item() == pytest.approx(expected[name], rel=1e-5), name
    assert metrics["entropy"].item() == pytest.approx(-expected["log_prob"].mean(), rel=1e-5)


# ------------------------------------------------------------- wrong details


def climbing(model, values):
    """:return: in place of the latent critics, of which the actor's loss sees other values; the latent loss does not"""
    bind = model.latent_critic.bind
    return SimpleNamespace(bind=lambda s, frozen=False: values(s, bind(s, frozen)) if frozen else bind(s))


def ways(model, batch):
    """:return: by name of a wrong detail what is set where"""
    policy, sample, matching = model.policy, TanhGaussian.sample, module.flow_matching_loss

    def density(change):
        return lambda pi, z: (sample(pi, z)[0], change(*sample(pi, z)))

    def on_actions(s, _):
        return lambda z: model.critic.bind(s)(policy.flow.act(s, z.unsqueeze(1))[:, 0])

    return {
        "latent critics at noise in [-1, 1]": (model, "noise_scale", 1.0),
        "noise is not scaled": (policy, "noise_scale", 1.0),
        "no deviation": (model, "rho", 0.0),
        "deviation of a sample": (module, "pessimistic_mean", lambda q, rho: q.mean(0) - rho * q.std(0)),
        "live critics in the target": (model, "critic_target", model.critic),
        "the first sample": (policy, "best_of", lambda s, samples: samples[:, 0]),
        "sign of the entropy": (TanhGaussian, "sample", density(lambda w, log_prob: -log_prob)),
        "no correction for tanh": (TanhGaussian, "sample", density(lambda w, p: p + (1 - w.square()).log().sum(-1))),
        "alpha is its logarithm": (model.entropy_coefficient, "forward", lambda: model.log_ent_coef.detach()),
        "target of the entropy": (model.entropy_coefficient, "target_entropy", -ENTROPY),
        "minimum in the actor's loss": (model, "latent_critic", climbing(model, lambda s, q: lambda z: q(z).amin(0, True))),
        "the actor climbs the critics of actions": (model, "latent_critic", climbing(model, on_actions)),
        "steps beyond the end in place of windows": (
            module,
            "flow_matching_loss",
            lambda u, x_0, a, _: matching(u, x_0, a, batch.action_mask),
        ),
    }


SWAPPED = {
    "live flow decodes": ("bc_flow_target", "bc_flow"),
    "ranked by targets": ("critic", "critic_target"),
}
OVERLOOKED = {
    "padding": {"valid": th.ones(B, 1)},
    "terminals": {"discounts": th.full((B, 1), GAMMA**HORIZON)},
}
LATENT = ["latent noise is scaled", "latent noise of pi", "latent critics learn from targets"]
WRONG = [
    *("latent critics at noise in [-1, 1]", "noise is not scaled", "no deviation", "deviation of a sample"),
    *("live critics in the target", "the first sample", "sign of the entropy", "no correction for tanh"),
    *("alpha is its logarithm", "target of the entropy", "minimum in the actor's loss"),
    *("the actor climbs the critics of actions", "steps beyond the end in place of windows"),
    *(*SWAPPED, *OVERLOOKED, *LATENT),
]


@pytest.mark.parametrize("broken", WRONG)
def test_the_comparison_notices_a_wrong_detail(model, batch, draws, expected, broken, monkeypatch):
    if broken in SWAPPED:
        old, new = SWAPPED[broken]
        monkeypatch.setitem(model.policy._modules, old, getattr(model, new))
    elif broken in OVERLOOKED:
        batch = batch._replace(**OVERLOOKED[broken])
    elif broken in LATENT:
        latent_loss = model.latent_loss
        others = {
            "latent noise is scaled": lambda s, z: latent_loss(s, SCALE * z),
            "latent noise of pi": lambda s, z: latent_loss(s, SCALE * model.actor.act(s.observations, z.unsqueeze(1))[:, 0]),
            "latent critics learn from targets": lambda s, z: learn_from_targets(model, monkeypatch, s, z),
        }
        monkeypatch.setattr(model, "latent_loss", others[broken])
    else:
        monkeypatch.setattr(*ways(model, batch)[broken])
    found = deviations(model, batch, draws, expected)
    assert max(found.values()) > 1e-3, found


def learn_from_targets(model, monkeypatch, batch, noise):
    with monkeypatch.context() as patched:
        patched.setattr(model, "critic", model.critic_target)
        return DSRL.latent_loss(model, batch, noise)


# ------------------------------------------------------------- which weights


def touched(model, loss):
    """:return: networks in which a loss leaves a gradient"""
    model.policy.zero_grad()
    loss.backward()
    parts = model.networks.items()
    return [name for name, one in parts if any(p.grad is not None and p.grad.any() for p in one.parameters())]


def test_each_loss_touches_its_network_alone(model, batch, draws):
    """No gradient passes through the flow, nor through the action that it decodes."""
    networks = {
        "critic_loss": "critic",
        "latent_loss": "latent_critic",
        "actor_loss": "actor",
        "ent_coef_loss": "entropy_coefficient",
        "flow_loss": "bc_flow",
    }
    for loss, network in networks.items():
        assert touched(model, our_terms(model, batch, draws)[loss]) == [network]


def test_a_gradient_through_the_flow_would_be_noticed(model, batch, draws, monkeypatch):
    """If the actor climbed the critics of actions the live flow would get a gradient, too."""
    monkeypatch.setitem(model.policy._modules, "bc_flow_target", model.bc_flow)
    monkeypatch.setattr(*ways(model, batch)["the actor climbs the critics of actions"])
    assert set(touched(model, our_terms(model, batch, draws)["actor_loss"])) >= {"actor", "bc_flow"}
