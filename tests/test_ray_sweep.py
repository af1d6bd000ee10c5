"""Sweeps and benches as tasks of Ray, on a cluster of two nodes."""

import os
from pathlib import Path

import pytest
from ray_cluster import ray_cluster
from zoo_commands import mistake, zoo

from sb3_flow.zoo import register
from sb3_flow.zoo.bench import ray_runs
from sb3_flow.zoo.bench.results import COLUMNS, Run, add_row, read_rows
from sb3_flow.zoo.bench.runner import Place, make, run_folder
from sb3_flow.zoo.sweep.zoo_run import ZooRun, run_zoo

__all__ = ["ray_cluster"]
pytestmark = pytest.mark.usefixtures("ray_cluster")

PLACE = Place(ray_address="auto")
SMALL = ["-n", 64, "--eval-freq", 32, "--eval-episodes", 1]


def row(plan):
    changes = {"task": plan.task, "algorithm": plan.algorithm, "seed": plan.seed, "online": 1.0, "plan": plan.decided}
    return {**dict.fromkeys(COLUMNS, ""), **changes}


def loses_its_worker(plan, folder):
    """Seed 0 loses its worker once, seed 1 always."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(len(list(folder.iterdir())))).touch()
    if plan.seed or len(list(folder.iterdir())) == 1:
        os._exit(1)
    return row(plan)


def writes(plan, folder):
    for name in ("logs/model.zip", "logs/replay_buffer.pkl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(str(plan.seed))
    return row(plan)


def jobs(out, seeds):
    return [(plan, run_folder(out, plan)) for plan in (Run("task", "algo", seed) for seed in range(seeds))]


def without_times(rows):
    return sorted(tuple((name, row[name]) for name in COLUMNS if name != "minutes") for row in rows)


def test_ray_gives_the_rows_of_this_machine(tmp_path, capsys):
    command = ["sweep", "--algo", "flow_ppo", "--env", "CartPole-v1", "--seeds", 2, *SMALL, "--out", tmp_path / "ray"]
    # a node has two CPUs
    command += ["--ray-address", "auto", "--cpus-per-run", 2, "--", "--device", "cpu"]
    zoo(*command, "-params", "n_steps:4")
    assert capsys.readouterr().out.startswith("2 runs, 0 of them finished")
    register()
    flags = ("--eval-freq", "32", "--eval-episodes", "1", "--device", "cpu", "-n", "64")
    found = read_rows(tmp_path / "ray" / "results.csv")
    for line in found:
        plan = ZooRun("CartPole-v1", "flow_ppo", int(line["seed"]), "flow_ppo", flags, {"n_steps": "4"}, {}, False, 0, 4)
        here = run_zoo(plan, tmp_path / "here" / line["seed"])
        add_row(tmp_path / "here.csv", {**here, "plan": line["plan"]})
        name = "flow_ppo/CartPole-v1_1/CartPole-v1.zip"
        assert (run_folder(tmp_path / "ray", plan) / name).is_file()
    assert without_times(found) == without_times(read_rows(tmp_path / "here.csv")) and len(found) == 2
    assert not list((tmp_path / "ray").glob(".*"))
    zoo(*command, "-params", "n_steps:4")
    assert capsys.readouterr().out.startswith("2 runs, 2 of them finished")
    assert "made with other settings" in mistake(*command)


def test_files_come_back_from_a_node_without_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "touch", lambda self: None)  # the mark by which a node knows the folder
    assert make(writes, jobs(tmp_path, 1), tmp_path / "results.csv", PLACE) == 0
    folder = tmp_path / "runs" / "task" / "algo" / "0"
    assert [path.relative_to(folder) for path in folder.rglob("*.*")] == [Path("logs/model.zip")]
    assert (folder / "logs" / "model.zip").read_text() == "0" and len(read_rows(tmp_path / "results.csv")) == 1


def test_a_run_whose_worker_is_lost_is_begun_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ray_runs, "TRIES", 2)
    assert make(loses_its_worker, jobs(tmp_path, 2), tmp_path / "results.csv", PLACE) == 1
    assert [found["seed"] for found in read_rows(tmp_path / "results.csv")] == ["0"]
    said = sorted(line for line in capsys.readouterr().err.splitlines() if "its worker was lost" in line)
    assert [line.partition("seed ")[2] for line in said] == [
        "0: its worker was lost in try 1 of 2",
        "1: its worker was lost in try 1 of 2",
        "1: its worker was lost in try 2 of 2",
    ]


def test_runs_that_fit_no_node(tmp_path):
    command = ["--algo", "flow_ppo", "--env", "CartPole-v1", "--seeds", 1, "--out", tmp_path]
    message = mistake("sweep", *command, "--ray-address", "auto", "--gpus-per-run", 0.5)
    assert "--cpus-per-run 1 --gpus-per-run 0.5: no node of the cluster is that large" in message
    with pytest.raises(ValueError, match="CPUs and GPUs of its nodes: 2 and 0, 2 and 0"):
        make(writes, jobs(tmp_path, 1), tmp_path / "results.csv", Place(ray_address="auto", cpus=3))
