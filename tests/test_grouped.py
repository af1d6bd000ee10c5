"""Members of a group share the starts of their episodes."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env as check_gymnasium_env
from gymnasium.wrappers import FrameStackObservation, TransformObservation
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize

from sb3_flow.grpo.grouped_starts import GroupedStart, group_starts, has_grouped_starts


class NoisyWalk(gym.Env):
    """
    A random walk from a random start: start and steps come from ``np_random``.

    :param length: steps of an episode
    """

    def __init__(self, length=3):
        self.length = length
        self.observation_space = spaces.Box(-100, 100, (2,), dtype=np.float64)
        self.action_space = spaces.Box(-1, 1, (2,), dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = self.np_random.uniform(-1, 1, 2), 0
        return self.x.copy(), {}

    def step(self, action):
        self.x = np.clip(self.x + self.np_random.normal(size=2), -99, 99)
        self.t += 1
        return self.x.copy(), 0.0, self.t >= self.length, False, {}


def walks(n_envs=4, **kwargs):
    """:return: N walks, each wrapped in GroupedStart"""
    return make_vec_env(NoisyWalk, n_envs=n_envs, wrapper_class=GroupedStart, **kwargs)


def record(env, steps=8):
    """Observations of `steps` steps without action after a reset, (steps + 1, N, ...), and where episodes began."""
    observations, begins = [env.reset()], [np.ones(env.num_envs, dtype=bool)]
    for _ in range(steps):
        observation, _, done, _ = env.step(np.zeros((env.num_envs, *env.action_space.shape), dtype=env.action_space.dtype))
        observations.append(observation)
        begins.append(done)
    return np.stack(observations), np.stack(begins)


@pytest.fixture(params=[DummyVecEnv, SubprocVecEnv], ids=["dummy", "subproc"], scope="module")
def env(request):
    env = walks(vec_env_cls=request.param)
    yield env
    env.close()


@pytest.mark.parametrize("shared_noise", [False, True])
def test_members_share_starts_and_by_choice_noise(env, shared_noise):
    group_starts(env, np.array([5, 6]), group_size=2, shared_noise=shared_noise)
    seen, begins = record(env)
    assert begins.sum(axis=0).tolist() == [3] * 4, "two automatic resets"
    for group in (slice(0, 2), slice(2, 4)):
        first, second = np.moveaxis(seen[:, group], 1, 0)
        start = begins[:, group.start]
        np.testing.assert_array_equal(first[start], second[start])
        assert (first == second).all(axis=1)[~start].tolist() == [shared_noise] * (~start).sum()
    starts = seen[begins[:, 0]]
    assert len(np.unique(starts[:, ::2])) == starts[:, ::2].size, "groups and episodes have starts of their own"


def test_same_seeds_repeat_and_different_ones_differ(env):
    seen = []
    for seeds in ([5, 6], [5, 6], [7, 6], [5, 5]):
        group_starts(env, np.array(seeds), group_size=2)
        seen.append(record(env)[0])
    np.testing.assert_array_equal(seen[0], seen[1])
    assert not np.isclose(seen[0][:, :2], seen[2][:, :2]).any()
    np.testing.assert_array_equal(seen[0][:, 2:], seen[2][:, 2:])
    assert not np.isclose(seen[3][:, :2], seen[3][:, 2:]).any(), "groups differ even with one seed"


def test_members_of_different_lengths_share_the_e_th_start():
    env = DummyVecEnv([lambda length=length: GroupedStart(NoisyWalk(length)) for length in (1, 2, 3)])
    group_starts(env, np.array([9]), group_size=3)
    seen, begins = record(env, steps=12)
    starts = [seen[begins[:, index], index][:4] for index in range(3)]
    np.testing.assert_array_equal(starts[0], starts[1])
    np.testing.assert_array_equal(starts[0], starts[2])
    assert len(np.unique(starts[0])) == 8


def test_seeds_waiting_in_the_vec_env_are_dropped():
    env = walks(seed=3)  # make_vec_env and the algorithms call `VecEnv.seed`
    group_starts(env, np.array([5, 6]), group_size=2)
    observations = env.reset()
    np.testing.assert_array_equal(observations[::2], observations[1::2])


def test_explicit_seed_is_unchanged_and_begins_the_count_again():
    bare, wrapped = NoisyWalk(), GroupedStart(NoisyWalk(), group=1, member=2, seed=3)
    np.testing.assert_array_equal(bare.reset(seed=8)[0], wrapped.reset(seed=8)[0])
    np.testing.assert_array_equal(bare.step(None)[0], wrapped.step(None)[0])
    assert wrapped.episode == 0 and wrapped.np_random_seed == 8
    first, second = wrapped.reset()[0], wrapped.reset()[0]
    np.testing.assert_array_equal(first, GroupedStart(NoisyWalk(), group=1, member=0, seed=3).reset()[0])
    assert wrapped.episode == 2 and not np.isclose(first, second).any()
    wrapped.reset(seed=8)
    np.testing.assert_array_equal(wrapped.reset()[0], first)


def test_without_a_seed_nothing_changes():
    bare, wrapped = walks(seed=4), make_vec_env(NoisyWalk, n_envs=4, seed=4)
    assert not has_grouped_starts(wrapped) and has_grouped_starts(bare)
    np.testing.assert_array_equal(record(bare)[0], record(wrapped)[0])


def test_start_and_noise_of_the_first_member_are_different_streams():
    # plain entropy [seed, group, episode] would be padded to the first member's, and its noise repeat its start
    wrapped = GroupedStart(NoisyWalk(), seed=3)
    start, _ = wrapped.reset()
    assert not np.isclose(wrapped.unwrapped.np_random.uniform(-1, 1, 2), start).any()


def test_wrappers_above_and_below():
    def make():
        below = FrameStackObservation(Monitor(NoisyWalk()), 2)
        return TransformObservation(GroupedStart(below), lambda frames: frames[-1], NoisyWalk().observation_space)

    for env in (VecNormalize(DummyVecEnv([make] * 4)), VecFrameStack(DummyVecEnv([make] * 4), 3)):
        assert has_grouped_starts(env)
        group_starts(env, np.array([1, 2]), group_size=2)
        seen, begins = record(env, steps=4)
        assert begins.sum() == 8
        np.testing.assert_array_equal(seen[0, ::2], seen[0, 1::2])
        np.testing.assert_array_equal(seen[3, ::2], seen[3, 1::2])  # after the automatic reset


@pytest.mark.parametrize("name", ["CartPole-v1", "InvertedPendulum-v5", "HalfCheetah-v5"])
def test_gymnasium_environments(name):
    env = make_vec_env(name, n_envs=4, wrapper_class=GroupedStart, seed=0)
    group_starts(env, np.array([1, 2]), group_size=2)
    seen, _ = record(env, steps=5)
    np.testing.assert_array_equal(seen[:, ::2], seen[:, 1::2])  # their dynamics have no noise
    assert not np.array_equal(seen[0, 0], seen[0, 2])
    assert not np.array_equal(seen[0], env.reset()), "the next episode starts elsewhere"
    env.close()


@pytest.mark.parametrize("seed", [None, 7])
def test_environment_checkers(seed):
    check_env(GroupedStart(NoisyWalk(), seed=seed), warn=False)
    env = GroupedStart(gym.make("CartPole-v1"), seed=seed)
    check_env(env, warn=False)
    with pytest.warns(UserWarning, match="different from the unwrapped"):
        check_gymnasium_env(env, skip_render_check=True)
    assert env.spec.additional_wrappers[-1].kwargs["seed"] == seed
    assert isinstance(gym.make(env.spec), GroupedStart)


def test_errors():
    with pytest.raises(ValueError, match="`group_size` must be at least 2, but 1"):
        group_starts(walks(), np.arange(4), group_size=1)
    with pytest.raises(ValueError, match="3 does not divide 4"):
        group_starts(walks(), np.arange(1), group_size=3)
    with pytest.raises(ValueError, match=r"one entry per group, shape \(2,\), but has \(4,\)"):
        group_starts(walks(), np.arange(4), group_size=2)
    with pytest.raises(ValueError, match="`seed` must be at least 0, but -1"):
        group_starts(walks(), np.array([1, -1]), group_size=2)
    with pytest.raises(ValueError, match=r'make_vec_env\(..., wrapper_class=GroupedStart\)`. Or choose `group_by="none"`'):
        group_starts(make_vec_env(NoisyWalk, n_envs=4), np.arange(2), group_size=2)
    with pytest.raises(ValueError, match="wrapper_class=GroupedStart"):
        group_starts(DummyVecEnv([NoisyWalk, lambda: GroupedStart(NoisyWalk())]), np.arange(1), group_size=2)
