"""
The commands of ``python -m sb3_flow.zoo``: each does what its rl-zoo3 namesake does, with our algorithms; and mistakes are
told in one sentence. rl-zoo3 exchanges Gymnasium's TimeLimit when it is imported: within tests, which come last.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch as th
import yaml
from stable_baselines3.common.vec_env import DummyVecEnv
from tasks import PointEnv

from sb3_flow import GRPO, RQL
from sb3_flow.data.generate import generate
from sb3_flow.zoo import ALGORITHMS, config_file

ALGOS = sorted(ALGORITHMS)
MAZE = "pointmaze-medium-navigate-singletask-v0"
# smaller than in the configurations, and just enough of it
SMALL = {
    "rql": ["-params", "policy_kwargs:dict(net_arch=[16,16])", "learning_starts:100", "-n", "200"],
    "fmq": ["-params", "policy_kwargs:dict(net_arch=[16,16])", "learning_starts:100", "-n", "200"],
    "flow_ppo": ["-n", "300"],
    "grpo": ["-params", "n_envs:8", "group_size:4", "n_steps:50", "-n", "300"],
    "gspo": ["-params", "n_envs:8", "group_size:4", "n_steps:50", "-n", "300"],
    "async_ppo": ["-n", "300"],
}


def environment(algo):
    return "Pendulum-v1" if algo in ("rql", "fmq") else "CartPole-v1"


def zoo(*arguments):
    """``python -m sb3_flow.zoo ...`` in this process."""
    before = sys.argv
    sys.argv = ["python -m sb3_flow.zoo", *map(str, arguments)]
    try:
        runpy.run_module("sb3_flow.zoo", run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before


def mistake(*arguments):
    """:return: what the command ends with"""
    with pytest.raises(SystemExit) as ended:
        zoo(*arguments)
    assert isinstance(ended.value.code, str) and "\n" not in ended.value.code
    return ended.value.code


def train(algo, folder, *arguments):
    zoo("train", "--algo", algo, "--env", environment(algo), "-f", folder, "--seed", 1, "--device", "cpu", *arguments)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """A folder in which every algorithm was trained once, as tests need it."""
    folder, trained = tmp_path_factory.mktemp("zoo"), set()

    def of(algo):
        if algo not in trained:
            trained.add(algo)
            train(algo, folder, *SMALL[algo], "--eval-freq", 200, "--eval-episodes", 2, "-tb", folder / "tensorboard")
        return folder

    return of


def run_folder(folder, algo, number=1):
    return folder / algo / f"{environment(algo)}_{number}"


@pytest.mark.parametrize("algo", ALGOS)
def test_train(algo, logs):
    folder = run_folder(logs(algo), algo)
    env_id = environment(algo)
    assert (folder / f"{env_id}.zip").is_file() and (folder / "best_model.zip").is_file()
    assert len(np.load(folder / "evaluations.npz")["timesteps"])
    assert len((folder / "0.monitor.csv").read_text().splitlines()) > 2  # episodes, also those of a collector process
    hyperparams = dict(yaml.unsafe_load((folder / env_id / "config.yml").read_text()))
    configured = yaml.safe_load(config_file(algo).read_text())[env_id]
    assert hyperparams.keys() >= configured.keys()  # without being told where they are
    assert list((logs(algo) / "tensorboard" / env_id).rglob("events.*"))
    model = ALGORITHMS[algo].load(folder / f"{env_id}.zip")
    assert type(model) is ALGORITHMS[algo] and model.num_timesteps >= 200 and model._n_updates > 0


@pytest.mark.parametrize("algo", ALGOS)
def test_enjoy(algo, logs, capsys):
    folder = logs(algo)
    capsys.readouterr()
    zoo("enjoy", "--algo", algo, "--env", environment(algo), "-f", folder, "-n", 220, "--no-render", "--device", "cpu")
    out = capsys.readouterr().out
    assert "Mean reward:" in out and "Mean episode length:" in out


@pytest.mark.parametrize("algo", ALGOS)
def test_record_video(algo, logs, capsys):
    folder = logs(algo)
    zoo("record_video", "--algo", algo, "--env", environment(algo), "-f", folder, "-n", 20)
    (video,) = (run_folder(folder, algo) / "videos").glob("*.mp4")
    assert video.stat().st_size > 1000


@pytest.mark.parametrize("algo", ALGOS)
def test_continue(algo, logs, capsys):
    folder, env_id = logs(algo), environment(algo)
    first = run_folder(folder, algo) / f"{env_id}.zip"
    train(algo, folder, "-i", first, *SMALL[algo], "--eval-freq", -1)
    assert "Loading pretrained agent" in capsys.readouterr().out
    (second,) = {path for path in (folder / algo).glob(f"*/{env_id}.zip")} - {first}
    before, after = (ALGORITHMS[algo].load(path) for path in (first, second))
    assert after._n_updates > before._n_updates
    weights = zip(before.policy.parameters(), after.policy.parameters(), strict=True)
    assert any(not th.equal(one, other) for one, other in weights)


# whose trials are cheap ones
SEEDS = {"rql": 242, "fmq": 150, "flow_ppo": 44, "grpo": 0, "gspo": 0, "async_ppo": 15}


@pytest.mark.parametrize("algo", ALGOS)
def test_optimize(algo, tmp_path, capsys):
    small = [*SMALL[algo][:-1], 120] if algo in ("rql", "fmq") else ["-params", "n_envs:2", *SMALL[algo]]
    small = SMALL[algo] if algo in ("grpo", "gspo") else small
    options = ["--n-trials", 2, "--n-startup-trials", 1, "--n-evaluations", 1, "--eval-episodes", 1, "--sampler", "random"]
    zoo(
        *("optimize", "--algo", algo, "--env", environment(algo), "-f", tmp_path, "--seed", SEEDS[algo], "--device", "cpu"),
        *(*options, "--no-optim-plots", *small),
    )
    (report,) = (tmp_path / algo).glob("report_*.csv")
    rows = report.read_text().splitlines()
    assert len(rows) == 3 and rows[1].endswith("COMPLETE")
    assert "Best trial:" in capsys.readouterr().out


@pytest.mark.parametrize("algo", ALGOS)
def test_a_trial_is_rebuilt_from_what_the_study_recorded(algo):
    import optuna

    from sb3_flow.zoo import register

    register()
    from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    env = DummyVecEnv([PointEnv, PointEnv])
    for _ in range(10):
        trial = study.ask()
        sampled = HYPERPARAMS_SAMPLER[algo](trial, 2, 16, {})
        rebuilt = HYPERPARAMS_CONVERTER[algo](trial.params)
        assert rebuilt == sampled
        if issubclass(ALGORITHMS[algo], GRPO):
            assert 16 % sampled["group_size"] == 0
            sampled["group_by"] = "none"  # PointEnv is not wrapped
        ALGORITHMS[algo]("MlpPolicy", env, device="cpu", **sampled)  # all of it is known and allowed


def test_plot_two_runs(logs, tmp_path, monkeypatch, capsys):
    train("flow_ppo", logs("flow_ppo"), "-n", 300, "--eval-freq", -1)
    monkeypatch.chdir(tmp_path)
    from matplotlib import pyplot as plt

    plt.switch_backend("agg")
    zoo("plot", "-a", "flow_ppo", "-e", "CartPole-v1", "-f", logs("flow_ppo"), "-w", 2)
    labels = [text.get_text() for text in plt.gca().get_legend().get_texts()]
    assert "CartPole-v1_1" in labels and len(labels) >= 2
    assert (tmp_path / "plot_train.png").stat().st_size > 5000
    assert "plot_train.png" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------- data first, then environment


@pytest.fixture(scope="module")
def maze_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return generate("pointmaze-medium-navigate", 3, out=folder, episode_length=50, progress_bar=False)


def test_one_command_does_both_phases(maze_file, tmp_path, capsys):
    dataset = f"offline_dataset:'ogbench:{MAZE}@{maze_file}'"
    small = ["-params", dataset, "offline_steps:40", "policy_kwargs:dict(net_arch=[16,16])", "-n", 60]
    command = ["--algo", "rql", "--env", MAZE, "-f", tmp_path, "--seed", 1, "--device", "cpu", *small, "--env-kwargs"]
    zoo("train", *command, "max_episode_steps:30", "--eval-freq", 20, "--eval-episodes", 2, "--save-freq", 30)
    folder = tmp_path / "rql" / f"{MAZE}_1"
    model = RQL.load(folder / f"{MAZE}.zip")
    assert model.offline_updates == 40 and model.num_timesteps == 60
    # evaluated and saved in both phases: after 20, 40 gradient steps, and after 20, 40, 60 environment steps
    evaluations = np.load(folder / "evaluations.npz")
    assert evaluations["timesteps"].tolist() == [20, 40, 20, 40, 60] and evaluations["successes"].shape == (5, 2)
    assert "is_success" in (folder / "0.monitor.csv").read_text()
    statistics = np.load(folder / MAZE / "vecnormalize.pkl", allow_pickle=True)
    assert statistics.obs_rms.count > 100  # of the dataset
    capsys.readouterr()
    zoo("enjoy", "--algo", "rql", "--env", MAZE, "-f", tmp_path, "-n", 31, "--no-render", "--device", "cpu")
    assert "Success rate:" in capsys.readouterr().out
    # goes on without doing the offline phase again
    again = ["-i", folder / f"{MAZE}.zip", "--eval-freq", -1]
    zoo("train", *command, "max_episode_steps:30", *again)
    assert RQL.load(tmp_path / "rql" / f"{MAZE}_2" / f"{MAZE}.zip").offline_updates == 40


def test_trials_with_an_offline_phase_are_evaluated_in_it(maze_file, tmp_path, capsys):
    dataset = f"offline_dataset:'ogbench:{MAZE}@{maze_file}'"
    small = ["-params", dataset, "offline_steps:20", "n_timesteps:0"]
    options = ["--n-trials", 1, "--n-evaluations", 2, "--eval-episodes", 1, "--sampler", "random", "--no-optim-plots"]
    command = ["--algo", "fmq", "--env", MAZE, "-f", tmp_path, "--seed", 3, "--device", "cpu", *small]
    zoo("optimize", *command, *options, "--optimization-log-path", tmp_path, "--env-kwargs", "max_episode_steps:20")
    assert np.load(tmp_path / "trial_0" / "evaluations.npz")["timesteps"].tolist() == [10, 20]


def test_evaluations_are_stochastic_where_the_configuration_says_so(maze_file, tmp_path, monkeypatch):
    from stable_baselines3.common import callbacks

    modes = []
    monkeypatch.setattr(
        callbacks, "evaluate_policy", lambda *_, deterministic, **__: (modes.append(deterministic), ([0.0], [1]))[1]
    )
    for value in ("False", "True"):
        dataset = f"offline_dataset:'ogbench:{MAZE}@{maze_file}'"
        small = ["-params", dataset, "offline_steps:2", f"deterministic_eval:{value}", "policy_kwargs:dict(net_arch=[8])"]
        zoo("train", "--algo", "rql", "--env", MAZE, "-f", tmp_path, *small, "-n", 1, "--eval-freq", 2, "--device", "cpu")
    assert modes == [False, True]


def test_viewing_acts_as_the_evaluations_of_training(tmp_path):
    from sb3_flow.zoo import register

    register()
    from sb3_flow.zoo.viewing import as_in_training

    for number, text in ((1, "deterministic_eval: false"), (2, "deterministic_eval: true"), (3, "gamma: 0.9")):
        config = tmp_path / "rql" / f"{MAZE}_{number}" / MAZE / "config.yml"
        config.parent.mkdir(parents=True)
        config.write_text(text)
    command = ["--algo", "rql", "--env", MAZE, "-f", str(tmp_path)]
    assert as_in_training(command) == as_in_training([*command, "--exp-id", "2"]) == []
    fresh = [*command, "-n", "50", "--exp-id", "1"]
    assert as_in_training(fresh) == ["--stochastic"]
    assert as_in_training([*fresh, "--deterministic"]) == as_in_training([*fresh, "--stochastic"]) == []
    assert as_in_training(["--algo", "rql", "--env", "nothing", "--help"]) == []


def test_viewing_a_model_makes_no_room_for_steps(logs):
    folder = run_folder(logs("rql"), "rql")
    from sb3_flow.zoo import register
    from sb3_flow.zoo.viewing import for_viewing

    register()
    import rl_zoo3

    with for_viewing():
        model = rl_zoo3.ALGOS["rql"].load(folder / "Pendulum-v1.zip", device="cpu")
    assert model.replay_buffer.buffer_size == 1
    assert rl_zoo3.ALGOS["rql"] is RQL


# ------------------------------------------------------------------------------------------------------ a stranger's mistakes


def test_wrong_command_and_algorithm(capsys):
    assert mistake("trian") == (
        "error: there is no command 'trian'; choose from train, enjoy, record_video, optimize, plot, plot_train, all_plots, "
        "plot_from_file"
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
    assert message.endswith("""; give one of that environment (-params "offline_dataset:'...'").""")


def test_continuous_algorithm_on_discrete_actions(tmp_path):
    for algo in ("rql", "fmq"):
        message = mistake("train", "--algo", algo, "--env", "CartPole-v1", "-f", tmp_path)
        assert f"{algo.upper()} only supports" in message and "For Discrete actions use DQN" in message


@pytest.mark.parametrize("package", ["rl_zoo3", "requests"])
def test_missing_extra(package, monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.split(".")[0] in ("rl_zoo3", package)]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("manager", "samplers", "viewing"):
        monkeypatch.delitem(sys.modules, f"sb3_flow.zoo.{name}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    message = mistake("enjoy", "--algo", "rql", "--env", "Pendulum-v1", "-f", tmp_path)
    assert "pip install 'sb3-flow[zoo]'" in message and package in message


def test_missing_gpu(logs, tmp_path, monkeypatch):
    monkeypatch.setattr(th.cuda, "is_available", lambda: False)
    for command in (["train", "-f", tmp_path], ["enjoy", "-f", logs("rql"), "--no-render"]):
        message = mistake(command[0], "--algo", "rql", "--env", "Pendulum-v1", "--device", "cuda", *command[1:])
        assert message.startswith("error: --device cuda: torch ") and "leave out --device to train on the CPU" in message


def test_unknown_hyperparameter_and_no_model(tmp_path):
    params = ["-params", "alhpa:1.0"]
    message = mistake("train", "--algo", "rql", "--env", "Pendulum-v1", "-f", tmp_path, *params)
    assert message == "error: RQL.__init__() got an unexpected keyword argument 'alhpa'"
    message = mistake("enjoy", "--algo", "rql", "--env", "Pendulum-v1")
    assert "there is no model of rql for Pendulum-v1" in message and "`-f logs`" in message


def test_errors_of_training_keep_their_traceback(logs, tmp_path, monkeypatch):
    def fail(self, *_, **__):
        raise ValueError("in training")

    monkeypatch.setattr(RQL, "train", fail)
    with pytest.raises(ValueError, match="in training"):
        train("rql", tmp_path, *SMALL["rql"])


def python(code, **environment):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment})


def test_old_stable_baselines3():
    ended = python("from importlib import metadata; metadata.version = lambda name: '2.7.1'; import sb3_flow")
    assert ended.returncode and ended.stderr.splitlines()[-1] == (
        "ImportError: sb3_flow needs stable-baselines3 2.9.2 or newer, but 2.7.1 is installed: "
        "pip install --upgrade 'stable-baselines3>=2.9.2,<3' 'sb3-contrib>=2.9.2,<3'"
    )


# ------------------------------------------------------------------------------------------------------------------ packaging


def test_the_core_imports_neither_rl_zoo3_nor_ogbench():
    ended = python("import sys, sb3_flow, sb3_flow.zoo; print(sorted({'rl_zoo3', 'ogbench', 'optuna'} & set(sys.modules)))")
    assert ended.stdout == "[]\n", ended.stderr


def test_as_a_command_from_an_empty_folder(tmp_path):
    root = Path(__file__).parents[1]
    command = "-m sb3_flow.zoo train --algo rql --env Pendulum-v1 -n 110 --seed 1 --device cpu --eval-freq -1 -params".split()
    ended = subprocess.run(
        [sys.executable, *command, "policy_kwargs:dict(net_arch=[8])", "learning_starts:100"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])},
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "logs/rql/Pendulum-v1_1/Pendulum-v1.zip").is_file()
    saved = yaml.unsafe_load((tmp_path / "logs/rql/Pendulum-v1_1/Pendulum-v1/config.yml").read_text())
    assert dict(saved)["n_critics"] == 2  # of the configuration that comes with the package


def test_help(capsys):
    zoo()
    assert "record_video" in capsys.readouterr().out
