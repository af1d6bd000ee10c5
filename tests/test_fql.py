"""FQL: its two kinds of actors, acting, saving, and an update that is a function of tensors."""

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.vec_env import DummyVecEnv
from tasks import PointEnv, collect
from test_offline_to_online import assert_same_state, state_of
from torch._subclasses.fake_tensor import FakeTensorMode

from sb3_flow import FQL
from sb3_flow.fql import CnnPolicy, MultiInputPolicy
from sb3_flow.fql.policies import FQLPolicy, OneStepActor
from sb3_flow.offline_to_online.actors import FlowActor

SMALL = {"policy_kwargs": {"net_arch": [16, 16]}, "n_candidates": 4, "flow_steps": 3, "batch_size": 16, "seed": 0}
TYPES = ["distilled", "best_of_n"]
OBSERVATIONS = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)


@pytest.fixture(scope="module")
def dataset():
    return collect(PointEnv())


def build(actor_type="distilled", env="point", **kwargs):
    return FQL("MlpPolicy", PointEnv() if env == "point" else env, actor_type=actor_type, **{**SMALL, **kwargs})


def randomise(model):
    generator = th.Generator().manual_seed(0)
    for parameter in model.policy.parameters():
        parameter.data += 0.3 * th.randn(parameter.shape, generator=generator)
    return model


# ------------------------------------------------------------------ the actors


def test_the_networks_of_both_actors():
    distilled, best = build(), build("best_of_n")
    assert list(distilled.networks) == ["actor", "critic", "critic_target", "teacher"]
    assert list(best.networks) == ["actor", "critic", "critic_target"]
    assert isinstance(distilled.actor, OneStepActor) and isinstance(distilled.teacher, FlowActor)
    assert isinstance(best.actor, FlowActor) and not hasattr(best, "teacher")
    assert distilled.policy.flow is distilled.teacher and best.policy.flow is best.actor
    assert (len(distilled.optimizers), len(best.optimizers)) == (3, 2)
    assert (distilled.acting_mode, best.acting_mode) == ("sample", "best_of_n")
    sizes = [model.policy.network_evaluations["actor"] for model in (distilled, best)]
    assert sizes == [1, 4 * 3]


def test_a_sample_of_the_distilled_actor_is_its_answer_to_the_noise():
    model = randomise(build())
    observations = th.as_tensor(OBSERVATIONS)
    with th.no_grad():
        noise = model.actor.noise(observations, keyed=True)(1)
        expected = model.actor.network(observations, noise[:, 0]).clamp(-1, 1)
        chunk = model.policy.predict_chunk(observations, deterministic=True)
    th.testing.assert_close(chunk, expected)


@pytest.mark.parametrize("actor_type", TYPES)
def test_exploration_takes_the_best_of_n_only_where_the_actor_is_best_of_n(actor_type, monkeypatch):
    model, counts = randomise(build(actor_type)), []
    best_of = model.policy.best_of
    monkeypatch.setattr(
        model.policy, "best_of", lambda s, samples, *how: (counts.append(samples.shape[1]), best_of(s, samples, *how))[1]
    )
    for mode in ("zero", "best_of_n"):  # the mode is predict's
        model.set_acting_mode(mode)
        model.policy.explore_chunk(th.as_tensor(OBSERVATIONS))
    assert counts == [1, 1] if actor_type == "distilled" else [4, 4]


def test_the_distilled_actor_is_not_searched():
    message = '`acting_mode="qgbs"` searches along a flow'
    with pytest.raises(ValueError, match=message):
        build(acting_mode="qgbs")
    model = build()
    with pytest.raises(ValueError, match=message):
        model.set_acting_mode("qgbs")
    assert model.acting_mode == model.policy.acting_mode == "sample"
    assert model.policy.acting_modes == ("sample", "zero", "best_of_n")
    assert build("best_of_n", acting_mode="qgbs").policy.acting_modes == ("sample", "zero", "best_of_n", "qgbs")


def test_options_that_there_are_not():
    with pytest.raises(ValueError, match="`actor_type` must be one of 'distilled', 'best_of_n', but 'ddpg'"):
        build("ddpg")
    with pytest.raises(ValueError, match="`q_aggregation` must be one of 'mean', 'min', but 'first'"):
        build(q_aggregation="first")
    with pytest.raises(ValueError, match="`acting_mode` must be one of"):
        build(acting_mode="best")


# ------------------------------------------------------------------ learning


@pytest.mark.parametrize("actor_type", TYPES)
def test_an_update_does_not_look_at_its_data(actor_type):
    """On tensors without data any number that left them, and any branch on one, would raise an error."""
    model = build(actor_type, normalize_q_loss=actor_type == "distilled", backend="torch", horizon_length=2)
    model.learn_offline(collect(PointEnv(), episodes=2), 1)
    batch = model._sample_windows(16)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = type(batch)(*(mode.from_tensor(part) for part in batch))
        metrics = model.update(fake, th.Generator())
    assert all(value.shape == () for value in metrics.values())


@pytest.mark.parametrize("actor_type", TYPES)
def test_the_update_repeats(actor_type, dataset):
    found = []
    for _ in range(2):
        model = build(actor_type, horizon_length=2, learning_starts=0)
        model.learn_offline(dataset, 10)
        th.manual_seed(len(found))  # torch's own generator is not drawn from
        found.append(state_of(model.learn(20)))
    assert_same_state(*found)


def test_distillation_brings_the_actor_to_the_flow(dataset):
    """With a large alpha the student does what the teacher does to the same noise."""
    model = build(alpha=1e4, policy_kwargs={"net_arch": [64, 64]}, learning_rate=3e-3)
    observations, noise = th.as_tensor(dataset.observations[:64]), th.randn(64, 1, 2)

    def distance():
        with th.no_grad():
            return float((model.actor.act(observations, noise) - model.teacher.act(observations, noise)).square().mean())

    before = distance()
    model.learn_offline(dataset, 300)
    assert distance() < 0.1 * before


def test_the_critic_draws_the_actor_from_the_flow(dataset):
    """The smaller alpha is, the larger are the values of the actions."""
    values = []
    for alpha in (100.0, 0.0):
        model = build(alpha=alpha, policy_kwargs={"net_arch": [64, 64]}, learning_rate=3e-3, gamma=0.9)
        model.learn_offline(dataset, 300)
        batch = model._sample_windows(256)
        noise = th.randn(256, 1, 2, generator=th.Generator().manual_seed(0))
        with th.no_grad():
            q = model.critic.bind(batch.observations)
            of_actor, of_flow = (q(one.act(batch.observations, noise)[:, 0]).mean() for one in (model.actor, model.teacher))
        values.append(float(of_actor - of_flow))
    assert values[1] > max(values[0], 0.0)


# -------------------------------------------------------------------- saving


@pytest.mark.parametrize("actor_type", TYPES)
def test_offline_training_in_two_halves_equals_one_go(actor_type, dataset, tmp_path):
    kwargs = {"env": None, "horizon_length": 2, "offline_dataset": dataset}
    whole = build(actor_type, **kwargs).learn_offline(dataset, 20)
    build(actor_type, **kwargs).learn_offline(dataset, 10).save(tmp_path / "half")
    th.manual_seed(99)
    resumed = FQL.load(tmp_path / "half").learn_offline(dataset, 10)
    assert_same_state(state_of(whole), state_of(resumed))
    if actor_type == "distilled":
        moments = [model.teacher.optimizer.state_dict()["state"] for model in (whole, resumed)]
        assert all(th.equal(moments[0][i]["exp_avg"], moments[1][i]["exp_avg"]) for i in moments[0])


@pytest.mark.parametrize("actor_type", TYPES)
def test_everything_is_restored(actor_type, dataset, tmp_path):
    model = build(actor_type, learning_starts=0, horizon_length=2, execution_horizon=1, q_aggregation="min")
    model.learn_offline(dataset, 5)
    model.learn(20)
    model.set_acting_mode("zero")
    model.save(tmp_path / "model")
    loaded = FQL.load(tmp_path / "model", env=PointEnv())
    assert_same_state(state_of(model), state_of(loaded))
    for name in ("actor_type", "alpha", "acting_mode", "q_aggregation", "n_candidates", "execution_horizon", "flow_steps"):
        assert getattr(loaded, name) == getattr(model, name), name
        assert getattr(loaded.policy, name, getattr(model, name)) == getattr(model, name), name
    expected = model.predict(OBSERVATIONS, deterministic=True)[0]
    np.testing.assert_array_equal(loaded.predict(OBSERVATIONS, deterministic=True)[0], expected)
    model.policy.save(tmp_path / "policy")
    policy = FQLPolicy.load(tmp_path / "policy")
    np.testing.assert_array_equal(policy.predict(OBSERVATIONS, deterministic=True)[0], expected)
    assert policy.actor_type == actor_type
    loaded.learn(10, reset_num_timesteps=False)


def test_the_mode_can_be_chosen_at_load(tmp_path):
    build().save(tmp_path / "model")
    loaded = FQL.load(tmp_path / "model", acting_mode="best_of_n")
    assert loaded.acting_mode == loaded.policy.acting_mode == "best_of_n"


# ------------------------------------------------------------------- features


@pytest.mark.parametrize(("kind", "policy"), [("dict", MultiInputPolicy), ("image", CnnPolicy)])
@pytest.mark.parametrize("actor_type", TYPES)
@pytest.mark.parametrize("share_features_extractor", [False, True])
def test_dict_and_image_observations(kind, policy, actor_type, share_features_extractor):
    kwargs = {"net_arch": [8], "share_features_extractor": share_features_extractor}
    kwargs |= {"features_extractor_kwargs": {"features_dim": 8}} if kind == "image" else {}
    env = DummyVecEnv([lambda: PointEnv(kind, length=5)] * 2)
    model = FQL(policy, env, **{**SMALL, "policy_kwargs": kwargs}, actor_type=actor_type, learning_starts=4)
    extractors = {id(network.features_extractor) for network in model.networks.values()}
    assert len(extractors) == len(model.networks) - share_features_extractor
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    model.learn_offline(collect(PointEnv(kind, length=5), episodes=3), 2)
    model.learn(20)
    after = model.policy.state_dict()
    changed = {name.split(".")[0] for name in before if not th.equal(before[name], after[name])}
    assert changed == set(model.networks)
    assert all(value.isfinite().all() for value in after.values())
    model.predict(env.reset(), deterministic=True)
