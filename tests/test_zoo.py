"""
The commands of ``python -m sb3_flow.zoo``: each does what its rl-zoo3 namesake does, with our algorithms. rl-zoo3 exchanges
Gymnasium's TimeLimit when it is imported: within tests, which come last.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch as th
import yaml
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv
from tasks import PointEnv
from zoo_commands import ALGOS, MAZE, SMALL, TAXI, environment, python, train, zoo

from sb3_flow import GRPO, RLPD, RQL, HerReplayBuffer, PrioritizedReplayBuffer
from sb3_flow.data.generate import generate
from sb3_flow.zoo import ALGORITHMS, config_file


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
    # the class's name, but for those that the zoo has already
    name = algo if algo in ("flow_ppo", "recurrent_ppo") else ALGORITHMS[algo].__name__
    assert list((logs(algo) / "tensorboard" / env_id / f"{name}_1").glob("events.*"))
    model = ALGORITHMS[algo].load(folder / f"{env_id}.zip")
    assert type(model) is ALGORITHMS[algo] and model.num_timesteps >= 200 and model._n_updates > 0


def test_a_replay_buffer_by_its_name(tmp_path):
    given = ["-params", "replay_buffer_class:'PrioritizedReplayBuffer'", "replay_buffer_kwargs:dict(alpha=0.3)"]
    train("rlpd", tmp_path, *given, *SMALL["rlpd"][1:], "--save-replay-buffer")
    folder = run_folder(tmp_path, "rlpd")
    model = ALGORITHMS["rlpd"].load(folder / "Pendulum-v1.zip", env=DummyVecEnv([lambda: gym.make("Pendulum-v1")]))
    model.load_replay_buffer(folder / "replay_buffer.pkl")
    assert type(model.replay_buffer) is PrioritizedReplayBuffer and model.replay_buffer.alpha == 0.3


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


def test_record_video_of_an_environment_of_ones_own(logs, tmp_path, monkeypatch):
    (tmp_path / "own_environments.py").write_text(
        "import gymnasium as gym\n"
        "gym.register('OwnCartPole-v0', 'gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=50)"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = tmp_path / "flow_ppo" / "OwnCartPole-v0_1"
    shutil.copytree(run_folder(logs("flow_ppo"), "flow_ppo"), run)
    (run / "CartPole-v1.zip").rename(run / "OwnCartPole-v0.zip")
    (run / "CartPole-v1").rename(run / "OwnCartPole-v0")
    command = ["--algo", "flow_ppo", "--env", "OwnCartPole-v0", "-f", tmp_path, "-n", 5]
    zoo("record_video", "--gym-packages", "own_environments", *command)
    assert list((run / "videos").glob("*.mp4"))


@pytest.mark.parametrize("algo", ALGOS)
def test_continue(algo, logs, capsys):
    folder, env_id = logs(algo), environment(algo)
    first = run_folder(folder, algo) / f"{env_id}.zip"
    capsys.readouterr()
    train(algo, folder, "-i", first, *SMALL[algo], "--eval-freq", -1)
    printed = capsys.readouterr().out
    assert "Loading pretrained agent" in printed
    attached, skipped = (re.search(rf"^{name}: (.*)$", printed, re.M)[1] for name in ("Attached", "Skipped"))
    assert re.match(r"of the configuration: .*(learning_starts|n_steps)", attached)
    assert skipped.startswith("of the configuration: policy") and skipped.count("which the model brings along") == 1
    assert ("the replay buffer: there is no" in skipped) == (algo in ("rql", "fmq", "fql", "rlpd", "dsrl", "qam"))
    (second,) = {path for path in (folder / algo).glob(f"*/{env_id}.zip")} - {first}
    before, after = (ALGORITHMS[algo].load(path) for path in (first, second))
    assert after._n_updates > before._n_updates
    weights = zip(before.policy.parameters(), after.policy.parameters(), strict=True)
    assert any(not th.equal(one, other) for one, other in weights)


# whose trials are cheap ones
SEEDS = {
    "rql": 242,
    "fmq": 150,
    "fql": 0,
    "rlpd": 0,
    "dsrl": 0,
    "qam": 0,
    "flow_ppo": 44,
    "recurrent_ppo": 44,
    "maskable_ppo": 44,
    "maskable_recurrent_ppo": 44,
    "grpo": 0,
    "gspo": 0,
    "async_ppo": 15,
}


@pytest.mark.parametrize("algo", ALGOS)
def test_optimize(algo, tmp_path, capsys):
    small = (
        [*SMALL[algo][:-1], 120]
        if algo in ("rql", "fmq", "fql", "rlpd", "dsrl", "qam")
        else ["-params", "n_envs:2", *SMALL[algo]]
    )
    small = SMALL[algo] if algo in ("grpo", "gspo") else small
    options = ["--n-trials", 2, "--n-startup-trials", 1, "--n-evaluations", 1, "--eval-episodes", 1, "--sampler", "random"]
    zoo(
        *("optimize", "--algo", algo, "--env", environment(algo), "-f", tmp_path, "--seed", SEEDS[algo], "--device", "cpu"),
        *(*options, "--no-optim-plots", *small),
    )
    (report,) = (tmp_path / algo).glob("report_*.csv")
    rows = report.read_text().splitlines()
    assert len(rows) == 3 and rows[1].endswith("COMPLETE")
    assert not list((tmp_path / algo).glob(f"{environment(algo)}_*")), "no folder that looks like a run"
    assert "Best trial:" in capsys.readouterr().out


@pytest.mark.parametrize("algo", ALGOS)
def test_a_trial_is_rebuilt_from_what_the_study_recorded(algo):
    import optuna

    from sb3_flow.zoo import register

    register()
    from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    env = DummyVecEnv([(lambda: gym.make("CartPole-v1")) if algo.startswith("maskable") else PointEnv] * 2)
    for _ in range(10):
        trial = study.ask()
        sampled = HYPERPARAMS_SAMPLER[algo](trial, 2, 16, {})
        rebuilt = HYPERPARAMS_CONVERTER[algo](trial.params)
        assert rebuilt == sampled
        if issubclass(ALGORITHMS[algo], GRPO):
            assert 16 % sampled["group_size"] == 0
            sampled["group_by"] = "none"  # PointEnv is not wrapped
        policy = "MlpGruPolicy" if algo.endswith("recurrent_ppo") else "MlpPolicy"
        ALGORITHMS[algo](policy, env, device="cpu", **sampled)  # all of it is known and allowed


@pytest.mark.parametrize("algo", ["maskable_ppo", "maskable_recurrent_ppo"])
def test_every_command_shows_masks_to_models_that_take_masks(algo, logs, tmp_path, monkeypatch):
    """Also where rl-zoo3's own loop asks the model for actions."""
    shown, predict = [], ALGORITHMS[algo].predict

    def noting(self, *args, action_masks=None, **kwargs):
        actions, state = predict(self, *args, action_masks=action_masks, **kwargs)
        shown.append(action_masks is not None and action_masks[range(len(actions)), actions].all())
        return actions, state

    monkeypatch.setattr(ALGORITHMS[algo], "predict", noting)
    evaluation = ["--eval-freq", 100, "--eval-episodes", 1]
    viewed = ["--algo", algo, "--env", TAXI, "-f", logs(algo), "-n", 20]
    trial = ["--n-trials", 1, "--n-evaluations", 1, "--eval-episodes", 1, "--sampler", "random", "--no-optim-plots"]
    for command in (
        lambda: train(algo, tmp_path, *SMALL[algo], *evaluation, "--vec-env", "subproc"),
        lambda: zoo("enjoy", *viewed, "--no-render", "--device", "cpu", "--n-envs", 2),
        lambda: zoo("record_video", *viewed, "--no-render"),
        lambda: train(algo, tmp_path, *SMALL[algo], "-optimize", *trial, "--seed", SEEDS[algo]),
    ):
        shown.clear()
        command()
        assert len(shown) >= 20 and all(shown)


def test_models_without_masks_are_evaluated_as_in_the_zoo(monkeypatch):
    import rl_zoo3.exp_manager
    from stable_baselines3.common import callbacks

    from sb3_flow.zoo import register

    register()
    env = DummyVecEnv([lambda: Monitor(gym.make("CartPole-v1"))])
    asked, evaluate = [], callbacks.evaluate_policy
    monkeypatch.setattr(callbacks, "evaluate_policy", lambda *args, **kwargs: (asked.append(1), evaluate(*args, **kwargs))[1])
    callback = rl_zoo3.exp_manager.EvalCallback(env, n_eval_episodes=1, eval_freq=8)
    ALGORITHMS["flow_ppo"]("MlpPolicy", "CartPole-v1", n_steps=16, batch_size=16, device="cpu").learn(16, callback)
    assert len(asked) == 2 and callback.last_mean_reward > 0


def test_plots(logs, tmp_path, monkeypatch, capsys):
    train("flow_ppo", logs("flow_ppo"), "-n", 300, "--eval-freq", -1)
    monkeypatch.chdir(tmp_path)
    from matplotlib import pyplot as plt

    plt.switch_backend("agg")
    zoo("plot", "-a", "flow_ppo", "-e", "CartPole-v1", "-f", logs("flow_ppo"), "-w", 2)
    labels = [text.get_text() for text in plt.gca().get_legend().get_texts()]
    assert "CartPole-v1_1" in labels and len(labels) >= 2
    # one does not replace another
    zoo("plot", "-a", "flow_ppo", "-e", "CartPole-v1", "-f", logs("flow_ppo"), "-w", 2, "-y", "length")
    zoo("plot", "-a", "grpo", "-e", "CartPole-v1", "Pendulum-v1", "-f", logs("grpo"), "-w", 2)
    pictures = [f"plot_train_{name}.png" for name in ("flow_ppo_CartPole-v1_reward", "flow_ppo_CartPole-v1_length")]
    pictures.append("plot_train_grpo_CartPole-v1_Pendulum-v1_reward.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(pictures)
    printed = capsys.readouterr().out
    assert all((tmp_path / name).stat().st_size > 5000 and name in printed for name in pictures)
    if sys.modules.get("rliable", True) is None:
        del sys.modules["rliable"]  # which the command hides if it cannot be imported


# ------------------------------------------------------------------------------------------- data first, then environment


@pytest.fixture(scope="module")
def maze_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return generate("pointmaze-medium-navigate", 3, out=folder, episode_length=50, progress_bar=False)


def test_one_command_does_both_phases(maze_file, tmp_path, capsys):
    dataset = f"offline_dataset:'ogbench:{MAZE}@{maze_file}'"
    small = ["-params", dataset, "offline_steps:40", "policy_kwargs:dict(net_arch=[16,16])", "-n", 60]
    command = ["--algo", "rql", "--env", MAZE, "-f", tmp_path, "--seed", 1, "--device", "cpu", *small, "--env-kwargs"]
    more = ["--eval-freq", 20, "--eval-episodes", 2, "--save-freq", 30, "-tb", tmp_path / "tensorboard"]
    zoo("train", *command, "max_episode_steps:30", *more)
    printed = capsys.readouterr().out
    assert [f"Eval {count}=40, " in printed for count in ("gradient_steps", "num_timesteps")] == [True, True]
    assert printed.count("Dataset's own mean return: ") == 2 and "; they are walks labelled for this task" in printed
    runs = sorted(path.name for path in (tmp_path / "tensorboard" / MAZE).iterdir())
    assert runs == ["RQL_1", "RQL_offline_1"]
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
    capsys.readouterr()
    zoo("train", *command, "max_episode_steps:30", *again, "--save-replay-buffer")
    assert RQL.load(tmp_path / "rql" / f"{MAZE}_2" / f"{MAZE}.zip").offline_updates == 40
    printed = capsys.readouterr().out
    assert f"the VecNormalize statistics {folder / MAZE / 'vecnormalize.pkl'}; the dataset ogbench:" in printed
    assert f"there is no {folder / 'replay_buffer.pkl'}, which --save-replay-buffer writes; the offline phase" in printed
    assert "the offline phase, which is over: 40 gradient steps were made\n" in printed
    # and once more, with all that can be attached
    second = tmp_path / "rql" / f"{MAZE}_2"
    command[command.index("offline_steps:40")] = "offline_steps:45"
    zoo("train", *command, "max_episode_steps:30", "-i", second / f"{MAZE}.zip", "--eval-freq", -1)
    printed = capsys.readouterr().out
    assert f"the replay buffer {second / 'replay_buffer.pkl'}, 60 environment steps; the dataset" in printed
    assert "5 of 45 offline gradient steps, which are still to be made\nSkipped: of the configuration: policy" in printed


def test_trials_with_an_offline_phase_are_evaluated_in_it(maze_file, tmp_path, capsys):
    dataset = f"offline_dataset:'ogbench:{MAZE}@{maze_file}'"
    small = ["-params", dataset, "offline_steps:20", "n_timesteps:0"]
    options = ["--n-trials", 1, "--n-evaluations", 2, "--eval-episodes", 1, "--sampler", "random", "--no-optim-plots"]
    command = ["--algo", "fmq", "--env", MAZE, "-f", tmp_path, "--seed", 3, "--device", "cpu", *small]
    zoo("optimize", *command, *options, "--optimization-log-path", tmp_path, "--env-kwargs", "max_episode_steps:20")
    assert np.load(tmp_path / "trial_0" / "evaluations.npz")["timesteps"].tolist() == [10, 20]


def test_viewing_passes_over_runs_without_a_model(tmp_path, capsys):
    from sb3_flow.zoo.viewing import latest_with_model

    for number, files in ((1, ["Own-v1.zip", "best_model.zip"]), (2, ["rl_model_10_steps.zip"]), (3, ["0.monitor.csv"])):
        folder = tmp_path / "rql" / f"Own-v1_{number}"
        folder.mkdir(parents=True)
        for name in files:
            (folder / name).touch()
    command = ["--algo", "rql", "--env", "Own-v1", "-f", str(tmp_path)]
    assert latest_with_model(command) == latest_with_model([*command, "--load-best"]) == ["--exp-id", "1"]
    assert f"Passing over {tmp_path}/rql/Own-v1_3, which has no best_model.zip" in capsys.readouterr().out
    for checkpoint in (["--load-last-checkpoint"], ["--load-checkpoint", "10"]):
        assert latest_with_model([*command, *checkpoint]) == ["--exp-id", "2"]
    assert latest_with_model([*command, "--load-checkpoint", "20"]) == latest_with_model([*command, "--exp-id", "3"]) == []


def test_hindsight_is_named_as_in_the_zoo(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_goals.py").write_text(
        "import gymnasium\nfrom goal_tasks import Reach\ngymnasium.register('OwnReach-v0', lambda: Reach(length=10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rlpd.yml").write_text("""
OwnReach-v0:
  n_timesteps: 60
  policy: 'MultiInputPolicy'
  normalize: True
  horizon_length: 2
  n_critics: 2
  learning_starts: 30
  buffer_size: 200
  replay_buffer_class: HerReplayBuffer
  replay_buffer_kwargs: "dict(goal_selection_strategy='final', n_sampled_goal=2)"
  policy_kwargs: "dict(net_arch=[8])"
""")
    command = ["--algo", "rlpd", "--env", "OwnReach-v0", "-f", tmp_path, "--device", "cpu", "--gym-packages", "own_goals"]
    training = ["train", *command, "--seed", 1, "-conf", tmp_path / "rlpd.yml", "--save-replay-buffer"]
    zoo(*training)
    run = tmp_path / "rlpd" / "OwnReach-v0_1"
    hyperparams = dict(yaml.unsafe_load((run / "OwnReach-v0" / "config.yml").read_text()))
    assert hyperparams["replay_buffer_class"] == "HerReplayBuffer"  # by this name `enjoy` knows it
    zoo("enjoy", *command, "-n", 20, "--no-render")
    zoo(*training, "-i", run / "OwnReach-v0.zip")
    assert f"the replay buffer {run / 'replay_buffer.pkl'}, 60 environment steps" in capsys.readouterr().out
    model = RLPD.load(tmp_path / "rlpd" / "OwnReach-v0_2" / "OwnReach-v0.zip")
    assert type(model.replay_buffer) is HerReplayBuffer and model.replay_buffer.n_sampled_goal == 2


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
