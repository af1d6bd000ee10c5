"""EnvPoolVecEnv: step by step what Gymnasium's dynamics say, and SB3's contract where EnvPool's own differs."""

import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize

from sb3_flow import PPO, AsyncPPO
from sb3_flow.envs import EnvPoolVecEnv

envpool = pytest.importorskip("envpool")


def actions_of(env: EnvPoolVecEnv, n_steps: int) -> Iterator[np.ndarray]:
    """:return: random actions"""
    env.action_space.seed(1)
    for _ in range(n_steps):
        yield np.array([env.action_space.sample() for _ in range(env.num_envs)])


def row(observation: Any, index: int) -> Any:
    """:return: what one environment observes"""
    if isinstance(observation, dict):
        return {key: part[index] for key, part in observation.items()}
    return observation[index]


def cart_pole(observation: np.ndarray) -> gym.Env:
    """:return: Gymnasium's, in this state"""
    env = gym.make("CartPole-v1").unwrapped
    env.reset()
    env.state = np.asarray(observation, dtype=np.float64)  # type: ignore[attr-defined]
    return env


def pendulum(observation: np.ndarray) -> gym.Env:
    """:return: Gymnasium's, in this state"""
    env = gym.make("Pendulum-v1").unwrapped
    env.reset()
    cosine, sine, speed = map(float, observation)
    env.state = np.array([np.arctan2(sine, cosine), speed])  # type: ignore[attr-defined]
    return env


@pytest.mark.parametrize(
    ("task", "reference", "limit"),
    [("CartPole-v1", cart_pole, 500), ("CartPole-v1", cart_pole, 12), ("Pendulum-v1", pendulum, 7)],
)
def test_every_step_is_that_of_the_dynamics(task: str, reference: Callable[[np.ndarray], gym.Env], limit: int) -> None:
    env = EnvPoolVecEnv(task, num_envs=3, seed=4, max_episode_steps=limit)
    observations = env.reset()
    references, lengths = [reference(one) for one in observations], np.zeros(3, dtype=int)
    ends = {"terminated": 0, "truncated": 0}
    for actions in actions_of(env, 150):
        observations, rewards, dones, infos = env.step(actions)
        assert rewards.dtype == np.float32 and dones.dtype == bool
        lengths += 1
        for i, twin in enumerate(references):
            expected, reward, terminated, _, _ = twin.step(actions[i])
            assert rewards[i] == pytest.approx(float(reward), abs=1e-3)  # one of EnvPool's own resets would give 0
            assert dones[i] == (terminated or lengths[i] == limit)
            assert infos[i]["elapsed_step"] == lengths[i]
            if not dones[i]:
                assert "terminal_observation" not in infos[i] and infos[i]["TimeLimit.truncated"] is False
                np.testing.assert_allclose(observations[i], expected, atol=1e-4)
                continue
            # the last state in the infos, a new one as the observation, and the next action counts
            np.testing.assert_allclose(infos[i]["terminal_observation"], expected, atol=1e-4)
            assert infos[i]["TimeLimit.truncated"] is bool(lengths[i] == limit)
            ends["truncated" if infos[i]["TimeLimit.truncated"] else "terminated"] += 1
            assert env.reset_infos[i]["elapsed_step"] == 0
            if task == "CartPole-v1":
                assert np.abs(observations[i]).max() <= 0.05
            references[i], lengths[i] = reference(observations[i]), 0
    assert ends["truncated"] > 2 or limit == 500
    assert ends["terminated"] > 2 or task == "Pendulum-v1"
    env.close()


def test_episodes_are_those_of_envpool_without_its_lost_steps() -> None:
    """EnvPool alone, with the same actions for the steps that count, sees the same; if not, it has changed."""
    env = EnvPoolVecEnv("CartPole-v1", num_envs=1, seed=2)
    pool = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=1, seed=2)
    np.testing.assert_array_equal(env.reset(), pool.reset()[0])
    lost = 0
    for actions in actions_of(env, 120):
        observation, reward, done, infos = env.step(actions)
        raw, raw_reward, terminated, truncated, _ = pool.step(actions)
        assert raw_reward == reward == 1 and (terminated | truncated) == done
        if done:
            np.testing.assert_array_equal(infos[0]["terminal_observation"], raw[0])
            raw, raw_reward, terminated, truncated, _ = pool.step(actions)
            assert raw_reward == 0 and not terminated and not truncated
            lost += 1
        np.testing.assert_array_equal(observation, raw)
    assert lost > 2


def test_termination_at_the_time_limit_counts_as_truncation() -> None:
    """EnvPool's doing, described in the docstring: Gymnasium would say both."""
    first = EnvPoolVecEnv("CartPole-v1", num_envs=1, seed=0)
    first.reset()
    length = 1
    while not first.step(np.array([1]))[2][0]:
        length += 1
    for limit, truncated in ((length, True), (length + 1, False)):
        env = EnvPoolVecEnv("CartPole-v1", num_envs=1, seed=0, max_episode_steps=limit)
        env.reset()
        for _ in range(length):
            _, _, done, infos = env.step(np.array([1]))
        assert done[0] and infos[0]["TimeLimit.truncated"] is truncated


def test_the_game_goes_on_after_a_lost_life() -> None:
    env = EnvPoolVecEnv("Breakout-v5", num_envs=1, seed=0, episodic_life=True, img_height=20, img_width=20)
    env.reset()
    lives = []
    for actions in actions_of(env, 400):
        _, _, done, infos = env.step(actions)
        if done[0]:
            lives.append((int(infos[0]["lives"]), int(env.reset_infos[0]["lives"])))
    assert lives[:5] == [(4, 4), (3, 3), (2, 2), (1, 1), (0, 5)]
    assert infos[0]["ram"].shape == (128,)
    env.close()


@pytest.mark.parametrize(
    ("task", "observation", "action"),
    [
        ("FrozenLake-v1", spaces.Discrete, spaces.Discrete),
        ("LunarLander-v3", spaces.Box, spaces.Discrete),
        ("BinPack-v2", spaces.Dict, spaces.MultiDiscrete),  # nested, masks
        ("TSP-v1", spaces.Dict, spaces.Discrete),  # a position from -1 on
        ("FingerSpin-v1", spaces.Dict, spaces.Box),  # a scalar, float64, no bounds
        ("Connector-v2", spaces.Dict, spaces.MultiDiscrete),
        ("RubiksCube-v0", spaces.Dict, spaces.MultiDiscrete),
    ],
)
def test_spaces(task: str, observation: type, action: type) -> None:
    env = EnvPoolVecEnv(task, num_envs=2, seed=0)
    assert type(env.observation_space) is observation and type(env.action_space) is action
    for inner in env.observation_space.values() if isinstance(env.observation_space, spaces.Dict) else ():
        assert type(inner) is spaces.Discrete or (type(inner) in (spaces.Box, spaces.MultiBinary) and inner.shape)
    found = env.reset()
    assert len(env.reset_infos) == 2
    for actions in actions_of(env, 30):
        for i in range(2):
            assert env.observation_space.contains(row(found, i))
        found, _, dones, infos = env.step(actions)
        for i in np.flatnonzero(dones):
            assert env.observation_space.contains(infos[i]["terminal_observation"])
    if task == "FingerSpin-v1":
        assert not env.observation_space["position"].is_bounded("below")
    env.close()


def test_what_is_returned_stays_as_it_is() -> None:
    env = EnvPoolVecEnv("CartPole-v1", num_envs=2, seed=0)
    env.reset()
    kept = [env.step(actions) for actions in actions_of(env, 60)]
    again = EnvPoolVecEnv("CartPole-v1", num_envs=2, seed=0)
    again.reset()
    for (o, r, d, i), actions in zip(kept, actions_of(again, 60), strict=True):
        o2, r2, d2, i2 = copy.deepcopy(again.step(actions))
        for a, b in ((o, o2), (r, r2), (d, d2)):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_equal(i, i2)


def test_seeds() -> None:
    def start(env: EnvPoolVecEnv) -> np.ndarray:
        return np.array(env.reset())

    env, same, other = (EnvPoolVecEnv("CartPole-v1", num_envs=3, seed=seed) for seed in (5, 5, 6))
    first = start(env)
    np.testing.assert_array_equal(first, start(same))
    np.testing.assert_array_equal(first[1:], start(other)[:2])
    assert (start(env) != first).all()  # the stream goes on
    assert env.seed(5) == [5, 6, 7]
    np.testing.assert_array_equal(first, start(env))
    assert (start(env) != first).all()  # used only once
    env.seed(2**32 - 2)  # as SB3 draws them
    assert start(env).shape == (3, 4)
    np.random.seed(0)
    drawn = start(EnvPoolVecEnv("CartPole-v1", num_envs=3))
    assert (start(EnvPoolVecEnv("CartPole-v1", num_envs=3)) != drawn).all()
    np.random.seed(0)
    np.testing.assert_array_equal(start(EnvPoolVecEnv("CartPole-v1", num_envs=3)), drawn)


def test_a_pool_that_was_made_already() -> None:
    pool = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=3, seed=5)
    env = EnvPoolVecEnv(pool)
    assert env.num_envs == 3 and env.pool is pool
    np.testing.assert_array_equal(env.reset(), EnvPoolVecEnv("CartPole-v1", num_envs=3, seed=5).reset())
    with pytest.warns(UserWarning, match="seeds of a pool are fixed"):
        env.seed(3)
    env.reset()
    assert env.pool is pool


def test_the_order_of_calls() -> None:
    env = EnvPoolVecEnv("CartPole-v1", num_envs=2, seed=0)
    with pytest.raises(RuntimeError, match="`reset` comes before"):
        env.step(np.zeros(2, dtype=int))
    env.reset()
    with pytest.raises(RuntimeError, match="after `step_async`"):
        env.step_wait()
    env.step_async(np.zeros(2, dtype=int))
    with pytest.raises(RuntimeError, match="`step_wait` before"):
        env.step_async(np.zeros(2, dtype=int))
    assert np.abs(env.reset()).max() <= 0.05  # the step that was begun is forgotten
    assert env.step(np.zeros(2, dtype=int))[3][0]["elapsed_step"] == 1
    for actions in (np.zeros(1, dtype=int), np.zeros((2, 1), dtype=int), np.array([0, 2]), np.array([-1, 0])):
        with pytest.raises(ValueError, match="`actions` must be"):
            env.step(actions)
    assert env.step(np.ones(2, dtype=int))[3][1]["elapsed_step"] == 2
    env.step_async(np.zeros(2, dtype=int))
    env.close()
    env.close()
    for call in (env.reset, lambda: env.step(np.zeros(2, dtype=int)), lambda: env.get_attr("spec")):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_threads_end() -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()
    env = EnvPoolVecEnv("CartPole-v1", num_envs=4, seed=0, num_threads=3)
    count = threads()
    assert count > before
    for seed in range(3):
        env.seed(seed)
        env.reset()
    assert threads() == count
    env.close()
    assert threads() == before


def test_what_single_environments_cannot() -> None:
    env = EnvPoolVecEnv("CartPole-v1", num_envs=2, seed=0)
    assert env.render_mode is None
    assert env.get_attr("render_mode", indices=1) == [None]
    assert [config["max_episode_steps"] for config in env.get_attr("config")] == [500, 500]
    assert not env.has_attr("action_masks")
    with pytest.raises(AttributeError, match="gravity"):
        env.get_attr("gravity")
    assert env.env_is_wrapped(Monitor) == [False, False] and env.env_is_wrapped(Monitor, 0) == [False]
    for call in (
        env.render,
        lambda: env.render("rgb_array"),
        env.get_images,
        lambda: env.set_attr("gravity", 1.0),
        lambda: env.env_method("gravity"),
        lambda: env.set_options({"low": 0.0}),
        lambda: env.set_options([{}, {"low": 0.0}]),
    ):
        with pytest.raises(NotImplementedError):
            call()
    env.set_options()


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("`task`.*'CartPole-v1'", lambda: EnvPoolVecEnv("CartPole-v7")),
        ("`task`", lambda: EnvPoolVecEnv("no such thing")),
        ("`task`", lambda: EnvPoolVecEnv(gym.make("CartPole-v1"))),
        ("`task`", lambda: EnvPoolVecEnv("TicTacToe-v1")),
        ("`task`", lambda: EnvPoolVecEnv(envpool.make("CartPole-v1", env_type="dm", num_envs=2))),
        ("`num_envs`", lambda: EnvPoolVecEnv("CartPole-v1", num_envs=0)),
        ("`num_envs`", lambda: EnvPoolVecEnv("CartPole-v1", num_envs=2.5)),  # type: ignore[arg-type]
        ("`num_envs`", lambda: EnvPoolVecEnv("CartPole-v1", num_envs=True)),
        ("`num_envs`", lambda: EnvPoolVecEnv(envpool.make("CartPole-v1", env_type="gymnasium", num_envs=2), num_envs=3)),
        ("`batch_size`", lambda: EnvPoolVecEnv("CartPole-v1", num_envs=2, batch_size=1)),
        ("`batch_size`", lambda: EnvPoolVecEnv(envpool.make("CartPole-v1", env_type="gymnasium", num_envs=2, batch_size=1))),
        ("`render_mode`", lambda: EnvPoolVecEnv("CartPole-v1", render_mode="rgb_array")),
    ],
)
def test_errors_name_the_argument(argument: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=argument):
        call()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ImportError, match=r"pip install 'sb3-flow\[envpool\]'"):
        EnvPoolVecEnv("CartPole-v1")


def test_the_core_does_not_import_it() -> None:
    code = "import sys, sb3_flow; from sb3_flow.envs import EnvPoolVecEnv; assert 'envpool' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_cannot_be_moved_but_made_again() -> None:
    with pytest.raises(TypeError, match="function was expected"):
        AsyncPPO("MlpPolicy", VecMonitor(EnvPoolVecEnv("CartPole-v1", num_envs=2)), n_steps=8, batch_size=8)


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1"])
def test_ppo_and_monitor(task: str) -> None:
    env = VecMonitor(EnvPoolVecEnv(task, num_envs=4, max_episode_steps=16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # `seed` reaches the environments
        model = PPO("MlpPolicy", env, n_steps=64, batch_size=64, n_epochs=2, seed=1, device="cpu", backend="torch")
    before = copy.deepcopy(model.policy.state_dict())
    model.learn(512)
    assert any((before[key] != value).any() for key, value in model.policy.state_dict().items())
    episodes = list(model.ep_info_buffer or ())
    assert len(episodes) >= 512 // 16
    if task == "CartPole-v1":
        assert all(one["r"] == one["l"] <= 16 for one in episodes)
        assert {one["l"] for one in episodes} > {16}  # some fall before the limit
    else:
        assert len(episodes) == 32 and all(one["l"] == 16 and one["r"] < 0 for one in episodes)
    again = VecMonitor(EnvPoolVecEnv(task, num_envs=4, max_episode_steps=16))
    twin = PPO("MlpPolicy", again, n_steps=64, batch_size=64, n_epochs=2, seed=1, device="cpu", backend="torch").learn(512)
    for key, value in model.policy.state_dict().items():
        assert (value == twin.policy.state_dict()[key]).all()
    _, lengths = evaluate_policy(model, env, n_eval_episodes=6, return_episode_rewards=True)
    assert len(lengths) == 6 and max(lengths) <= 16


def test_async_ppo() -> None:
    def environments() -> VecNormalize:
        return VecNormalize(VecMonitor(EnvPoolVecEnv("CartPole-v1", num_envs=2)))

    runs = []
    for _ in range(2):
        model = AsyncPPO(
            "MlpPolicy", environments, n_steps=32, batch_size=32, n_epochs=1, seed=1, device="cpu", backend="torch"
        )
        try:
            model.learn(256)
        finally:
            model.close()
        assert model.num_timesteps == 256
        assert all(one["r"] == one["l"] > 5 for one in model.ep_info_buffer or ())
        runs.append(([one["l"] for one in model.ep_info_buffer or ()], model.policy.state_dict()))
    assert runs[0][0] == runs[1][0] and len(runs[0][0]) > 3
    assert all((value == runs[1][1][key]).all() for key, value in runs[0][1].items())
