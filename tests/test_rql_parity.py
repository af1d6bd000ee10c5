"""
RQL's loss terms against a plain NumPy float64 transcription of the published formulas, on fixed weights, noise, depths
and a batch with padded and terminal windows; and which weights each term may touch.
"""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from network_references import as_float64, ensemble_np, mlp_np

from sb3_flow import RQL, OfflineDataset
from sb3_flow.data import ChunkSamples

B, F, K, ACTION_DIM, HORIZON = 8, 10, 3, 2, 3
A = ACTION_DIM * HORIZON
ALPHA, KAPPA, RHO, GAMMA = 3.0, 0.7, 0.5, 0.99


@pytest.fixture(scope="module")
def model():
    rng = np.random.default_rng(0)
    ends = np.zeros(40, dtype=bool)
    ends[[19, 39]] = True
    dataset = OfflineDataset.from_arrays(
        rng.normal(size=(40, 4)).astype(np.float32),
        rng.uniform(-1, 1, size=(40, ACTION_DIM)).astype(np.float32),
        rng.normal(size=40).astype(np.float32),
        ends,
        ends,
        action_space=spaces.Box(-1, 1, (ACTION_DIM,)),
    )
    model = RQL(
        "MlpPolicy",
        None,
        horizon_length=HORIZON,
        flow_steps=F,
        alpha=ALPHA,
        expectile=KAPPA,
        rho=RHO,
        gamma=GAMMA,
        n_critics=K,
        policy_kwargs=dict(net_arch=[16, 16]),
        offline_dataset=dataset,
        seed=0,
    )
    generator = th.Generator().manual_seed(1)
    for parameter in model.policy.parameters():
        # biases, scales and shifts must matter, and the target must differ from the value function
        parameter.data += 0.1 * th.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def batch():
    generator = th.Generator().manual_seed(2)

    def randn(*shape):
        return th.randn(*shape, generator=generator)

    mask = th.ones(B, A)
    mask[6, 2 * ACTION_DIM :] = 0  # a window that sticks out of its trajectory by one step
    valid = th.ones(B, 1)
    valid[6] = 0
    discounts = th.full((B, 1), GAMMA**HORIZON)
    discounts[2] = 0  # a terminal
    return ChunkSamples(randn(B, 4), randn(B, A).clamp(-1, 1), randn(B, 4), 10 * randn(B, 1), discounts, valid, mask)


@pytest.fixture(scope="module")
def draws():
    rng = np.random.default_rng(3)
    time = rng.uniform(size=(B, 1))
    time[1] = 0.95  # the step is cut short there
    time[5] = 0.0
    depth = np.concatenate([rng.uniform(size=(B // 2, 1)), [[0.0], [1.0], [0.3], [0.7]]])
    return {"noise": rng.normal(size=(B, A)), "next_noise": rng.normal(size=(B, A)), "time": time, "depth": depth}


# --------------------------------------------------------- the transcription


def velocity_np(weights, s, x, t):
    inputs = np.concatenate([s, x, t], axis=1)
    return mlp_np(weights, inputs, 0 * inputs, "velocity_net.")[0]


def value_np(weights, s, x, t):
    return ensemble_np(weights, np.concatenate([s, x, t], axis=1), "ensemble.")[..., None]


def reference_terms(model, batch, draws):
    actor, critic, target_net = (as_float64(m) for m in (model.actor, model.critic, model.critic_target))
    s, a, s_next, R, disc, valid, mask = (x.double().numpy() for x in batch)
    q = value_np(target_net, s_next, draws["next_noise"], np.zeros((B, 1)))
    mean = sum(q) / K
    std = np.sqrt(sum((member - mean) ** 2 for member in q) / K)
    y = R + disc * (mean - RHO * std)

    x, t = a.copy(), np.ones((B, 1))
    for _ in range(F):
        x = x - velocity_np(actor, s, x, t) * draws["depth"] / F
        t = t - draws["depth"] / F
    value_loss = 0.0
    for member in value_np(critic, s, x, t):
        for b in range(B):
            e = y[b, 0] - member[b, 0]
            value_loss += valid[b, 0] * (KAPPA if e >= 0 else 1 - KAPPA) * e**2 / (K * B)

    x_t = (1 - draws["time"]) * draws["noise"] + draws["time"] * a
    p = velocity_np(actor, s, x_t, draws["time"])
    bc_loss = (mask * (p - (a - draws["noise"])) ** 2).sum() / (B * A)
    step = np.minimum(1 / F, 1 - draws["time"])
    values = value_np(critic, s, x_t + step * p, np.minimum(draws["time"] + 1 / F, 1)).mean(axis=0)
    q_loss = -(valid * values).sum() / B
    return {"target": y, "value_loss": value_loss, "bc_loss": bc_loss, "policy_loss": q_loss + ALPHA * bc_loss}


def our_terms(model, batch, draws):
    tensors = {name: th.as_tensor(value, dtype=th.float32) for name, value in draws.items()}
    velocity, value = model.actor.velocity(batch.observations), model.critic.bind(batch.observations)
    with th.no_grad():
        target = model.td_target(batch, tensors["next_noise"])
    value_loss, _ = model.value_loss(value, velocity, batch, target, tensors["depth"])
    policy_loss, bc_loss = model.policy_loss(value, velocity, batch, tensors["noise"], tensors["time"])
    return {"target": target, "value_loss": value_loss, "bc_loss": bc_loss, "policy_loss": policy_loss}


@pytest.mark.parametrize("term", ["target", "value_loss", "bc_loss", "policy_loss"])
def test_term_equals_the_transcription(model, batch, draws, term):
    expected, given = reference_terms(model, batch, draws)[term], our_terms(model, batch, draws)[term]
    np.testing.assert_allclose(given.detach().numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("broken", ["expectile", "valid", "mask", "rho", "discount"])
def test_the_comparison_notices_a_wrong_detail(model, batch, draws, broken, monkeypatch):
    expected = reference_terms(model, batch, draws)
    if broken == "expectile":
        monkeypatch.setattr(model, "expectile", 1 - KAPPA)
    elif broken == "rho":
        monkeypatch.setattr(model, "rho", 0.0)
    elif broken == "valid":
        batch = batch._replace(valid=th.ones(B, 1))
    elif broken == "mask":
        batch = batch._replace(action_mask=th.ones(B, A))
    else:
        batch = batch._replace(discounts=th.full((B, 1), GAMMA**HORIZON))
    given = our_terms(model, batch, draws)
    assert any(not np.allclose(given[name].detach().numpy(), expected[name], rtol=1e-4) for name in expected)


def zero_grad(model):
    for parameter in model.policy.parameters():
        parameter.grad = None


def has_gradient(module):
    return any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in module.parameters())


def test_value_term_leaves_no_gradient_in_the_value_network(model, batch, draws):
    zero_grad(model)
    our_terms(model, batch, draws)["policy_loss"].backward()
    assert all(parameter.grad is None for parameter in model.critic.parameters())
    assert has_gradient(model.actor)


def test_value_loss_leaves_no_gradient_in_the_actor_or_the_targets(model, batch, draws):
    zero_grad(model)
    our_terms(model, batch, draws)["value_loss"].backward()
    assert has_gradient(model.critic)
    assert all(parameter.grad is None for parameter in model.actor.parameters())
    assert all(parameter.grad is None for parameter in model.critic_target.parameters())


def test_value_gradient_reaches_the_actor_through_one_step_only(model, batch, draws):
    """d L_Q / d u = -step * dV/dx: scaling the step scales the gradient, so no other path exists."""
    tensors = {name: th.as_tensor(value, dtype=th.float32) for name, value in draws.items()}
    u = th.randn(B, A, requires_grad=True)
    value = model.critic.bind(batch.observations)
    loss, bc_loss = model.policy_loss(value, lambda x, t: u, batch, tensors["noise"], tensors["time"])
    (gradient,) = th.autograd.grad(loss - ALPHA * bc_loss, u)
    x_t = (1 - tensors["time"]) * tensors["noise"] + tensors["time"] * batch.actions
    step = (1 - tensors["time"]).clamp(max=1 / F)
    x_plus = (x_t + step * u).detach().requires_grad_()
    values = value(x_plus, (tensors["time"] + 1 / F).clamp(max=1), frozen=True).mean(dim=0)
    (dv_dx,) = th.autograd.grad((batch.valid * values).sum(), x_plus)
    th.testing.assert_close(gradient, -step * dv_dx / B)


@pytest.mark.parametrize(("t", "step", "t_plus"), [(0.95, 0.05, 1.0), (0.0, 0.1, 0.1)])
def test_step_is_cut_short_at_the_end(model, batch, t, step, t_plus):
    seen = {}

    def value(x, time, frozen):
        seen.update(x=x, t=time, frozen=frozen)
        return x.sum(dim=1, keepdim=True)[None]

    noise, time = th.zeros(B, A), th.full((B, 1), t)
    model.policy_loss(value, lambda x, _: th.ones_like(x), batch, noise, time)
    th.testing.assert_close(seen["x"], t * batch.actions + step)
    th.testing.assert_close(seen["t"], th.full((B, 1), t_plus))
    assert seen["frozen"]


def test_update_order(model, batch):
    """One Adam step on the sum; both averages follow the weights from before it."""
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    model.update(batch, th.Generator().manual_seed(0))
    after = model.policy.state_dict()
    for name, old in before.items():
        if name.startswith("actor."):
            average = name.replace("actor.", "actor_ema.", 1)
            th.testing.assert_close(after[average], before[average].lerp(old, 1 - model.ema_decay))
            assert not th.equal(after[name], old)
        elif name.startswith("critic."):
            target = name.replace("critic.", "critic_target.", 1)
            th.testing.assert_close(after[target], before[target].lerp(old, model.tau))
            assert not th.equal(after[name], old)


def test_behaviour_cloning_touches_the_actor_alone(model, batch, monkeypatch):
    monkeypatch.setattr(model, "objective", "bc")
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    metrics = model.update(batch, th.Generator().manual_seed(0))
    assert set(metrics) == {"actor_loss", "flow_loss"}
    changed = {name.split(".")[0] for name, value in model.policy.state_dict().items() if not th.equal(value, before[name])}
    assert "actor" in changed
    assert "critic" not in changed
