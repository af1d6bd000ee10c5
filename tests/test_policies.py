"""How RQL's policy acts: evaluation modes, determinism, chunks through ``predict``."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv
from tasks import PointEnv, collect

from sb3_flow import FMQ, RQL
from sb3_flow.compiled import unavailable
from sb3_flow.flow import TanhGELU, euler_forward, guided_euler, jump
from sb3_flow.rql import MlpPolicy

SMALL = {"policy_kwargs": {"net_arch": [16, 16]}, "n_critics": 2, "seed": 0}
MODES = ["sample", "zero", "best_of_n", "qgbs", "guided"]


def test_the_test_environment_is_valid():
    for kind in ("box", "dict", "image"):
        check_env(PointEnv(kind))


def build(env=None, **kwargs):
    return RQL("MlpPolicy", PointEnv() if env is None else env, **{**SMALL, **kwargs})


def randomise(model):
    """The moving average must not be the actor, or a mix-up goes unnoticed."""
    generator = th.Generator().manual_seed(0)
    for parameter in model.policy.parameters():
        parameter.data += 0.3 * th.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("horizon_length", [1, 3])
def test_deterministic_actions_are_repeatable_and_survive_a_reload(tmp_path, mode, horizon_length):
    model = randomise(build(acting_mode=mode, horizon_length=horizon_length))
    observations = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    first, _ = model.predict(observations, deterministic=True)
    model.predict(observations, deterministic=False)
    np.testing.assert_array_equal(model.predict(observations, deterministic=True)[0], first)
    model.save(tmp_path / "model")
    loaded = RQL.load(tmp_path / "model")
    assert loaded.acting_mode == loaded.policy.acting_mode == mode
    np.testing.assert_array_equal(loaded.predict(observations, deterministic=True)[0], first)
    model.policy.save(tmp_path / "policy")
    np.testing.assert_array_equal(MlpPolicy.load(tmp_path / "policy").predict(observations, deterministic=True)[0], first)


def test_a_policy_that_cannot_be_saved_leaves_the_file_before(tmp_path, monkeypatch):
    build().policy.save(tmp_path / "folder" / "policy")
    before = (tmp_path / "folder" / "policy").read_bytes()

    def full_disk(content, path):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(th, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        build(seed=1).policy.save(tmp_path / "folder" / "policy")
    assert [file.name for file in (tmp_path / "folder").iterdir()] == ["policy"]
    assert (tmp_path / "folder" / "policy").read_bytes() == before


@pytest.mark.parametrize("mode", MODES)
def test_stochastic_actions_follow_the_seed(mode):
    observations = np.zeros((4, 2), dtype=np.float32)
    one, other, third = (randomise(build(acting_mode=mode, seed=seed)) for seed in (0, 0, 1))
    third.policy.load_state_dict(one.policy.state_dict())
    draws = [[m.predict(observations)[0] for _ in range(3)] for m in (one, other, third)]
    np.testing.assert_array_equal(draws[0], draws[1])
    if mode != "zero":
        assert not np.array_equal(draws[0], draws[2])
        assert not np.array_equal(draws[0][0], draws[0][1])
    one.set_random_seed(0)
    np.testing.assert_array_equal(one.predict(observations)[0], draws[0][0])


def test_modes_use_the_noise_they_say():
    model = randomise(build(n_candidates=5))
    policy = model.policy
    observation = th.tensor([[0.3, -0.2]])
    velocity = policy.actor_ema.velocity(observation)
    with th.no_grad():
        flows = [
            euler_forward(velocity, noise[None], 10).clamp(-1, 1)[0]
            for noise in policy.acting_actor.noise(observation, keyed=True)(5)[0]
        ]
        zero = euler_forward(velocity, th.zeros(1, 2), 10).clamp(-1, 1)[0]
        scores = [th.stack(model.critic(observation, flow[None])).mean() for flow in flows]
        best = flows[int(th.stack(scores).argmax())]
    for mode, expected in (("zero", zero), ("sample", flows[0]), ("best_of_n", best)):
        model.set_acting_mode(mode)
        action, _ = model.predict(observation.numpy(), deterministic=True)
        np.testing.assert_allclose(action[0], 2 * expected.numpy(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="`acting_mode` must be one of"):
        model.set_acting_mode("mean")


@pytest.mark.parametrize("horizon_length", [1, 3])
def test_guidance_of_one_is_twice_what_training_adds(horizon_length):
    """Where the value is linear, the loss is least at u = a - x_0 + A / (2 alpha F) grad V, which guidance adds once more."""
    alpha, steps = 0.7, 5
    model = randomise(build(acting_mode="guided", alpha=alpha, flow_steps=steps, guidance=1.0, horizon_length=horizon_length))
    A = 2 * horizon_length
    slope, data, noise = (th.randn(8, A, generator=th.Generator().manual_seed(i)) for i in range(3))
    time = th.rand(8, 1, generator=th.Generator().manual_seed(3)) * (1 - 1 / steps)  # the last step of a flow may be shorter
    batch = SimpleNamespace(actions=data, action_mask=th.ones(8, A), valid=th.ones(8, 1))
    u = (data - noise).requires_grad_()

    def value(x, t, frozen=False):
        return (slope * x).sum(-1, keepdim=True)[None]

    def least(u):
        loss, _ = model.policy_loss(value, lambda x, t: u, batch, noise, time)
        (gradient,) = th.autograd.grad(loss, u)
        return gradient.abs().max()

    added = A / (2 * alpha * steps) * slope
    assert least(u) > 1e-3 and least((data - noise + added).requires_grad_()) < 1e-6
    policy = model.policy
    policy.critic.bind = lambda observation: value
    observations = th.zeros(8, 2)
    velocity = policy.actor_ema.velocity(observations)
    with th.no_grad():
        found = policy.guided_samples(observations, 0.1 * noise)
        expected = guided_euler(velocity, value, 0.1 * noise, steps, A / (2 * alpha * steps)).clamp(-1, 1)
    th.testing.assert_close(found, expected)
    assert (found.abs() < 1).any() and not th.allclose(found, policy.samples(observations, 0.1 * noise[:, None])[:, 0])


@pytest.mark.skipif(unavailable() is not None, reason="no network is compiled")
@pytest.mark.parametrize(("policy", "kind"), [("MlpPolicy", "box"), ("MultiInputPolicy", "dict"), ("CnnPolicy", "image")])
def test_guided_is_the_same_in_both_backends(policy, kind):
    env = PointEnv(kind)
    env.observation_space.seed(0)
    one = env.observation_space.sample()
    observations = {name: part[None] for name, part in one.items()} if kind == "dict" else one[None]
    models = [
        RQL(policy, env, acting_mode="guided", guidance=5.0, backend=backend, flow_steps=3, **SMALL)
        for backend in ("native", "torch")
    ]
    models[1].policy.load_state_dict(models[0].policy.state_dict())
    actions = [model.predict(observations, deterministic=True)[0] for model in models]
    np.testing.assert_allclose(*actions, rtol=1e-4, atol=1e-4)
    models[0].set_acting_mode("sample")
    assert np.abs(models[0].predict(observations, deterministic=True)[0] - actions[0]).max() > 1e-3


def test_guided_needs_values_of_partial_actions():
    model = build(acting_mode="guided", flow_steps=3)
    assert model.policy.network_evaluations == {"actor": 3, "critic": 3, "critic_gradient": 3, "actions": 1}
    assert build().policy.acting_modes == tuple(MODES)
    with pytest.raises(ValueError, match='`acting_mode="guided"` follows values of partial actions, but with `alpha=0`'):
        build(acting_mode="guided", alpha=0.0)
    assert build(alpha=0.0).policy.acting_modes == ("sample", "zero", "best_of_n", "qgbs")
    with pytest.raises(ValueError, match="partial actions, but of the algorithms RQL alone learns them"):
        FMQ("MlpPolicy", PointEnv(), seed=0, policy_kwargs=SMALL["policy_kwargs"]).set_acting_mode("guided")
    with pytest.raises(ValueError, match=r"`guidance` must be at least 0\.0, but -1"):
        build(guidance=-1)


@pytest.mark.parametrize("mode", ["best_of_n", "qgbs", "guided"])
def test_a_clone_has_no_values_to_act_by(mode):
    with pytest.raises(ValueError, match=f'`acting_mode="{mode}"` values actions by a critic, but with `objective="bc"`'):
        build(objective="bc", acting_mode=mode)
    model = build(objective="bc")
    with pytest.raises(ValueError, match="no value function is trained"):
        model.set_acting_mode(mode)
    assert model.acting_mode == model.policy.acting_mode == "sample"


def test_a_clone_says_that_it_has_no_values():
    assert build().policy.no_values is None
    policy = build(objective="bc").policy
    assert policy.acting_modes == ("sample", "zero")
    assert MlpPolicy(**policy._get_constructor_parameters()).acting_modes == ("sample", "zero")


@pytest.mark.parametrize("mode", ["qgbs", "guided"])
def test_modes_that_take_gradients_are_not_exported(mode):
    policy = build(acting_mode=mode, flow_steps=2, search={"eta": 0.3}).policy
    for export in (lambda: th.export.export(policy, (th.zeros(1, 2),)), lambda: th.jit.trace(policy, (th.zeros(1, 2),))):
        with pytest.raises(ValueError, match=f'`acting_mode="{mode}"` takes gradients'):
            export()


def test_beam_search_jumps_as_far_as_the_flow_goes():
    policy = randomise(build()).policy
    observations, noise = th.randn(3, 2), th.randn(3, 4, 2)
    average = policy._average_velocity(observations)
    zeros, ones = th.zeros(3, 4, 1), th.ones(3, 4, 1)
    with th.no_grad():
        whole = jump(average, noise, zeros, ones).clamp(-1, 1)
        th.testing.assert_close(whole, policy.actor_ema.act(observations, noise))
        halves = jump(average, jump(average, noise, zeros, 0.5 * ones), 0.5 * ones, ones)
        policy.actor_ema.flow_steps = 2 * policy.flow_steps
        finer = policy.actor_ema.act(observations, noise)
    th.testing.assert_close(halves.clamp(-1, 1), finer)


def test_mode_can_be_changed_when_loading(tmp_path):
    build(acting_mode="zero").save(tmp_path / "model")
    assert RQL.load(tmp_path / "model", acting_mode="sample").policy.acting_mode == "sample"


def test_exploration_uses_the_actor_and_evaluation_its_average():
    model = build(acting_mode="zero")
    model.policy.actor.velocity_net.layers[-1].bias.data += 100.0
    observation = np.zeros((1, 2), dtype=np.float32)
    assert (np.abs(model.predict(observation, deterministic=True)[0]) < 2).all()
    assert (model.policy.explore_chunk(th.zeros(1, 2)) == 1).all()


def test_a_chunk_travels_in_the_state():
    model = randomise(build(horizon_length=4, acting_mode="sample"))
    observations = np.zeros((3, 2), dtype=np.float32)
    state, actions = None, []
    for _ in range(4):
        action, state = model.predict(observations, state, np.zeros(3, dtype=bool))
        actions.append(action)
    chunks = state[0]
    np.testing.assert_array_equal(np.stack(actions, axis=1), chunks)
    # a new chunk when the old one is used up, also for the one environment whose episode begins
    _, state = model.predict(observations, state, np.zeros(3, dtype=bool))
    assert (state[1] == 1).all()
    assert not np.array_equal(state[0], chunks)
    before = state[0].copy()
    action, state = model.predict(observations, state, np.array([False, True, False]))
    assert state[1].tolist() == [2, 1, 2]
    np.testing.assert_array_equal(state[0][[0, 2]], before[[0, 2]])
    assert not np.array_equal(state[0][1], before[1])
    np.testing.assert_array_equal(action[[0, 2]], before[[0, 2], 1])


def test_chunks_of_a_single_observation():
    model = build(horizon_length=3)
    action, state = model.predict(np.zeros(2, dtype=np.float32))
    assert action.shape == (2,)
    action, _ = model.predict(np.zeros(2, dtype=np.float32), state)
    assert action.shape == (2,)
    with pytest.raises(ValueError, match="mixing Gym API"):
        model.predict((np.zeros(2, dtype=np.float32), {}))


@pytest.mark.parametrize("n_envs", [1, 3])
def test_evaluate_policy_executes_chunks(n_envs):
    model = build(horizon_length=5, acting_mode="zero")
    plans = []
    plan = model.policy.plan
    model.policy.plan = lambda *args: plans.append(1) or plan(*args)
    _, lengths = evaluate_policy(
        model, DummyVecEnv([PointEnv] * n_envs), n_eval_episodes=n_envs, warn=False, return_episode_rewards=True
    )
    if n_envs == 1:
        assert len(plans) == -(-lengths[0] // 5)


def test_actions_stay_within_bounds_and_are_unscaled():
    model = build(horizon_length=2)
    model.policy.actor_ema.velocity_net.layers[-1].bias.data += 100.0
    actions, _ = model.predict(np.zeros((5, 2), dtype=np.float32), deterministic=True)
    assert (actions == 2.0).all()


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("activation", [TanhGELU, th.nn.ReLU])
@pytest.mark.parametrize("kind", ["box", "image"])
def test_every_parameter_learns(backend, activation, kind):
    """The flow is integrated without gradients before it is trained: nothing of the one may leak into the other."""
    policy_kwargs = {"net_arch": [16, 16], "activation_fn": activation}
    if kind == "image":
        policy_kwargs["features_extractor_kwargs"] = {"features_dim": 8}
    policy = "CnnPolicy" if kind == "image" else "MlpPolicy"
    model = RQL(
        policy,
        PointEnv(kind),
        seed=0,
        n_critics=2,
        policy_kwargs=policy_kwargs,
        batch_size=8,
        buffer_size=100,
        backend=backend,
    )
    model.learn_offline(collect(PointEnv(kind), episodes=3), 1)
    before = {name: value.clone() for name, value in model.policy.named_parameters()}
    model.train(3, 8)
    still = [name for name, value in model.policy.named_parameters() if th.equal(value, before[name])]
    # a bias behind a LayerNorm-free ReLU may be dead; whole layers may not
    assert not [name for name in still if name.endswith("weight") or "ensemble.weights" in name]
