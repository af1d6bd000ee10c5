"""DSRL: the noise that it decides, the flows that it steers, acting, saving, and an update that is a function of tensors."""

import copy

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from tasks import PointEnv, collect
from test_offline_to_online import assert_same_state, state_of
from torch._subclasses.fake_tensor import FakeTensorMode

from sb3_flow import DSRL, FMQ, FQL, QAM, RQL, FlowMapPolicy
from sb3_flow.dsrl import CnnPolicy, MultiInputPolicy
from sb3_flow.dsrl.policies import DSRLPolicy
from sb3_flow.offline_to_online.decoders import FlowRecipe

NETS = {"policy_kwargs": {"net_arch": [16, 16]}, "seed": 0}
SMALL = {**NETS, "flow_steps": 3, "n_critics": 2, "batch_size": 16}
OBSERVATIONS = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
OWN = ["actor", "critic", "critic_target", "latent_critic", "entropy_coefficient", "bc_flow", "bc_flow_target"]


@pytest.fixture(scope="module")
def dataset():
    return collect(PointEnv())


def build(env="point", **kwargs):
    kwargs = {**SMALL, **kwargs}
    if "decoder" in kwargs:
        kwargs.pop("flow_steps")
    return DSRL("MlpPolicy", PointEnv() if env == "point" else env, **kwargs)


def randomise(model):
    generator = th.Generator().manual_seed(0)
    for parameter in model.policy.parameters():
        parameter.data += 0.3 * th.randn(parameter.shape, generator=generator)
    return model


SOURCES = {
    "RQL": lambda: RQL("MlpPolicy", PointEnv(), n_critics=2, flow_steps=4, **NETS),
    "FMQ": lambda: FMQ("MlpPolicy", PointEnv(), **NETS),
    "FMQ, 3 jumps": lambda: FMQ("MlpPolicy", PointEnv(), n_sampling_steps=3, **NETS),
    "FQL": lambda: FQL("MlpPolicy", PointEnv(), flow_steps=4, **NETS),
    "QC": lambda: FQL("MlpPolicy", PointEnv(), actor_type="best_of_n", flow_steps=4, **NETS),
    "DSRL": lambda: build(flow_steps=4),
    "QAM": lambda: QAM("MlpPolicy", PointEnv(), n_critics=2, flow_steps=4, **NETS),
}


def what_the_flow_does(name, policy, noise):
    """:return: actions of a policy's flow, found without its ``frozen_flow``"""
    observations = th.as_tensor(OBSERVATIONS)
    with th.no_grad():
        if name.startswith("FMQ"):
            return policy.actor.act(observations, noise, policy.n_sampling_steps)
        flow = {"RQL": "actor_ema", "FQL": "teacher", "QC": "actor", "DSRL": "bc_flow_target", "QAM": "behaviour_target"}[name]
        return getattr(policy, flow).act(observations, noise)


# ------------------------------------------------------------------- networks


def test_the_networks():
    model, steered = build(), build(decoder=FQL("MlpPolicy", PointEnv(), **NETS))
    assert list(model.networks) == OWN and list(steered.networks) == OWN[:-1]
    assert (len(model.optimizers), len(steered.optimizers)) == (5, 4)
    assert len(build(ent_coef=0.1).optimizers) == 4
    assert model.policy.flow is model.bc_flow_target and steered.policy.flow is steered.bc_flow
    assert (model.acting_mode, build(n_candidates=3).acting_mode) == ("sample", "best_of_n")
    assert model.policy.network_evaluations["actor"] == 1 + 3
    assert build(n_candidates=5).policy.network_evaluations["actor"] == 5 * (1 + 3)


def test_an_action_is_the_decoded_noise_of_the_actor():
    model = randomise(build(noise_scale=0.7))
    observations = th.as_tensor(OBSERVATIONS)
    with th.no_grad():
        mean, log_std = model.actor.gaussian(observations)
        eps = model.actor.noise(observations, keyed=True)(1)
        for mode, noise in (("sample", eps), ("zero", 0 * eps)):
            model.set_acting_mode(mode)
            z = 0.7 * th.tanh(mean + log_std.exp() * noise)
            expected = model.bc_flow_target.act(observations, z)[:, 0]
            th.testing.assert_close(model.policy.predict_chunk(observations, deterministic=True), expected)


def test_exploration_takes_the_best_of_n(monkeypatch):
    for n in (1, 4):
        model, counts = randomise(build(n_candidates=n)), []
        best_of = model.policy.best_of
        monkeypatch.setattr(model.policy, "best_of", lambda s, a, f=best_of, c=counts: (c.append(a.shape[1]), f(s, a))[1])
        model.set_acting_mode("zero")  # the mode is predict's
        model.policy.explore_chunk(th.as_tensor(OBSERVATIONS))
        assert counts == [n]


def test_modes_that_there_are_not(tmp_path):
    with pytest.raises(ValueError, match='`acting_mode="qgbs"` searches along a flow, but DSRL decides the noise'):
        build(acting_mode="qgbs")
    model = build()
    with pytest.raises(ValueError, match='`acting_mode="best_of_n"` needs `n_candidates` of at least 2, but 1 was given'):
        model.set_acting_mode("best_of_n")
    assert model.acting_mode == model.policy.acting_mode == "sample"
    assert model.policy.acting_modes == ("sample", "zero")
    assert build(n_candidates=2).policy.acting_modes == ("sample", "zero", "best_of_n")
    model.save(tmp_path / "model")
    assert DSRL.load(tmp_path / "model", n_candidates=8, acting_mode="best_of_n").policy.network_evaluations["critic"] == 8


# ----------------------------------------------------------------- the decoder


@pytest.mark.parametrize("name", SOURCES)
def test_a_given_flow_decodes_and_stays_as_it_is(name, dataset, tmp_path):
    source = randomise(SOURCES[name]())
    source.save(tmp_path / "model.zip")
    source.policy.save(tmp_path / "policy")
    noise = th.randn(6, 5, 2, generator=th.Generator().manual_seed(0))
    expected = what_the_flow_does(name, source.policy, noise)
    for decoder in (source, source.policy, tmp_path / "model", str(tmp_path / "model.zip"), tmp_path / "policy"):
        model = build(decoder=decoder, backend="torch" if decoder is source else "auto")
        found = model.policy.flow.act(th.as_tensor(OBSERVATIONS), noise)
        th.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert isinstance(model.decoder, FlowRecipe)
    before = copy.deepcopy(source.policy.state_dict())
    model.learn_offline(dataset, 3)
    assert "flow_loss" not in model.update(model._sample_windows(16), th.Generator())
    th.testing.assert_close(model.policy.flow.act(th.as_tensor(OBSERVATIONS), noise), found, rtol=0, atol=0)
    th.testing.assert_close(source.policy.state_dict(), before, rtol=0, atol=0)
    with th.no_grad():
        _, points = model.policy.flow_path(th.as_tensor(OBSERVATIONS), noise)
        th.testing.assert_close(points[0], model.policy.steered(th.as_tensor(OBSERVATIONS), noise))
        th.testing.assert_close(points[-1], model.policy.samples(th.as_tensor(OBSERVATIONS), noise), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["FMQ, 3 jumps", "FQL"])
def test_a_model_brings_its_flow_along(name, dataset, tmp_path):
    """Neither the file nor the model that the flow came from is there when the model is loaded."""
    source = randomise(SOURCES[name]())
    source.save(tmp_path / "source.zip")
    model = build(decoder=tmp_path / "source.zip", learning_starts=0).learn_offline(dataset, 5)
    (tmp_path / "source.zip").unlink()
    del source
    model.save(tmp_path / "model")
    model.policy.save(tmp_path / "policy")
    th.manual_seed(99)
    expected = model.predict(OBSERVATIONS, deterministic=True)[0]
    loaded = DSRL.load(tmp_path / "model", env=PointEnv(), offline_dataset=dataset)
    assert_same_state(state_of(model), state_of(loaded))
    policy = DSRLPolicy.load(tmp_path / "policy")
    for one in (loaded, policy, build(decoder=loaded).policy.flow):
        if isinstance(one, (DSRL, DSRLPolicy)):
            np.testing.assert_array_equal(one.predict(OBSERVATIONS, deterministic=True)[0], expected)
        else:
            assert one.flow_steps == model.policy.flow.flow_steps
    assert_same_state(*(state_of(one.learn_offline(dataset, 5)) for one in (model, loaded)))
    copied = copy.deepcopy(model)
    np.testing.assert_array_equal(
        *(one.learn_offline(dataset, 2).predict(OBSERVATIONS, deterministic=True)[0] for one in (model, copied))
    )


def test_a_saved_model_takes_no_other_flow(tmp_path):
    build().save(tmp_path / "model")
    with pytest.raises(ValueError, match="`decoder` was given to `load`, but a saved model has its flow"):
        DSRL.load(tmp_path / "model", decoder=SOURCES["FQL"]())


def flow_map_policy(observations=2, **given):
    box = spaces.Box(-np.inf, np.inf, (observations,))
    return FlowMapPolicy(box, spaces.Box(-2, 2, (2,)), lambda _: 1e-3, n_critics=0, net_arch=[8], **given)


class NarrowEnv(PointEnv):
    def __init__(self):
        super().__init__()
        self.action_space = spaces.Box(-1, 1, (2,))


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (
            lambda: flow_map_policy(3),
            r"for `observation_space=Box\(.*, \(2,\).*but it has `observation_space=Box\(.*\(3,\)",
        ),
        (
            lambda: flow_map_policy(horizon_length=2),
            "for `horizon_length=1`, as the model does, but it has `horizon_length=2`",
        ),
        (lambda: FQL("MlpPolicy", NarrowEnv(), **NETS), r"for `action_space=Box\(-2.0, 2.0.*has `action_space=Box\(-1.0, 1.0"),
    ],
)
def test_flows_that_do_not_fit(decoder, message):
    with pytest.raises(ValueError, match=f"`decoder` must decide actions {message}"):
        build(decoder=decoder())


def test_things_that_have_no_flow(tmp_path):
    SAC("MlpPolicy", PointEnv(), policy_kwargs={"net_arch": [4]}).save(tmp_path / "sac")
    with pytest.raises(TypeError, match="or a file with either, but a SACPolicy was given"):
        build(decoder=tmp_path / "sac")
    with pytest.raises(TypeError, match="but a ActorCriticPolicy was given"):
        build(decoder=PPO("MlpPolicy", PointEnv()))
    with pytest.raises(TypeError, match="but a int was given"):
        build(decoder=3)
    with pytest.raises(FileNotFoundError, match=r"`decoder` must be a saved model or policy, but there is no file .*nothing"):
        build(decoder=tmp_path / "nothing")
    policy = flow_map_policy()
    th.save({"state_dict": policy.state_dict(), "data": policy._get_constructor_parameters()}, tmp_path / "older")
    with pytest.raises(ValueError, match="older was saved by an earlier version: load it by its own class"):
        build(decoder=tmp_path / "older")
    build(decoder=FlowMapPolicy.load(tmp_path / "older"))


def test_steering_a_cloned_flow_map(dataset):
    """The bounds of observations that come from data do not matter; the flow sees what the model's environment gives."""
    policy = FlowMapPolicy(dataset.observation_space, dataset.action_space, lambda _: 1e-3, n_critics=0, net_arch=[16])
    policy.learn_behaviour(dataset, 5)
    env = VecNormalize(DummyVecEnv([PointEnv] * 2))
    model = build(env, decoder=policy, learning_starts=0)
    model.learn_offline(dataset, 2)
    model.learn(20)
    assert all(
        th.equal(ours, theirs) for ours, theirs in zip(model.bc_flow.parameters(), policy.actor.parameters(), strict=True)
    )
    assert model.policy.state_dict()["actor.network.layers.0.weight"].isfinite().all()


# ------------------------------------------------------------------ learning


@pytest.mark.parametrize("given", [{"n_candidates": 3}, {"ent_coef": 0.1}], ids=str)
def test_an_update_does_not_look_at_its_data(given):
    """On tensors without data any number that left them, and any branch on one, would raise an error."""
    model = build(backend="torch", horizon_length=2, **given)
    model.learn_offline(collect(PointEnv(), episodes=2), 1)
    batch = model._sample_windows(16)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = type(batch)(*(mode.from_tensor(part) for part in batch))
        metrics = model.update(fake, th.Generator())
    assert all(value.shape == () for value in metrics.values())


def test_the_update_repeats(dataset):
    found = []
    for _ in range(2):
        model = build(horizon_length=2, learning_starts=0)
        model.learn_offline(dataset, 10)
        th.manual_seed(len(found))  # torch's own generator is not drawn from
        found.append(state_of(model.learn(20)))
    assert_same_state(*found)


def test_steering_finds_better_actions_of_the_flow(dataset):
    """The noise of the actor means better actions to the critics than Gaussian noise does; and alpha follows the entropy."""
    model = build(policy_kwargs={"net_arch": [32, 32]}, learning_rate=3e-3, gamma=0.9, rho=0.0, tau=0.05, batch_size=64)
    model.learn_offline(dataset, 150)
    batch = model._sample_windows(256)
    noise = th.randn(256, 1, 2, generator=th.Generator().manual_seed(0))
    with th.no_grad():
        q = model.critic.bind(batch.observations)
        steered = q(model.policy.samples(batch.observations, noise)[:, 0]).mean()
        cloned = q(model.policy.flow.act(batch.observations, noise)[:, 0]).mean()
    assert steered > cloned
    assert 0 < model.entropy_coefficient() < 0.9


# -------------------------------------------------------------------- saving


def test_offline_training_in_two_halves_equals_one_go(dataset, tmp_path):
    kwargs = {"env": None, "horizon_length": 2, "offline_dataset": dataset}
    whole = build(**kwargs).learn_offline(dataset, 20)
    build(**kwargs).learn_offline(dataset, 10).save(tmp_path / "half")
    th.manual_seed(99)
    resumed = DSRL.load(tmp_path / "half").learn_offline(dataset, 10)
    assert_same_state(state_of(whole), state_of(resumed))
    for network in ("bc_flow", "latent_critic", "entropy_coefficient"):
        moments = [model.networks[network].optimizer.state_dict()["state"] for model in (whole, resumed)]
        assert all(th.equal(moments[0][i]["exp_avg"], moments[1][i]["exp_avg"]) for i in moments[0])


def test_everything_is_restored(dataset, tmp_path):
    own = {"noise_scale": 0.7, "rho": 0.2, "ent_coef": "auto_0.2", "target_entropy": -1.0, "n_candidates": 3}
    model = build(learning_starts=0, horizon_length=2, execution_horizon=1, **own)
    model.learn_offline(dataset, 5)
    model.learn(20)
    model.set_acting_mode("zero")
    model.save(tmp_path / "model")
    loaded = DSRL.load(tmp_path / "model", env=PointEnv(), offline_dataset=dataset)
    assert_same_state(state_of(model), state_of(loaded))
    for name in (*own, "acting_mode", "execution_horizon", "flow_steps"):
        assert getattr(loaded, name) == getattr(model, name), name
        assert getattr(loaded.policy, name, getattr(model, name)) == getattr(model, name), name
    expected = model.predict(OBSERVATIONS, deterministic=True)[0]
    np.testing.assert_array_equal(loaded.predict(OBSERVATIONS, deterministic=True)[0], expected)
    model.policy.save(tmp_path / "policy")
    policy = DSRLPolicy.load(tmp_path / "policy")
    np.testing.assert_array_equal(policy.predict(OBSERVATIONS, deterministic=True)[0], expected)
    loaded.learn(10, reset_num_timesteps=False)


# ------------------------------------------------------------------- features


@pytest.mark.parametrize(("kind", "policy"), [("dict", MultiInputPolicy), ("image", CnnPolicy)])
@pytest.mark.parametrize("share_features_extractor", [False, True])
def test_dict_and_image_observations(kind, policy, share_features_extractor, tmp_path):
    kwargs = {"net_arch": [8], "share_features_extractor": share_features_extractor}
    kwargs |= {"features_extractor_kwargs": {"features_dim": 8}} if kind == "image" else {}
    env = DummyVecEnv([lambda: PointEnv(kind, length=5)] * 2)
    model = DSRL(policy, env, **{**SMALL, "policy_kwargs": kwargs}, learning_starts=4)
    networks = {name: network for name, network in model.networks.items() if name != "entropy_coefficient"}
    extractors = {id(network.features_extractor) for network in networks.values()}
    assert len(extractors) == len(networks) - 2 * share_features_extractor
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    model.learn_offline(collect(PointEnv(kind, length=5), episodes=3), 2)
    model.learn(20)
    after = model.policy.state_dict()
    changed = {name.split(".")[0] for name in before if not th.equal(before[name], after[name])}
    assert changed == set(model.networks)
    assert all(value.isfinite().all() for value in after.values())
    # a model with this model's flow, which has a features extractor of its own, loads without this model
    steered = DSRL(policy, env, **{**SMALL, "flow_steps": 10, "policy_kwargs": {"net_arch": [8]}}, decoder=model)
    steered.save(tmp_path / "steered")
    loaded, observations = DSRL.load(tmp_path / "steered"), env.reset()
    np.testing.assert_array_equal(*(one.predict(observations, deterministic=True)[0] for one in (steered, loaded)))
