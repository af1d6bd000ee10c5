"""
Every entry of zoo_configs: it is read by rl-zoo3 as a command would, builds its model and takes a gradient step. What is
replaced is the environment, by a random one with the same spaces, the dataset, by a few rows with them, and what makes a step
long: sizes of networks, batches and rollouts.
"""

import argparse
from functools import cache
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch as th
import yaml
from on_policy import Walk
from stable_baselines3.common.env_util import make_vec_env

from sb3_flow import GRPO, PPO, AsyncPPO, OfflineDataset
from sb3_flow.zoo import ALGORITHMS, config_file, register

CONFIGS = {algo: yaml.safe_load(config_file(algo).read_text()) for algo in ALGORITHMS}
OF_ANOTHER_GYMNASIUM = {"Taxi-v3", "Taxi-v4"} - set(gym.registry)
ENTRIES = [(algo, entry) for algo, entries in CONFIGS.items() for entry in entries if entry not in OF_ANOTHER_GYMNASIUM]


def settings_of(algo, entry):
    """:return: all but the name of the dataset"""
    return {key: value for key, value in CONFIGS[algo][entry].items() if key != "offline_dataset"}


def distinct():
    """:return: entries without the tasks of a dataset whose settings are those of another task"""
    found = {}
    for algo, entry in ENTRIES:
        family = entry.split("-singletask")[0]
        found.setdefault((algo, family, yaml.safe_dump(settings_of(algo, entry))), (algo, entry))
    return list(found.values())


@cache
def spaces_of(family):
    if family.endswith("low_dim"):  # of RoboMimic, which is not installed here: observations of position, grip and object
        return gym.spaces.Box(-np.inf, np.inf, (23,), np.float32), gym.spaces.Box(-1, 1, (7,), np.float32)
    env = gym.make(f"{family}-singletask-v0" if family in FAMILIES.values() else family)
    env.close()
    return env.observation_space, env.action_space


# single tasks of a dataset have the same spaces
FAMILIES = {entry: entry.split("-singletask")[0] for _, entry in ENTRIES if "-singletask" in entry}


def some_data(observation_space, action_space, rows=40):
    rng = np.random.default_rng(0)
    ends = np.zeros(rows, bool)
    ends[[19, 39]] = True
    return OfflineDataset.from_arrays(
        rng.standard_normal((rows, *observation_space.shape)),
        rng.uniform(action_space.low, action_space.high, (rows, *action_space.shape)),
        rng.standard_normal(rows),
        np.zeros(rows, bool),
        ends,
        action_space=action_space,
    )


class InProcess(AsyncPPO):
    """Without the collector process, which would take seconds for each entry; tests/test_zoo.py has it."""

    _setup_learn = PPO._setup_learn
    collect_rollouts = PPO.collect_rollouts
    _act = PPO._act


def built(algo, entry, folder, monkeypatch):
    """:return: the model of an entry, as ``train`` builds it but smaller"""
    register()
    import rl_zoo3

    from sb3_flow.zoo.manager import ExperimentManager

    env_id = "CartPole-v1" if entry == "default" and algo not in ("rql", "fmq", "fql", "rlpd", "dsrl", "qam") else entry
    env_id = "Pendulum-v1" if env_id == "default" else env_id
    assert env_id in gym.registry
    spaces = spaces_of(FAMILIES.get(env_id, env_id))
    given = CONFIGS[algo][entry]
    if "offline_dataset" in given:
        assert given.get("offline_steps", 0) >= 1000 or algo == "rlpd"  # which has no offline phase

    class Small(ExperimentManager):
        def _preprocess_hyperparams(self, hyperparams):
            result = super()._preprocess_hyperparams(hyperparams)
            hyperparams = result[0]
            kwargs = hyperparams.get("policy_kwargs", {})
            sizes = {"pi": [8], "vf": [8]} if isinstance(kwargs.get("net_arch"), dict) else [8, 8]
            hyperparams["policy_kwargs"] = {**kwargs, "net_arch": sizes}
            hyperparams["batch_size"] = 16
            if algo in ("rql", "fmq", "fql", "rlpd", "dsrl", "qam"):
                hyperparams |= {"buffer_size": 200, "learning_starts": 0}
            else:
                hyperparams |= {"n_steps": 10, "n_epochs": 1}
            if "offline_dataset" in hyperparams:
                hyperparams["offline_dataset"] = some_data(*spaces)
            return result

        def create_envs(self, n_envs, eval_env=False, no_log=False):
            wrapper = None if algo.startswith("maskable") else self.env_wrapper  # a walk's masks are no part of its infos
            env = make_vec_env(lambda: Walk(spaces[1], spaces[0]), n_envs, seed=0, wrapper_class=wrapper, monitor_kwargs={})
            return self._maybe_normalize(env, eval_env)

    if algo == "async_ppo":
        monkeypatch.setitem(rl_zoo3.ALGOS, algo, InProcess)
    arguments = argparse.Namespace(gym_packages=[], env_kwargs=None)
    manager = Small(arguments, algo, env_id, str(folder), eval_freq=-1, verbose=0, device="cpu")
    if entry == "default":
        with_default = folder / "default.yml"
        with_default.write_text(yaml.safe_dump({"default": given}))
        manager.config = str(with_default)
    model, saved = manager.setup_experiment()
    assert dict(saved) == given
    return model, manager


def weights_of(model):
    return {name: weight.clone() for name, weight in model.policy.state_dict().items()}


def test_an_entry_has_the_dataset_of_its_name():
    for algo, entry in ENTRIES:
        dataset = CONFIGS[algo][entry].get("offline_dataset")
        if dataset is not None:
            task = entry.split("-")[0]
            robomimic = f"robomimic:~/.robomimic/{task}/mh/low_dim_v15.hdf5"
            assert dataset == (robomimic if entry.endswith("low_dim") else f"ogbench:{entry}")


@pytest.mark.parametrize(("algo", "entry"), distinct())
def test_an_entry_builds_its_model_and_learns(algo, entry, tmp_path, monkeypatch):
    model, manager = built(algo, entry, tmp_path, monkeypatch)
    before = weights_of(model)
    if manager.offline_steps:
        assert model.offline_steps == manager.offline_steps
        model.learn_offline(model.offline_dataset, 1)
        assert model.offline_updates == 1
    else:
        assert manager.n_timesteps >= 1e4
        model.learn(30 if algo in ("rql", "fmq", "fql", "rlpd", "dsrl", "qam") else 1)
    assert model._n_updates > 0
    after = weights_of(model)
    assert all(weight.isfinite().all() for weight in after.values())
    assert any(not th.equal(before[name], weight) for name, weight in after.items())
    for key, value in CONFIGS[algo][entry].items():
        if key not in (
            "policy",
            "learning_rate",
            "clip_range",
            "batch_size",
            "n_steps",
            "n_epochs",
            "n_envs",
            "learning_starts",
        ):
            if isinstance(value, int | float | str) and hasattr(model, key):
                assert getattr(model, key) == value or key in ("policy_kwargs", "offline_dataset"), key
    # and acts
    observation = np.zeros((1, *model.observation_space.shape), np.float32)
    assert model.action_space.contains(model.predict(observation, deterministic=True)[0][0])


def test_the_configurations_of_the_repository_are_the_packages():
    folder = Path(__file__).parents[1] / "zoo_configs"
    assert {path.stem for path in folder.glob("*.yml")} == set(ALGORITHMS)
    for algo in ALGORITHMS:
        assert config_file(algo).read_text() == (folder / f"{algo}.yml").read_text()


def without_spaces(entry):
    return {key: "".join(value.split()) if isinstance(value, str) else value for key, value in entry.items()}


OF_TENSORS = ("phys2d/CartPole-v1",)


@pytest.mark.parametrize("algo", ["flow_ppo", "grpo"])
def test_environments_of_tensors_have_the_numbers_of_others(algo):
    for name in OF_TENSORS:
        one, other = CONFIGS[algo][name], CONFIGS[algo][name.removeprefix("phys2d/")]
        assert one["vec_env_class"] == "sb3_flow.envs.JaxVecEnv" and one["n_envs"] == 64
        own = {"vec_env_class", "n_envs", "n_timesteps", "n_epochs", "env_wrapper", "group_size", "group_by"}
        assert {**one, **dict.fromkeys(own)} == {**other, **dict.fromkeys(own)}


@pytest.mark.parametrize("algo", ["flow_ppo", "async_ppo"])
def test_numbers_said_to_be_the_zoos_are(algo):
    import rl_zoo3

    theirs = yaml.safe_load((Path(rl_zoo3.__file__).parent / "hyperparams" / "ppo.yml").read_text())
    versions = {name.split("-v")[0]: without_spaces(entry) for name, entry in theirs.items()}
    for name, entry in CONFIGS[algo].items():
        ours = without_spaces(entry)
        if name in OF_TENSORS:
            continue
        assert ours.pop("backend") == "auto"
        assert ours == versions[name.split("-v")[0]]


def test_numbers_of_recurrent_policies_said_to_be_the_zoos_are():
    import rl_zoo3

    theirs = yaml.safe_load((Path(rl_zoo3.__file__).parent / "hyperparams" / "ppo_lstm.yml").read_text())
    for name, entry in CONFIGS["recurrent_ppo"].items():
        named = theirs.get(name) or theirs[name.replace("-", "NoVel-")]
        expected = {**named, "policy": "MlpLstmPolicy"} if name == "default" else named
        assert without_spaces(entry) == without_spaces(expected)


@pytest.mark.parametrize("algo", ["grpo", "gspo"])
def test_numbers_of_groups_said_to_be_the_zoos_are(algo):
    theirs = {name.split("-v")[0]: entry for name, entry in CONFIGS["flow_ppo"].items()}
    tuned_here = {"CartPole-v1", "Pendulum-v1", "default"}
    for name, entry in CONFIGS[algo].items():
        if name in OF_TENSORS:
            continue
        assert entry["n_envs"] % entry["group_size"] == 0
        if name not in tuned_here:
            zoo = theirs[name.split("-v")[0]]
            assert entry["n_steps"] == gym.spec(name).max_episode_steps
            for key in ("normalize", "gamma", "ent_coef", "clip_range", "max_grad_norm", "use_sde"):
                assert entry.get(key) == zoo.get(key), (name, key)
            if "net_arch" in zoo.get("policy_kwargs", ""):
                assert "net_arch=dict(pi=[256, 256])" in entry["policy_kwargs"]
    assert issubclass(ALGORITHMS[algo], GRPO)


# Tables of the papers: alpha, expectile, rho, chunk length, discount
RQL_TABLE = {
    "antmaze-large-navigate": (0.1, 0.5, 0.5, 1, 0.99),
    "antmaze-giant-navigate": (0.1, 0.5, 0.5, 1, 0.995),
    "humanoidmaze-medium-navigate": (0.3, 0.5, 0.0, 1, 0.995),
    "humanoidmaze-large-navigate": (0.3, 0.5, 0.0, 1, 0.995),
    "scene-play-sparse": (3.0, 0.7, 0.5, 5, 0.99),
    "puzzle-3x3-play-sparse": (1.0, 0.7, 0.5, 5, 0.99),
    "puzzle-4x4-play-sparse": (1.0, 0.9, 0.5, 5, 0.99),
    "cube-double-play": (10.0, 0.9, 0.5, 5, 0.99),
    "cube-triple-play": (1.0, 0.9, 0.5, 5, 0.99),
    "cube-quadruple-play": (1.0, 0.7, 0.5, 5, 0.99),
}


@pytest.mark.parametrize("domain", RQL_TABLE)
def test_the_entries_of_rql_are_its_papers(domain):
    for task in range(1, 6):
        entry = CONFIGS["rql"][f"{domain}-singletask-task{task}-v0"]
        names = ("alpha", "expectile", "rho", "horizon_length", "gamma")
        assert tuple(entry[name] for name in names) == RQL_TABLE[domain]
        assert (entry["offline_steps"], entry["n_timesteps"], entry["acting_mode"]) == (1_000_000, 0, "sample")


# Commands of the reference implementation: alpha, discount, aggregation
FQL_TABLE = {
    "antmaze-large-navigate": (10.0, 0.99, "min"),
    "antmaze-giant-navigate": (10.0, 0.995, "min"),
    "humanoidmaze-medium-navigate": (30.0, 0.995, "mean"),
    "humanoidmaze-large-navigate": (30.0, 0.995, "mean"),
    "antsoccer-arena-navigate": (10.0, 0.995, "mean"),
    "cube-single-play": (300.0, 0.99, "mean"),
    "cube-double-play": (300.0, 0.99, "mean"),
    "scene-play": (300.0, 0.99, "mean"),
    "puzzle-3x3-play": (1000.0, 0.99, "mean"),
    "puzzle-4x4-play": (1000.0, 0.99, "mean"),
}


@pytest.mark.parametrize("domain", FQL_TABLE)
def test_the_entries_of_fql_are_its_references(domain):
    for task in range(1, 6):
        entry = CONFIGS["fql"][f"{domain}-singletask-task{task}-v0"]
        assert tuple(entry[name] for name in ("alpha", "gamma", "q_aggregation")) == FQL_TABLE[domain]
        assert (entry["offline_steps"], entry["n_timesteps"], entry["horizon_length"]) == (1_000_000, 0, 1)
        assert "actor_type" not in entry


@pytest.mark.parametrize("domain", ["cube-triple-play", "scene-play-sparse", "puzzle-3x3-play-sparse"])
def test_the_entries_of_q_chunking_are_its_references(domain):
    for task in range(1, 6):
        entry = CONFIGS["fql"][f"{domain}-singletask-task{task}-v0"]
        names = ("actor_type", "n_candidates", "horizon_length", "learning_starts", "gamma", "q_aggregation")
        assert tuple(entry[name] for name in names) == ("best_of_n", 32, 5, 5000, 0.99, "mean")
        assert entry["offline_steps"] == entry["n_timesteps"] == 1_000_000


# Settings of the reference implementation with chunks: weight of imitation, discount, pessimism, chunk length
RLPD_TABLE = {
    "puzzle-3x3-play-sparse": (0.01, 0.99, 0.5, 5),
    "scene-play-sparse": (0.3, 0.99, 0.5, 5),
    "cube-double-play": (0.1, 0.99, 0.5, 5),
    "antmaze-large-navigate": (0.0, 0.99, 0.5, 1),
    "humanoidmaze-medium-navigate": (0.03, 0.995, 0.0, 1),
    "cube-triple-play": (0.0, 0.99, 0.5, 5),
    "cube-quadruple-play": (0.0, 0.99, 0.5, 5),
    "puzzle-4x4-play-sparse": (0.0, 0.99, 0.5, 5),
    "antmaze-giant-navigate": (0.01, 0.995, 0.5, 1),
    "humanoidmaze-large-navigate": (0.0, 0.995, 0.0, 1),
}


@pytest.mark.parametrize("domain", RLPD_TABLE)
def test_the_entries_of_rlpd_are_its_references(domain):
    for task in range(1, 6):
        entry = CONFIGS["rlpd"][f"{domain}-singletask-task{task}-v0"]
        assert tuple(entry[name] for name in ("bc_alpha", "gamma", "rho", "horizon_length")) == RLPD_TABLE[domain]
        assert (entry["n_timesteps"], entry["learning_starts"], entry["backup_entropy"]) == (500_000, 5000, False)
        assert entry["acting_mode"] == "sample" and not {"offline_steps", "offline_fraction", "n_critics"} & set(entry)


# Commands of the reference implementation: noise_scale, discount, horizon, pessimism
DSRL_TABLE = {
    "cube-double-play": (1.0, 0.99, 5, 0.5),
    "cube-triple-play": (1.4, 0.99, 5, 0.5),
    "cube-quadruple-play": (1.4, 0.99, 5, 0.5),
    "scene-play-sparse": (0.4, 0.99, 5, 0.5),
    "puzzle-3x3-play-sparse": (1.0, 0.99, 5, 0.5),
    "puzzle-4x4-play-sparse": (1.0, 0.99, 5, 0.5),
    "antmaze-large-navigate": (0.8, 0.99, 1, 0.5),
    "antmaze-giant-navigate": (1.2, 0.995, 1, 0.5),
    "humanoidmaze-medium-navigate": (0.6, 0.995, 1, 0.0),
    "humanoidmaze-large-navigate": (0.8, 0.995, 1, 0.0),
}


@pytest.mark.parametrize("domain", DSRL_TABLE)
def test_the_entries_of_dsrl_are_its_references(domain):
    for task in range(1, 6):
        entry = CONFIGS["dsrl"][f"{domain}-singletask-task{task}-v0"]
        names = ("noise_scale", "gamma", "horizon_length", "rho")
        assert tuple(entry[name] for name in names) == DSRL_TABLE[domain]
        assert (entry["offline_steps"], entry["n_timesteps"], entry["learning_starts"]) == (1_000_000, 500_000, 5_000)


# Settings of the reference implementation with edits: inv_temp, scale of edits, rho, chunk length, discount
QAM_TABLE = {
    "puzzle-3x3-play-sparse": (1.0, 0.1, 0.5, 5, 0.99),
    "scene-play-sparse": (1.0, 0.0, 0.5, 5, 0.99),
    "cube-double-play": (1.0, 0.0, 0.5, 5, 0.99),
    "cube-triple-play": (3.0, 0.1, 0.5, 5, 0.99),
    "cube-quadruple-play": (3.0, 0.1, 0.5, 5, 0.99),
    "puzzle-4x4-play-sparse": (0.1, 0.9, 0.5, 5, 0.99),
    "antmaze-large-navigate": (1.0, 0.1, 0.5, 1, 0.99),
    "antmaze-giant-navigate": (10.0, 0.1, 0.5, 1, 0.995),
    "humanoidmaze-medium-navigate": (3.0, 0.1, 0.0, 1, 0.995),
    "humanoidmaze-large-navigate": (3.0, 0.1, 0.0, 1, 0.995),
}


@pytest.mark.parametrize("domain", QAM_TABLE)
def test_the_entries_of_qam_are_its_references(domain):
    for task in range(1, 6):
        entry = CONFIGS["qam"][f"{domain}-singletask-task{task}-v0"]
        names = ("inv_temp", "edit_scale", "rho", "horizon_length", "gamma")
        assert tuple(entry[name] for name in names) == QAM_TABLE[domain]
        assert (entry["offline_steps"], entry["n_timesteps"], entry["learning_starts"]) == (1_000_000, 500_000, 5000)
