"""QAM: its policies with and without edits, acting, saving, and an update that is a function of tensors."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.vec_env import DummyVecEnv
from tasks import PointEnv, collect
from test_offline_to_online import assert_same_state, state_of
from torch._subclasses.fake_tensor import FakeTensorMode

from sb3_flow import QAM
from sb3_flow.offline_to_online.actors import FlowActor
from sb3_flow.offline_to_online.gaussian_actor import GaussianActor
from sb3_flow.qam import CnnPolicy, MultiInputPolicy
from sb3_flow.qam.policies import QAMPolicy

SMALL = {"policy_kwargs": {"net_arch": [16, 16]}, "n_candidates": 4, "flow_steps": 3, "n_critics": 2, "batch_size": 16}
SMALL |= {"seed": 0}
SCALES = [0.0, 0.5]
OBSERVATIONS = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)


@pytest.fixture(scope="module")
def dataset():
    return collect(PointEnv())


def build(edit_scale=0.0, env="point", **kwargs):
    return QAM("MlpPolicy", PointEnv() if env == "point" else env, edit_scale=edit_scale, **{**SMALL, **kwargs})


def randomise(model):
    generator = th.Generator().manual_seed(0)
    for parameter in model.policy.parameters():
        parameter.data += 0.3 * th.randn(parameter.shape, generator=generator)
    return model


# ------------------------------------------------------------------ the policy


def test_the_networks_with_and_without_edits():
    plain, edited = build(), build(0.5)
    networks = ["actor", "critic", "critic_target", "behaviour", "behaviour_target"]
    assert list(plain.networks) == networks and len(plain.optimizers) == 3
    assert list(edited.networks) == [*networks, "edit_actor", "entropy_coefficient"] and len(edited.optimizers) == 5
    assert isinstance(edited.behaviour, FlowActor) and isinstance(edited.edit_actor, GaussianActor)
    for model in (plain, edited):
        behaviour, average = model.behaviour.state_dict(), model.behaviour_target.state_dict()
        assert all(th.equal(behaviour[name], average[name]) for name in behaviour)
        assert not any(parameter.requires_grad for parameter in model.behaviour_target.parameters())
        assert not hasattr(model.behaviour_target, "optimizer") and model.acting_mode == "sample"
    assert [model.policy.noise_dim for model in (plain, edited)] == [2, 4]
    assert [model.policy.network_evaluations["actor"] for model in (plain, edited)] == [3, 4]
    assert edited.entropy_coefficient.target_entropy == -0.5 * 2
    fixed = build(0.5, ent_coef=0.2, target_entropy=-3.0)
    assert len(fixed.optimizers) == 4 and float(fixed.entropy_coefficient()) == pytest.approx(0.2)
    assert fixed.entropy_coefficient.target_entropy == -3.0


def test_a_sample_is_the_edited_end_of_the_fine_tuned_flow():
    model, observations = randomise(build(0.5)), th.as_tensor(OBSERVATIONS)
    with th.no_grad():
        noise = model.actor.noise(observations, keyed=True, noise_dim=4)(1)
        end = model.actor.act(observations, noise[..., :2])
        mean, log_std = model.edit_actor.gaussian(observations, end)
        expected = (end + 0.5 * th.tanh(mean + log_std.exp() * noise[..., 2:])).clamp(-1, 1)[:, 0]
        chunk = model.policy.predict_chunk(observations, deterministic=True)
        model.set_acting_mode("zero")
        modes = model.policy.predict_chunk(observations)
        end = model.actor.act(observations, th.zeros(6, 1, 2))
        of_modes = (end + 0.5 * th.tanh(model.edit_actor.gaussian(observations, end)[0])).clamp(-1, 1)[:, 0]
    th.testing.assert_close(chunk, expected)
    th.testing.assert_close(modes, of_modes)
    assert not th.allclose(chunk, modes)


def test_every_candidate_has_an_edit_of_its_own():
    model, observations = randomise(build(0.5, acting_mode="best_of_n")), th.as_tensor(OBSERVATIONS)
    noise = th.randn(6, 4, 4)
    with th.no_grad():
        together = model.policy.samples(observations, noise)
        alone = th.cat([model.policy.samples(observations, noise[:, i : i + 1]) for i in range(4)], dim=1)
        chosen = model.policy.predict_chunk(observations, deterministic=True)
        candidates = model.policy.samples(observations, model.actor.noise(observations, None, True, 4)(4))
        best = model.critic.bind(observations)(candidates).mean(dim=0).argmax(dim=1)
    th.testing.assert_close(together, alone)
    th.testing.assert_close(chosen, candidates[th.arange(6), best])


@pytest.mark.parametrize("edit_scale", SCALES)
def test_exploration_takes_a_fresh_sample_in_every_mode(edit_scale):
    chunks = []
    for mode in ("zero", "best_of_n"):
        model = randomise(build(edit_scale, acting_mode=mode))
        chunks.append(model.policy.explore_chunk(th.as_tensor(OBSERVATIONS)))
    th.testing.assert_close(*chunks)


def test_a_path_ends_in_the_edited_action():
    model, observations, noise = randomise(build(0.5)), th.as_tensor(OBSERVATIONS), th.randn(6, 5, 4)
    with th.no_grad():
        times, points = model.policy.flow_path(observations, noise)
        assert points.shape == (4, 6, 5, 2) and th.equal(points[0], noise[..., :2])
        th.testing.assert_close(points[-1], model.policy.samples(observations, noise))
        values = model.policy.path_values(observations, times, points)
    assert values.shape == (2, 4, 6, 5)


def test_edits_are_not_searched():
    message = '`acting_mode="qgbs"` searches along a flow, but with `edit_scale=0.5` actions'
    with pytest.raises(ValueError, match=message):
        build(0.5, acting_mode="qgbs")
    model = build(0.5)
    with pytest.raises(ValueError, match=message):
        model.set_acting_mode("qgbs")
    assert model.acting_mode == model.policy.acting_mode == "sample"
    assert model.policy.acting_modes == ("sample", "zero", "best_of_n")
    assert build(acting_mode="qgbs").policy.acting_modes == ("sample", "zero", "best_of_n", "qgbs")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"edit_scale": -0.1}, "`edit_scale` must be at least 0"),
        ({"edit_scale": float("inf")}, "`edit_scale` must be a finite number"),
        ({"inv_temp": -1.0}, "`inv_temp` must be at least 0"),
        ({"rho": -1.0}, "`rho` must be at least 0"),
        ({"max_grad_norm": -1.0}, "`max_grad_norm` must be at least 0"),
        ({"max_grad_norm": "1"}, "`max_grad_norm` must be"),
        ({"edit_scale": 0.5, "ent_coef": "low"}, '`ent_coef` must be "auto"'),
        ({"edit_scale": 0.5, "target_entropy": None}, '`target_entropy` must be "auto"'),
        ({"acting_mode": "edit"}, "`acting_mode` must be one of"),
    ],
)
def test_arguments_that_cannot_be_used(given, message):
    with pytest.raises(ValueError, match=message):
        build(**given)


# ------------------------------------------------------------------ learning


@pytest.mark.parametrize("edit_scale", SCALES)
def test_an_update_does_not_look_at_its_data(edit_scale):
    """On tensors without data any number that left them, and any branch on one, would raise an error."""
    model = build(edit_scale, backend="torch", horizon_length=2)
    model.learn_offline(collect(PointEnv(), episodes=2), 1)
    batch = model._sample_windows(16)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = type(batch)(*(mode.from_tensor(part) for part in batch))
        metrics = model.update(fake, th.Generator())
    assert all(value.shape == () for value in metrics.values())
    names = {"edit_loss", "ent_coef", "ent_coef_loss"}
    assert names & set(metrics) == (names if edit_scale else set())


@pytest.mark.parametrize("edit_scale", SCALES)
def test_the_update_repeats(edit_scale, dataset):
    found = []
    for _ in range(2):
        model = build(edit_scale, horizon_length=2, learning_starts=0)
        model.learn_offline(dataset, 10)
        th.manual_seed(len(found))  # torch's own generator is not drawn from
        found.append(state_of(model.learn(20)))
    assert_same_state(*found)


@pytest.mark.parametrize("flow_steps", [1, 2])
def test_the_shortest_flows(flow_steps, dataset):
    model = build(0.5, flow_steps=flow_steps)
    model.learn_offline(dataset, 3)
    assert all(value.isfinite().all() for value in model.policy.state_dict().values())
    assert len(model.memoryless_path(th.zeros(4, 2), th.zeros(flow_steps, 4, 2))) == flow_steps + 1


def test_adjoint_matching_finds_the_tilted_distribution(monkeypatch):
    """
    Data a ~ N(0, s^2) and Q(s, a) = c a give the density N(0, s^2) exp(inv_temp c a): the mean becomes inv_temp c s^2, and the
    spread stays. The velocity of such data is linear in x, so that the adjoint does not depend on the path.
    """
    s, slope, steps = 0.1, 8.0, 200
    model = build(flow_steps=steps, inv_temp=2.0)
    observations, times = th.zeros(32, 2), th.arange(steps) / steps

    def v_beta(x, t):
        return (t * s**2 - (1 - t)) / ((1 - t) ** 2 + (t * s) ** 2) * x

    monkeypatch.setattr(model.behaviour_target, "velocity", lambda *_: v_beta)
    monkeypatch.setattr(model.critic_target, "bind", lambda _: lambda a: slope * a.sum(dim=-1).unsqueeze(0))
    adjoints = th.stack(model.lean_adjoint(observations, [th.zeros(32, 2)] * (steps + 1)))[:steps, 0, 0]

    def v_theta(x, t):
        """Make Eq. 4 zero."""
        here = (t * steps).round().long()
        return v_beta(x, t) - (model.sigma(times).square() / 2 * adjoints)[here]

    monkeypatch.setattr(model.actor, "velocity", lambda *_: v_theta)
    noise = th.randn(steps, 32, 2, generator=th.Generator().manual_seed(0))
    batch = SimpleNamespace(observations=observations)
    assert float(model.adjoint_loss(batch, noise)[0]) == pytest.approx(0, abs=1e-4)
    with th.no_grad():
        ends = model.actor.act(th.zeros(1, 2), th.tensor([[[0.0, 1.0]]]))[0, 0]
    mean, spread = float(ends[0]), float(ends[1] - ends[0])
    assert (mean, spread) == (pytest.approx(2.0 * slope * s**2, rel=0.05), pytest.approx(s, rel=0.05))


def test_edits_follow_the_critics(dataset):
    """Edited actions have larger values than the flow's own."""
    model = build(0.5, inv_temp=0.0, ent_coef=0.0, policy_kwargs={"net_arch": [32, 32]}, learning_rate=3e-3, gamma=0.9)
    model.learn_offline(dataset, 100)
    batch, noise = model._sample_windows(256), th.randn(256, 1, 4, generator=th.Generator().manual_seed(0))
    with th.no_grad():
        q = model.critic.bind(batch.observations)
        own, edited = model.actor.act(batch.observations, noise[..., :2]), model.policy.samples(batch.observations, noise)
        assert float(q(edited).mean()) > float(q(own).mean())


# -------------------------------------------------------------------- saving


@pytest.mark.parametrize("edit_scale", SCALES)
def test_offline_training_in_two_halves_equals_one_go(edit_scale, dataset, tmp_path):
    kwargs = {"env": None, "horizon_length": 2, "offline_dataset": dataset}
    whole = build(edit_scale, **kwargs).learn_offline(dataset, 20)
    build(edit_scale, **kwargs).learn_offline(dataset, 10).save(tmp_path / "half")
    th.manual_seed(99)
    resumed = QAM.load(tmp_path / "half").learn_offline(dataset, 10)
    assert_same_state(state_of(whole), state_of(resumed))
    for name in ("behaviour", "edit_actor", "entropy_coefficient") if edit_scale else ("behaviour",):
        moments = [getattr(model, name).optimizer.state_dict()["state"] for model in (whole, resumed)]
        assert all(th.equal(moments[0][i]["exp_avg"], moments[1][i]["exp_avg"]) for i in moments[0])


@pytest.mark.parametrize("edit_scale", SCALES)
def test_everything_is_restored(edit_scale, dataset, tmp_path):
    own = {"ent_coef": "auto_0.3", "target_entropy": -2.5} if edit_scale else {}
    model = build(edit_scale, learning_starts=0, horizon_length=2, execution_horizon=1, inv_temp=3.0, rho=0.0, **own)
    model.learn_offline(dataset, 5)
    model.learn(20)
    model.set_acting_mode("zero")
    model.save(tmp_path / "model")
    loaded = QAM.load(tmp_path / "model", env=PointEnv())
    assert_same_state(state_of(model), state_of(loaded))
    names = ("inv_temp", "rho", "max_grad_norm", "edit_scale", "ent_coef", "target_entropy", "acting_mode", "n_candidates")
    for name in (*names, "execution_horizon", "flow_steps"):
        assert getattr(loaded, name) == getattr(model, name), name
        assert getattr(loaded.policy, name, getattr(model, name)) == getattr(model, name), name
    expected = model.predict(OBSERVATIONS, deterministic=True)[0]
    np.testing.assert_array_equal(loaded.predict(OBSERVATIONS, deterministic=True)[0], expected)
    model.policy.save(tmp_path / "policy")
    policy = QAMPolicy.load(tmp_path / "policy")
    np.testing.assert_array_equal(policy.predict(OBSERVATIONS, deterministic=True)[0], expected)
    assert policy.edits == bool(edit_scale)
    loaded.learn(10, reset_num_timesteps=False)


# ------------------------------------------------------------------- features


@pytest.mark.parametrize(("kind", "policy"), [("dict", MultiInputPolicy), ("image", CnnPolicy)])
@pytest.mark.parametrize("share_features_extractor", [False, True])
def test_dict_and_image_observations(kind, policy, share_features_extractor):
    kwargs = {"net_arch": [8], "share_features_extractor": share_features_extractor}
    kwargs |= {"features_extractor_kwargs": {"features_dim": 8}} if kind == "image" else {}
    env = DummyVecEnv([lambda: PointEnv(kind, length=5)] * 2)
    model = QAM(policy, env, **{**SMALL, "policy_kwargs": kwargs}, edit_scale=0.5, learning_starts=4)
    extractors = [network.features_extractor for network in model.networks.values() if hasattr(network, "features_extractor")]
    assert len({id(each) for each in extractors}) == len(extractors) - share_features_extractor
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    model.learn_offline(collect(PointEnv(kind, length=5), episodes=3), 2)
    model.learn(20)
    after = model.policy.state_dict()
    changed = {name.split(".")[0] for name in before if not th.equal(before[name], after[name])}
    assert changed == set(model.networks)
    assert all(value.isfinite().all() for value in after.values())
    model.predict(env.reset(), deterministic=True)
