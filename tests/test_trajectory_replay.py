"""Windows of the trajectory replay buffer: golden values, then an oracle that walks every step by hand."""

import copy
import pickle
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_flow.data import OfflineDataset, TrajectoryReplayBuffer

OBS, ACT = spaces.Box(-np.inf, np.inf, (2,)), spaces.Box(-2, 2, (1,))
GAMMA = 0.9


def dataset_of(lengths, terminated=(), seed=0):
    """Observations [trajectory, step]; actions encode the row; random rewards."""
    n = sum(lengths)
    rng = np.random.default_rng(seed)
    steps = [np.arange(length) for length in lengths]
    observations = np.stack([np.repeat(np.arange(len(lengths)), lengths), np.concatenate(steps)], axis=1).astype(np.float32)
    ends = np.zeros(n, dtype=bool)
    ends[np.cumsum(lengths) - 1] = True
    flags = np.zeros(n, dtype=bool)
    flags[list(terminated)] = True
    return OfflineDataset.from_arrays(
        observations,
        np.linspace(-2, 2, n, dtype=np.float32)[:, None],
        rng.normal(size=n).astype(np.float32),
        flags,
        ends,
        next_observations=observations + np.float32([0, 1]),
        action_space=ACT,
    )


def buffer_of(dataset=None, buffer_size=100, n_envs=1, **kwargs):
    kwargs = {"gamma": GAMMA, **kwargs}
    buffer = TrajectoryReplayBuffer(buffer_size, OBS, ACT, "cpu", n_envs, **kwargs)
    buffer.generator = th.Generator().manual_seed(0)
    if dataset is not None:
        buffer.set_offline(dataset)
    return buffer


def test_window_table_of_the_reference():
    """A trajectory with rows 0..999, all rewards -1, gamma .99, chunks of 5."""
    n = 1000
    observations = np.arange(n, dtype=np.float32)[:, None]
    ends = np.arange(n) == n - 1
    dataset = OfflineDataset.from_arrays(
        observations, np.zeros((n, 1)), -np.ones(n), np.zeros(n, dtype=bool), ends, next_observations=observations + 1
    )
    buffer = TrajectoryReplayBuffer(10, dataset.observation_space, dataset.action_space, "cpu", horizon_length=5, gamma=0.99)
    buffer.set_offline(dataset)
    windows = buffer.offline_windows(np.arange(990, 999))
    np.testing.assert_allclose(windows.rewards[:6, 0], -4.900995, rtol=1e-6)
    np.testing.assert_allclose(windows.rewards[[6, 8], 0], [-3.940399, -1.99], rtol=1e-6)
    assert windows.valid[:, 0].tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 0]
    assert windows.next_observations[[0, 4, 5], 0].tolist() == [995, 999, 999]
    assert windows.action_mask.sum(dim=1).tolist() == [5, 5, 5, 5, 5, 5, 4, 3, 2]
    np.testing.assert_allclose(windows.discounts, 0.99**5, rtol=1e-6)


def walk(dataset, start, h, rule):
    """One window, step by step, from the definition."""
    last = next(last for first, last in dataset.trajectories if first <= start <= last)
    total, steps_inside, alive = 0.0, 0, True
    actions = []
    for j in range(h):
        row = min(start + j, last)
        actions.append(dataset.actions[row, 0] / 2)
        if start + j <= last:
            total += GAMMA**j * dataset.rewards[row]
            steps_inside += 1
            alive &= not dataset.terminated[row]
    if rule == "rql":
        mask = not dataset.terminated[min(start + h - 1, last)]
        successor = dataset.observations[min(start + h, last)]
    else:
        mask = alive
        successor = dataset.next_observations[min(start + h - 1, last)]
    return total, float(mask) * GAMMA**h, steps_inside == h, steps_inside, successor, actions


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    h=st.integers(1, 6),
    rule=st.sampled_from(["rql", "q_chunking"]),
    sampling=st.sampled_from(["trajectory", "transition"]),
    data=st.data(),
)
def test_windows_equal_a_walk_step_by_step(lengths, h, rule, sampling, data):
    n = sum(lengths)
    terminated = data.draw(st.lists(st.integers(0, n - 1), max_size=4))
    dataset = dataset_of(lengths, terminated)
    buffer = buffer_of(horizon_length=h, window_rule=rule, sampling=sampling)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            buffer.set_offline(dataset)
        except ValueError as error:
            assert max(lengths) < h or (rule == "rql" and max(lengths) == 1), error
            return
    samples = buffer.sample(64)
    starts_of = {}
    for b in range(64):
        trajectory, step = samples.observations[b].int().tolist()
        start = sum(lengths[:trajectory]) + step
        starts_of.setdefault(trajectory, set()).add(step)
        total, discount, valid, inside, successor, actions = walk(dataset, start, h, rule)
        assert samples.rewards[b].item() == pytest.approx(total, abs=1e-5)
        assert samples.discounts[b].item() == pytest.approx(discount, abs=1e-6)
        assert samples.valid[b].item() == valid
        assert samples.action_mask[b].tolist() == [1.0] * inside + [0.0] * (h - inside)
        np.testing.assert_array_equal(samples.next_observations[b], successor)
        np.testing.assert_allclose(samples.actions[b], np.clip(actions, -1 + 1e-5, 1 - 1e-5), atol=1e-6)
    for trajectory, starts in starts_of.items():
        last = sum(lengths[: trajectory + 1]) - 1
        end_is_start = rule == "q_chunking" or dataset.terminated[last]
        assert max(starts) <= lengths[trajectory] - (1 if end_is_start else 2)


def test_terminal_rows_are_learnt_with_single_steps():
    """The reference never starts a window on a last row; a terminal reward there would be lost for h = 1."""
    samples = buffer_of(dataset_of([4, 4], terminated=[3])).sample(200)
    rows = {(int(t), int(s)) for t, s in samples.observations}
    assert (0, 3) in rows
    assert (1, 3) not in rows  # cut by a time limit
    at_end = (samples.observations[:, 0] == 0) & (samples.observations[:, 1] == 3)
    assert not samples.discounts[at_end].any()


def test_sampling_by_trajectory_or_by_transition():
    dataset = dataset_of([2, 100])
    by_trajectory = buffer_of(dataset, sampling="trajectory").sample(4000).observations[:, 0]
    by_transition = buffer_of(dataset, sampling="transition").sample(4000).observations[:, 0]
    assert by_trajectory.mean().item() == pytest.approx(0.5, abs=0.05)
    assert by_transition.mean().item() == pytest.approx(0.99, abs=0.01)


def test_small_batches_hold_distinct_trajectories():
    samples = buffer_of(dataset_of([5] * 20)).sample(10)
    assert len(set(samples.observations[:, 0].tolist())) == 10


def step_env(buffer, clock, dones, n_envs, timeouts=None):
    """Observations [environment, clock]."""
    observations = np.stack([np.arange(n_envs), np.full(n_envs, clock)], axis=1).astype(np.float32)
    infos = [{"TimeLimit.truncated": bool(t)} for t in (np.zeros(n_envs) if timeouts is None else timeouts)]
    actions = np.full((n_envs, 1), 0.25, dtype=np.float32)
    rewards = np.full(n_envs, float(clock), dtype=np.float32)
    buffer.add(observations, observations + np.float32([0, 1]), actions, rewards, dones, infos)


@settings(max_examples=60, deadline=None)
@given(
    n_envs=st.integers(1, 4),
    capacity=st.integers(3, 12),
    n_steps=st.integers(1, 40),
    h=st.integers(1, 4),
    rule=st.sampled_from(["rql", "q_chunking"]),
    seed=st.integers(0, 1000),
)
def test_online_windows_are_contiguous(n_envs, capacity, n_steps, h, rule, seed):
    """Never across an episode's end, a column, a reset of the environments or the ring's write head."""
    rng = np.random.default_rng(seed)
    buffer = buffer_of(buffer_size=capacity * n_envs, n_envs=n_envs, horizon_length=h, window_rule=rule)
    episode = np.zeros((n_steps, n_envs), dtype=int)  # which episode a step belongs to
    ended = np.zeros((n_steps, n_envs), dtype=bool)
    timeouts = np.zeros((n_steps, n_envs), dtype=bool)
    current = np.arange(n_envs)
    for clock in range(n_steps):
        if rng.random() < 0.1:
            buffer.cut_trajectories()
            current = current + 100
        episode[clock] = current
        ended[clock] = rng.random(n_envs) < 0.2
        timeouts[clock] = ended[clock] & (rng.random(n_envs) < 0.5)
        step_env(buffer, clock, ended[clock].astype(np.float32), n_envs, timeouts[clock])
        current = current + 1000 * ended[clock]
    if not buffer.can_sample():
        with pytest.raises(ValueError, match="no window"):
            buffer.sample(4)
        return
    samples = buffer.sample(64)
    for b in range(64):
        env, clock = samples.observations[b].int().tolist()
        assert clock >= n_steps - capacity
        same = [c for c in range(clock, n_steps) if episode[c, env] == episode[clock, env]]
        inside = len(same[:h])
        last = same[-1]
        assert samples.valid[b].item() == (inside == h)
        assert samples.action_mask[b].sum().item() == inside
        assert samples.rewards[b].item() == pytest.approx(sum(GAMMA**j * (clock + j) for j in range(inside)), rel=1e-5)
        if not ended[last, env]:
            assert inside == h  # of unfinished episodes only whole windows
        terminal = ended & ~timeouts
        if rule == "rql":
            successor, stops = min(clock + h, last), terminal[min(clock + h - 1, last), env]
        else:
            successor, stops = min(clock + h, last + 1), terminal[clock : min(clock + h, last + 1), env].any()
        assert samples.next_observations[b].tolist() == [env, successor]
        assert samples.discounts[b].item() == pytest.approx(0.0 if stops else GAMMA**h)


def test_offline_and_online_rows_mix_in_the_stated_ratio():
    dataset = dataset_of([10] * 5)
    for fraction, expected in ((0.25, 16), (1.0, 64), (0.0, 0)):
        buffer = buffer_of(dataset, offline_fraction=fraction)
        assert (buffer.sample(64).actions[:, 0] != 0.25).all(), "nothing but offline rows yet"
        for clock in range(30):
            step_env(buffer, clock, np.float32([clock % 10 == 9]), 1)
        assert (buffer.sample(64).actions[:, 0] != 0.25).sum().item() == expected


@pytest.mark.parametrize("fraction", [None, 0.5])
def test_what_can_be_sampled_follows_every_change(fraction):
    """A buffer that was sampled before a change draws what one draws that was not."""
    dataset = dataset_of([10] * 5)
    buffer = buffer_of(dataset, buffer_size=12, n_envs=2, horizon_length=2, offline_fraction=fraction)
    changes = {
        "nothing": lambda: None,
        "cut": buffer.cut_trajectories,
        "reset": buffer.reset,
        "dataset": lambda: buffer.set_offline(None if buffer.n_offline else dataset),
        "phase": lambda: setattr(buffer, "offline_only", not buffer.offline_only),
        "fraction": lambda: setattr(buffer, "offline_fraction", 0.25 if buffer.offline_fraction is None else None),
    }
    rng = np.random.default_rng(0)
    for clock in range(200):
        step_env(buffer, clock, np.float32([clock % 5 == 4, clock % 7 == 6]), 2)
        buffer.can_sample()
        changes[rng.choice(list(changes), p=[0.5, 0.1, 0.1, 0.1, 0.1, 0.1])]()
        fresh = pickle.loads(pickle.dumps(buffer))
        fresh.set_offline(buffer.offline_dataset)
        fresh.offline_only = buffer.offline_only  # of the model's phase, no part of a pickle
        assert fresh.can_sample() == buffer.can_sample()
        if buffer.can_sample():
            buffer.generator, fresh.generator = (th.Generator().manual_seed(clock) for _ in range(2))
            for one, other in zip(buffer.sample(16), fresh.sample(16), strict=True):
                assert th.equal(one, other)


def test_uniform_mixture_over_trajectories_by_default():
    buffer = buffer_of(dataset_of([10] * 9))
    for clock in range(200):
        step_env(buffer, clock, np.float32([clock % 100 == 99]), 1)
    # 9 offline episodes, the last 100 rows hold one online episode
    offline = np.mean([(buffer.sample(64).actions[:, 0] != 0.25).float().mean().item() for _ in range(50)])
    assert offline == pytest.approx(0.9, abs=0.03)


def test_the_dataset_is_never_overwritten():
    dataset = dataset_of([10] * 5)
    before = dataset.observations.copy()
    buffer = buffer_of(dataset, buffer_size=8)
    for clock in range(50):
        step_env(buffer, clock, np.float32([clock % 7 == 6]), 1)
    np.testing.assert_array_equal(dataset.observations, before)
    assert buffer.n_offline == 50


@pytest.mark.parametrize("rule", ["rql", "q_chunking"])
def test_device_storage_samples_the_same(rule):
    dataset = dataset_of([10] * 5, terminated=[19])
    buffers = [buffer_of(dataset, n_envs=2, horizon_length=3, window_rule=rule, storage=s) for s in ("cpu", "device")]
    for clock in range(70):
        for buffer in buffers:
            step_env(buffer, clock, np.float32([clock % 10 == 9, clock % 7 == 6]), 2)
    for one, other in zip(buffers[0].sample(64), buffers[1].sample(64), strict=True):
        assert th.equal(one, other)
    # a copy on the device, not a view
    assert buffers[1]._stored.online.actions.data_ptr() != th.as_tensor(buffers[1].actions).data_ptr()


def test_normalisation_is_applied_when_sampling():

    venv = VecNormalize(DummyVecEnv([lambda: gym.make("Pendulum-v1")]), clip_obs=5.0)
    venv.obs_rms.mean, venv.obs_rms.var = np.array([1.0, 2.0, 3.0]), np.array([4.0, 4.0, 4.0])
    venv.ret_rms.var = np.array(4.0)
    observations = np.arange(30, dtype=np.float32).reshape(10, 3)
    ends = np.arange(10) == 9
    dataset = OfflineDataset.from_arrays(
        observations, np.zeros((10, 1)), np.arange(10), np.zeros(10, bool), ends, next_observations=observations + 3
    )
    buffer = TrajectoryReplayBuffer(10, dataset.observation_space, dataset.action_space, "cpu", horizon_length=2, gamma=GAMMA)
    buffer.set_offline(dataset)
    raw, normal = buffer.offline_windows(np.arange(5)), buffer.offline_windows(np.arange(5), env=venv)
    np.testing.assert_allclose(normal.observations, venv.normalize_obs(raw.observations.numpy()), rtol=1e-6)
    np.testing.assert_allclose(normal.next_observations, venv.normalize_obs(raw.next_observations.numpy()), rtol=1e-6)
    expected = venv.normalize_reward(np.arange(5.0)) + GAMMA * venv.normalize_reward(np.arange(1.0, 6.0))
    np.testing.assert_allclose(normal.rewards[:, 0], expected, rtol=1e-5)


def test_dict_observations():
    space = spaces.Dict({"a": spaces.Box(-10, 10, (2,)), "b": spaces.Discrete(5)})
    buffer = TrajectoryReplayBuffer(20, space, ACT, "cpu", n_envs=2, horizon_length=2, gamma=GAMMA)
    for clock in range(15):
        obs = {"a": np.full((2, 2), clock, dtype=np.float32), "b": np.array([clock % 5, (clock + 1) % 5])}
        new = {"a": obs["a"] + 1, "b": (obs["b"] + 1) % 5}
        buffer.add(obs, new, np.zeros((2, 1)), np.zeros(2), np.zeros(2), [{}, {}])
    samples = buffer.sample(16)
    assert samples.observations["a"].shape == (16, 2)
    th.testing.assert_close(samples.next_observations["a"], samples.observations["a"] + 2)
    assert ((samples.next_observations["b"] - samples.observations["b"]) % 5 == 2).all()


def test_pickle_keeps_online_rows_and_leaves_the_dataset_out():
    buffer = buffer_of(dataset_of([10] * 50), horizon_length=2)
    for clock in range(30):
        step_env(buffer, clock, np.float32([clock % 10 == 9]), 1)
    restored = pickle.loads(pickle.dumps(buffer))
    assert restored.n_offline == 0
    restored.generator, buffer.generator = (th.Generator().manual_seed(1) for _ in range(2))
    buffer.set_offline(None)
    for one, other in zip(buffer.sample(32), restored.sample(32), strict=True):
        assert th.equal(one, other)
    step_env(restored, 30, np.float32([0]), 1)  # tensors are views of the restored arrays
    assert restored._stored.online.rewards[restored.pos - 1] == 30
    assert copy.deepcopy(buffer).pos == buffer.pos


def test_reset_forgets_online_rows_only():
    buffer = buffer_of(dataset_of([10] * 5), offline_fraction=0.0)
    for clock in range(20):
        step_env(buffer, clock, np.float32([0]), 1)
    buffer.reset()
    assert buffer.size() == 0
    assert (buffer.sample(16).actions[:, 0] != 0.25).all()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"horizon_length": 0}, "`horizon_length` must be at least 1, but 0"),
        ({"offline_fraction": 1.5}, "`offline_fraction` must be None or in"),
        ({"sampling": "row"}, "`sampling` must be one of .*'row'"),
        ({"window_rule": "x"}, "`window_rule` must be one of"),
        ({"storage": "gpu"}, "`storage` must be one of"),
        ({"optimize_memory_usage": True, "window_rule": "q_chunking"}, "optimize_memory_usage"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        buffer_of(**kwargs)


def test_discrete_actions_are_refused():
    with pytest.raises(ValueError, match="must be a Box, but Discrete"):
        TrajectoryReplayBuffer(10, OBS, spaces.Discrete(2))


def test_too_short_trajectories_are_refused_and_nothing_changes():
    dataset = dataset_of([10])
    buffer = buffer_of(dataset, horizon_length=5)
    with pytest.raises(ValueError, match=r"`horizon_length=5` is longer than every trajectory .* 3 steps"):
        buffer.set_offline(dataset_of([3, 2]))
    assert buffer.offline_dataset is dataset
    with pytest.warns(UserWarning, match="1 of 2 trajectories .* are shorter"):
        buffer.set_offline(dataset_of([8, 2]))


class Derived(VecNormalize):
    """Of another class, for which the buffer calls the methods of VecNormalize themselves."""


def drawn_with(buffer, venv):
    buffer.generator = th.Generator().manual_seed(1)
    return buffer.sample(64, env=venv)


@pytest.mark.parametrize("storage", ["cpu", "device"])
@pytest.mark.parametrize("is_dict", [False, True])
def test_normalisation_has_the_bits_of_vec_normalize(is_dict, storage):
    rng = np.random.default_rng(0)
    image = spaces.Box(0, 255, (3,), np.uint8)
    space = spaces.Dict({"a": OBS, "b": OBS, "c": image}) if is_dict else OBS

    def observed(n):
        normal, raw = rng.normal(2, 30, (2, n, 2)).astype(np.float32), rng.integers(0, 256, (n, 3), dtype=np.uint8)
        return {"a": normal[0], "b": normal[1], "c": raw} if is_dict else normal[0]

    class Env(gym.Env):
        observation_space, action_space = space, ACT

    venvs = [
        normalizer(DummyVecEnv([Env]), clip_obs=1.5, clip_reward=2.0, norm_obs_keys=["b", "c"] if is_dict else None)
        for normalizer in (VecNormalize, Derived)
    ]
    buffer = TrajectoryReplayBuffer(50, space, ACT, "cpu", horizon_length=2, gamma=GAMMA, storage=storage)
    for step in range(50):
        buffer.add(observed(1), observed(1), np.zeros((1, 1)), rng.normal(0, 9, 1), np.array([step % 10 == 9]), [{}])

    def assert_same_bits():
        drawn = [drawn_with(buffer, venv) for venv in (*venvs, None)]
        for name, ours, theirs, raw in zip(drawn[0]._fields, *drawn, strict=True):
            for key in ours if isinstance(ours, dict) else [None]:
                ours_, theirs_, raw_ = (part if key is None else part[key] for part in (ours, theirs, raw))
                assert ours_.dtype == theirs_.dtype and th.equal(ours_, theirs_), (name, key)
                assert (name in ("observations", "next_observations", "rewards") and key != "a") != th.equal(ours_, raw_)

    def change(what):
        for venv in venvs:
            what(venv)
        assert_same_bits()

    def statistics(venv):
        return venv.obs_rms["b"] if is_dict else venv.obs_rms

    def in_place(venv):
        statistics(venv).mean[:] += 1

    assert_same_bits()
    seen, returns = observed(7), rng.normal(0, 3, 7)
    change(lambda venv: statistics(venv).update(seen["b"] if is_dict else seen))
    change(lambda venv: venv.ret_rms.update(returns))
    change(in_place)
    change(lambda venv: setattr(venv, "epsilon", 0.5))
    change(lambda venv: setattr(venv, "clip_obs", 0.5))
    change(lambda venv: setattr(venv, "clip_reward", 0.25))
    buffer = pickle.loads(pickle.dumps(buffer))
    assert_same_bits()
    for name in ("norm_obs", "norm_reward"):
        for venv in venvs:
            setattr(venv, name, False)
    raw, ours = (drawn_with(buffer, venv) for venv in (None, venvs[0]))
    assert th.equal(raw.rewards, ours.rewards)
