"""Environment ids that are named as OGBench's datasets, and what they make."""

import sys

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common.env_util import make_vec_env

from sb3_flow import OfflineDataset
from sb3_flow.common import SparseReward
from sb3_flow.common.environments import single_task_names
from sb3_flow.data.generate import generate
from sb3_flow.data.sources import single_task

SPARSE = "scene-play-sparse-singletask-task1-v0"


def test_every_name_is_registered_and_one_of_ogbench():
    import ogbench  # noqa: F401

    names = list(single_task_names())
    assert len(names) == len(set(names)) > 300
    for name in names:
        assert name in gym.registry
        assert gym.registry[single_task(name).env_id].max_episode_steps > 0


@pytest.mark.parametrize(
    ("name", "env_id", "dataset", "sparse"),
    [
        ("pointmaze-medium-navigate-singletask-v0", "pointmaze-medium-singletask-v0", "pointmaze-medium-navigate-v0", False),
        (
            "puzzle-4x4-noisy-sparse-singletask-task3-v0",
            "puzzle-4x4-singletask-task3-v0",
            "puzzle-4x4-noisy-v0",
            True,
        ),
    ],
)
def test_what_a_name_says(name, env_id, dataset, sparse):
    task = single_task(name)
    assert (task.env_id, task.dataset, task.sparse) == (env_id, dataset, sparse)


def test_an_environment_is_made_as_sb3_makes_it():
    env = make_vec_env("pointmaze-medium-navigate-singletask-task2-v0", n_envs=1)
    own = gym.make("pointmaze-medium-singletask-task2-v0")
    assert env.observation_space == own.observation_space and env.action_space == own.action_space
    env.reset()
    for _ in range(1000):  # OGBench's time limit
        _, reward, done, infos = env.step(env.action_space.sample()[None])
    assert done[0] and infos[0]["TimeLimit.truncated"] and infos[0]["is_success"] is False and reward[0] == -1


@pytest.fixture(scope="module")
def scene_file(tmp_path_factory):
    return generate("scene-play", 1, out=tmp_path_factory.mktemp("data"), episode_length=100, progress_bar=False)


def test_sparse_rewards_of_environment_and_data(scene_file):
    dense = OfflineDataset.load(f"ogbench:{SPARSE.replace('-sparse', '')}@{scene_file}")
    sparse = OfflineDataset.load(f"ogbench:{SPARSE}@{scene_file}")
    assert dense.rewards.min() < -1
    np.testing.assert_array_equal(sparse.rewards, dense.sparse_rewards().rewards)
    np.testing.assert_array_equal(sparse.terminated, dense.terminated)
    env = gym.make(SPARSE)
    sparse.check_spaces(env.observation_space, env.action_space)
    env.reset(seed=0)
    _, reward, _, _, info = env.step(env.action_space.sample())
    assert reward == -1.0 and info["is_success"] is False
    wrapper = SparseReward(gym.make("Pendulum-v1"))
    assert [wrapper.reward(reward) for reward in (-5, -1, 0)] == [-1.0, -1.0, 0.0]


def test_without_ogbench(monkeypatch):
    monkeypatch.setitem(sys.modules, "ogbench", None)
    with pytest.raises(ImportError, match=r"cube-double-play-singletask-task2-v0 needs .* pip install 'sb3-flow\[ogbench\]'"):
        gym.make("cube-double-play-singletask-task2-v0")
