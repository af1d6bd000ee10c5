"""Copies and pickles of models: they learn by themselves what the original would have learned, and take nothing from it."""

import copy
import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch as th
from async_environments import clock_processes, clocks
from on_policy import ACTION_SPACES, assert_same_weights, walks
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from tasks import PointEnv, collect

from sb3_flow import DSRL, FMQ, FQL, GRPO, PPO, QAM, RLPD, RQL, AsyncPPO, MaskablePPO, MaskableRecurrentPPO, RecurrentPPO
from sb3_flow.data import OfflineDataset

SMALL: dict[str, Any] = {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "seed": 3, "device": "cpu"}
SMALL |= {"policy_kwargs": {"net_arch": [8]}}
OFFLINE: dict[str, Any] = {
    "learning_starts": 4,
    "batch_size": 8,
    "seed": 3,
    "device": "cpu",
    "policy_kwargs": {"net_arch": [8]},
}
BOX = ACTION_SPACES["box"]
MODELS: dict[str, Callable[[], BaseAlgorithm]] = {
    "native": lambda: PPO("MlpPolicy", walks(2, BOX), backend="native", **SMALL),
    "torch": lambda: PPO("MlpPolicy", walks(2, BOX), backend="torch", **SMALL),
    "gSDE": lambda: PPO("MlpPolicy", walks(2, BOX), use_sde=True, **SMALL),
    "reference": lambda: PPO("MlpPolicy", walks(2, BOX), kl_coef=0.1, reference_policy="initial", **SMALL),
    "GRPO": lambda: GRPO("MlpPolicy", walks(2, BOX), group_by="none", **SMALL),
    "MaskablePPO": lambda: MaskablePPO("MlpPolicy", walks(2, ACTION_SPACES["discrete"]), **SMALL),
    "RecurrentPPO": lambda: RecurrentPPO("MlpLstmPolicy", walks(2, BOX), **SMALL),
    "MaskableRecurrentPPO": lambda: MaskableRecurrentPPO("MlpGruPolicy", walks(2, ACTION_SPACES["discrete"]), **SMALL),
    "RQL": lambda: RQL("MlpPolicy", PointEnv(), **OFFLINE),
    "PPO, normalised": lambda: PPO("MlpPolicy", VecNormalize(walks(2, BOX)), **SMALL),
    "RLPD, normalised": lambda: RLPD("MlpPolicy", VecNormalize(DummyVecEnv([PointEnv])), **OFFLINE),
    "FMQ": lambda: FMQ("MlpPolicy", PointEnv(), **OFFLINE),
    "FQL": lambda: FQL("MlpPolicy", PointEnv(), **OFFLINE),
    "RLPD": lambda: RLPD("MlpPolicy", PointEnv(), **OFFLINE),
    "DSRL": lambda: DSRL("MlpPolicy", PointEnv(), **OFFLINE),
    "QAM": lambda: QAM("MlpPolicy", PointEnv(), flow_steps=3, edit_scale=0.5, **OFFLINE),
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "cloudpickle": lambda model: pickle.loads(cloudpickle.dumps(model)),
}


def learn(model: Any) -> dict[str, th.Tensor]:
    """:return: weights after a little more of learning, from the same state of the global generators"""
    th.manual_seed(5)
    np.random.seed(5)
    return model.learn(32, reset_num_timesteps=False).policy.state_dict()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_a_copy_learns_by_itself_what_the_original_does(name, way):
    model = MODELS[name]().learn(32)
    before = {key: weight.clone() for key, weight in model.policy.state_dict().items()}
    copied = WAYS[way](model)
    assert_same_weights(copied.policy.state_dict(), before)
    weights = learn(copied)
    assert any(not th.equal(weight, before[key]) for key, weight in weights.items())  # torch sees what was learned
    assert_same_weights(model.policy.state_dict(), before)
    assert_same_weights(learn(model), weights)
    observation = model.env.reset()
    np.testing.assert_array_equal(*(one.predict(observation, deterministic=True)[0] for one in (model, copied)))


def test_a_copy_made_in_the_offline_phase_is_in_none():
    dataset, copies = collect(PointEnv()), []
    model = RLPD("MlpPolicy", PointEnv(), offline_dataset=dataset, offline_fraction=0.5, **OFFLINE).learn(3)
    callback = lambda local, _: copies.append(copy.deepcopy(local["self"])) or True  # noqa: E731
    model.learn_offline(dataset, 2, callback)
    copied = copies[0]
    assert copied.phase.name == "online" and copied.num_timesteps == 3 and not copied.replay_buffer.offline_only
    copied.learn(20, reset_num_timesteps=False)
    assert copied.num_timesteps == 23 and len(copied.replay_buffer._sources()) == 2
    alone = RLPD("MlpPolicy", None, offline_dataset=dataset, **OFFLINE).learn_offline(dataset, 1, callback)
    assert alone.env is None and copies[-1].env is None
    copies[-1].learn_offline(dataset, 1)


@pytest.mark.parametrize("algorithm", [RQL, FMQ, FQL, RLPD, DSRL])
def test_a_copy_shares_the_dataset_which_is_read_only(algorithm, tmp_path):
    collect(PointEnv()).save(tmp_path / "data")
    dataset = OfflineDataset.load(f"npz:{tmp_path / 'data'}")  # memory-mapped
    model = algorithm("MlpPolicy", None, offline_dataset=dataset, **OFFLINE).learn_offline(dataset, 2)
    copied = copy.deepcopy(model)
    assert copied.offline_dataset is dataset and copied.replay_buffer.offline_dataset is dataset
    weights = copied.learn_offline(dataset, 2).policy.state_dict()
    assert_same_weights(model.learn_offline(dataset, 2).policy.state_dict(), weights)


def descriptors() -> dict[int, str]:
    """:return: what this process's descriptors stand for"""
    found = {}
    for path in Path("/proc/self/fd").iterdir():
        if path.is_symlink() and not (target := os.readlink(path)).startswith("/proc"):
            found[int(path.name)] = target
    return found


def test_a_copy_leaves_the_collector_to_the_original():
    model = AsyncPPO("MlpPolicy", clocks(), mode="sync", **SMALL).learn(32)
    gc.collect()
    before, pid = descriptors(), model._collectors.pids[0]
    for way in (*WAYS.values(), copy.copy):
        copied = way(model)
        assert copied._collectors is None and model._collectors.pids[0] == pid
        del copied
        gc.collect()
        assert descriptors() == before
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="Collectors belong to the process that started them"):
            way(model._collectors)
    copied = copy.deepcopy(model)
    weights = {key: weight.clone() for key, weight in model.policy.state_dict().items()}
    copied.learn(32, reset_num_timesteps=False)
    assert copied._collectors.pids[0] != pid
    copied.close()
    assert_same_weights(model.policy.state_dict(), weights)
    model.learn(32, reset_num_timesteps=False)
    assert model._collectors.pids[0] == pid
    model.close()


def test_environments_in_processes_are_left_alone():
    """SB3's ``SubprocVecEnv`` cannot be copied; an attempt closes its pipes."""
    env = clock_processes()
    model = PPO("MlpPolicy", VecNormalize(env), **SMALL)
    with pytest.raises(TypeError, match="`env` is a SubprocVecEnv cannot be copied"):
        copy.deepcopy(model)
    gc.collect()
    pickle.loads(pickle.dumps(model))  # without what its VecNormalize wraps, as SB3's
    assert env.reset().shape == (2, 2)
    env.close()


def test_environments_from_a_function_are_made_again_for_a_copy():
    model = AsyncPPO("MlpPolicy", lambda: VecNormalize(clock_processes()), **SMALL).learn(32)
    before = descriptors()
    copied = copy.deepcopy(model)
    assert copied.env is not model.env and copied.get_vec_normalize_env() is copied.env
    assert copied.env.obs_rms.count == model.env.obs_rms.count
    assert before.items() <= descriptors().items()
    copied.env.close()
    model.learn(32)
    model.close()
    model.env.close()
