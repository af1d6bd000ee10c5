"""Runs in processes that share the GPUs of a machine: who gets which, and what a worker sees. No GPU is needed."""

import argparse
import os
import subprocess
import sys
from concurrent.futures import Future

import pytest
import torch as th

from sb3_flow.zoo.bench import process_runs, runner
from sb3_flow.zoo.bench.process_runs import as_places_are_free, in_processes, visible_gpus
from sb3_flow.zoo.bench.runner import Place

CUDA = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("given", "count", "found"),
    [
        (None, 2, ["0", "1"]),
        ("3, 1", 2, ["3", "1"]),
        ("GPU-a,GPU-b,GPU-c", 2, ["GPU-a", "GPU-b"]),  # CUDA stops at the first that is not there
        ("", 0, []),
        (None, 0, []),
    ],
)
def test_gpus_that_this_process_may_use(given, count, found, monkeypatch):
    monkeypatch.delenv(CUDA, raising=False) if given is None else monkeypatch.setenv(CUDA, given)
    monkeypatch.setattr(th.cuda, "device_count", lambda: count)
    assert visible_gpus() == found


def test_a_run_takes_the_place_that_is_free(monkeypatch):
    futures, where, order = {}, [], iter("bdacef")

    def submit(place, job):
        where.append((place, *job))
        futures[job[0]] = Future()
        return futures[job[0]]

    def wait(running, return_when):
        name = next(order)
        assert len(running) <= 4 and futures[name] in running
        if name == "b":
            futures[name].set_exception(RuntimeError("this run failed"))
        else:
            futures[name].set_result(name)
        return {futures[name]}, set()

    monkeypatch.setattr(process_runs, "wait", wait)
    ends = list(as_places_are_free(["0", "1", "0", "1"], [(name,) for name in "abcdef"], submit))
    # four at once, each GPU one before one has two; then e where b failed, f where d ended, both on the second GPU
    assert where == [("0", "a"), ("1", "b"), ("0", "c"), ("1", "d"), ("1", "e"), ("1", "f")]
    assert [job for job, _ in ends] == [(name,) for name in "bdacef"]
    assert isinstance(ends[0][1].exception(), RuntimeError) and ends[1][1].result() == "d"


def sees(number):
    """A run, in a worker."""
    if number == 1:
        raise ValueError(f"run 1 failed where it saw {os.environ[CUDA]}")
    return {"number": number, "sees": os.environ[CUDA], "threads": th.get_num_threads(), "process": os.getpid()}


def test_a_worker_sees_its_gpu_alone(monkeypatch):
    monkeypatch.setenv(CUDA, "5,GPU-x")
    ends = dict(in_processes(sees, [(number,) for number in range(6)], 2, 3, False, ("5", "GPU-x")))
    assert isinstance(ends[1,], ValueError) and str(ends.pop((1,))) == "run 1 failed where it saw GPU-x"
    assert ends[0,]["sees"] == "5" and sorted(row["number"] for row in ends.values()) == [0, 2, 3, 4, 5]
    assert len({(row["sees"], row["process"]) for row in ends.values()}) == len({row["sees"] for row in ends.values()})
    assert {row["threads"] for row in ends.values()} == {3} and os.environ[CUDA] == "5,GPU-x"


def test_no_import_asks_for_gpus():
    """Else a worker would have seen all GPUs before it is told which is its own."""
    code = """
import torch

def asked(*_):
    raise AssertionError("a GPU was asked for")

for name in ("is_available", "device_count", "init", "current_device", "get_device_properties"):
    setattr(torch.cuda, name, asked)
import sb3_flow.zoo.bench.runner, sb3_flow.zoo.bench.training, sb3_flow.zoo.sweep.zoo_run
sb3_flow.zoo.register()
import rl_zoo3.train
"""
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


def place(*words):
    """The place that the flags of a command choose."""
    parser = argparse.ArgumentParser()
    runner.add_runner_flags(parser)
    return runner.place_of(parser.parse_args(words), own_processes=True)


def test_places_on_gpus(monkeypatch):
    monkeypatch.setattr(runner, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(runner, "available_cores", lambda: 16)
    assert place("--per-device", "3") == Place(6, True, cpus=2, devices=("0", "1"))
    assert place("--per-device", "20") == Place(40, True, cpus=1, devices=("0", "1"))
    assert place("--per-device", "3", "--cpus-per-run", "5").cpus == 5
    # the driver of a cluster needs no GPU
    monkeypatch.setattr(runner, "visible_gpus", lambda: [])
    assert place("--per-device", "4", "--ray-address", "auto") == place("--gpus-per-run", ".25", "--ray-address", "auto")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--per-device 2: expected is a GPU, but torch .* sees none here; give --workers 2"),
        ("--workers 3", "--workers 3 and --per-device 2 exclude each other: --per-device decides"),
        ("--ray-address auto --workers 3", "--workers and --ray-address exclude each other"),
        ("--ray-address auto --gpus-per-run 0.25", "--gpus-per-run 0.25 and --per-device 2 exclude .* is --gpus-per-run 0.5"),
        ("--gpus-per-run 0", "--gpus-per-run 0 and --per-device 2 exclude each other"),
        ("--per-device 0", "`--per-device` must be at least 1"),
    ],
)
def test_flags_that_do_not_go_together(words, message, monkeypatch):
    monkeypatch.setattr(th.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=message):
        place("--per-device", "2", *words.split())
