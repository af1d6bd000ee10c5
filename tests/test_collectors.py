"""AsyncPPO with several collectors: what is equal to PPO, what repeats, how old rollouts are, and that nothing is left."""

import copy
import os
import pickle
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from async_environments import Clock, clocks
from gymnasium import spaces
from on_policy import DICT, Walk, assert_same_weights, learned, walks
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize
from test_async_ppo import (
    SMALL,
    Record,
    Watched,
    check_ends,
    check_estimates,
    check_lag_bounds,
    children,
    nothing_is_left,
    shared_blocks,
    without_times,
)

from sb3_flow import PPO, AsyncPPO
from sb3_flow.collect import CollectorError
from sb3_flow.collect.environment_transfer import made_by
from sb3_flow.collect.infos import pack_infos, unpack_infos
from sb3_flow.collect.shares import Shares
from sb3_flow.common.normalisers import merge_normalisers, record_normalisers, recorded_normalisers

__all__ = ["nothing_is_left"]  # a fixture that every test here uses
TWO: dict[str, Any] = {**SMALL, "n_collectors": 2}


class Seeded(Walk):
    """A walk with a single action: its seed alone decides what happens."""

    def __init__(self) -> None:
        super().__init__(spaces.Discrete(1))


def test_sync_is_ppo_with_the_same_environments_in_the_same_order() -> None:
    """With one action to choose from, the generators that draw actions make no difference."""
    found = []
    for kind, env, kwargs in (
        (PPO, VecMonitor(DummyVecEnv([Seeded] * 6)), {}),
        (AsyncPPO, lambda: VecMonitor(DummyVecEnv([Seeded] * 2)), {"mode": "sync", "n_collectors": 3}),
    ):
        model = kind("MlpPolicy", env, **SMALL, **kwargs)
        weights, logged = learned(model, 4 * 96)
        model.learn(96, reset_num_timesteps=False)
        assert model.n_envs == model.get_env().num_envs == 6 and model.num_timesteps == 5 * 96
        weights["last"] = th.tensor(model._last_obs)
        found.append((weights, [{key: one[key] for key in one if not key.startswith("async/")} for one in logged]))
        if kind is AsyncPPO:
            assert len(model._collectors.pids) == 3
    assert_same_weights(found[1][0], found[0][0])
    assert found[1][1] == found[0][1]


@pytest.mark.parametrize("mode", ["sync", "lockstep"])
def test_two_collectors_repeat_to_the_last_bit(mode: str) -> None:
    def make() -> VecNormalize:
        return VecNormalize(walks(2, spaces.Box(-1, 1, (2,), np.float32), DICT), norm_obs_keys=["a"])

    found = []
    for _ in range(2):
        model = AsyncPPO("MultiInputPolicy", make, mode=mode, **{**TWO, "policy_kwargs": {"net_arch": [8]}})
        weights, logged = learned(model, 4 * 64)
        normaliser = model.get_vec_normalize_env()
        weights |= {"mean": th.tensor(normaliser.obs_rms["a"].mean), "var": th.tensor(normaliser.ret_rms.var)}
        found.append((weights, [without_times(one) for one in logged]))
        assert len(np.unique(model.rollout_buffer.actions[:, 0])) == 4 * 16  # no two environments act alike
    assert_same_weights(found[1][0], found[0][0])
    assert found[1][1] == found[0][1]


def test_lockstep() -> None:
    """What :mod:`test_async_ppo` asks of one collector."""
    model, callback = Watched("MlpPolicy", lambda: VecMonitor(clocks(1)), **TWO), Record()
    model.learn(5 * 32, callback=callback)
    for number, one in enumerate(model.kept):
        assert one["version"] == number and one["versions"].shape == (16, 2)
        assert (one["versions"] == max(number - 1, 0)).all()
    model.check_behaviour()
    check_ends(model, callback)
    check_estimates(model)
    assert callback.steps == 5 * 16 and (np.array(callback.rewards) == np.array(callback.numbers)).all()
    pids = model._collectors.pids
    stopped = Record(at=20, action=lambda _: False)
    model.learn(10 * 32, callback=stopped)
    assert stopped.steps == 20 and model._collectors.outstanding == [] and model._collectors.pids == pids
    model.learn(2 * 32)


def test_lag_never_exceeds_its_bound() -> None:
    make = partial(clocks, 1, sleep=2e-4)
    check_lag_bounds(Watched("MlpPolicy", make, mode="free", n_slots=3, max_policy_lag=0, **TWO), 6)


# --- VecNormalize


def statistics(rows: np.ndarray) -> RunningMeanStd:
    """:return: statistics of all rows, computed at once"""
    found = RunningMeanStd(shape=rows.shape[1:])
    found.update(rows)
    return found


def test_statistics_of_shares_add_up_to_those_of_the_whole() -> None:
    generator = np.random.default_rng(0)
    envs = [VecNormalize(walks(2, spaces.Discrete(2), DICT), norm_obs_keys=["a"]) for _ in range(3)]
    for env in envs:
        env.obs_rms["a"].update(generator.normal(50.0, 1e-3, (1000, 2)))
        break
    master = envs[0]
    rows = [generator.normal(50.0, 1e-3, (7, 2)) for _ in range(2)]
    expected = master.obs_rms["a"].copy()
    expected.update(np.concatenate(rows))
    news = []
    for env, part in zip(envs[1:], rows, strict=True):
        env.obs_rms = {"a": master.obs_rms["a"].copy()}
        record_normalisers(env)
        env.obs_rms["a"].update(part[:3])
        env.obs_rms["a"].update(part[3:])
        news.append(recorded_normalisers(env))
    for one in news:
        merge_normalisers(master, one)
    found = master.obs_rms["a"]
    assert found.count == expected.count and master.ret_rms.count == RunningMeanStd().count  # nothing came to the returns
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-14)
    np.testing.assert_allclose(found.var, expected.var, rtol=1e-9)


@pytest.mark.parametrize("mode", ["sync", "lockstep", "free"])
def test_statistics_of_all_collectors_arrive(mode: str) -> None:
    def make() -> VecNormalize:
        return VecNormalize(DummyVecEnv([Seeded] * 2), clip_obs=1e6, norm_reward=False)

    free = {"max_policy_lag": 9} if mode == "free" else {}  # nothing is dropped
    model = AsyncPPO("MlpPolicy", make, mode=mode, **free, **TWO)
    model.learn(3 * 64)
    model.learn(2 * 64, reset_num_timesteps=False)
    raw = DummyVecEnv([Seeded] * 4)
    raw.seed(SMALL["seed"])
    rows = [raw.reset(), *(raw.step([0] * 4)[0] for _ in range(5 * 16))]
    expected, found = statistics(np.concatenate(rows)), model.get_vec_normalize_env().obs_rms
    assert found.count == pytest.approx(expected.count) and model.dropped_rollouts == 0
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(found.var, expected.var, rtol=1e-6)


# --- infos


def typed(value: Any) -> Any:
    """:return: a value with the types in it, which == does not tell apart"""
    if isinstance(value, dict):
        return {key: typed(part) for key, part in value.items()}
    if isinstance(value, list):
        return [typed(part) for part in value]
    return type(value), value.tolist() if isinstance(value, np.ndarray) else value


def test_infos_arrive_as_they_were() -> None:
    everywhere = [1.5, np.float64(0.1), np.float32(0.1), True, np.bool_(False), 7, 2**70, "text", None, np.arange(3)]
    infos = [
        [{f"key {number}": value for number, value in enumerate(everywhere)} | {"place": float(place)} for place in range(3)]
        for _ in range(4)
    ]
    infos[1][2] |= {"episode": {"r": 1.0, "l": 2}, "key 0": 3}  # another type than elsewhere
    del infos[3][0]["key 1"]
    infos[2][1]["key 2"] = np.float64(2.5)
    infos[0][0]["place"] = float("nan")
    packed = pickle.loads(pickle.dumps(pack_infos(infos)))
    assert sorted(packed.columns) == ["key 3", "key 4", "place"]
    found = unpack_infos(packed)
    assert repr(typed(found)) == repr(typed([[{key: info[key] for key in other} for info, other in zip(*rows, strict=True)]
                                             for rows in zip(infos, found, strict=True)]))  # fmt: skip
    assert [[set(info) for info in row] for row in infos] == [[set(info) for info in row] for row in found]
    assert len({id(info) for row in found for info in row}) == 12
    empty = [[{}, {}], [{}, {"only": 1.0}]]
    assert unpack_infos(pack_infos(empty)) == empty


# --- failures


def test_the_failure_of_one_collector_ends_all() -> None:
    def end(model: AsyncPPO, number: int) -> None:
        os.kill(model._collectors.pids[1], number)

    model = AsyncPPO("MlpPolicy", lambda: clocks(1, sleep=1e-3), collector_timeout=1.0, **TWO)
    for number, message in ((signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "made no step for 1 seconds")):
        with pytest.raises(CollectorError, match=rf"collector process \(pid \d+\) .*{message}"):
            model.learn(20 * 32, callback=Record(at=20, action=lambda model, number=number: end(model, number)))
        assert model._collectors is None and children(os.getpid()) == set()
    model.learn(2 * 32)
    model.close()

    model = AsyncPPO("MlpPolicy", lambda: clocks(1, trouble="raise"), **TWO)
    with pytest.raises(CollectorError, match="ZeroDivisionError: the wheel is off"):
        model.learn(10 * 32)
    assert model._collectors is None and children(os.getpid()) == set()


def test_a_slow_reset_in_one_collector_is_waited_for(tmp_path: Path) -> None:
    class Slow(Clock):
        def reset(self, **kwargs: Any) -> Any:
            try:
                (tmp_path / "taken").touch(exist_ok=False)
                time.sleep(2.0)
            except FileExistsError:
                pass
            return super().reset(**kwargs)

    (tmp_path / "taken").touch()  # not here
    model = AsyncPPO("MlpPolicy", Slow, collector_timeout=30.0, **TWO)
    (tmp_path / "taken").unlink()
    model.learn(3 * 32)
    assert model.num_timesteps == 3 * 32


def test_starts_and_stops_leak_nothing() -> None:
    model = AsyncPPO("MlpPolicy", lambda: clocks(1), **TWO)
    model.learn(32)
    model.close()
    found = []
    for _ in range(50):
        model.learn(32, callback=Record())  # keeps what it was given
        model.close()
        found.append((len(os.listdir("/proc/self/fd")), shared_blocks(), len(children(os.getpid()))))
    assert found[0] == found[-1] and found[0][1:] == (0, 0)


# --- environments


def test_environments_that_exist_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError, match=r"`env` must be an id, or a function.*if `n_collectors` is 2; but DummyVecEnv was given"
    ):
        AsyncPPO("MlpPolicy", clocks(), **TWO)
    with pytest.raises(ValueError, match="`n_collectors` must be at least 1"):
        AsyncPPO("MlpPolicy", clocks(), **{**TWO, "n_collectors": 0})
    model = AsyncPPO("MlpPolicy", "CartPole-v1", **TWO)
    assert model.learn(2 * 32).num_timesteps == 2 * 32
    assert [len(info) for info in model.ep_info_buffer] != []
    model.save(tmp_path / "model")
    with pytest.raises(TypeError, match="n_collectors=1"):
        AsyncPPO.load(tmp_path / "model", env=model.get_env().venv.envs[0], device="cpu")
    alone = AsyncPPO.load(tmp_path / "model", env=cartpoles(3), n_collectors=1, device="cpu")
    assert alone.learn(48).n_envs == 3
    more = AsyncPPO.load(tmp_path / "model", env=lambda: cartpoles(2), n_collectors=3, device="cpu")
    assert more.n_envs == 6 and more.learn(96, reset_num_timesteps=False).num_timesteps == 2 * 32 + 96
    more.set_env(lambda: cartpoles(2))
    assert more._collectors is None and isinstance(more.get_env(), Shares)
    with pytest.raises(AssertionError, match="number of environments"):
        more.set_env(lambda: cartpoles(3))
    copied = copy.deepcopy(more)
    assert copied.get_env() is not more.get_env() and copied.learn(96).num_timesteps == 96


def cartpoles(n_envs: int) -> DummyVecEnv:
    return DummyVecEnv([lambda: gym.make("CartPole-v1")] * n_envs)


def test_shares_are_one_vectorised_environment() -> None:
    made = []

    def make() -> VecNormalize:
        made.append(1)
        return VecNormalize(VecMonitor(DummyVecEnv([Seeded] * 2)), norm_obs=False, norm_reward=False)

    shares, whole = Shares(made_by(make), 3), VecMonitor(DummyVecEnv([Seeded] * 6))
    assert shares.num_envs == 6 and len(made) == 1  # the others are made when they are stepped
    shares.only_first = True
    shares.reset()
    shares.only_first = False
    assert len(made) == 1
    for _ in range(2):
        for env in (shares, whole):
            env.seed(5)
        np.testing.assert_array_equal(shares.reset(), whole.reset())
        for _ in range(30):
            for mine, other in zip(shares.step(np.zeros(6, int)), whole.step(np.zeros(6, int)), strict=True):
                if isinstance(mine, list):
                    assert [sorted(info) for info in mine] == [sorted(info) for info in other]
                else:
                    np.testing.assert_array_equal(mine, other)
    assert len(made) == 3
    shares.set_attr("mean_length", 9, indices=[1, 4])
    assert shares.get_attr("mean_length") == [6, 9, 6, 6, 9, 6] and shares.get_attr("mean_length", 4) == [9]
    assert shares.env_method("action_masks", indices=[5])[0].shape == (1,)
    assert shares.env_is_wrapped(Seeded) == [False] * 6
    # a step without a reset of all, as after `learn`
    shares.only_first = True
    shares.reset()
    shares.only_first = False
    assert shares.step(np.zeros(6, int))[0].shape == (6, 3)
    with pytest.raises(ValueError, match=r"`options` must be one dictionary, or a list of 2"):
        shares.set_options([{}] * 6)
    shares.close()


def test_a_policy_is_evaluated_in_its_environments() -> None:
    model = AsyncPPO("MlpPolicy", lambda: VecMonitor(clocks(1)), **TWO).learn(2 * 32)
    rewards, lengths = evaluate_policy(model, model.get_env(), n_eval_episodes=6, return_episode_rewards=True)
    assert len(rewards) == 6 and set(lengths) <= {3, 4, 5}
