"""The bench: suites, runs that go on after a kill, results, table and pictures."""

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import yaml
from gymnasium import spaces

from sb3_flow import OfflineDataset
from sb3_flow.common.statistics import interquartile_mean
from sb3_flow.zoo import ALGORITHMS
from sb3_flow.zoo.bench import command, process_runs, runner, suites, training
from sb3_flow.zoo.bench.pictures import draw_curves, draw_profile
from sb3_flow.zoo.bench.results import COLUMNS, add_row, read_rows, table, unfinished
from sb3_flow.zoo.bench.suites import SUITES, load_suite, plans
from tests.benchmarks import bench_pages
from tests.zoo_commands import mistake, zoo

SMALL = {"learning_starts": 5, "batch_size": 16, "policy_kwargs": {"net_arch": [8], "n_critics": 2}}
ENV_ID = "ShortPendulum-v1"

if ENV_ID not in gym.registry:
    gym.register(ENV_ID, "gymnasium.envs.classic_control.pendulum:PendulumEnv", max_episode_steps=10)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pendulum's spaces and random numbers."""
    rng, n = np.random.default_rng(0), 60
    dataset = OfflineDataset.from_arrays(
        rng.normal(size=(n, 3)).astype(np.float32),
        rng.uniform(-2, 2, (n, 1)).astype(np.float32),
        rng.normal(size=n),
        np.zeros(n, bool),
        np.arange(n) % 20 == 19,
        action_space=spaces.Box(-2, 2, (1,)),
    )
    folder = tmp_path_factory.mktemp("data") / "pendulum"
    dataset.save(folder)
    return f"npz:{folder}"


@pytest.fixture
def suite(tmp_path, data):
    """The path of a suite of one task and two algorithms."""

    def write(**changes):
        content = {
            "offline_steps": 6,
            "online_steps": 60,
            "eval_freq": 30,
            "n_eval_episodes": 1,
            "n_final_episodes": 2,
            "settings": SMALL,
            "tasks": {ENV_ID: {"dataset": data}},
            "algorithms": {"bc": {"algo": "rql", "settings": {"objective": "bc"}}, "fql": {"algo": "fql"}},
        }
        path = tmp_path / "small.yml"
        path.write_text(yaml.safe_dump({**content, **changes}))
        return path

    return write


def without_times(rows):
    return sorted(tuple((name, row[name]) for name in COLUMNS if name != "minutes") for row in rows)


@pytest.mark.parametrize("offline", [True, False], ids=["offline", "online-only"])
def test_a_run_that_was_stopped_gives_the_same_row(tmp_path, suite, data, monkeypatch, offline):
    path = suite(offline_steps=40, eval_freq=20, algorithms={"fql": {"algo": "fql", "offline": offline}})
    (plan,) = plans(load_suite(path), seeds=[3])
    whole = training.run(plan, tmp_path / "whole", data)
    save, saves = training._save, []

    def stopped(*arguments):
        saves.append(save(*arguments))
        if len(saves) in (1, 3, 4):
            raise KeyboardInterrupt
        return saves[-1]

    monkeypatch.setattr(training, "_save", stopped)
    row = None
    while row is None:
        try:
            row = training.run(plan, tmp_path / "stopped", data)
        except KeyboardInterrupt:
            pass
    assert len(saves) == (5 if offline else 3)
    assert without_times([row]) == without_times([whole])
    assert len(set(whole["scores"].split())) > 1
    assert (whole["offline"] == "") == (not offline)
    ends = {f"checkpoint-{steps}" for steps in ((40, 40 + plan.online_steps) if offline else (plan.online_steps,))}
    assert {path.name for path in (tmp_path / "stopped").iterdir()} == ends
    assert not list(tmp_path.glob("stopped/*/replay_buffer.pkl"))  # of no use to a finished run
    with pytest.raises(ValueError, match=r"checkpoint-.* was made with other settings .*\"n_final_episodes\": 2.* now"):
        training.run(dataclasses.replace(plan, n_final_episodes=3), tmp_path / "stopped", data)


def test_the_command(tmp_path, suite, capsys, monkeypatch):
    out = tmp_path / "out"
    arguments = ["bench", "--suite", suite(), "--out", out, "--seeds", 0, 1]
    zoo(*arguments)
    printed = capsys.readouterr().out
    rows = read_rows(out / "results.csv")
    assert [(row["algorithm"], row["seed"]) for row in rows] == [("bc", "0"), ("fql", "0"), ("bc", "1"), ("fql", "1")]
    assert table(rows) in printed and (out / "table.md").read_text() == table(rows) + "\n"
    for name in ("curves", "profile_offline", "profile_online"):
        assert (out / f"{name}.png").stat().st_size > 1_000

    monkeypatch.setattr(command, "run", None)  # nothing is left to do
    zoo(*arguments)
    assert "4 runs, 4 of them finished" in capsys.readouterr().out
    assert "made with other settings" in mistake("bench", "--suite", suite(eval_freq=20), "--out", out)


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, suite, capsys):
    path = suite(algorithms={"bad": {"algo": "fql", "settings": {"alpha": -1.0}}, "fql": {"algo": "fql"}})
    arguments = ["bench", "--suite", path, "--out", tmp_path / "out", "--seeds", 0]
    assert mistake(*arguments) == "error: 1 runs failed; the same command tries them again"
    assert "alpha" in capsys.readouterr().err
    assert [row["algorithm"] for row in read_rows(tmp_path / "out" / "results.csv")] == ["fql"]


def test_a_row_that_cannot_be_written_is_reported(tmp_path, suite, capsys, monkeypatch):
    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(runner, "add_row", full)
    path = suite(algorithms={"fql": {"algo": "fql"}})
    assert "1 runs failed" in mistake("bench", "--suite", path, "--out", tmp_path / "out", "--seeds", 0)
    assert "disk full" in capsys.readouterr().err


def test_a_worker_that_was_killed_ends_the_command(monkeypatch):
    broken = Future()
    broken.set_exception(BrokenProcessPool())
    monkeypatch.setattr(process_runs, "ProcessPoolExecutor", lambda *_, **__: SimpleNamespace(submit=lambda *_: broken))
    for devices, fewer in (((), "fewer --workers"), (("0", "1"), "a smaller --per-device")):
        with pytest.raises(SystemExit, match=f"a worker was killed, perhaps for want of memory: give {fewer}"):
            next(runner.rows(None, [(None, None, "")], None, runner.Place(workers=2, devices=devices)))


def test_a_killed_bench_goes_on_and_leaves_no_process(tmp_path, suite, data):
    out = tmp_path / "out"
    # a process of its own does not know the short environment
    path = suite(online_steps=3_000, eval_freq=50, n_final_episodes=1, tasks={"Pendulum-v1": {"dataset": data}})
    arguments = ["bench", "--suite", path, "--out", out, "--seeds", 0, "--workers", 2]
    program = [sys.executable, "-m", "sb3_flow.zoo", *map(str, arguments)]
    with subprocess.Popen(program, start_new_session=True, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while len(list(out.glob("runs/*/*/*/checkpoint-*"))) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        while _processes_of(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert not (out / "results.csv").exists()
    for folder in {checkpoint.parent for checkpoint in out.glob("runs/*/*/*/checkpoint-*")}:
        (plan,) = plans(load_suite(path), algorithms=[folder.parent.name], seeds=[0])
        _, progress, _ = training._begin(plan, folder, OfflineDataset.load(plan.dataset))  # the rest would take long
        # the end of the offline phase stays beside the last checkpoint
        assert progress.steps[-1] == max(int(found.name.split("-")[1]) for found in folder.glob("checkpoint-*"))


def _processes_of(group):
    """:return: whether a process of the group lives"""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_data_are_made_once_for_each_number_of_episodes(tmp_path, suite, monkeypatch):
    made = []

    def generate(name, episodes, out, **_):
        made.append((name, episodes))
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.npz").touch()

    monkeypatch.setattr(command, "generate", generate)
    task = "cube-single-play-singletask-task1-v0"
    locations = []
    for episodes in (3, 3, 5, None):
        (plan,) = plans(load_suite(suite(tasks={task: {"episodes": episodes}})), algorithms=["bc"], seeds=[0])
        locations.append(command.locate_data(plan, tmp_path))
    assert made == [("cube-single-play-v0", 3), ("cube-single-play-v0", 5)]
    file = tmp_path / "3_episodes" / "cube-single-play-v0.npz"
    assert locations[0] == locations[1] == f"ogbench:{task}@{file}"
    assert locations[2] != locations[0] and locations[3] == f"ogbench:{task}"  # published data, in OGBench's folder


def test_two_benches_in_one_folder(tmp_path):
    """Rows that another process added meanwhile stay, also those that it adds at the same time."""
    file = tmp_path / "results.csv"
    row = {**dict.fromkeys(COLUMNS, ""), "task": "t", "algorithm": "a", "seed": 0, "plan": "{}"}
    with ThreadPoolExecutor(4) as benches:  # a lock of a file keeps threads apart as it does processes
        list(benches.map(lambda seed: add_row(tmp_path / "many.csv", {**row, "seed": seed}), range(40)))
    assert sorted(int(found["seed"]) for found in read_rows(tmp_path / "many.csv")) == list(range(40))
    add_row(file, row)
    add_row(file, {**row, "seed": 1})
    add_row(file, {**row, "seed": 1, "online": 0.5})
    assert [(found["seed"], found["online"]) for found in read_rows(file)] == [("0", ""), ("1", "0.5")]
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no result of the bench"):
        read_rows(tmp_path / "other.csv")


@pytest.mark.parametrize("name", sorted(path.stem for path in SUITES.glob("*.yml")))
def test_suites_of_the_package(name, monkeypatch):
    suite = load_suite(name)
    for plan in plans(suite, seeds=[0]):
        monkeypatch.setattr(ALGORITHMS[plan.algo], "_setup_model", lambda self: None)
        ALGORITHMS[plan.algo]("MlpPolicy", "Pendulum-v1", seed=plan.seed, **plan.settings)
    if name == "cpu":
        assert len(suite.tasks) >= 6
        every = [{**plan.settings, "alone": None} for plan in plans(suite, seeds=[0])]
        assert len({json.dumps(settings["policy_kwargs"]) for settings in every}) == 1  # the same networks for all


def test_settings_of_a_plan(suite):
    path = suite(
        settings={"gamma": 0.9, "tau": 0.1, "alpha": 1.0, "n_critics": 3},
        tasks={"Pendulum-v1": {"dataset": "npz:x", "settings": {"tau": 0.2, "alpha": 2.0, "n_critics": 4}}},
        algorithms={
            "fql": {"algo": "fql", "settings": {"alpha": 3.0, "n_critics": 5}, "tasks": {"Pendulum-v1": {"n_critics": 6}}}
        },
    )
    found = plans(load_suite(path), seeds=[0, 1], variants=[{}, {"alpha": 7}])
    assert [(plan.algorithm, plan.seed) for plan in found] == [("fql", 0), ("fql alpha=7", 0), ("fql", 1), ("fql alpha=7", 1)]
    assert found[0].settings == {"gamma": 0.9, "tau": 0.2, "alpha": 3.0, "n_critics": 6}
    assert found[1].settings["alpha"] == 7
    assert list(suites.variants(["alpha=1,1e-3", "actor_type=best_of_n", "net_arch=[8, 8]"])) == [
        {"alpha": 1, "actor_type": "best_of_n", "net_arch": [8, 8]},
        {"alpha": 1e-3, "actor_type": "best_of_n", "net_arch": [8, 8]},
    ]


def test_whole_numbers_of_a_suite_may_be_written_as_floats(suite):
    found = load_suite(suite(offline_steps=6.0, eval_freq=3e1))
    assert [(type(value), value) for value in (found.offline_steps, found.eval_freq)] == [(int, 6), (int, 30)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offline_step": 3}, "offline_step is unknown"),
        ({"offline_steps": -1}, "offline_steps"),
        ({"algorithms": {"x": {"algo": "flow_ppo"}}}, "learns from no data"),
        ({"algorithms": {"x": {"algo": "fql", "alpha": 1.0}}}, "alpha is unknown"),
        ({"algorithms": {"x": {}}}, "algo is missing"),
        ({"offline_steps": 2.5}, "`offline_steps` must be a whole number, but 2.5"),
        ({"n_final_episodes": 0}, "`n_final_episodes` must be at least 1"),
        ({"normalize": "no"}, "`normalize` must be true or false, but 'no'"),
        ({"settings": None}, "`settings` must be a mapping of arguments, but None"),
        ({"tasks": {}}, "must not be empty"),
        ({"tasks": {ENV_ID: {"episodes": 1.5}}}, f"tasks: {ENV_ID}: `episodes` must be a whole number, but 1.5"),
        ({"algorithms": {"x": {"algo": "fql", "tasks": {"Pendulm-v1": {}}}}}, "x: tasks: Pendulm-v1: not in the suite"),
        ({"algorithms": {"x": {"algo": "fql", "tasks": {ENV_ID: None}}}}, "`tasks` must be a mapping of arguments"),
        ({"algorithms": {"x": {"algo": "fql", "settings": {"alfa": 1.0}}}}, f"x on {ENV_ID}: FQL has no argument alfa"),
    ],
)
def test_mistakes_in_a_suite(suite, tmp_path, changes, message):
    assert message in mistake("bench", "--suite", suite(**changes), "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "gpu"], "there is no such suite"),
        (["--algos", "sac"], "--algos sac: not in the suite"),
        (["--tasks", "CartPole-v1"], "--tasks CartPole-v1: not in the suite"),
        (["--grid", "alpha"], "--grid alpha"),
        (["--grid", "alpha=[1"], "--grid alpha=[1: the values are no YAML"),
        (["--grid", "alpha=1,2", "alpha=3"], "alpha or one of its values is given twice"),
        (["--grid", "alpha=1,1"], "alpha or one of its values is given twice"),
        (["--seeds", "0", "0"], "--seeds 0 0: one is given twice"),
        (["--algos", "rql", "rql"], "--algos rql rql: one is given twice"),
        (["--dataset", "npz:x"], "belong together"),
        (["--workers", "0"], "--workers"),
    ],
)
def test_mistakes_in_the_command(tmp_path, arguments, message):
    assert message in mistake("bench", *arguments, "--out", tmp_path)


def rows_of(scores):
    """:param scores: by algorithm and task, offline and online of each seed"""
    plan = json.dumps({"offline": True, "offline_steps": 10})
    return [
        {
            **dict.fromkeys(COLUMNS, ""),
            **{"task": task, "algorithm": algorithm, "seed": str(seed), "plan": plan},
            **{"offline": str(offline), "online": str(online), "steps": "10 20", "scores": f"{offline} {online}"},
        }
        for algorithm, by_task in scores.items()
        for task, ends in by_task.items()
        for seed, (offline, online) in enumerate(ends)
    ]


SCORES = {
    "a": {"t1": [(0.0, 0.5), (0.2, 0.7), (0.4, 0.6)], "t2": [(0.1, 1.0), (0.3, 1.0), (0.8, 1.0)]},
    "b": {"t1": [(1.0, 1.0)]},
}


def test_table():
    lines = table(rows_of(SCORES)).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    assert cells[0] == ["", "t1", "t2", "all tasks, offline", "all tasks, online"]
    assert cells[2][:3] == ["a", "0.20 -> 0.60 (3)", "0.40 -> 1.00 (3)"]
    middle = interquartile_mean([0.0, 0.2, 0.4, 0.1, 0.3, 0.8])
    assert cells[2][3].startswith(f"{middle:.2f} [")
    assert cells[3] == ["b", "1.00 -> 1.00 (1)", "", "-", "-"]
    (*_, line) = table(rows_of({"c": {"t1": [(0.0, 0.5)], "t2": [(0.5, 1.0)]}})).splitlines()
    assert line.split("|")[-3:-1] == [" 0.25               ", " 0.75              "], "one seed has no interval"


def test_pictures(tmp_path):
    rows = rows_of(SCORES)
    figure = draw_curves(rows, tmp_path / "curves.png")
    first = figure.axes[0]
    assert [line.get_label() for line in first.lines[:2]] == ["a", "b"]
    np.testing.assert_allclose(first.lines[0].get_data(), [[10, 20], [0.2, 0.6]])
    figure = draw_profile(rows, tmp_path / "profile.png", "offline")
    (line,) = figure.axes[0].lines  # b lacks a task
    thresholds, above = line.get_data()
    np.testing.assert_allclose(above[np.isclose(thresholds, 0.25)], 3 / 6)


def test_unfinished_runs(suite):
    todo = plans(load_suite(suite()), seeds=[0, 1])
    row = {"task": todo[0].task, "algorithm": todo[0].algorithm, "seed": "0", "plan": todo[0].decided}
    assert unfinished(todo, [row]) == todo[1:]


def test_results_in_the_repository():
    """Every row of results that are committed can be read, and has the suite's plan."""
    for file in sorted(SUITES.glob("*.csv")):
        rows = read_rows(file)
        assert rows and len({(row["task"], row["algorithm"], row["seed"]) for row in rows}) == len(rows)
        todo = plans(load_suite(file.stem), seeds=sorted({int(row["seed"]) for row in rows}))
        assert len(todo) - len(unfinished(todo, rows)) == len(rows)
        with open(file, newline="") as lines:
            assert next(csv.reader(lines)) == list(COLUMNS)


def test_the_manual_shows_the_rows():
    rows = read_rows(SUITES / "cpu.csv")
    for page, text in bench_pages.texts(rows).items():
        assert (bench_pages.DOCS / page).read_text() == text, "write it anew with `python -m tests.benchmarks.bench_pages`"
    for picture in bench_pages.pictures():
        assert bench_pages.digest(rows).encode() in picture.read_bytes(), f"{picture} was made of other rows"


def test_scores_of_an_algorithm_beside_the_others():
    rows = [
        {"task": "a", "algorithm": "rql", "offline": "0.25", "online": "1.0", "seed": "0"},
        {"task": "a", "algorithm": "rql", "offline": "0.75", "online": "1.0", "seed": "1"},
        {"task": "a", "algorithm": "rlpd", "offline": "", "online": "0.5", "seed": "0"},
        {"task": "a", "algorithm": "bc", "offline": "0.1", "online": "0.25", "seed": "0"},
        {"task": "b", "algorithm": "bc", "offline": "0.1", "online": "0.2", "seed": "0"},
    ]
    *_, first, second = bench_pages.scores(rows, ["rql", "rlpd"]).split("\n")
    assert first == "| a | 0.50 -> 1.00 | - -> 0.50 | 0.10 -> 0.25 |"
    assert second == "| b | | | 0.10 -> 0.20 |"
    *_, first, _ = bench_pages.scores(rows, ["rql"]).split("\n")
    assert first == "| a | 0.50 -> 1.00 | 0.10 -> 0.25 to 0.50 |"
