"""
QAM's losses, targets and one whole update against a plain NumPy float64 transcription of the published formulas, on fixed
weights, noise, times and a batch with padded and terminal windows; and which weights each loss may touch.

The transcription differentiates otherwise than the package: Jacobians column by column in forward mode, the critics' action
gradient and the gradients of an update by central differences.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch as th
from network_references import as_float64, disturb, mlp_np, q_np, two_trajectories, velocity_np, windows

from sb3_flow import QAM
from sb3_flow.flow import action_gradient
from sb3_flow.losses import td_loss

B, F, K, ACTION_DIM, HORIZON = 8, 5, 3, 2, 2
A = ACTION_DIM * HORIZON
GAMMA, RHO, INV_TEMP, EDIT_SCALE, LR = 0.99, 0.5, 0.7, 0.4, 0.01


def build(**given):
    sizes = {"horizon_length": HORIZON, "flow_steps": F, "n_critics": K, "gamma": GAMMA, "inv_temp": INV_TEMP, "rho": RHO}
    sizes |= {"offline_dataset": two_trajectories(ACTION_DIM), "edit_scale": EDIT_SCALE, "learning_rate": LR, "seed": 0}
    plain = {"net_arch": [8, 8], "optimizer_class": th.optim.SGD}
    return disturb(QAM("MlpPolicy", None, policy_kwargs=plain, **{**sizes, **given}))


@pytest.fixture
def model():
    return build()


@pytest.fixture(scope="module")
def batch():
    return windows(B, ACTION_DIM, HORIZON, GAMMA)


@dataclass
class Draws:
    """The random numbers of an update."""

    time: np.ndarray
    noise: np.ndarray
    path: np.ndarray
    next_decision: np.ndarray
    decision: np.ndarray


def drawn(noise_dim, seed=0):
    """:return: the numbers that an update draws from a generator with this seed"""
    generator = th.Generator().manual_seed(seed)
    time = th.rand(B, 1, generator=generator)
    noise = th.randn(F + 1, B, A, generator=generator)
    decisions = th.randn(2, B, 1, noise_dim, generator=generator)
    return Draws(*(each.double().numpy() for each in (time, noise[0], noise[1:], *decisions)))


@pytest.fixture(scope="module")
def draws():
    return drawn(2 * A)


# --------------------------------------------------------- the transcription


def flow_np(weights, s, z):
    x = z
    for i in range(F):
        x = x + velocity_np(weights, s, x, np.full((len(s), 1), i / F)) / F
    return np.clip(x, -1, 1)


def product_np(weights, s, x, t, g):
    """:return: J^T g, where J is the Jacobian of the velocity in x"""
    inputs = np.concatenate([s, x, np.full((len(s), 1), t)], axis=1)
    product = np.zeros_like(g)
    for j in range(A):
        along = np.zeros_like(inputs)
        along[:, s.shape[1] + j] = 1
        product[:, j] = (mlp_np(weights, inputs, along, "velocity_net.")[1] * g).sum(axis=1)
    return product


def action_gradient_np(weights, s, a):
    """:return: the gradient of mean_k Q_k(s, clip(a)) in a, by central differences"""
    gradient, step = np.zeros_like(a), 1e-6
    for j in range(A):
        ends = []
        for sign in (1, -1):
            moved = a.copy()
            moved[:, j] += sign * step
            ends.append(q_np(weights, s, np.clip(moved, -1, 1)).mean(axis=0))
        gradient[:, j] = (ends[0] - ends[1]) / (2 * step)
    return gradient


def edit_np(weights, s, a, z):
    """:return: edits and their log-probabilities, by the density of a Gaussian and the slope of tanh"""
    inputs = np.concatenate([s, a], axis=1)
    outputs = mlp_np(weights, inputs, 0 * inputs, "network.")[0]
    mean, std = outputs[:, :A], np.exp(np.clip(outputs[:, A:], -20, 2))
    u = mean + std * z
    density = np.exp(-(((u - mean) / std) ** 2) / 2) / (std * np.sqrt(2 * np.pi))
    return np.tanh(u), (np.log(density) - np.log(1 - np.tanh(u) ** 2)).sum(axis=1)


def sample_np(nets, s, noise):
    a = flow_np(nets["actor"], s, noise[:, 0, :A])
    if "edit_actor" not in nets:
        return a
    return np.clip(a + EDIT_SCALE * edit_np(nets["edit_actor"], s, a, noise[:, 0, A:])[0], -1, 1)


def sigma_np(i):
    return np.sqrt(2 * (1 - i / F + 1 / F) / (i / F + 1 / F))


def path_np(nets, s, noise):
    """:return: points of a path, and their adjoints"""
    h, xs = 1 / F, [noise[0]]
    for i in range(F - 1):
        v = velocity_np(nets["actor"], s, xs[i], np.full((B, 1), i * h))
        xs.append(xs[i] + h * (2 * v - xs[i] / (i * h + h)) + np.sqrt(h) * sigma_np(i) * noise[i + 1])
    xs.append(xs[-1] + h * velocity_np(nets["behaviour_target"], s, xs[-1], np.full((B, 1), (F - 1) * h)))
    gs = [None] * F + [-INV_TEMP * action_gradient_np(nets["critic_target"], s, xs[F])]
    for i in reversed(range(F)):
        t = i * h + h
        gs[i] = gs[i + 1] + h * (2 * product_np(nets["behaviour_target"], s, xs[i], t, gs[i + 1]) - gs[i + 1] / t)
    return xs, gs


class Reference:
    """The losses as functions of the weights of the network that they train; the others are constants."""

    def __init__(self, model, batch, draws):
        self.nets = {name: as_float64(network) for name, network in model.networks.items()}
        self.s, self.a, self.s_next, self.R, self.discount, self.valid, _ = (x.double().numpy() for x in batch)
        self.draws = draws
        q = q_np(self.nets["critic_target"], self.s_next, sample_np(self.nets, self.s_next, draws.next_decision))
        spread = np.sqrt(((q - q.mean(axis=0)) ** 2).sum(axis=0) / K)
        self.target = self.R[:, 0] + self.discount[:, 0] * (q.sum(axis=0) / K - RHO * spread)
        self.points, self.adjoints = path_np(self.nets, self.s, draws.path)
        self.slow = [velocity_np(self.nets["behaviour_target"], self.s, self.points[i], self.at(i)) for i in range(F)]

    def at(self, i):
        return np.full((B, 1), i / F)

    def critic(self, weights):
        return sum((self.valid[:, 0] * (q - self.target) ** 2).sum() for q in q_np(weights, self.s, self.a)) / (K * B)

    def behaviour(self, weights):
        time, noise = self.draws.time, self.draws.noise
        v = velocity_np(weights, self.s, (1 - time) * noise + time * self.a, time)
        return (self.valid * (v - (self.a - noise)) ** 2).sum() / (B * A)

    def actor(self, weights):
        loss = 0.0
        for i in range(F):
            v = velocity_np(weights, self.s, self.points[i], self.at(i))
            error = (v - self.slow[i]) * 2 / sigma_np(i) + sigma_np(i) * self.adjoints[i]
            loss += (error**2).sum() / B
        return loss

    def edit_actor(self, weights):
        noise = self.draws.decision[:, 0]
        a = flow_np(self.nets["actor"], self.s, noise[:, :A])
        edits, log_prob = edit_np(weights, self.s, a, noise[:, A:])
        q = q_np(self.nets["critic"], self.s, np.clip(a + EDIT_SCALE * edits, -1, 1)).mean(axis=0)
        alpha = np.exp(self.nets["entropy_coefficient"]["log_ent_coef"])
        self.log_prob = log_prob
        return (alpha * log_prob - q).mean()

    def entropy_coefficient(self, weights):
        self.edit_actor(self.nets["edit_actor"])
        return -(weights["log_ent_coef"] * (self.log_prob - 0.5 * A)).mean()

    def terms(self):
        losses = {name: getattr(self, name)(self.nets[name]) for name in self.nets if hasattr(self, name)}
        path = {"points": np.stack(self.points), "adjoints": np.stack(self.adjoints)}
        return {**losses, **path, "target": self.target[:, None]}

    def gradients(self, name):
        """:return: the gradient of a network's loss in each of its weights, by central differences"""
        found, step = {}, 1e-6
        for key, value in self.nets[name].items():
            gradient = np.zeros_like(value)
            for index in np.ndindex(value.shape):
                ends = []
                for sign in (1, -1):
                    moved = value.copy()
                    moved[index] += sign * step
                    ends.append(getattr(self, name)({**self.nets[name], key: moved}))
                gradient[index] = (ends[0] - ends[1]) / (2 * step)
            found[key] = gradient
        return found


def our_terms(model, batch, draws):
    time, noise, path, next_decision, decision = (th.as_tensor(x, dtype=th.float32) for x in vars(draws).values())
    with th.no_grad():
        target = model.td_target(batch, next_decision)
    points = model.memoryless_path(batch.observations, path)
    terms = {
        "target": target,
        "critic": td_loss(model.critic.bind(batch.observations)(batch.actions), target, batch.valid),
        "behaviour": model.flow_loss(batch, noise, time),
        "points": th.stack(points),
        "adjoints": th.stack(model.lean_adjoint(batch.observations, points)),
        "actor": model.adjoint_loss(batch, path)[0],
    }
    if model.policy.edits:
        _, of_edit = model.edit_loss(batch, decision)
        terms |= {"edit_actor": of_edit["edit_loss"], "entropy_coefficient": of_edit["ent_coef_loss"]}
    return terms


def deviation(given, expected):
    """:return: the largest relative deviation of a term"""
    assert set(given) == set(expected)
    differences = {name: np.abs(given[name].detach().numpy() - value).max() for name, value in expected.items()}
    return max(((name, d / np.abs(expected[name]).max()) for name, d in differences.items()), key=lambda item: item[1])


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("edit_scale", [0.0, EDIT_SCALE])
def test_terms_equal_the_transcription(batch, edit_scale, backend):
    model = build(edit_scale=edit_scale)
    model.policy.set_backend("auto" if backend == "native" else "torch")
    numbers = drawn(model.policy.noise_dim)
    name, largest = deviation(our_terms(model, batch, numbers), Reference(model, batch, numbers).terms())
    assert largest < 1e-5, name


def test_what_the_cases_tell_apart(model, batch, draws):
    """Ends of paths and of decisions, also edited ones, lie within the bounds and beyond them."""
    reference = Reference(model, batch, draws)
    ends = reference.points[-1]
    assert 0 < (abs(ends) > 1).mean() < 1
    assert 0 < (abs(sample_np(reference.nets, reference.s_next, draws.next_decision)) == 1).mean() < 1


# -------------------------------------------------------------- wrong details


def set_argument(name, value):
    def broken(model, monkeypatch):
        for one in (model, model.policy):
            if hasattr(one, name):
                monkeypatch.setattr(one, name, value)

    return broken


def take(name, instead):
    def broken(model, monkeypatch):
        monkeypatch.setattr(model, name, getattr(model, instead))

    return broken


def patch(name, make):
    """:return: a way to break a method: ``make(model, method)`` gives another"""

    def broken(model, monkeypatch):
        monkeypatch.setattr(model, name, make(model, getattr(model, name)))

    return broken


def along_the_fine_tuned_flow(model, method):
    def lean_adjoint(observation, points):
        kept, model.behaviour_target = model.behaviour_target, model.actor
        try:
            return method(observation, points)
        finally:
            model.behaviour_target = kept

    return lean_adjoint


def jacobian_at_the_time_of_the_point(model, method):
    def lean_adjoint(observation, points):
        bind, velocity = model.behaviour_target.velocity, model.behaviour_target.velocity(observation)
        model.behaviour_target.velocity = lambda _: lambda x, t: velocity(x, t - 1 / F)
        try:
            return method(observation, points)
        finally:
            model.behaviour_target.velocity = bind

    return lean_adjoint


def last_step(velocity_of, noisy):
    def make(model, method):
        def path(observation, noise):
            *points, _ = method(observation, noise)
            x, time, h = points[-1], noise.new_full((B, 1), 1 - 1 / F), 1 / F
            with th.no_grad():
                v = getattr(model, velocity_of).velocity(observation)(x, time)
            z = th.randn(x.shape, generator=th.Generator().manual_seed(0))
            return [*points, x + h * (2 * v - x) + h**0.5 * model.sigma(time) * z if noisy else x + h * v]

        return path

    return make


def other_gradient(replace):
    def broken(model, monkeypatch):
        monkeypatch.setattr("sb3_flow.qam.qam.action_gradient", replace)

    return broken


def without_clip(critic, x, how):
    class NeverClipped(th.Tensor):
        def clamp(self, *_):
            return self.as_subclass(th.Tensor)

    return action_gradient(lambda a: critic(a.as_subclass(NeverClipped)), x, how)


def without_drift(model, method):
    """The adjoint of the velocity alone."""

    def lean_adjoint(observation, points):
        adjoints = method(observation, points)
        found, velocity = [adjoints[-1]], model.behaviour_target.velocity(observation)
        for i in reversed(range(F)):
            x = points[i].detach().requires_grad_()
            (product,) = th.autograd.grad(velocity(x, x.new_full((B, 1), (i + 1) / F)), x, found[-1])
            found.append(found[-1] + 2 / F * product)
        return found[::-1]

    return lean_adjoint


WRONG = {
    "inverse temperature": set_argument("inv_temp", 1.0),
    "sign of the adjoint": set_argument("inv_temp", -INV_TEMP),
    "pessimism": set_argument("rho", 0.0),
    "scale of edits": set_argument("edit_scale", 1.0),
    "sigma without h": patch("sigma", lambda model, _: lambda t: (2 * (1 - t) / (t + 1 / F)).sqrt()),
    "sigma squared": patch("sigma", lambda model, sigma: lambda t: sigma(t).square()),
    "live behaviour flow": take("behaviour_target", "behaviour"),
    "live critics": take("critic_target", "critic"),
    "adjoint along the fine-tuned flow": patch("lean_adjoint", along_the_fine_tuned_flow),
    "adjoint without the drift": patch("lean_adjoint", without_drift),
    "Jacobian at the time of the point": patch("lean_adjoint", jacobian_at_the_time_of_the_point),
    "adjoints in the wrong order": patch("lean_adjoint", lambda _, adjoint: lambda s, points: adjoint(s, points)[::-1]),
    "last step with noise": patch("memoryless_path", last_step("behaviour_target", noisy=True)),
    "last step of the fine-tuned flow": patch("memoryless_path", last_step("actor", noisy=False)),
    "unclipped action": other_gradient(without_clip),
    "minimum of the critics": other_gradient(lambda critic, x, how: action_gradient(critic, x, "min")),
    "entropy": lambda model, _: model.entropy_coefficient.log_ent_coef.data.fill_(-30.0),
}


@pytest.mark.parametrize("broken", [*WRONG, "valid", "discount"])
def test_the_comparison_notices_a_wrong_detail(model, batch, draws, broken, monkeypatch):
    expected = Reference(model, batch, draws).terms()
    overlooked = {"valid": {"valid": th.ones(B, 1)}, "discount": {"discounts": th.full((B, 1), GAMMA**HORIZON)}}
    WRONG.get(broken, lambda *_: None)(model, monkeypatch)
    given = our_terms(model, batch._replace(**overlooked.get(broken, {})), draws)
    assert deviation(given, expected)[1] > 1e-3


# ------------------------------------------------------------ a whole update


TRAINED = ("actor", "behaviour", "critic", "edit_actor", "entropy_coefficient")


@pytest.fixture(scope="module")
def gradients(batch, draws):
    reference = Reference(build(), batch, draws)
    return {name: reference.gradients(name) for name in TRAINED}


@pytest.mark.parametrize("max_grad_norm", [1.0, None])
def test_an_update_equals_the_transcription(batch, draws, gradients, max_grad_norm):
    """All weights after a step of gradient descent, with clipping over all networks, and of the networks that follow."""
    model = build(max_grad_norm=max_grad_norm)
    reference = Reference(model, batch, draws)
    norm = np.sqrt(sum((g**2).sum() for of_network in gradients.values() for g in of_network.values()))
    assert norm > 2
    scale = LR if max_grad_norm is None else LR * max_grad_norm / norm
    expected = {name: {key: w - scale * gradients[name][key] for key, w in reference.nets[name].items()} for name in TRAINED}
    # alpha has Adam, whose first step is as long as its rate
    log_alpha, slope = (of["entropy_coefficient"]["log_ent_coef"] for of in (reference.nets, gradients))
    expected["entropy_coefficient"]["log_ent_coef"] = log_alpha - LR * np.sign(slope)
    for name in ("critic", "behaviour"):
        old, average = reference.nets[name], reference.nets[f"{name}_target"]
        expected[f"{name}_target"] = {key: (1 - model.tau) * average[key] + model.tau * old[key] for key in old}
    model.update(batch, th.Generator().manual_seed(0))
    for name, network in model.networks.items():
        for key, value in as_float64(network).items():
            np.testing.assert_allclose(value, expected[name][key], rtol=1e-5, atol=1e-6, err_msg=f"{name}.{key}")
            moved = np.abs(expected[name][key] - reference.nets[name][key]).max()
            assert np.abs(value - expected[name][key]).max() < 1e-2 * moved + 1e-7, f"{name}.{key}"


# ------------------------------------------------------------- which weights


def touched(model, loss):
    """:return: networks in which a loss leaves a gradient"""
    for parameter in model.policy.parameters():
        parameter.grad = None
    loss.backward()
    networks = model.networks.items()
    return {name for name, one in networks if any(p.grad is not None and p.grad.abs().sum() > 0 for p in one.parameters())}


def test_each_loss_touches_its_network_alone(model, batch, draws):
    for name in TRAINED:
        assert touched(model, our_terms(model, batch, draws)[name]) == {name}
    path = th.as_tensor(draws.path, dtype=th.float32)
    points = model.memoryless_path(batch.observations, path)
    assert not any(x.requires_grad for x in (*points, *model.lean_adjoint(batch.observations, points)))


def test_the_norm_is_of_all_networks_together(model, batch):
    model.max_grad_norm = 1e-3
    model.update(batch, th.Generator().manual_seed(0))
    gradients = [p.grad for optimizer in model.optimizers for group in optimizer.param_groups for p in group["params"]]
    assert float(th.cat([g.flatten() for g in gradients]).norm()) == pytest.approx(1e-3, rel=1e-3)
