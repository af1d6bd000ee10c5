"""Environments of tensors in the zoo: ``vec_env_class`` in a configuration."""

import sys
import warnings

import numpy as np
import pytest
import yaml
from zoo_commands import mistake, zoo

from sb3_flow import PPO
from sb3_flow.on_policy import collection

TASK = "phys2d/CartPole-v1"
JAX = "vec_env_class:'sb3_flow.envs.JaxVecEnv'"


def test_train_and_enjoy(tmp_path, monkeypatch, capsys):
    pytest.importorskip("flax")
    collect, rollouts = collection.collect_tensors, []

    def noting(model, env, *arguments):
        rollouts.append(env.num_envs)
        return collect(model, env, *arguments)

    monkeypatch.setattr(collection, "collect_tensors", noting)
    # the configuration's entry is for 64 environments
    small = ["-params", "n_envs:8", "n_steps:16", "batch_size:64", "normalize:True", "--device", "cpu", "--seed", 1]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(one step late|not of the same type)")
        zoo("train", "--algo", "flow_ppo", "--env", TASK, "-f", tmp_path, "-n", 256, "--eval-freq", 128, *small)
    assert rollouts == [8, 8]
    folder = tmp_path / "flow_ppo" / "phys2d-CartPole-v1_1"
    with np.load(folder / "evaluations.npz") as found:
        assert found["timesteps"].tolist() == [128, 256] and found["results"].shape == (2, 5)
        np.testing.assert_array_equal(found["results"], found["ep_lengths"])  # CartPole pays 1 for each step
    kept = dict(yaml.unsafe_load((folder / "phys2d-CartPole-v1" / "config.yml").read_text()))
    assert kept["vec_env_class"] == "sb3_flow.envs.JaxVecEnv" and (folder / "phys2d-CartPole-v1/vecnormalize.pkl").is_file()
    assert PPO.load(folder / "phys2d-CartPole-v1.zip", device="cpu").num_timesteps == 256
    capsys.readouterr()
    zoo("enjoy", "--algo", "flow_ppo", "--env", TASK, "-f", tmp_path, "--no-render", "-n", 60)
    printed = capsys.readouterr().out
    assert "Loading running average" in printed and "Mean reward" in printed


@pytest.mark.parametrize("algo", ["ppo", "async_ppo", "rql"])
def test_other_algorithms(algo, tmp_path):
    env = "Pendulum-v1" if algo == "rql" else "CartPole-v1"
    message = mistake("train", "--algo", algo, "--env", env, "-f", tmp_path, "-params", JAX)
    told = "environments of tensors are for flow_ppo, grpo, gspo, but --algo"
    assert message.startswith(f"error: vec_env_class is 'sb3_flow.envs.JaxVecEnv': {told} {algo} was given")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (["vec_env_class:'sb3_flow.envs.RayVecEnv'"], "vec_env_class must name a subclass of sb3_flow.envs.TorchVecEnv"),
        (["vec_env_class:'sb3_flow.envs.Nothing'"], "but 'sb3_flow.envs.Nothing' was given"),
        (["vec_env_class:'JaxVecEnv'"], "but 'JaxVecEnv' was given"),
        (["vec_env_class:'no_such_module.Envs'"], "No module named 'no_such_module'"),
        ([JAX, "env_wrapper:'sb3_flow.GroupedStart'"], "env_wrapper wraps single environments, but those of vec_env_class"),
        ([JAX], "`task` must be a task that Gymnasium steps by JAX, such as phys2d/CartPole-v1, but 'CartPole-v1' was given"),
    ],
)
def test_mistakes(params, message, tmp_path):
    pytest.importorskip("flax")
    assert message in mistake("train", "--algo", "flow_ppo", "--env", "CartPole-v1", "-f", tmp_path, "-params", *params)
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.parametrize("package", ["jax", "flax"])
def test_without_jax(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    message = mistake("train", "--algo", "flow_ppo", "--env", TASK, "-f", tmp_path)
    assert message.startswith("error: JaxVecEnv needs the package jax: pip install 'sb3-flow[jax]' (")
