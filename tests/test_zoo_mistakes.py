"""A stranger's mistakes with ``python -m sb3_flow.zoo``: one sentence each, with what to do."""

import importlib
import sys

import pytest
import torch as th
from zoo_commands import ALGOS, MAZE, SMALL, mistake, python, train, zoo

from sb3_flow import RQL
from sb3_flow.data.generate import generate


@pytest.fixture(scope="module")
def maze_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return generate("pointmaze-medium-navigate", 2, out=folder, episode_length=50, progress_bar=False)


def test_wrong_command_and_algorithm(capsys):
    assert mistake("trian") == (
        "error: there is no command 'trian'; choose from train, enjoy, record_video, optimize, plot_train, all_plots, "
        "plot_from_file, push_to_hub, load_from_hub, bench, sweep, plot"
    )
    with pytest.raises(SystemExit):
        zoo("train", "--algo", "rlq", "--env", "Pendulum-v1")
    last = capsys.readouterr().err.splitlines()[-1]
    assert "--algo: invalid choice: 'rlq'" in last and all(algo in last for algo in ALGOS)


def test_wrong_environment(tmp_path):
    assert mistake("train", "--algo", "rql", "--env", "cube-double-play-singletask-task6-v0", "-f", tmp_path) == (
        "error: cube-double-play-singletask-task6-v0 not found in gym registry, you maybe meant "
        "cube-double-play-singletask-task5-v0?"
    )


@pytest.mark.parametrize("command", ["train", "optimize"])
def test_environment_without_masks(command, tmp_path):
    message = mistake(command, "--algo", "maskable_ppo", "--env", "CartPole-v1", "-f", tmp_path)
    assert message.startswith(
        "error: --algo maskable_ppo needs action masks, but --env CartPole-v1 has no method `action_masks`."
    )
    assert "sb3_flow.envs.ActionMasksFromInfo" in message and not list((tmp_path / "maskable_ppo").glob("*"))


def test_dataset_not_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    command = ["--algo", "rql", "--env", MAZE, "-f", tmp_path, "-params", "policy_kwargs:dict(net_arch=[8])"]
    for name in ("train", "optimize"):
        message = mistake(name, *command)
        assert f"there is no file {tmp_path}/.ogbench/data/pointmaze-medium-navigate-v0.npz" in message
        assert "python -m sb3_flow.data.generate pointmaze-medium-navigate-v0 --out DIR" in message
        assert f"'ogbench:{MAZE}@DIR/pointmaze-medium-navigate-v0.npz'" in message
    ants = "antmaze-large-navigate-singletask-task1-v0"
    params = ["policy_kwargs:dict(net_arch=[8])", f"offline_dataset:'ogbench:{ants}'"]
    message = mistake("train", *command[:-1], *params)
    assert "ogbench.download_datasets(['antmaze-large-navigate-v0'], 'DIR')" in message and "data.generate" not in message


def test_dataset_of_another_environment(maze_file, tmp_path):
    params = [f"offline_dataset:'ogbench:{MAZE}@{maze_file}'", "offline_steps:10", "policy_kwargs:dict(net_arch=[8])"]
    message = mistake("train", "--algo", "fmq", "--env", "Pendulum-v1", "-f", tmp_path, "-params", *params)
    assert f"'ogbench:{MAZE}@{maze_file}' does not go with --env Pendulum-v1: the model's actions have shape (1,)" in message
    assert message.endswith("""; give a dataset of that environment (-params "offline_dataset:'...'").""")


def test_continuous_algorithm_on_discrete_actions(tmp_path):
    for algo in ("rql", "fmq", "fql", "rlpd", "dsrl", "qam"):
        message = mistake("train", "--algo", algo, "--env", "CartPole-v1", "-f", tmp_path)
        assert f"{algo.upper()} only supports" in message and "For Discrete actions use DQN" in message


@pytest.mark.parametrize("package", ["rl_zoo3", "requests"])
def test_missing_extra(package, monkeypatch, tmp_path):
    ours = [f"sb3_flow.zoo.{name}" for name in ("manager", "samplers", "viewing")]
    for name in ours:
        importlib.import_module(name)  # what is there before comes back afterwards; anything else would stay
    for name in [name for name in sys.modules if name.split(".")[0] in ("rl_zoo3", package)]:
        monkeypatch.delitem(sys.modules, name)
    for name in ours:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    message = mistake("enjoy", "--algo", "rql", "--env", "Pendulum-v1", "-f", tmp_path)
    assert "pip install 'sb3-flow[zoo]'" in message and package in message


def test_missing_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(th.cuda, "is_available", lambda: False)
    small = [*SMALL["rql"][:-1], 101, "--eval-freq", -1]
    train("rql", tmp_path, *small)
    for command in (["train"], ["enjoy", "--no-render"]):
        options = ["--algo", "rql", "--env", "Pendulum-v1", "--device", "cuda", "-f", tmp_path]
        message = mistake(command[0], *options, *command[1:])
        assert message.startswith("error: --device cuda: torch ") and "leave out --device to train on the CPU" in message


def test_unknown_hyperparameter_and_no_model(tmp_path):
    params = ["-params", "alhpa:1.0"]
    message = mistake("train", "--algo", "rql", "--env", "Pendulum-v1", "-f", tmp_path, *params)
    assert message == "error: RQL has no argument `alhpa`: did you mean `alpha`?"
    message = mistake("enjoy", "--algo", "rql", "--env", "Pendulum-v1")
    assert "there is no model of rql for Pendulum-v1" in message and "`-f logs`" in message


def test_a_run_that_does_not_begin_leaves_no_folder(tmp_path):
    good = tmp_path / "rql" / "Pendulum-v1_1"
    (good / "Pendulum-v1").mkdir(parents=True)
    mistake("train", "--algo", "rql", "--env", "Pendulum-v1", "-f", tmp_path, "-params", "alhpa:1.0")
    mistake("train", "--algo", "rql", "--env", "CartPole-v1", "-f", tmp_path)
    mistake("optimize", "--algo", "rql", "--env", "CartPole-v1", "-f", tmp_path, "-params", "offline_dataset:'nothing'")
    assert list(tmp_path.rglob("*")) == [tmp_path / "rql", good, good / "Pendulum-v1"]  # as it was


def test_a_package_of_environments_that_is_not_there():
    for command in ("train", "record_video", "enjoy"):
        message = mistake(command, "--env", "Pendulum-v1", "--gym-packages", "no_such_package")
        assert message == "error: No module named 'no_such_package'"


@pytest.mark.parametrize("episodes", [0, 1])
def test_errors_of_training_keep_their_traceback(episodes, tmp_path, monkeypatch):
    def fail(self, *_, **__):
        raise ValueError("in training")

    monkeypatch.setattr(RQL, "train", fail)
    with pytest.raises(ValueError, match="in training"):
        train("rql", tmp_path, *SMALL["rql"][:-3], f"learning_starts:{100 + 200 * episodes}", "-n", 400)
    # what was logged stays, an empty folder does not
    assert len(list((tmp_path / "rql").glob("*/*monitor.csv"))) == episodes


def test_old_stable_baselines3():
    ended = python("from importlib import metadata; metadata.version = lambda name: '2.7.1'; import sb3_flow")
    assert ended.returncode and ended.stderr.splitlines()[-1] == (
        "ImportError: sb3_flow needs stable-baselines3 2.9.2 or newer, but 2.7.1 is installed: "
        "pip install --upgrade 'stable-baselines3>=2.9.2,<3' 'sb3-contrib>=2.9.2,<3'"
    )
