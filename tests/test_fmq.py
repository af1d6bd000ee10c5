"""FMQ and FlowMapPolicy: the switch of phases, saving, acting, and what must not go wrong silently."""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from tasks import PointEnv, collect
from test_offline_to_online import assert_same_state, state_of

from sb3_flow import FMQ, FlowMapPolicy, OfflineDataset
from sb3_flow.fmq import CnnPolicy, MultiInputPolicy
from sb3_flow.fmq import policies as fmq_policies

SMALL = {"policy_kwargs": {"net_arch": [16, 16]}, "n_candidates": 4, "batch_size": 16, "warmup_steps": 5, "seed": 0}
MODES = ["sample", "zero", "best_of_n", "qgbs"]


@pytest.fixture(scope="module")
def dataset():
    return collect(PointEnv())


def build(env="point", **kwargs):
    return FMQ("MlpPolicy", PointEnv() if env == "point" else env, **{**SMALL, **kwargs})


def randomise(model, scale=0.3):
    generator = th.Generator().manual_seed(0)
    for parameter in model.policy.parameters():
        parameter.data += scale * th.randn(parameter.shape, generator=generator)
    return model


def weights(network):
    return {name: value.clone() for name, value in network.state_dict().items()}


def same(one, other):
    return all(th.equal(one[name], other[name]) for name in one)


# ------------------------------------------------------------------ the switch


def test_the_anchor_is_the_actor_at_the_switch_and_stays(dataset):
    model = build(learning_starts=0, horizon_length=2)
    model.learn_offline(dataset, 20)
    offline, before = weights(model.actor), weights(model.anchor)
    assert not same(offline, before)
    observation = np.float32([[0.3, -0.2]])
    action = model.predict(observation, deterministic=True)[0]
    model.learn(0)
    assert same(weights(model.anchor), offline) and same(weights(model.actor), offline)
    np.testing.assert_array_equal(model.predict(observation, deterministic=True)[0], action)
    model.learn(40)
    assert same(weights(model.anchor), offline)  # bitwise
    assert not same(weights(model.actor), offline)
    model.learn(20, reset_num_timesteps=False)
    assert same(weights(model.anchor), offline)
    model.learn_offline(dataset, 5)
    again = weights(model.actor)
    model.learn(10)
    assert same(weights(model.anchor), again)


def test_the_phases_differ_in_the_logs(dataset, tmp_path):
    model = build(learning_starts=0)
    model.set_logger(configure(str(tmp_path), ["csv"]))
    model.learn_offline(dataset, 12, log_interval=6)
    model.learn(40, log_interval=1)
    rows = [dict(zip(*pair, strict=True)) for pair in _csv(tmp_path / "progress.csv")]
    assert {row["train/online_phase"] for row in rows} == {"0", "1"}
    for row in rows:
        online = row["train/online_phase"] == "1"
        assert bool(row.get("train/diagonal_loss")) != online and bool(row.get("train/guidance_loss")) == online
        if online:
            assert 0 < float(row["train/guidance_radius"]) <= 1


def _csv(path):
    # rows that were written before a new column appeared are shorter
    header, *lines = (line.split(",") for line in path.read_text().splitlines())
    return [(header, line + [""] * (len(header) - len(line))) for line in lines]


def test_online_without_an_offline_phase_moves_the_anchor():
    model = build(learning_starts=10).learn(40)
    assert same(weights(model.anchor), weights(model.actor))
    kept = build(learning_starts=10, reanchor_every=0)
    first = weights(kept.anchor)
    kept.learn(40)
    assert same(weights(kept.anchor), first) and not same(weights(kept.actor), first)


def test_imitation_goes_on_online_under_that_rule(dataset):
    model = build(online_rule="bc", learning_starts=0)
    model.learn_offline(dataset, 10)
    model.learn(20)
    assert not model.guided
    model.dump_logs()
    batch = model._sample_windows(16)
    metrics = model.update(batch, model.random_streams["update"])
    assert "guidance_loss" not in metrics and metrics["diagonal_loss"] > 0


def test_without_environment(dataset):
    model = FMQ("FlowMapPolicy", None, **SMALL, offline_dataset=dataset).learn_offline(dataset, 5)
    assert model.policy.n_steps == model.offline_updates == 5


# -------------------------------------------------------------------- saving


@pytest.mark.parametrize("distillation", ["mf", "lsd", "psd"])
def test_offline_training_in_two_halves_equals_one_go(dataset, tmp_path, distillation):
    kwargs = {**SMALL, "horizon_length": 2, "distillation": distillation, "offline_dataset": dataset}
    whole = FMQ("MlpPolicy", None, **kwargs).learn_offline(dataset, 30)
    FMQ("MlpPolicy", None, **kwargs).learn_offline(dataset, 15).save(tmp_path / "half")
    th.manual_seed(99)
    resumed = FMQ.load(tmp_path / "half").learn_offline(dataset, 15)
    assert_same_state(state_of(whole), state_of(resumed))
    assert resumed.policy.n_steps == 30


def test_everything_is_restored_across_the_switch(dataset, tmp_path):
    model = build(learning_starts=0, horizon_length=2, execution_horizon=1)
    model.learn_offline(dataset, 10)
    model.learn(30)
    model.set_acting_mode("qgbs", beam_width=2, branches=3)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    loaded = FMQ.load(tmp_path / "model", env=PointEnv())
    assert_same_state(state_of(model), state_of(loaded))
    assert any(name.startswith("policy.anchor") for name in state_of(loaded))
    for name in (
        "anchored_at",
        "offline_updates",
        "_n_updates",
        "acting_mode",
        "search",
        "execution_horizon",
        "num_timesteps",
    ):
        assert getattr(model, name) == getattr(loaded, name), name
    assert loaded.policy.n_steps == 40 and loaded.policy.network_evaluations == model.policy.network_evaluations
    anchor = weights(loaded.anchor)
    loaded.set_offline_dataset(dataset)
    loaded.load_replay_buffer(tmp_path / "buffer")
    loaded.learn(10, reset_num_timesteps=False)
    assert same(anchor, weights(loaded.anchor))  # loading is not a switch of phase
    # the same next update from the same windows
    one, other = FMQ.load(tmp_path / "model", env=PointEnv()), FMQ.load(tmp_path / "model", env=PointEnv())
    for each in (one, other):
        each.set_offline_dataset(dataset)
        each.load_replay_buffer(tmp_path / "buffer")
        each.set_logger(configure(None, []))
        each.train(3, 16)
    assert_same_state(state_of(one), state_of(other))


def test_set_parameters(dataset):
    one, other = build(), randomise(build(seed=1))
    one.learn_offline(dataset, 3)
    other.set_parameters(one.get_parameters())
    assert same(weights(one.policy), weights(other.policy))


# -------------------------------------------------------------------- acting


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("horizon_length", "execution_horizon"), [(1, None), (4, None), (4, 2)])
def test_modes(tmp_path, mode, horizon_length, execution_horizon):
    settings = {"horizon_length": horizon_length, "execution_horizon": execution_horizon}
    model = randomise(build(acting_mode=mode, n_candidates=6, **settings), scale=0.02)  # not all at the actions' bounds
    observations = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    action, state = model.predict(observations, deterministic=True)
    assert action.shape == (5, 2) and model.action_space.contains(action[0])
    np.testing.assert_array_equal(model.predict(observations, deterministic=True)[0], action)
    model.predict(observations)
    np.testing.assert_array_equal(model.predict(observations, deterministic=True)[0], action)
    model.save(tmp_path / "model")
    loaded = FMQ.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.predict(observations, deterministic=True)[0], action)
    loaded.set_acting_mode("sample")
    assert loaded.acting_mode == loaded.policy.acting_mode == "sample"
    if horizon_length > 1:
        assert state[0].shape == (5, execution_horizon or horizon_length, 2)
        for step in range(1, 5):
            chunks, (action, state) = state, model.predict(observations + step, state, np.zeros(5, bool), deterministic=True)
            replanned = not np.array_equal(chunks[0], state[0])
            assert replanned == (step % (execution_horizon or horizon_length) == 0)
    if mode == "zero":
        return
    same_observation = np.zeros((20, 2), dtype=np.float32)
    drawn = model.predict(same_observation)[0]
    assert len({tuple(row) for row in drawn}) > 6  # every row has its own noise, but there are only four corners
    assert not np.array_equal(model.predict(same_observation)[0], drawn)


@pytest.mark.parametrize("steps", [1, 3])
def test_what_the_modes_compute(steps):
    model = randomise(build(n_candidates=6, n_sampling_steps=steps))
    policy, s = model.policy, th.tensor([[0.3, -0.2]])
    noise = policy.actor.noise(s, keyed=True)(6)[0]
    velocity = policy.actor.velocity(s.expand(6, -1))

    def jumps(a, steps):
        for i in range(steps):
            r, t = (th.full((len(a), 1), time / steps) for time in (i, i + 1))
            a = a + (t - r) * velocity(a, r, t)
        return a.clamp(-1, 1)

    with th.no_grad():
        samples, one_jump = jumps(noise, steps), jumps(noise, 1)
        q, q_of_one = (th.stack(model.critic(s.expand(6, -1), a)).amin(0)[:, 0] for a in (samples, one_jump))
        expected = {"sample": samples[0], "zero": jumps(th.zeros(6, 2), steps)[0], "best_of_n": samples[q.argmax()]}
        expected["qgbs"] = one_jump[:4][q_of_one[:4].argmax()]  # without iterations and moves: best of the beam
    for mode, action in expected.items():
        model.set_acting_mode(mode, **({"iterations": 0, "eta": 0.0} if mode == "qgbs" else {}))
        np.testing.assert_allclose(
            model.predict(s.numpy(), deterministic=True)[0][0], 2 * action.numpy(), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("search", [{}, {"iterations": 2, "beam_width": 3}, {"iterations": 0}, {"eta": 0.0}])
@pytest.mark.parametrize("mode", MODES)
def test_network_evaluations_are_what_happens(monkeypatch, mode, search):
    model = build(acting_mode=mode, search=search, n_sampling_steps=3, policy_kwargs={"net_arch": [8]})
    rows = {"actor": 0, "critic": 0, "critic_gradient": 0}
    run, bind_ensemble = type(model.actor.flow_map).bind, type(model.critic.ensemble).bind

    def bind(self, features, *n_candidates):
        velocity = run(self, features, *n_candidates)

        def counted(a, r, t):
            rows["actor"] += a[..., 0].numel()
            return velocity(a, r, t)

        return counted

    def bind_critic(self):
        ensemble = bind_ensemble(self)

        def counted(inputs, frozen=False):
            rows["critic"] += len(inputs)
            rows["critic_gradient"] += len(inputs) if inputs.requires_grad else 0
            return ensemble(inputs, frozen)

        return counted

    monkeypatch.setattr(type(model.actor.flow_map), "bind", bind)
    monkeypatch.setattr(type(model.critic.ensemble), "bind", bind_critic)
    model.predict(np.zeros((3, 2), dtype=np.float32))
    counts = model.policy.network_evaluations
    assert counts.pop("actions") == 1
    assert {name: count / 3 for name, count in rows.items()} == counts


@pytest.mark.parametrize("n_envs", [1, 4])
def test_learning_with_several_environments_and_normalisation(dataset, n_envs):
    env = VecNormalize(DummyVecEnv([PointEnv] * n_envs))
    model = build(env, horizon_length=3, execution_horizon=2, learning_starts=0)
    model.learn_offline(dataset, 10, callback=EvalCallback(VecNormalize(DummyVecEnv([PointEnv]), training=False), eval_freq=5))
    model.learn(60)
    assert np.isfinite(evaluate_policy(model, env, n_eval_episodes=3)[0])


@pytest.mark.parametrize(("kind", "policy"), [("dict", "MultiInputPolicy"), ("image", "CnnPolicy")])
def test_other_observations(tmp_path, kind, policy):
    data = collect(PointEnv(kind), episodes=2)
    model = FMQ(policy, PointEnv(kind), **SMALL, horizon_length=2, learning_starts=0, buffer_size=100)
    model.learn_offline(data, 2)
    model.learn(25)
    model.save(tmp_path / "model")
    observation = model.get_env().reset()
    loaded = FMQ.load(tmp_path / "model")
    np.testing.assert_array_equal(*(m.predict(observation, deterministic=True)[0] for m in (model, loaded)))


# ----------------------------------------------------------- the policy alone


def two_sided(n=4000):
    """Actions scatter around the observation: mean s / 2, deviation 0.1."""
    rng = np.random.default_rng(0)
    s = rng.uniform(-1, 1, size=(n, 1)).astype(np.float32)
    a = np.clip(s / 2 + 0.1 * rng.normal(size=(n, 1)), -1, 1).astype(np.float32)
    ends = np.arange(n) % 100 == 99
    box = spaces.Box(-1, 1, (1,))
    return OfflineDataset.from_arrays(s, a, np.zeros(n, np.float32), ends, ends, observation_space=box, action_space=box)


def test_behaviour_cloning_without_critic_or_algorithm(tmp_path):
    data = two_sided()
    settings = {"n_critics": 0, "net_arch": [32, 32], "warmup_steps": 100, "anneal_end_step": 400}
    th.manual_seed(0)
    policy = FlowMapPolicy(data.observation_space, data.action_space, lambda _: 3e-3, **settings)
    observations = np.repeat(np.float32([[-0.8], [0.0], [0.8]]), 500, axis=0)

    def error():
        actions = policy.predict(observations)[0].reshape(3, 500)
        return np.abs(actions.mean(1) - [-0.4, 0.0, 0.4]).max(), actions.std(1).max()

    before, _ = error()
    policy.learn_behaviour(data, 600, seed=1)
    after, deviation = error()
    assert after < 0.15 < before and deviation < 0.25
    assert policy.n_steps == 600
    policy.save(tmp_path / "policy")
    again = FlowMapPolicy.load(tmp_path / "policy")
    np.testing.assert_array_equal(*(p.predict(observations[:5], deterministic=True)[0] for p in (policy, again)))
    with pytest.raises(ValueError, match="actions have shape"):
        policy.learn_behaviour(collect(PointEnv(), episodes=2), 1)


@pytest.mark.parametrize(("kind", "policy_class"), [("dict", MultiInputPolicy), ("image", CnnPolicy)])
def test_behaviour_cloning_of_other_observations(kind, policy_class):
    data, env = collect(PointEnv(kind), episodes=2), PointEnv(kind)
    space = env.observation_space if kind == "dict" else spaces.Box(0, 255, (1, 36, 36), dtype=np.uint8)
    policy = policy_class(space, env.action_space, lambda _: 1e-3, n_critics=0, horizon_length=2)
    assert policy.learn_behaviour(data, 2).n_steps == 2


@pytest.mark.parametrize("mode", ["best_of_n", "qgbs"])
def test_search_without_critic_is_refused(dataset, mode):
    policy = FlowMapPolicy(dataset.observation_space, dataset.action_space, lambda _: 1e-3, n_critics=0, net_arch=[8])
    with pytest.raises(ValueError, match="n_critics=0"):
        policy.set_acting_mode(mode)


# ---------------------------------------------------- what went wrong elsewhere


def test_times_are_in_the_unit_interval(monkeypatch, dataset):
    """A port drew its "uniform" numbers from [0, 2^32), and its Gaussian noise from their logarithms: NaN."""
    seen = []

    def diagonal(velocity, actions, noise, t, mask):
        seen.append((noise, t))
        return velocity(actions, t, t).mean()

    def eulerian(velocity, actions, noise, r, t, mask):
        seen.append((noise, r, t))
        return velocity(actions, r, t).mean()

    monkeypatch.setattr(fmq_policies, "diagonal_loss", diagonal)
    monkeypatch.setattr(fmq_policies, "eulerian_loss", eulerian)
    model = build(warmup_steps=0, anneal_end_step=1)
    model.set_logger(configure(None, []))
    model.batch_size = 500
    model.learn_offline(dataset, 20)
    times = th.cat([time for draw in seen for time in draw[1:]])
    noise = th.cat([draw[0] for draw in seen]).flatten()
    assert ((times >= 0) & (times < 1)).all() and times.max() > 0.9 and times.min() < 0.1
    assert noise.isfinite().all() and noise.mean().abs() < 0.02 and abs(noise.std() - 1) < 0.02
    assert len(set(noise.tolist())) > 0.99 * len(noise)  # every row and every update has its own


def test_online_collection_walks_through_episodes():
    """A port reset the environment before every step, so that it only ever saw first states."""
    model = build(learning_starts=5, buffer_size=100).learn(60)
    steps = model.replay_buffer.observations[:60, 0], model.replay_buffer.next_observations[:60, 0]
    dones = model.replay_buffer.dones[:60, 0].astype(bool)
    np.testing.assert_array_equal(steps[0][1:][~dones[:-1]], steps[1][:-1][~dones[:-1]])
    assert 0 < dones.sum() < 30


def test_the_critic_takes_any_number_of_rows():
    """A port compiled its critic for the training batch and asked it for single rows."""
    model = randomise(build())
    s, a = th.randn(7, 2), th.randn(7, 2)
    with th.no_grad():
        together = model.critic.bind(s)(a)
        apart = th.cat([model.critic.bind(s[[i]])(a[[i]]) for i in range(7)], dim=1)
        candidates = model.critic.bind(s)(a.unsqueeze(1).expand(-1, 3, -1))
    th.testing.assert_close(together, apart)
    th.testing.assert_close(candidates, together.unsqueeze(-1).expand(-1, -1, 3))


# ------------------------------------------------------------------- errors


def test_numbers_that_are_not_finite_stop_training(dataset):
    model = build(learning_starts=0)
    model.learn_offline(dataset, 3)
    model.critic.ensemble.biases[-1].data[0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"Gradient step 4 .*q mean, critic loss"):
        model.learn_offline(dataset, 3)
    model = build(learning_starts=0)
    model.learn_offline(dataset, 3)
    model.actor.flow_map.layers[-1].bias.data[0] = float("inf")
    model.actor.flow_map.layers[0].weight.data[0] = float("nan")
    with pytest.raises(FloatingPointError, match="action"):
        model.predict(np.zeros((1, 2), dtype=np.float32))
    with pytest.raises(FloatingPointError, match="action"):
        model.learn(5)


@pytest.mark.parametrize("horizon_length", [1, 2])
def test_gradients_that_are_not_finite_stop_training(monkeypatch, dataset, horizon_length):
    model = build(learning_starts=0, horizon_length=horizon_length)
    model.learn_offline(dataset, 3)
    value = type(model.critic).bind

    def broken(self, observation, frozen=False):
        critic = value(self, observation, frozen)
        # finite values, infinite slope at 0
        return (lambda a: critic(a) + (a - a.detach()).abs().sqrt().sum(-1)) if frozen else critic

    monkeypatch.setattr(type(model.critic), "bind", broken)
    with pytest.raises(FloatingPointError, match=r"Gradient step \d+ .*guidance"):
        model.learn(20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"online_rule": "sac"}, "online_rule"),
        ({"eta": -1.0}, "eta"),
        ({"beta": -1.0}, "beta"),
        ({"radius": "other"}, "radius"),
        ({"guidance_critic": "max"}, "guidance_critic"),
        ({"guidance_at": "data"}, "guidance_at"),
        ({"q_aggregation": "max"}, "q_aggregation"),
        ({"n_candidates": 0}, "n_candidates"),
        ({"acting_mode": "two_step"}, "acting_mode"),
        ({"search": {"width": 3}}, "search.*width"),
        ({"distillation": "esd"}, "distillation"),
        ({"lsd_gradient": "both"}, "lsd_gradient"),
        ({"horizon_length": 2, "execution_horizon": 3}, "execution_horizon"),
        ({"policy_kwargs": {"fourier_dim": 3}}, "fourier_dim"),
        ({"policy_kwargs": {"n_critics": 0}, "acting_mode": "sample"}, "n_critics"),
        ({"optimize_memory_usage": True}, "optimize_memory_usage"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**arguments)
