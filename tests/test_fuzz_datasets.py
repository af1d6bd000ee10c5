"""A small part of ``python -m tests.fuzz_datasets``."""

import subprocess
import sys

import pytest

import tests.fuzz_datasets.__main__ as fuzz
from tests.fuzz_datasets import engine

CASES = {"ogbench": 8}


@pytest.mark.parametrize("name", engine.KINDS)
def test_right_files_are_taken_and_wrong_ones_refused(name, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", "")  # the cases set it, and it is put back afterwards
    outcomes = [engine.attack(name, 0, case) for case in range(CASES.get(name, 25))]
    assert set(outcomes) == {engine.TAKEN, engine.REFUSED}


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (
            lambda *_, **__: engine.OfflineDataset.from_arrays([[0.0]], [[0.0]], [0.0], [1], [1]),
            "taken although wrong|instead of",
        ),
        (lambda *_, **__: [][0], "IndexError instead of ValueError|refused although right"),
    ],
)
def test_mistakes_of_load_are_failures(load, message, monkeypatch):
    stand_in = type("StandIn", (), {"load": staticmethod(load)})
    real = engine.OfflineDataset
    monkeypatch.setattr(engine, "OfflineDataset", stand_in)
    stand_in.from_arrays = real.from_arrays
    for case in range(5):
        with pytest.raises(engine.Failure, match=message):
            engine.attack("npz", 0, case)


def test_a_crash_is_a_failure_with_its_case(capfd, monkeypatch):
    lines = (
        "import ctypes, tests.fuzz_datasets.__main__ as fuzz",
        "from tests.fuzz_datasets import engine",
        "engine.attack = lambda *_: ctypes.string_at(0)",
        "fuzz.main()",
    )
    run = subprocess.run

    def broken(command, **options):
        return run([sys.executable, "-c", "\n".join(lines), *command[3:]], **options)

    monkeypatch.setattr(subprocess, "run", broken)
    counts = fuzz.run("npz", seed=3, cases=1, seconds=60)
    assert counts["failures"] == counts["crashes"] == 1
    assert "npz --seed 3 --case 0: the process ended with SIGSEGV" in capfd.readouterr().out
