"""
Run SB3's own test suite, taken from its source distribution on the package index, with one of our classes in a seat.

    python -m tests.sb3_suite.run RQL [further pytest arguments]
"""

import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache" / "sb3_suite"
# needs Atari to be imported, and concerns no algorithm
IGNORED = ("test_utils.py",)


def fetch() -> Path:
    """:return: the unpacked source distribution of the installed SB3, downloaded once"""
    folder = CACHE / f"stable_baselines3-{version('stable-baselines3')}"
    if not (folder / "tests").is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        requirement = f"stable-baselines3=={version('stable-baselines3')}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "--dest", str(CACHE), requirement], check=True)
        archive = next(CACHE.glob(f"stable[_-]baselines3-{version('stable-baselines3')}.tar.gz"))
        with tarfile.open(archive) as file:
            file.extractall(CACHE, filter="data")
    return folder


def main(algorithm: str, *arguments: str) -> int:
    folder = fetch()
    environment = {**os.environ, "SB3_FLOW_SEAT": algorithm, "PYTHONPATH": str(HERE)}
    ignored = [f"--ignore=tests/{name}" for name in IGNORED]
    command = [sys.executable, "-m", "pytest", "-p", "seat", "-q", "--no-header", "-p", "no:cacheprovider", *ignored]
    return subprocess.run([*command, "tests", *arguments], cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(*(sys.argv[1:] or ["RQL"])))
