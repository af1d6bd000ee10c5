"""RLPD: half of each batch from the dataset, SAC without one, acting, saving, and an update that is a function of tensors."""

import warnings

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from tasks import PointEnv, collect
from test_offline_to_online import assert_same_state, state_of
from torch._subclasses.fake_tensor import FakeTensorMode

from sb3_flow import RLPD
from sb3_flow.rlpd import CnnPolicy, MultiInputPolicy
from sb3_flow.rlpd.policies import RLPDPolicy

SMALL = {"policy_kwargs": {"net_arch": [16, 16]}, "n_critics": 3, "n_candidates": 4, "batch_size": 16, "seed": 0}
OBSERVATIONS = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)


@pytest.fixture(scope="module")
def dataset():
    return collect(PointEnv(), seed=7)


def build(env="point", **kwargs):
    return RLPD("MlpPolicy", PointEnv() if env == "point" else env, **{**SMALL, "learning_starts": 0, **kwargs})


def randomise(model):
    generator = th.Generator().manual_seed(0)
    for parameter in model.policy.parameters():
        parameter.data += 0.3 * th.randn(parameter.shape, generator=generator)
    return model


# ------------------------------------------------------------ where data come from


def from_dataset(observations, dataset):
    rows = {row.tobytes() for row in dataset.observations}
    return sum(row.tobytes() in rows for row in observations.numpy())


@pytest.mark.parametrize(("arguments", "expected"), [({}, 8), ({"offline_fraction": 0.25}, 4)])
def test_half_of_each_batch_is_from_the_dataset_from_the_first_online_step_on(arguments, expected, dataset, monkeypatch):
    model, counts = build(offline_dataset=dataset, **arguments), []
    update = model.update
    monkeypatch.setattr(
        model,
        "update",
        lambda batch, *rest: (counts.append(from_dataset(batch.observations, dataset)), update(batch, *rest))[1],
    )
    model.learn(30)
    assert model.offline_updates == 0 and model._n_updates == 30
    assert counts == [expected] * 30


def test_a_loaded_model_misses_its_dataset(dataset, tmp_path):
    model = build(offline_dataset=dataset).learn(10)
    assert model.offline_updates == 0
    model.save(tmp_path / "model")
    with pytest.warns(UserWarning, match="This model was trained on a dataset, which is not saved with it"):
        RLPD.load(tmp_path / "model", env=PointEnv()).learn(10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RLPD.load(tmp_path / "model", env=PointEnv(), offline_dataset=dataset).learn(10)


@pytest.mark.parametrize("ent_coef", [0.7, "auto"])
def test_the_coefficient_of_the_entropy_at_load(ent_coef, tmp_path):
    build(ent_coef=0.2).save(tmp_path / "model")
    if ent_coef == "auto":
        with pytest.raises(RuntimeError, match="`ent_coef` was constant when the model was saved: give a number"):
            RLPD.load(tmp_path / "model", ent_coef=ent_coef)
    else:
        model = RLPD.load(tmp_path / "model", ent_coef=ent_coef)
        assert model.ent_coef == ent_coef and model.ent_coef_tensor.item() == pytest.approx(ent_coef)


def test_without_a_dataset_all_is_online(dataset):
    model = build().learn(30)
    assert model.replay_buffer.n_offline == 0 and model._n_updates == 30
    assert from_dataset(model._sample_windows(16).observations, dataset) == 0


def test_the_first_steps_are_random_with_a_dataset_too(dataset, monkeypatch):
    model = build(offline_dataset=dataset, learning_starts=10)
    decide, decisions = model.policy.explore_chunk, []
    monkeypatch.setattr(model.policy, "explore_chunk", lambda s: (decisions.append(1), decide(s))[1])
    model.learn(15)
    assert len(decisions) == 5


def test_sac_on_the_dataset_alone_and_an_environment_later(dataset):
    model = build(env=None, offline_dataset=dataset, horizon_length=2)
    model.learn_offline(dataset, 5)
    assert model.offline_updates == 5
    model.set_env(PointEnv())
    model.learn(20)
    assert model._n_updates > 5
    assert 0 < from_dataset(model._sample_windows(16).observations, dataset) < 16


def test_it_learns_to_reach_the_origin(dataset):
    small = {"policy_kwargs": {"net_arch": [32, 32]}, "batch_size": 64, "learning_rate": 1e-2, "gamma": 0.9}
    model = build(offline_dataset=dataset, ent_coef=0.05, **small)
    before, _ = evaluate_policy(model, PointEnv(), 10)
    model.learn(200)
    after, _ = evaluate_policy(model, PointEnv(), 10)
    assert after > -3 > before


# ------------------------------------------------------------------------ updates


@pytest.mark.parametrize("arguments", [{}, {"rho": 0.5, "backup_entropy": False, "bc_alpha": 0.1}, {"ent_coef": 0.2}])
def test_an_update_does_not_look_at_its_data(arguments):
    """On tensors without data any number that left them, and any branch on one, would raise an error."""
    model = build(backend="torch", horizon_length=2, **arguments)
    model.learn_offline(collect(PointEnv(), episodes=2), 1)
    batch = model._sample_windows(16)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = type(batch)(*(mode.from_tensor(part) for part in batch))
        metrics = model.update(fake, th.Generator())
    assert all(value.shape == () for value in metrics.values())
    assert ("bc_loss" in metrics) == ("bc_alpha" in arguments)
    assert ("ent_coef_loss" in metrics) == ("ent_coef" not in arguments)


def test_the_update_repeats(dataset):
    found = []
    for _ in range(2):
        model = build(offline_dataset=dataset, horizon_length=2)
        th.manual_seed(len(found))  # torch's own generator is not drawn from
        found.append(state_of(model.learn(20)))
    assert_same_state(*found)


def test_the_actor_waits_for_its_turn(dataset):
    model = build(offline_dataset=dataset, policy_delay=3, gradient_steps=3)
    model.learn_offline(dataset, 1)
    model._n_updates, changed, metrics = 0, [], []
    for _ in range(6):
        before = {name: value.clone() for name, value in model.policy.state_dict().items()}
        metrics.append(model.update(model._sample_windows(16), model.random_streams["update"]))
        model._n_updates += 1
        after = model.policy.state_dict()
        changed.append({name.split(".")[0] for name in before if not th.equal(before[name], after[name])})
    alone = {"critic", "critic_target"}
    assert changed == [alone, alone, alone | {"actor", "entropy_coefficient"}] * 2
    assert ["actor_loss" in each for each in metrics] == [False, False, True] * 2


def test_the_members_of_the_minimum_are_drawn_anew(dataset, monkeypatch):
    model, drawn = build(n_critics=5, offline_dataset=dataset), []
    td_target = model.td_target
    monkeypatch.setattr(model, "td_target", lambda batch, z, members: (drawn.append(members), td_target(batch, z, members))[1])
    model.learn_offline(dataset, 40)
    assert all(len(set(members.tolist())) == 2 for members in drawn)
    assert {int(member) for members in drawn for member in members} == set(range(5))


def test_fewer_critics_than_the_minimum_is_taken_over(dataset):
    model = build(n_critics=1).learn_offline(dataset, 2)
    assert model.n_min_critics == 2 and model._n_updates == 2


def test_imitation_brings_the_actor_to_the_data():
    towards = collect(PointEnv(), policy=lambda s, rng: np.clip(-3 * s + 0.1 * rng.normal(size=2), -2, 2).astype(np.float32))
    distances = []
    for bc_alpha in (0.0, 10.0):
        model = build(bc_alpha=bc_alpha, learning_rate=1e-2).learn_offline(towards, 100)
        found = model.predict(towards.observations)[0]
        distances.append(np.square(found - towards.actions).mean())
    assert distances[1] < 0.2 < distances[0]


def test_a_constant_coefficient(dataset, tmp_path):
    model = build(ent_coef=0.3).learn_offline(dataset, 5)
    assert model.log_ent_coef is None and float(model.ent_coef_tensor) == pytest.approx(0.3)
    assert len(model.optimizers) == 2
    model.save(tmp_path / "model")
    loaded = RLPD.load(tmp_path / "model")
    assert float(loaded.ent_coef_tensor) == pytest.approx(0.3) and loaded.log_ent_coef is None


def test_the_target_entropy_is_that_of_a_chunk():
    targets = [
        build(horizon_length=3, target_entropy=given).entropy_coefficient.target_entropy for given in ("auto", "auto_0.5", -1)
    ]
    assert targets == [-6, -3, -1]
    assert build().entropy_coefficient.target_entropy == -1


# ------------------------------------------------------------------------- acting


def test_the_modes_of_acting():
    model = randomise(build(horizon_length=2))
    assert model.acting_mode == "zero" and model.policy.acting_modes == ("sample", "zero", "best_of_n")
    observations = th.as_tensor(OBSERVATIONS)
    with th.no_grad():
        mean, _ = model.actor.gaussian(observations)
        for deterministic in (True, False):
            th.testing.assert_close(model.policy.predict_chunk(observations, deterministic), th.tanh(mean[:, 0]))
        model.set_acting_mode("sample")
        expected = model.actor.act(observations, model.actor.noise(observations, keyed=True)(1))[:, 0]
        th.testing.assert_close(model.policy.predict_chunk(observations, deterministic=True), expected)
        model.set_acting_mode("best_of_n")
        samples = model.actor.act(observations, model.actor.noise(observations, keyed=True)(4))
        best = model.critic.bind(observations)(samples).mean(0).argmax(1)
        th.testing.assert_close(model.policy.predict_chunk(observations, True), samples[th.arange(6), best])
    assert model.policy.network_evaluations == {"actor": 4, "critic": 4, "critic_gradient": 0, "actions": 2}


def test_there_is_no_flow_to_search_along():
    message = '`acting_mode="qgbs"` searches along a flow, but a Gaussian takes one step: give "sample", "zero" or "best_of_n"'
    with pytest.raises(ValueError, match=message):
        build(acting_mode="qgbs")
    model = build()
    with pytest.raises(ValueError, match=message):
        model.set_acting_mode("qgbs")
    assert model.acting_mode == model.policy.acting_mode == "zero"


def test_the_online_phase_collects_samples_in_every_mode():
    model = randomise(build())
    observations = th.as_tensor(OBSERVATIONS)
    for mode in ("zero", "best_of_n"):
        model.set_acting_mode(mode)
        one, other = (model.policy.explore_chunk(observations) for _ in range(2))
        assert not th.equal(one, other)


# ------------------------------------------------------------------------- saving


def test_training_in_two_halves_equals_one_go(dataset, tmp_path):
    """Gradient steps on half dataset, half online steps, of which a file and a buffer hold all."""
    kwargs = {"horizon_length": 2, "offline_dataset": dataset, "policy_delay": 2}
    model = build(**kwargs).learn(25)
    model.save(tmp_path / "half")
    model.save_replay_buffer(tmp_path / "buffer")
    resumed = RLPD.load(tmp_path / "half", env=PointEnv(), offline_dataset=dataset)
    resumed.load_replay_buffer(tmp_path / "buffer")
    resumed.set_offline_dataset(dataset)
    resumed.set_logger(model.logger)
    th.manual_seed(99)
    for one in (model, resumed):
        one.train(11, 16)
    assert_same_state(state_of(model), state_of(resumed))
    moments = [one.entropy_coefficient.optimizer.state_dict()["state"][0] for one in (model, resumed)]
    assert all(th.equal(moments[0][name], moments[1][name]) for name in ("exp_avg", "exp_avg_sq", "step"))
    assert th.equal(model.log_ent_coef, resumed.log_ent_coef) and model.log_ent_coef != 0


def test_everything_is_restored(dataset, tmp_path):
    model = build(horizon_length=2, execution_horizon=1, rho=0.5, backup_entropy=False, target_entropy=-3, bc_alpha=0.1)
    model.learn_offline(dataset, 5)
    model.learn(20)
    model.set_acting_mode("sample")
    model.save(tmp_path / "model")
    loaded = RLPD.load(tmp_path / "model", env=PointEnv())
    assert_same_state(state_of(model), state_of(loaded))
    names = ("rho", "backup_entropy", "bc_alpha", "n_critics", "n_min_critics", "policy_delay", "ent_coef", "target_entropy")
    for name in (*names, "acting_mode", "execution_horizon", "offline_fraction", "n_candidates"):
        assert getattr(loaded, name) == getattr(model, name), name
        assert getattr(loaded.policy, name, getattr(model, name)) == getattr(model, name), name
    expected = model.predict(OBSERVATIONS, deterministic=True)[0]
    np.testing.assert_array_equal(loaded.predict(OBSERVATIONS, deterministic=True)[0], expected)
    model.policy.save(tmp_path / "policy")
    policy = RLPDPolicy.load(tmp_path / "policy")
    np.testing.assert_array_equal(policy.predict(OBSERVATIONS, deterministic=True)[0], expected)
    assert policy.entropy_coefficient.target_entropy == -3
    loaded.learn(10, reset_num_timesteps=False)


# ----------------------------------------------------------------------- features


@pytest.mark.parametrize(("kind", "policy"), [("dict", MultiInputPolicy), ("image", CnnPolicy)])
@pytest.mark.parametrize("share_features_extractor", [False, True])
def test_dict_and_image_observations(kind, policy, share_features_extractor):
    kwargs = {"net_arch": [8], "share_features_extractor": share_features_extractor}
    kwargs |= {"features_extractor_kwargs": {"features_dim": 8}} if kind == "image" else {}
    env = DummyVecEnv([lambda: PointEnv(kind, length=5)] * 2)
    data = collect(PointEnv(kind, length=5), episodes=3)
    model = RLPD(policy, env, **{**SMALL, "policy_kwargs": kwargs}, learning_starts=4, offline_dataset=data, bc_alpha=0.1)
    extractors = {id(network.features_extractor) for network in (model.actor, model.critic, model.critic_target)}
    assert len(extractors) == 3 - share_features_extractor
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    model.learn(20)
    after = model.policy.state_dict()
    changed = {name.split(".")[0] for name in before if not th.equal(before[name], after[name])}
    assert changed == set(model.networks) == {"actor", "critic", "critic_target", "entropy_coefficient"}
    assert all(value.isfinite().all() for value in after.values())
    model.predict(env.reset(), deterministic=True)


def test_normalised_observations_and_rewards(dataset):
    env = VecNormalize(DummyVecEnv([PointEnv]))
    model = build(env=env, offline_dataset=dataset).learn(30)
    batch = model._sample_windows(64)
    assert from_dataset(batch.observations, dataset) == 0  # normalised, too
    assert all(value.isfinite().all() for value in model.policy.state_dict().values())


# ------------------------------------------------------------------- wrong options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ent_coef": "0.1_auto"}, '`ent_coef` must be "auto", "auto_<number>" or a number, but \'0.1_auto\' was given'),
        ({"target_entropy": "half"}, '`target_entropy` must be "auto"'),
        ({"rho": -0.5}, "`rho` must be at least 0"),
        ({"bc_alpha": -1}, "`bc_alpha` must be at least 0"),
        ({"n_min_critics": 0}, "`n_min_critics` must be at least 1"),
        ({"n_min_critics": 5}, "`n_min_critics` must be at most `n_critics=3`, but 5 was given"),
        ({"policy_delay": 1.5}, "`policy_delay` must be a whole number"),
        ({"backup_entropy": "no"}, "`backup_entropy` must be one of"),
        ({"offline_fraction": 2.0}, "`offline_fraction` must be"),
        ({"policy_kwargs": {"ent_coef": -1.0}}, "`ent_coef` must be at least 0"),
    ],
)
def test_options_that_there_are_not(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**arguments)


def test_sacs_own_arguments_are_unknown():
    with pytest.raises(TypeError, match="use_sde"):
        build(use_sde=True)


def test_an_argument_without_effect():
    with pytest.warns(UserWarning, match="`n_min_critics` has no effect here: `rho` takes the place of the minimum"):
        build(rho=0.5, n_min_critics=1)
