"""Sweeps on this machine: runs, rows, a sweep that was killed; and several processes on one study."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml
from zoo_commands import mistake, zoo

from sb3_flow.zoo import register
from sb3_flow.zoo.bench import runner
from sb3_flow.zoo.bench.pictures import draw_profile
from sb3_flow.zoo.bench.results import COLUMNS, comparable_scores, read_rows, table
from sb3_flow.zoo.bench.runner import run_folder
from sb3_flow.zoo.sweep import zoo_run

SMALL = ["-n", 64, "--eval-freq", 32, "--eval-episodes", 1]
OWN = """
import os, time
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

class Held(CartPoleEnv):
    def reset(self, *, seed=None, options=None):
        while seed == 1 and os.path.exists(os.environ["HOLD"]):
            time.sleep(0.05)
        return super().reset(seed=seed, options=options)

gym.register("Held-v1", Held, max_episode_steps=20)
"""


@pytest.fixture
def command():
    """The module of the command, which imports rl-zoo3: within tests, see test_zoo."""
    register()
    return importlib.import_module("sb3_flow.zoo.sweep.sweep_command")


@pytest.fixture
def runs(command):
    """The runs of a command."""

    def of(*words):
        words = list(map(str, words))
        split = words.index("--") if "--" in words else len(words)
        return command.sweep_runs(command._parser().parse_args(words[:split]), words[split + 1 :])

    return of


def test_runs_of_a_command(tmp_path, runs):
    found = runs(
        *("--algo", "flow_ppo", "ppo", "--env", "CartPole-v1", "Acrobot-v1", "--seeds", 2, "--eval-freq", 800),
        *("--grid", "gamma=0.9,1e-1", "policy_kwargs=dict(ortho_init=False)", "-n", 900),
        *("--", "-params", "gamma:0.5", "n_steps:16", "--device", "cpu"),
    )
    assert len(found) == 2 * 2 * 2 * 2
    assert [(run.seed, run.task, run.algo) for run in found[::2]] == [
        (seed, env, algo) for seed in (0, 1) for env in ("CartPole-v1", "Acrobot-v1") for algo in ("flow_ppo", "ppo")
    ]
    first, second = found[:2]
    assert first.algorithm == "flow_ppo gamma=0.9 policy_kwargs=dict(ortho_init=False)"
    assert first.command(tmp_path) == [
        *("--algo", "flow_ppo", "--env", "CartPole-v1", "--seed", "0", "-f", str(tmp_path)),
        *("--eval-freq", "800", "--eval-episodes", "5", "--device", "cpu", "-n", "900"),
        *("-params", "gamma:0.9", "n_steps:16", "policy_kwargs:'dict(ortho_init=False)'"),
    ]
    assert second.hyperparams["gamma"] == 0.1 and second.hyperparams["n_steps"] == 16
    assert second.hyperparams["n_envs"] == 8 and second.eval_every == 100  # of the zoo's configuration
    assert "gamma" in first.decided and first.decided != second.decided
    assert run_folder(tmp_path, runs("--algo", "ppo", "--env", "CartPole-v1", "--seeds", 1)[0]) == (
        tmp_path / "runs" / "CartPole-v1" / "ppo" / "0"
    )


def test_seeds(command):
    assert command.seeds_of([3]) == [0, 1, 2]
    assert command.seeds_of([3, 7, 0]) == [3, 7, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--algo", "flow_ppo", "pop"], "--algo pop: unknown; choose from"),
        (["--algo", "ppo", "ppo"], "--algo ppo ppo: one is given twice"),
        (["--env", "CartPol-v1"], "--env CartPol-v1: no such environment; did you mean CartPole-v1?"),
        (["--env", "CartPole-v1", "CartPole-v1"], "--env CartPole-v1 CartPole-v1: one is given twice"),
        (["--seeds", "0"], "--seeds 0: one number says how many seeds there are, which is 1 or more"),
        (["--seeds", "1", "1"], "--seeds 1 1: one is given twice"),
        (["--seeds", "1", "-1"], "--seeds 1 -1: seeds are 0 or more"),
        (["--grid", "gamma"], "--grid gamma: give a name and its values"),
        (["--grid", "gamma=1,1"], "gamma or one of its values is given twice"),
        (["--grid", "gama=1,2"], "PPO has no argument `gama`: did you mean `gamma`?"),
        (["--eval-freq", "0"], "`--eval-freq` must be at least 1"),
        (["-n", "0"], "`--n-timesteps` must be at least 1"),
        (["-n", "100"], "--eval-freq 25000: flow_ppo on CartPole-v1 ends before its first evaluation, after 100 steps"),
        (["--workers", "0"], "`--workers` must be at least 1"),
        (["--workers", "2", "--ray-address", "auto"], "--workers and --ray-address exclude each other"),
        (["--gpus-per-run", "0.5"], "--gpus-per-run needs --ray-address"),
        (["--ray-address", "auto", "--gpus-per-run", "-1"], "--gpus-per-run -1.0: give a number of GPUs"),
        (["--", "--seed", "3"], "--seed after --: the sweep gives it to each run"),
        (["--", "-i", "model.zip"], "-i after --: a sweep trains each run from its beginning"),
        (["--", "--conf-file", "nowhere.yml"], "nowhere.yml"),
        (["--", "--gym-packages", "nowhere"], "No module named 'nowhere'"),
    ],
)
def test_mistakes_in_the_command(tmp_path, arguments, message):
    command = ["--algo", "flow_ppo", "--env", "CartPole-v1", "--seeds", "1", "--out", tmp_path]
    assert message in mistake("sweep", *command, *arguments)
    assert not any(tmp_path.iterdir())


def test_without_ray(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    command = ["--algo", "flow_ppo", "--env", "CartPole-v1", "--seeds", 1, "--out", tmp_path, "--ray-address", "auto"]
    assert "--ray-address needs the package ray: pip install 'sb3-flow[ray]'" in mistake("sweep", *command)


def test_a_run_that_fails(tmp_path, runs):
    (plan,) = runs("--algo", "flow_ppo", "--env", "CartPole-v1", "--seeds", 1, "--", "--no-such-flag")
    folder = tmp_path / "run"
    with pytest.raises(RuntimeError, match=r"training ended with .*unrecognized arguments: --no-such-flag .*train.log"):
        zoo_run.run_zoo(plan, folder)
    (plan,) = runs("--algo", "flow_ppo", "--env", "CartPole-v1", "--seeds", 1, "--", "-params", "n_steps:0")
    with pytest.raises(RuntimeError, match=r"training ended with .*n_steps"):
        zoo_run.run_zoo(plan, folder)


def test_row_of_a_run_with_an_offline_phase(tmp_path, runs):
    """Steps of the online phase are counted on from the offline phase, and a score is the success where it is known."""
    arguments = ["--algo", "rql", "--env", "Pendulum-v1", "--seeds", 1, "-n", 40, "--eval-freq", 20]
    (plan,) = runs(*arguments, "--", "-params", "offline_steps:50")
    folder = tmp_path / "rql" / "Pendulum-v1_1"
    folder.mkdir(parents=True)
    results = {"timesteps": [20, 40, 10, 30], "results": [[1.0, 3.0], [2.0, 4.0], [5.0, 5.0], [7.0, 8.0]]}
    np.savez(folder / "evaluations.npz", **results)
    row = zoo_run.row_of(plan, tmp_path, 1.0)
    assert tuple(row) == COLUMNS and (row["offline"], row["online"]) == (3.0, 7.5)
    assert (row["steps"], row["scores"]) == ("20 40 60 80", "2 3 5 7.5")
    np.savez(folder / "evaluations.npz", **results, successes=[[0, 0], [0, 1], [1, 1], [1, 0]])
    assert zoo_run.row_of(plan, tmp_path, 1.0)["scores"] == "0 0.5 1 0.5"


def rows_of(scores):
    """:param scores: by task and algorithm, of each seed"""
    return [
        {
            **dict.fromkeys(COLUMNS, ""),
            **{"task": task, "algorithm": algorithm, "seed": str(seed), "online": str(score), "steps": "10"},
            **{"scores": str(score), "plan": json.dumps({"offline": False, "offline_steps": 0})},
        }
        for task, by_algorithm in scores.items()
        for algorithm, values in by_algorithm.items()
        for seed, score in enumerate(values)
    ]


def test_returns_of_several_tasks_are_put_on_a_scale(tmp_path):
    rows = rows_of({"A": {"one": [-500.0, -100.0], "two": [-200.0, -300.0]}, "B": {"one": [10.0, 10.0], "two": [10.0, 10.0]}})
    assert comparable_scores(rows, "online") == {
        "one": {"A": {0: 0.0, 1: 1.0}, "B": {0: 0.5, 1: 0.5}},
        "two": {"A": {0: 0.75, 1: 0.5}, "B": {0: 0.5, 1: 0.5}},
    }
    head, names, _, first, _ = table(rows).splitlines()
    assert head.endswith(
        "score at the end (a number in brackets: seeds); all tasks: 0 is the worst and 1 the best run of a task"
    )
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (names, first)]
    assert cells[0] == ["", "A", "B", "all tasks"]
    assert cells[1][:3] == ["one", "-300.00 (2)", "10.00 (2)"] and cells[1][3].startswith("0.50 [")
    axis = draw_profile(rows, tmp_path / "profile.png", "online").axes[0]
    assert axis.get_title() == "end of training, 2 tasks" and axis.lines[0].get_xdata()[[0, -1]].tolist() == [0.0, 1.0]
    one = [row for row in rows if row["task"] == "A"]
    assert comparable_scores(one, "online")["one"] == {"A": {0: -500.0, 1: -100.0}}
    assert draw_profile(one, tmp_path / "profile.png", "online").axes[0].lines[0].get_xdata()[[0, -1]].tolist() == [-500, -100]


@pytest.fixture
def own_environment(tmp_path, monkeypatch):
    """An environment whose seed 1 waits while a file is there; the flags of `train` that know it."""
    (tmp_path / "held_environment.py").write_text(OWN)
    conf = tmp_path / "own.yml"
    conf.write_text(yaml.safe_dump({"Held-v1": {"n_timesteps": 1e4, "policy": "MlpPolicy", "n_steps": 32, "batch_size": 32}}))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.getcwd()]))
    monkeypatch.setenv("HOLD", str(tmp_path / "hold"))
    return ["--conf-file", conf, "--gym-packages", "held_environment", "--device", "cpu"]


def test_a_sweep_that_was_killed_makes_what_is_missing(tmp_path, own_environment, capsys):
    out, hold = tmp_path / "out", tmp_path / "hold"
    command = ["sweep", "--algo", "flow_ppo", "--env", "Held-v1", "--seeds", 2, "--out", out, "--workers", 2, *SMALL]
    command += ["--", *own_environment]
    log = out / "runs" / "Held-v1" / "flow_ppo" / "1" / zoo_run.LOG
    hold.touch()
    started(command, lambda: len(read_rows(out / "results.csv")) == 1 and log.exists(), signal.SIGKILL)
    first = (out / "results.csv").read_text()
    assert [row["seed"] for row in read_rows(out / "results.csv")] == ["0"]
    log.unlink()
    code, printed = started(command, log.exists, signal.SIGTERM)
    assert code == 130 and "2 runs, 1 of them finished" in printed and "stopped; the same command goes on" in printed
    assert (out / "results.csv").read_text() == first
    hold.unlink()
    zoo(*command)
    printed = capsys.readouterr().out
    assert "2 runs, 1 of them finished" in printed and "1/1 Held-v1 flow_ppo seed 1: score" in printed
    rows = read_rows(out / "results.csv")
    assert [row["seed"] for row in rows] == ["0", "1"] and first in (out / "results.csv").read_text()
    assert {path.name for path in out.iterdir()} == {"runs", "results.csv", "table.md", "curves.png", "profile_online.png"}
    assert (out / "table.md").read_text() == table(rows) + "\n"

    # a run is what `train` makes
    zoo("train", "--algo", "flow_ppo", "--env", "Held-v1", "--seed", 1, "-f", tmp_path / "logs", *SMALL, *own_environment)
    with np.load(tmp_path / "logs" / "flow_ppo" / "Held-v1_1" / "evaluations.npz") as alone:
        assert rows[1]["steps"].split() == [str(step) for step in alone["timesteps"]] == ["32", "64"]
        assert [float(score) for score in rows[1]["scores"].split()] == alone["results"].mean(axis=1).tolist()
    assert (log.parent / "flow_ppo" / "Held-v1_1" / "Held-v1.zip").is_file()

    capsys.readouterr()
    zoo(*command)  # nothing is left to do
    assert "2 runs, 2 of them finished" in capsys.readouterr().out
    command[command.index("-n") + 1] = 96
    assert "a row of flow_ppo on Held-v1, seed 0, which was made with other settings" in mistake(*command)


def started(command, ready, end):
    """Start a command in a process, send a signal when it is ready, and wait until no process is left; give what it said."""
    program = [sys.executable, "-m", "sb3_flow.zoo", *map(str, command)]
    deadline = time.monotonic() + 300
    with subprocess.Popen(
        program, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        while not ready():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        if end == signal.SIGKILL:
            os.killpg(process.pid, end)
        else:
            process.send_signal(end)
        printed, _ = process.communicate()
    while True:
        assert time.monotonic() < deadline
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return process.returncode, printed
        time.sleep(0.05)


def test_a_place(command):
    parser = command._parser()
    given = ["--algo", "ppo", "--env", "CartPole-v1", "--seeds", "1"]
    found = runner.place_of(parser.parse_args([*given, "--ray-address", "auto", "--gpus-per-run", "0.25"]), True)
    assert found == runner.Place(1, True, "auto", 1, 0.25)
    assert runner.place_of(parser.parse_args([*given, "--workers", "3", "--cpus-per-run", "2"])) == runner.Place(3, cpus=2)


def test_two_processes_share_a_study(tmp_path):
    from optuna import load_study
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    storage = str(tmp_path / "study.log")
    # no update is made, so that every trial is cheap
    small = ["-params", "learning_starts:100", "-n", 20, "--eval-episodes", 1, "--env-kwargs", "max_episode_steps:10"]
    command = ["optimize", "--algo", "fql", "--env", "Pendulum-v1", "--storage", storage, "--study-name", "s", *small]
    command += ["--sampler", "random", "--pruner", "none", "--no-optim-plots", "--device", "cpu", "-f", tmp_path]
    program = [sys.executable, "-m", "sb3_flow.zoo", *map(str, command), "--n-trials", "3"]
    both = [subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    for process in both:
        printed, _ = process.communicate()
        assert process.returncode == 0, printed

    def trials():
        return load_study(study_name="s", storage=JournalStorage(JournalFileBackend(storage))).get_trials()

    found = trials()
    assert [trial.number for trial in found] == list(range(6)) and all(trial.state.name == "COMPLETE" for trial in found)
    assert len({trial.params["learning_rate"] for trial in found}) == 6, "none twice"
    for _ in range(2):  # the second time nothing is left to do
        zoo(*command, "--max-total-trials", 7)
        assert len(trials()) == 7


def test_tables_that_another_process_makes_meanwhile(tmp_path, monkeypatch):
    import optuna
    from sqlalchemy.exc import IntegrityError, OperationalError

    from sb3_flow.zoo.manager import _make_tables

    make = optuna.storages.get_storage
    errors = [OperationalError("CREATE TABLE studies", {}, Exception()), IntegrityError("INSERT", {}, Exception())]

    def beside_another(url):
        if errors:
            raise errors.pop()
        return make(url)

    monkeypatch.setattr(optuna.storages, "get_storage", beside_another)
    _make_tables(f"sqlite:///{tmp_path}/study.db")
    optuna.create_study(storage=f"sqlite:///{tmp_path}/study.db")
    with pytest.raises(OperationalError, match="unable to open database file"):
        _make_tables(f"sqlite:///{tmp_path}/nowhere/study.db", tries=2)
