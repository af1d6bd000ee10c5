"""
RLPD's losses, targets and one whole update against a plain NumPy float64 transcription of the published formulas, on fixed
weights, noise and a batch with padded and terminal windows; and SB3's SAC, which RLPD is with two critics and rho = 1.
"""

from functools import cached_property
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from network_references import as_float64, disturb, gaussian_np, log_density_np, q_np, two_trajectories, windows
from stable_baselines3 import SAC
from stable_baselines3.common.distributions import SquashedDiagGaussianDistribution
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import ReplayBufferSamples

from sb3_flow import RLPD
from sb3_flow.losses import td_loss
from sb3_flow.offline_to_online.gaussian_actor import TanhGaussian
from sb3_flow.rlpd import rlpd as module

B, K, M, ACTION_DIM, HORIZON = 8, 4, 2, 2, 2
A = ACTION_DIM * HORIZON
GAMMA, TAU, RATE, TARGET_ENTROPY = 0.99, 0.3, 0.1, -1.5
ADAM = {"eps": 1.0}  # the step depends on the size of the gradient


def build(net_arch=(8, 8), **given):
    networks = {"net_arch": list(net_arch), "optimizer_kwargs": ADAM}
    sizes = {"horizon_length": HORIZON, "n_critics": K, "n_min_critics": M, "gamma": GAMMA, "tau": TAU, "learning_rate": RATE}
    arguments = {
        **sizes,
        "target_entropy": TARGET_ENTROPY,
        "ent_coef": "auto_0.4",
        "bc_alpha": 0.3,
        "backend": "torch",
        **given,
    }
    dataset = two_trajectories(ACTION_DIM)
    return disturb(RLPD("MlpPolicy", None, **arguments, policy_kwargs=networks, offline_dataset=dataset, seed=0))


@pytest.fixture
def model():
    return build()


@pytest.fixture(scope="module")
def batch():
    return windows(B, ACTION_DIM, HORIZON, GAMMA)


@pytest.fixture(scope="module")
def draws():
    rng = np.random.default_rng(3)
    return {"noise": rng.normal(size=(B, 1, A)), "next_noise": rng.normal(size=(B, 1, A)), "members": np.array([2, 0])}


# --------------------------------------------------------- the transcription


def sample_np(weights, s, z):
    mean, log_std = gaussian_np(weights, s)
    u = mean + np.exp(log_std) * z
    return np.tanh(u), log_density_np(mean, log_std, u)


def aggregate_np(q, rho):
    """:return: mean_k - rho std_k"""
    mean = q.sum(axis=0) / len(q)
    return mean - rho * np.sqrt(((q - mean) ** 2).sum(axis=0) / len(q))


class Reference:
    """The losses as functions of the weights, in float64."""

    def __init__(self, model, batch, draws):
        self.model, self.draws = model, draws
        self.weights = {name: as_float64(getattr(model, name)) for name in ("actor", "critic", "critic_target")}
        self.log_alpha = model.log_ent_coef.double().item()
        self.s, self.a, self.s_next, self.R, self.discounts, self.valid, _ = (part.double().numpy() for part in batch)

    @cached_property
    def target(self):
        a, log_prob = sample_np(self.weights["actor"], self.s_next, self.draws["next_noise"][:, 0])
        q = q_np(self.weights["critic_target"], self.s_next, a)
        rho = self.model.rho
        q = np.minimum(*q[self.draws["members"]]) if rho is None else aggregate_np(q, rho)
        if self.model.backup_entropy:
            q = q - np.exp(self.log_alpha) * log_prob
        return (self.R[:, 0] + self.discounts[:, 0] * q)[:, None]

    def critic_loss(self):
        y, loss = self.target, 0.0
        for member in q_np(self.weights["critic"], self.s, self.a):
            for b in range(B):
                loss += self.valid[b, 0] * (member[b] - y[b, 0]) ** 2 / (K * B)
        return loss

    def log_prob(self):
        return sample_np(self.weights["actor"], self.s, self.draws["noise"][:, 0])[1][:, None]

    def actor_loss(self):
        a, log_prob = sample_np(self.weights["actor"], self.s, self.draws["noise"][:, 0])
        q = aggregate_np(q_np(self.weights["critic"], self.s, a), self.model.rho or 0.0)
        return (np.exp(self.log_alpha) * log_prob - q).sum() / B

    def bc_loss(self):
        u = np.arctanh(np.clip(self.a, np.float32(-1 + 1e-5), np.float32(1 - 1e-5)))
        return -(self.valid[:, 0] * log_density_np(*gaussian_np(self.weights["actor"], self.s), u)).sum() / B

    def ent_coef_loss(self):
        return -self.log_alpha * (self.log_prob().mean() + TARGET_ENTROPY)

    def terms(self):
        names = ("critic_loss", "log_prob", "actor_loss", "bc_loss", "ent_coef_loss")
        return {"target": self.target} | {name: getattr(self, name)() for name in names}

    def gradient(self, loss, network):
        """:return: of every weight of a network, by central differences"""
        found = {}
        for name, weight in self.weights[network].items():
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
    noise, next_noise = (th.as_tensor(draws[name], dtype=th.float32) for name in ("noise", "next_noise"))
    with th.no_grad():
        target = model.td_target(batch, next_noise, th.as_tensor(draws["members"]))
    critic_loss = td_loss(model.critic.bind(batch.observations)(batch.actions), target, batch.valid)
    pi = model.actor.gaussian(batch.observations)
    actor_loss, log_prob = model.actor_loss(batch, pi, noise)
    terms = {"target": target, "critic_loss": critic_loss, "log_prob": log_prob, "actor_loss": actor_loss}
    return {**terms, "bc_loss": model.bc_loss(batch, pi), "ent_coef_loss": model.entropy_coefficient.loss(log_prob)}


@pytest.mark.parametrize("rho", [None, 0.0, 0.5])
@pytest.mark.parametrize("backup_entropy", [True, False])
def test_terms_equal_the_transcription(model, batch, draws, rho, backup_entropy, monkeypatch):
    monkeypatch.setattr(model, "rho", rho)
    monkeypatch.setattr(model, "backup_entropy", backup_entropy)
    expected, given = Reference(model, batch, draws).terms(), our_terms(model, batch, draws)
    assert set(given) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(given[name].detach().numpy(), value, rtol=1e-5, atol=1e-5, err_msg=name)


# ------------------------------------------------------------ a whole update


def drawn_from(seed, n_critics=K, chunk_dim=A):
    """:return: the generator of an update, and the numbers that the update will draw"""
    generator = th.Generator().manual_seed(seed)
    noise, next_noise = th.randn(2, B, 1, chunk_dim, generator=generator)
    members = th.randperm(n_critics, generator=generator)[:M]
    return generator.manual_seed(seed), {"noise": noise, "next_noise": next_noise, "members": members}


def weights_of(model):
    return {name: value.double().numpy().copy() for name, value in model.policy.state_dict().items()}


@pytest.mark.parametrize("rho", [None, 0.5])
def test_the_weights_after_an_update_equal_the_transcriptions(batch, rho):
    model = build(net_arch=[6], rho=rho)
    generator, draws = drawn_from(5)
    draws = {name: value.numpy() for name, value in draws.items()}
    reference, before = Reference(model, batch, draws), weights_of(model)
    metrics = model.update(batch, generator)
    after = weights_of(model)

    gradients = {"critic": reference.gradient(reference.critic_loss, "critic")}
    gradients["actor"] = reference.gradient(lambda: reference.actor_loss() + 0.3 * reference.bc_loss(), "actor")
    for network, found in gradients.items():
        for name, g in found.items():
            name = f"{network}.{name}"
            np.testing.assert_allclose(after[name], before[name] - RATE * g / (np.abs(g) + 1.0), atol=1e-6, err_msg=name)
    slope = -(reference.log_prob().mean() + TARGET_ENTROPY)
    log_alpha = after["entropy_coefficient.log_ent_coef"]
    np.testing.assert_allclose(log_alpha, reference.log_alpha - RATE * np.sign(slope), atol=1e-6)
    for name in before:
        if name.startswith("critic_target."):
            source = before[name.replace("critic_target.", "critic.")]  # from before the step
            np.testing.assert_allclose(after[name], (1 - TAU) * before[name] + TAU * source, atol=1e-6, err_msg=name)

    expected = reference.terms()
    expected["actor_loss"] += 0.3 * expected["bc_loss"]
    for name in ("critic_loss", "actor_loss", "bc_loss", "ent_coef_loss"):
        assert metrics[name].item() == pytest.approx(expected[name], rel=1e-5)
    assert metrics["ent_coef"].item() == pytest.approx(0.4 * np.exp(before["entropy_coefficient.log_ent_coef"] - np.log(0.4)))
    assert metrics["entropy"].item() == pytest.approx(-expected["log_prob"].mean(), rel=1e-5)


# ------------------------------------------------------------- wrong details


def break_model(broken, model, monkeypatch):
    actor, coefficient = model.actor, model.entropy_coefficient
    sample, gaussian = TanhGaussian.sample, actor.gaussian
    ways = {
        "no minimum": (module, "pessimistic_mean", lambda q, _: q.mean(0)),
        "pessimistic actor": (model, "rho", 1.0),
        "entropy is not backed up": (model, "backup_entropy", False),
        "live critic": (model, "critic_target", model.critic),
        "no correction for tanh": (
            TanhGaussian,
            "sample",
            lambda pi, z: (sample(pi, z)[0], sample(pi, z)[1] + (1 - sample(pi, z)[0].square()).log().sum(-1)),
        ),
        "no standard deviation": (actor, "gaussian", lambda s: TanhGaussian(gaussian(s).mean, 0 * gaussian(s).log_std)),
        "no noise": (TanhGaussian, "sample", lambda pi, z: sample(pi, 0 * z)),
        "alpha is its logarithm": (coefficient, "forward", lambda: model.log_ent_coef.detach()),
        "alpha in its loss": (coefficient, "loss", lambda p: -(model.log_ent_coef.exp() * (p + TARGET_ENTROPY)).mean()),
        "target entropy": (coefficient, "target_entropy", -TARGET_ENTROPY),
    }
    if broken in ways:
        monkeypatch.setattr(*ways[broken])


def wrong_inputs(broken, batch, draws):
    overlooked = {
        "padding": {"valid": th.ones(B, 1)},
        "terminals": {"discounts": th.full((B, 1), GAMMA**HORIZON)},
        "discount of a step": {"discounts": batch.discounts / GAMMA ** (HORIZON - 1)},
    }
    batch = batch._replace(**overlooked.get(broken, {}))
    members = {"all members": np.arange(K), "one member": draws["members"][:1]}
    return batch, {**draws, "members": members.get(broken, draws["members"])}


INPUTS = ["padding", "terminals", "discount of a step", "all members", "one member"]
NETWORKS = ["no correction for tanh", "no standard deviation", "no noise", "live critic", "pessimistic actor"]
ENTROPY = ["entropy is not backed up", "alpha is its logarithm", "alpha in its loss", "target entropy"]


@pytest.mark.parametrize("broken", [*INPUTS, *NETWORKS, *ENTROPY])
def test_the_comparison_notices_a_wrong_detail(model, batch, draws, broken, monkeypatch):
    expected = Reference(model, batch, draws).terms()
    break_model(broken, model, monkeypatch)
    given = our_terms(model, *wrong_inputs(broken, batch, draws))
    assert not all(np.allclose(given[name].detach().numpy(), expected[name], rtol=1e-4, atol=1e-4) for name in expected)


def test_the_cases_matter(model, batch, draws):
    """The members of M, the pessimism and the limit of imitated actions change something."""
    reference = Reference(model, batch, draws)
    a, _ = sample_np(reference.weights["actor"], reference.s_next, draws["next_noise"][:, 0])
    q = q_np(reference.weights["critic_target"], reference.s_next, a)
    assert len({int(each) for each in q.argmin(axis=0)}) > 1 and (q.argmin(axis=0) != 0).any()
    assert (batch.actions.abs() == 1).any()


def test_each_loss_touches_its_network_alone(model, batch, draws):
    networks = {"critic_loss": "critic", "actor_loss": "actor", "bc_loss": "actor", "ent_coef_loss": "entropy_coefficient"}
    for loss, network in networks.items():
        model.policy.zero_grad()
        our_terms(model, batch, draws)[loss].backward()
        parts = model.networks.items()
        assert [name for name, one in parts if any(p.grad is not None and p.grad.any() for p in one.parameters())] == [network]


# ----------------------------------------------------------------- SB3's SAC


class WithSB3sDensity:
    """Our actor in SB3's SAC: the actions come from our network and given noise, their probabilities from SB3."""

    def __init__(self, actor, noises):
        self.actor, self.optimizer, self.noises = actor, actor.optimizer, iter(noises)

    def action_log_prob(self, observation):
        mean, log_std = (part[:, 0] for part in self.actor.gaussian(observation))
        distribution = SquashedDiagGaussianDistribution(ACTION_DIM).proba_distribution(mean, log_std)
        u = mean + log_std.exp() * next(self.noises)[:, 0]
        return th.tanh(u), distribution.log_prob(th.tanh(u), u)


def sacs_update(model, batch, noises, critic_rate):
    """
    Make an update of SB3's SAC with the networks of a model in the places of SAC's.

    :return: what SAC logged, and the coefficient's logarithm
    """
    env = gym.make("Pendulum-v1")
    env.observation_space, env.action_space = model.observation_space, model.action_space
    sac = SAC("MlpPolicy", env, learning_rate=RATE, ent_coef="auto_0.4", target_entropy=TARGET_ENTROPY, tau=TAU, gamma=GAMMA)
    sac.log_ent_coef.data.fill_(model.log_ent_coef.item())
    sac.actor, sac.critic, sac.critic_target = WithSB3sDensity(model.actor, noises), model.critic, model.critic_target
    sac._update_learning_rate = lambda _: None
    model.critic.optimizer.param_groups[0]["lr"] = critic_rate
    dones = (batch.discounts == 0).float()
    samples = ReplayBufferSamples(batch.observations, batch.actions, batch.next_observations, dones, batch.rewards)
    sac.replay_buffer = SimpleNamespace(sample=lambda *_, **__: samples)
    logger = Logger(None, [])
    sac.set_logger(logger)
    sac.train(1, B)
    return logger.name_to_value, sac.log_ent_coef.item()


@pytest.mark.parametrize("critic_rate", [RATE, 0.0])
def test_an_update_is_that_of_sac(critic_rate):
    """SAC's critics step before the actor's loss is taken; with ``critic_rate=0`` the actor sees the same critics in both."""
    plain = {"horizon_length": 1, "n_critics": 2, "n_min_critics": 2, "rho": 1.0, "bc_alpha": 0.0}
    ours, theirs = build(**plain), build(**plain)
    batch = windows(B, ACTION_DIM, 1, GAMMA)
    batch = batch._replace(valid=th.ones(B, 1))
    generator, draws = drawn_from(0, 2, ACTION_DIM)
    ours.critic.optimizer.param_groups[0]["lr"] = critic_rate
    before = weights_of(ours)
    metrics = ours.update(batch, generator)
    logged, log_ent_coef = sacs_update(theirs, batch, [draws["noise"], draws["next_noise"]], critic_rate)

    names = {"critic_loss", "ent_coef_loss", "ent_coef"} | ({"actor_loss"} if critic_rate == 0 else set())
    for name in names:
        assert metrics[name].item() == pytest.approx(logged[f"train/{name}"], rel=1e-5), name
    assert ours.log_ent_coef.item() == pytest.approx(log_ent_coef, abs=1e-6)
    same = ["critic", "actor"] if critic_rate == 0 else ["critic"]
    after, expected = weights_of(ours), weights_of(theirs)
    for name in before:
        if name.split(".")[0] in same:
            np.testing.assert_allclose(after[name], expected[name], atol=1e-6, err_msg=name)
        if name.startswith("critic_target."):  # SAC's target follows the new weights, ours the old
            source = expected[name.replace("critic_target.", "critic.")] - before[name.replace("critic_target.", "critic.")]
            np.testing.assert_allclose(expected[name], after[name] + TAU * source, atol=1e-6, err_msg=name)


def test_the_minimum_of_two_is_the_mean_less_a_deviation():
    q = th.randn(2, 100, dtype=th.double)
    th.testing.assert_close(module.pessimistic_mean(q, 1.0), q.amin(dim=0))
