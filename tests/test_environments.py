"""Environment ids that are named as OGBench's datasets, and what they make."""

import json
import sys
from types import ModuleType

import gymnasium as gym
import h5py
import numpy as np
import pytest
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from stable_baselines3.common.env_util import make_vec_env
from zoo_commands import TAXI

from sb3_flow import OfflineDataset
from sb3_flow.data.generate import generate
from sb3_flow.data.ogbench import single_task
from sb3_flow.envs import ActionMasksFromInfo, SparseReward
from sb3_flow.envs.registration import single_task_names

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
    env = gym.make(f"sb3_flow.envs:{SPARSE}")
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


# ------------------------------------------------------------------------------------------------------------------ RoboMimic

SIZES = {"robot0_eef_pos": 3, "robot0_eef_quat": 4, "robot0_gripper_qpos": 2, "object": 14}


@pytest.fixture
def demonstrations(tmp_path):
    """A file as RoboMimic's, with two demonstrations: the eleventh row of each is numbered 10, and so on."""
    path = tmp_path / "low_dim_v15.hdf5"
    with h5py.File(path, "w") as file:
        file.create_group("data").attrs["env_args"] = json.dumps({"env_name": "PickPlaceCan", "type": 1, "env_kwargs": {}})
        for name, first, length in (("demo_10", 10, 3), ("demo_2", 0, 5)):
            demo = file["data"].create_group(name)
            for group, shift in (("obs", 0), ("next_obs", 1)):
                for key, size in SIZES.items():
                    rows = first + shift + np.arange(length, dtype=np.float64)
                    demo[f"{group}/{key}"] = np.repeat(rows[:, None], size, axis=1)
            demo["actions"] = np.full((length, 7), 0.5)
            demo["rewards"] = np.arange(length) == length - 1
            demo["dones"] = demo["rewards"][:]
    return path


def test_demonstrations_become_a_dataset(demonstrations, tmp_path):
    dataset = OfflineDataset.load(f"robomimic:{demonstrations}")
    assert dataset.observations.shape == (8, 23) and dataset.actions.shape == (8, 7)
    assert dataset.observations[:, 0].tolist() == [0, 1, 2, 3, 4, 10, 11, 12]  # demo_2 before demo_10
    assert dataset.final_observations[:, 22].tolist() == [5, 13]
    assert dataset.rewards.tolist() == [-1, -1, -1, -1, 0, -1, -1, 0]
    np.testing.assert_array_equal(dataset.terminated, dataset.rewards == 0)
    np.testing.assert_array_equal(dataset.trajectory_ends, dataset.rewards == 0)
    with h5py.File(demonstrations, "a") as file:
        del file["data/demo_2/obs/object"]
    with pytest.raises(ValueError, match=r"lacks \['obs/object'\] in its demonstrations; a low-dimensional file"):
        OfflineDataset.load(f"robomimic:{demonstrations}")
    with h5py.File(tmp_path / "empty.hdf5", "w"):
        pass
    with pytest.raises(ValueError, match="holds no demonstrations"):
        OfflineDataset.load(f"robomimic:{tmp_path / 'empty.hdf5'}")


class StandIn:
    """What is used of robomimic's EnvRobosuite."""

    action_dimension = 7

    def reset(self):
        return {**{key: np.zeros(size) for key, size in SIZES.items()}, "lang_emb": np.zeros(3)}

    def step(self, action):
        return {**self.reset(), "object": np.ones(14)}, 1.0, False, {}

    def is_success(self):
        return {"task": np.bool_(True)}


def test_tasks_of_robomimic(demonstrations, monkeypatch):
    made = []
    env_utils, obs_utils = ModuleType("robomimic.utils.env_utils"), ModuleType("robomimic.utils.obs_utils")
    env_utils.create_env_from_metadata = lambda settings, **kwargs: (made.append((settings, kwargs)), StandIn())[1]
    obs_utils.initialize_obs_utils_with_obs_specs = lambda specs: made.append(specs)
    for name, module in (("env_utils", env_utils), ("obs_utils", obs_utils)):
        monkeypatch.setitem(sys.modules, f"robomimic.utils.{name}", module)
    for name in ("robomimic", "robomimic.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    env = gym.make("can-mh-low_dim", file=str(demonstrations))
    assert env.spec.max_episode_steps == 300 and gym.spec("square-mh-low_dim").max_episode_steps == 400
    assert made[1] == ({"env_name": "PickPlaceCan", "type": 1, "env_kwargs": {}}, {"render_offscreen": False})
    OfflineDataset.load(f"robomimic:{demonstrations}").check_spaces(env.observation_space, env.action_space)
    observation, _ = env.reset(seed=0)
    assert env.observation_space.contains(observation)
    observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
    assert observation.tolist() == [0.0] * 9 + [1.0] * 14
    assert (reward, terminated, truncated, info["is_success"]) == (0.0, True, False, True)
    with pytest.raises(FileNotFoundError, match=r"download RoboMimic's low_dim_v15\.hdf5 of this task"):
        gym.make("can-mh-low_dim", file="nothing.hdf5")


def test_without_robomimic(monkeypatch):
    monkeypatch.setitem(sys.modules, "robomimic", None)
    with pytest.raises(ImportError, match="need the packages robomimic, robosuite and h5py: pip install"):
        gym.make("square-mh-low_dim")


def test_masks_are_those_of_the_last_info():
    env = ActionMasksFromInfo(gym.make(TAXI))
    with pytest.raises(RuntimeError, match="`action_masks` was called before `reset`"):
        env.action_masks()
    _, info = env.reset(seed=0)
    for action in (0, 1, 2, 3):
        assert env.action_masks().dtype == bool
        np.testing.assert_array_equal(env.action_masks(), info["action_mask"])
        info = env.step(action)[4]
    # as SB3's environments of several see it, after an automatic reset, too
    vec_env = make_vec_env(lambda: ActionMasksFromInfo(gym.make(TAXI, max_episode_steps=2)), 2, seed=0)
    assert is_masking_supported(vec_env)
    vec_env.reset()
    for _ in range(3):
        vec_env.step([0, 1])
        taxis = [each.unwrapped for each in vec_env.envs]
        np.testing.assert_array_equal(get_action_masks(vec_env), [taxi.action_mask(taxi.s) for taxi in taxis])


def test_infos_without_masks_are_refused():
    with pytest.raises(ValueError, match=r"`info` of .*CartPole.* must have the key 'action_mask', but it has \[\]"):
        ActionMasksFromInfo(gym.make("CartPole-v1")).reset()
