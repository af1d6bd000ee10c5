"""The script for a GPU works as far as it goes without one, so that no lease of a GPU is lost to a mistake in the script."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.benchmarks.gpu import NEEDED, PARTS, unpacked_wheels

ROOT = Path(__file__).resolve().parent.parent


def run(tmp_path, *flags):
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--dry-run", "--out", str(tmp_path / "report.md"), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return (tmp_path / "report.md").read_text()


def test_every_part_but_the_long_ones(tmp_path):
    parts = [part for part in PARTS if part not in ("equality", "packing")]  # the tests of the update runner do the same
    report = run(tmp_path, "--parts", *parts)
    assert [line[3:] for line in report.splitlines() if line.startswith("## ")] == parts
    assert "ended with" not in report and "Traceback" not in report, report
    assert "a dry run on the CPU: figures below mean nothing" in report
    for found in (
        "full  QAM",
        "small RLPD",
        "left out: no checkout was given",
        "ratio",
        "storage=cpu",
        "another seed",
        "the next model: recorded",
    ):
        assert found in report, report


def test_time_runs_out(tmp_path):
    report = run(tmp_path, "--parts", "machine", "--seconds", "5")
    assert "left out: 5 seconds are over" in report


def test_packages_come_from_wheels_where_they_are_missing(tmp_path, monkeypatch):
    import tests.benchmarks.gpu as script

    assert unpacked_wheels(None, tmp_path) == []
    monkeypatch.setattr(script, "NEEDED", (*NEEDED, "sb3_flow_not_installed"))
    with pytest.raises(SystemExit, match="not among the wheels of WHEELS=None: sb3_flow_not_installed"):
        unpacked_wheels(None, tmp_path / "unpacked")
    with zipfile.ZipFile(tmp_path / "a-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("sb3_flow_not_installed/__init__.py", "")
    assert unpacked_wheels(str(tmp_path), tmp_path / "unpacked") == [str(tmp_path / "unpacked")]
    assert (tmp_path / "unpacked" / "sb3_flow_not_installed" / "__init__.py").exists()
