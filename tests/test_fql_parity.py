"""
FQL's losses and targets against a plain NumPy float64 transcription of the published formulas, on fixed weights, noise, times
and a batch with padded and terminal windows; and which weights each loss may touch.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch as th
from network_references import as_float64, disturb, mlp_np, q_np, two_trajectories, velocity_np, windows

from sb3_flow import FQL
from sb3_flow.losses import td_loss

B, F, K, N, ACTION_DIM, HORIZON = 8, 10, 3, 5, 2, 3
A = ACTION_DIM * HORIZON
ALPHA, GAMMA = 3.0, 0.99


def build(**given):
    sizes = {"horizon_length": HORIZON, "flow_steps": F, "n_critics": K, "n_candidates": N, "gamma": GAMMA}
    sizes["offline_dataset"] = two_trajectories(ACTION_DIM)
    return disturb(FQL("MlpPolicy", None, **sizes, policy_kwargs={"net_arch": [16, 16]}, seed=0, **given))


@pytest.fixture(scope="module")
def models():
    return {"distilled": build(alpha=ALPHA), "best_of_n": build(actor_type="best_of_n")}


@pytest.fixture(params=["distilled", "best_of_n"])
def model(request, models):
    return models[request.param]


@pytest.fixture
def distilled(models):
    return models["distilled"]


@pytest.fixture(scope="module")
def batch():
    return windows(B, ACTION_DIM, HORIZON, GAMMA)


@pytest.fixture(scope="module")
def draws():
    rng = np.random.default_rng(3)
    names = {"noise": (B, A), "next_noise": (B, N, A), "student_noise": (B, 1, A)}
    return {name: rng.normal(size=shape) for name, shape in names.items()} | {"time": rng.uniform(size=(B, 1))}


def noise_of_target(model, draws):
    return draws["next_noise"] if model.policy.actor_type == "best_of_n" else draws["next_noise"][:, :1]


# --------------------------------------------------------- the transcription


def flow_np(weights, s, z):
    """:return: the flow's action, clipped once, at the end"""
    x = z
    for i in range(F):
        x = x + velocity_np(weights, s, x, np.full((len(s), 1), i / F)) / F
    return np.clip(x, -1, 1)


def student_np(weights, s, z):
    inputs = np.concatenate([s, z], axis=1)
    return mlp_np(weights, inputs, 0 * inputs, "network.")[0]


def aggregate_np(q, how):
    return q.min(axis=0) if how == "min" else q.sum(axis=0) / K


def reference_terms(model, batch, draws):
    distilled = model.policy.actor_type == "distilled"
    actor, critic, target_net = (as_float64(m) for m in (model.actor, model.critic, model.critic_target))
    flow = as_float64(model.teacher) if distilled else actor
    s, a, s_next, R, disc, valid, mask = (x.double().numpy() for x in batch)
    how = model.q_aggregation

    noise = noise_of_target(model, draws)
    if distilled:
        chosen = np.clip(student_np(actor, s_next, noise[:, 0]), -1, 1)
    else:
        chosen = np.empty((B, A))
        for b in range(B):
            state = s_next[b : b + 1]
            samples = [flow_np(flow, state, noise[b, j : j + 1]) for j in range(N)]
            scores = [aggregate_np(q_np(critic, state, sample), how)[0] for sample in samples]
            chosen[b] = samples[int(np.argmax(scores))][0]
    y = R[:, 0] + disc[:, 0] * aggregate_np(q_np(target_net, s_next, chosen), how)

    critic_loss = 0.0
    for member in q_np(critic, s, a):
        for b in range(B):
            critic_loss += valid[b, 0] * (member[b] - y[b]) ** 2 / (K * B)

    x_t = (1 - draws["time"]) * draws["noise"] + draws["time"] * a
    u = velocity_np(flow, s, x_t, draws["time"])
    terms = {"target": y[:, None], "critic_loss": critic_loss}
    terms["flow_loss"] = (mask * (u - (a - draws["noise"])) ** 2).sum() / (B * A)
    if distilled:
        z = draws["student_noise"][:, 0]
        mu, taught = student_np(actor, s, z), flow_np(flow, s, z)
        terms["distillation_loss"] = ((mu - taught) ** 2).sum() / (B * A)
        q = q_np(critic, s, np.clip(mu, -1, 1)).sum(axis=0) / K
        scale = sum(abs(one) for one in q) / B if model.normalize_q_loss else 1.0
        terms["actor_loss"] = -q.sum() / B / scale + model.alpha * terms["distillation_loss"]
    return terms


def our_terms(model, batch, draws, student=None):
    tensors = {name: th.as_tensor(value, dtype=th.float32) for name, value in draws.items()}
    with th.no_grad():
        target = model.td_target(batch, noise_of_target(model, tensors))
    terms = {"target": target}
    terms["critic_loss"] = td_loss(model.critic.bind(batch.observations)(batch.actions), target, batch.valid)
    terms["flow_loss"] = model.flow_loss(batch, tensors["noise"], tensors["time"])
    if model.policy.is_distilled:
        loss, parts = model.actor_loss(student or model.actor, batch, tensors["student_noise"])
        terms |= {"actor_loss": loss, "distillation_loss": parts["distillation_loss"]}
    return terms


@pytest.fixture
def aggregated(model, monkeypatch):
    """Sets the aggregation of a model and its policy."""

    def set_to(how):
        monkeypatch.setattr(model, "q_aggregation", how)
        monkeypatch.setattr(model.policy, "q_aggregation", how)

    return set_to


@pytest.mark.parametrize("normalize_q_loss", [False, True])
@pytest.mark.parametrize("q_aggregation", ["mean", "min"])
def test_terms_equal_the_transcription(model, batch, draws, q_aggregation, normalize_q_loss, aggregated, monkeypatch):
    aggregated(q_aggregation)
    monkeypatch.setattr(model, "normalize_q_loss", normalize_q_loss)
    expected, given = reference_terms(model, batch, draws), our_terms(model, batch, draws)
    assert set(given) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(given[name].detach().numpy(), value, rtol=1e-5, err_msg=name)


def test_what_the_cases_tell_apart(models, batch, draws):
    """Some answers of both actors lie beyond the bounds, and critics and targets choose different samples."""
    s = batch.observations
    noise = th.as_tensor(draws["student_noise"], dtype=th.float32)
    with th.no_grad():
        mu = models["distilled"].actor.unclipped(s, noise)
        assert 0 < (mu.abs() > 1).float().mean() < 1
        assert (models["distilled"].teacher.act(s, noise).abs() == 1).any()
        model, noise = models["best_of_n"], th.as_tensor(draws["next_noise"], dtype=th.float32)
        samples = model.actor.act(batch.next_observations, noise)
        critics = [model.critic.bind(batch.next_observations), model.critic_target.bind(batch.next_observations)]
        scores = [(critic(samples).mean(0), critic(samples).amin(0)) for critic in critics]
    choices = [score.argmax(dim=1) for pair in scores for score in pair]
    assert not th.equal(choices[0], choices[1]) and not th.equal(choices[0], choices[2])


WRONG = ["valid", "mask", "discount", "aggregation", "target network"]
DISTANCES = ["clipped distance", "summed distance", "unclipped teacher", "noise"]
WRONG_DISTILLED = [*WRONG, *DISTANCES, "alpha", "normalisation", "unclipped critic"]
WRONG_BEST_OF_N = [*WRONG, "ranked by targets", "the first sample"]


def compare(model, batch, draws, expected, student=None):
    given = our_terms(model, batch, draws, student)
    return all(np.allclose(given[name].detach().numpy(), expected[name], rtol=1e-4) for name in expected)


class NeverClipped(th.Tensor):
    def clamp(self, *_):
        return self


def wrong_batch(broken, batch):
    """:return: the batch as it is to a loss that overlooks a part of it"""
    overlooked = {
        "valid": {"valid": th.ones(B, 1)},
        "mask": {"action_mask": th.ones(B, A)},
        "discount": {"discounts": th.full((B, 1), GAMMA**HORIZON)},
    }
    return batch._replace(**overlooked.get(broken, {}))


def break_model(broken, model, monkeypatch):
    if broken == "aggregation":
        for one in (model, model.policy):
            monkeypatch.setattr(one, "q_aggregation", "min")
    elif broken == "target network":
        monkeypatch.setattr(model, "critic_target", model.critic)
    elif broken == "alpha":
        monkeypatch.setattr(model, "alpha", 1.0)
    elif broken == "normalisation":
        monkeypatch.setattr(model, "normalize_q_loss", True)
    elif broken == "unclipped teacher":
        monkeypatch.setattr(model.teacher, "act", lambda s, z: unclipped_end(model.teacher, s, z))
    elif broken == "summed distance":
        monkeypatch.setattr("sb3_flow.fql.fql.regression_loss", lambda one, other: (one - other).square().sum(1).mean())
    elif broken == "noise":
        act = model.teacher.act
        monkeypatch.setattr(model.teacher, "act", lambda s, z: act(s, z.flip(0)))
    elif broken == "ranked by targets":
        monkeypatch.setitem(model.policy._modules, "critic", model.critic_target)
    elif broken == "the first sample":
        monkeypatch.setattr(model.policy, "best_of", lambda s, samples, how: samples[:, 0])


def wrong_student(broken, actor):
    """:return: in place of the actor in its loss"""
    answers = {
        "clipped distance": actor.act,
        "unclipped critic": lambda s, z: actor.unclipped(s, z).as_subclass(NeverClipped),
    }
    return SimpleNamespace(unclipped=answers[broken]) if broken in answers else None


def unclipped_end(flow, observation, noise):
    x, velocity = noise[:, 0], flow.velocity(observation)
    for i in range(F):
        x = x + velocity(x, th.full((len(x), 1), i / F)) / F
    return x[:, None]


@pytest.mark.parametrize("broken", WRONG_DISTILLED)
def test_the_comparison_notices_a_wrong_detail(distilled, batch, draws, broken, monkeypatch):
    expected = reference_terms(distilled, batch, draws)
    break_model(broken, distilled, monkeypatch)
    assert not compare(distilled, wrong_batch(broken, batch), draws, expected, wrong_student(broken, distilled.actor))


@pytest.mark.parametrize("broken", WRONG_BEST_OF_N)
def test_the_comparison_notices_a_wrong_detail_of_best_of_n(models, batch, draws, broken, monkeypatch):
    expected = reference_terms(models["best_of_n"], batch, draws)
    break_model(broken, models["best_of_n"], monkeypatch)
    assert not compare(models["best_of_n"], wrong_batch(broken, batch), draws, expected)


def test_the_minimum_is_not_taken_in_the_actors_loss(distilled, batch, draws, monkeypatch):
    noise = th.as_tensor(draws["student_noise"], dtype=th.float32)
    mean = distilled.actor_loss(distilled.actor, batch, noise)[0]
    for one in (distilled, distilled.policy):
        monkeypatch.setattr(one, "q_aggregation", "min")
    assert th.equal(distilled.actor_loss(distilled.actor, batch, noise)[0], mean)


# ------------------------------------------------------------- which weights


def touched(model, loss):
    """:return: networks in which a loss leaves a gradient"""
    for parameter in model.policy.parameters():
        parameter.grad = None
    loss.backward()
    networks = model.networks.items()
    return {name for name, one in networks if any(p.grad is not None and p.grad.abs().sum() > 0 for p in one.parameters())}


def test_each_loss_touches_its_network_alone(model, batch, draws):
    terms = our_terms(model, batch, draws)
    assert touched(model, terms["critic_loss"]) == {"critic"}
    assert touched(model, terms["flow_loss"]) == {"teacher" if model.policy.is_distilled else "actor"}
    if model.policy.is_distilled:
        assert touched(model, terms["actor_loss"]) == {"actor"}
        assert touched(model, our_terms(model, batch, draws)["distillation_loss"]) == {"actor"}


def test_normalisation_passes_no_gradient_through_the_scale(distilled, batch, draws, monkeypatch):
    """The gradient keeps its direction: it is divided by a number."""
    monkeypatch.setattr(distilled, "alpha", 0.0)
    noise = th.as_tensor(draws["student_noise"], dtype=th.float32)
    gradients = []
    for normalize in (False, True):
        monkeypatch.setattr(distilled, "normalize_q_loss", normalize)
        loss, _ = distilled.actor_loss(distilled.actor, batch, noise)
        gradients.append(th.cat([g.flatten() for g in th.autograd.grad(loss, list(distilled.actor.network.parameters()))]))
    with th.no_grad():
        mu = distilled.actor.act(batch.observations, noise)[:, 0]
        scale = distilled.critic.bind(batch.observations)(mu).mean(dim=0).abs().mean()
    th.testing.assert_close(gradients[1], gradients[0] / scale, rtol=1e-4, atol=1e-7)


def test_update_order(model, batch):
    """One Adam step on the sum; the target follows the weights from before it."""
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    model.update(batch, th.Generator().manual_seed(0))
    after = model.policy.state_dict()
    for name, old in before.items():
        if name.startswith("critic."):
            target = name.replace("critic.", "critic_target.", 1)
            th.testing.assert_close(after[target], before[target].lerp(old, model.tau))
        if not name.startswith("critic_target."):
            assert not th.equal(after[name], old), name
