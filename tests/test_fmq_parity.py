"""
FMQ's target, losses and guidance against a plain NumPy float64 transcription of the published formulas, on fixed weights,
noise, times and a batch with padded and terminal windows; and which weights each term may touch.
"""

import numpy as np
import pytest
import torch as th
from flow_map_reference import average_velocity_np
from gymnasium import spaces
from network_references import as_float64, ensemble_np

from sb3_flow import FMQ, OfflineDataset
from sb3_flow.data import ChunkSamples
from sb3_flow.losses import td_loss

B, N, K, ACTION_DIM, HORIZON, FOURIER = 8, 5, 2, 2, 3, 8
A = ACTION_DIM * HORIZON
GAMMA, BETA, ETA = 0.99, 0.3, 0.4


def build(**kwargs):
    rng = np.random.default_rng(0)
    ends = np.arange(40) % 20 == 19
    arrays = (rng.normal(size=(40, 4)), rng.uniform(-1, 1, size=(40, ACTION_DIM)), rng.normal(size=40), ends, ends)
    box = spaces.Box(-1, 1, (ACTION_DIM,))
    dataset = OfflineDataset.from_arrays(*(x if x.dtype == bool else x.astype(np.float32) for x in arrays), action_space=box)
    settings = {"horizon_length": HORIZON, "gamma": GAMMA, "n_candidates": N, "eta": ETA, "beta": BETA, "seed": 0, **kwargs}
    policy_kwargs = {"net_arch": [16, 16], "fourier_dim": FOURIER, "n_critics": K}
    model = FMQ("MlpPolicy", None, policy_kwargs=policy_kwargs, offline_dataset=dataset, **settings)
    generator = th.Generator().manual_seed(1)
    for parameter in model.policy.parameters():
        # biases, scales and shifts must matter; actor and anchor, critic and target must differ
        parameter.data += 0.2 * th.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def batch():
    generator = th.Generator().manual_seed(2)

    def randn(*shape):
        return th.randn(*shape, generator=generator)

    mask, valid = th.ones(B, A), th.ones(B, 1)
    mask[6, 2 * ACTION_DIM :], valid[6] = 0, 0  # a window that sticks out of its trajectory by one step
    discounts = th.full((B, 1), GAMMA**HORIZON)
    discounts[2] = 0  # a terminal
    return ChunkSamples(randn(B, 4), randn(B, A).clamp(-1, 1), randn(B, 4), randn(B, 1), discounts, valid, mask)


@pytest.fixture(scope="module")
def draws():
    rng = np.random.default_rng(3)
    r = rng.uniform(size=(B, 1))
    r[1], r[5] = 0.0, 0.97
    return {"noise": rng.normal(size=(B, A)), "candidates": rng.normal(size=(B, N, A)), "r": r}


def tensor(x):
    return th.tensor(x, dtype=th.float32)


# --------------------------------------------------------- the transcription


def u_np(actor, s, a, r, t):
    weights = {name.removeprefix("flow_map."): value for name, value in as_float64(actor).items() if "flow_map" in name}
    return average_velocity_np(weights, s, a, r, t, FOURIER)


def q_np(critic, s, a):
    """:return: shape (K, B)"""
    return ensemble_np(as_float64(critic), np.concatenate([s, a], axis=1), "ensemble.")


def gradient_np(value, a, step=1e-5):
    """Central differences of ``value(a)`` of shape (B,)."""
    columns = []
    for j in range(a.shape[1]):
        shift = np.zeros_like(a)
        shift[:, j] = step
        columns.append((value(a + shift) - value(a - shift)) / (2 * step))
    return np.stack(columns, axis=1)


def target_np(model, batch, draws, rank, agg, broken=None):
    s, noise = batch.next_observations.double().numpy(), draws["candidates"]
    zero, one = np.zeros((B, 1)), np.ones((B, 1))
    anchor_or_actor = model.anchor if broken == "the anchor acts" else model.actor
    candidates = [np.clip(noise[:, n] + u_np(anchor_or_actor, s, noise[:, n], zero, one), -1, 1) for n in range(N)]
    ranking = model.critic_target if broken == "targets rank" else model.critic
    scores = np.stack([rank(q_np(ranking, s, a)) for a in candidates])
    best = np.stack(candidates)[scores.argmax(0), np.arange(B)]
    valuing = model.critic if broken == "live critics value" else model.critic_target
    return batch.rewards.double().numpy()[:, 0] + batch.discounts.double().numpy()[:, 0] * agg(q_np(valuing, s, best))


def guided_np(model, batch, draws, broken=None):
    """:return: u* and L_FMQ"""
    s, a, noise, r = batch.observations.double().numpy(), batch.actions.double().numpy(), draws["noise"], draws["r"]
    one = np.ones_like(r)
    a_r = (r * noise + (1 - r) * a) if broken == "r and 1 - r swapped" else (1 - r) * noise + r * a
    u, u_off = u_np(model.actor, s, a_r, r, one), u_np(model.anchor, s, a_r, r, one)
    at = u if model.guidance_at == "actor" else u_off
    a_1 = a_r + (1 - r) * at
    a_1 = a_1 if broken == "not clipped" else np.clip(a_1, -1, 1)
    pick = {"first": lambda q: q[0], "min": lambda q: q.min(0), "mean": lambda q: q.mean(0)}
    pick = pick["min" if broken == "minimum" else model.guidance_critic]
    g = gradient_np(lambda x: pick(q_np(model.critic, s, x)), a_1)
    norm = 1.0 if model.normalize_gradient == (broken == "not normalised") else np.sqrt((g**2).sum(1, keepdims=True)) + 1e-8
    eta = np.full(B, model.eta)
    if model.adaptive_radius:
        q = q_np(model.critic, s, a_1)
        delta = np.abs(q[0] - q[1]) / np.sqrt(2)
        eta = (model.eta if model.radius == "published" else 1.0) / (1 + model.beta * delta / (delta.mean() + 1e-8))
    sign = -1 if broken == "sign" else 1
    target = (u if broken == "no anchor" else u_off) + sign * eta[:, None] * g / norm
    return target, (batch.action_mask.double().numpy() * (u - target) ** 2).sum() / (B * A)


RULES = {"mean": lambda q: q.mean(0), "min": lambda q: q.min(0)}


@pytest.mark.parametrize("aggregation", ["mean", "min"])
@pytest.mark.parametrize("offline", [True, False])
def test_target(monkeypatch, batch, draws, aggregation, offline):
    model = build(q_aggregation=aggregation)
    monkeypatch.setattr(FMQ, "is_offline", property(lambda self: offline))
    rule = RULES[aggregation if offline else "min"]
    with th.no_grad():
        y = model.td_target(batch, tensor(draws["candidates"]))[:, 0].double().numpy()
    np.testing.assert_allclose(y, target_np(model, batch, draws, rule, rule), rtol=1e-5, atol=1e-5)
    for broken in ("the anchor acts", "targets rank", "live critics value"):
        assert not np.allclose(y, target_np(model, batch, draws, rule, rule, broken), rtol=1e-3), broken
    other = RULES["min" if rule is RULES["mean"] else "mean"]
    assert not np.allclose(y, target_np(model, batch, draws, rule, other), rtol=1e-3)


def test_critic_loss(batch):
    model, target = build(), th.linspace(-2, 2, B)[:, None]
    loss = td_loss(model.critic.bind(batch.observations)(batch.actions), target, batch.valid)
    q = q_np(model.critic, batch.observations.double().numpy(), batch.actions.double().numpy())
    errors = (q - target.double().numpy()[:, 0]) ** 2
    assert loss.item() == pytest.approx((errors * batch.valid.numpy()[:, 0]).mean(), rel=1e-5)
    assert loss.item() != pytest.approx(errors.mean(), rel=1e-2)


OPTIONS = [
    {},
    {"radius": "published"},
    {"adaptive_radius": False},
    {"guidance_at": "actor"},
    {"guidance_critic": "min"},
    {"guidance_critic": "mean"},
    {"normalize_gradient": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_guidance(batch, draws, options):
    model = build(**options)
    velocity = model.actor.velocity(batch.observations)
    noise, r = tensor(draws["noise"]), tensor(draws["r"])
    a_r = (1 - r) * noise + r * batch.actions
    target, _ = model.guided_velocity(batch, a_r, r, velocity(a_r, r, th.ones_like(r)))
    expected, expected_loss = guided_np(model, batch, draws)
    np.testing.assert_allclose(target.double().numpy(), expected, rtol=1e-4, atol=1e-5)
    loss = model.guidance_loss(velocity, batch, noise, r)["guidance_loss"].item()
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for broken in ("sign", "not normalised", "no anchor", "r and 1 - r swapped", "not clipped"):
        assert loss != pytest.approx(guided_np(model, batch, draws, broken)[1], rel=1e-3), broken
    if not options:
        assert loss != pytest.approx(guided_np(model, batch, draws, "minimum")[1], rel=1e-4)
    for other in OPTIONS:
        if other != options:
            assert not np.allclose(target.numpy(), guided_np(build(**other), batch, draws)[0], rtol=1e-3), other


def test_loss_at_the_switch_is_the_squared_radius(batch, draws):
    """Where actor and anchor agree the error is the guidance itself: mean(eta_eff^2) / A if all windows are whole."""
    model = build()
    model.anchor.load_state_dict(model.actor.state_dict())
    whole = batch._replace(action_mask=th.ones(B, A))
    noise, r = tensor(draws["noise"]), tensor(draws["r"])
    parts = model.guidance_loss(model.actor.velocity(batch.observations), whole, noise, r)
    a_r = (1 - r) * noise + r * batch.actions
    u_off = model.anchor.velocity(batch.observations)(a_r, r, th.ones_like(r))
    target, _ = model.guided_velocity(batch, a_r, r, u_off)
    radius = (target - u_off).norm(dim=1)
    assert parts["guidance_loss"].item() == pytest.approx((radius**2).mean().item() / A, rel=1e-4)
    assert parts["drift"].item() == pytest.approx(0.0, abs=1e-10)
    assert radius.std() > 0.01  # it varies with the critics' disagreement
    fixed = build(adaptive_radius=False)
    target, _ = fixed.guided_velocity(batch, a_r, r, u_off)
    u_off = fixed.anchor.velocity(batch.observations)(a_r, r, th.ones_like(r))
    th.testing.assert_close((target - u_off).norm(dim=1), th.full((B,), ETA), rtol=1e-4, atol=1e-5)


def gradients(network):
    return {name for name, parameter in network.named_parameters() if parameter.grad is not None and parameter.grad.any()}


@pytest.mark.parametrize("distillation", ["mf", "lsd", "psd"])
def test_each_loss_trains_its_own_network(monkeypatch, batch, distillation):
    model = build(distillation=distillation, warmup_steps=0)
    model.policy.n_steps += 10
    for offline in (True, False):
        monkeypatch.setattr(FMQ, "is_offline", property(lambda self, offline=offline: offline))
        for network in (model.actor, model.critic):
            network.zero_grad(set_to_none=True)
        draws = model.actor_draws(batch.actions, th.Generator().manual_seed(0))
        loss, _ = model.actor_loss(model.actor.velocity(batch.observations), batch, draws)
        loss.backward()
        assert gradients(model.actor) and not gradients(model.critic)
        model.actor.zero_grad(set_to_none=True)
        q_values = model.critic.bind(batch.observations)(batch.actions)
        td_loss(q_values, th.zeros(B, 1), batch.valid).backward()
        members = model.critic.ensemble.weights[0].grad
        assert not gradients(model.actor) and all(members[k].any() for k in range(K))  # both critics are trained
        assert not gradients(model.anchor) and not gradients(model.critic_target)


def test_self_distillation_waits_for_its_warm_up(batch):
    model = build(warmup_steps=3, anneal_end_step=4)
    losses = []
    for step in range(1, 6):
        model.policy.n_steps.fill_(step)
        draws = model.policy.imitation_draws(batch.actions, th.Generator().manual_seed(0))
        parts = model.policy.behaviour_loss(model.actor.velocity(batch.observations), batch, draws)
        losses.append(parts["distillation_loss"].item())
        assert parts["diagonal_loss"] > 0
    assert losses[:3] == [0, 0, 0] and losses[3] > 0 and losses[4] > 0
