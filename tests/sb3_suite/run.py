"""
Run the test suite of SB3 or of sb3-contrib, taken from its source distribution on the package index, with one of our
classes in a seat of theirs.

    python -m tests.sb3_suite.run RQL [further pytest arguments]

The seats are listed in ``seats.py``.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.sb3_suite.seats import SEATS

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache" / "sb3_suite"


def fetch(package: str) -> Path:
    """
    :param package: an installed package, its name with underscores
    :return: its unpacked source distribution of the same version, downloaded once
    """
    name = f"{package}-{version(package)}"
    if not (CACHE / name / "tests").is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "--dest", str(CACHE), f"{package}=={version(package)}"], check=True)
        archive = next(CACHE.glob(f"{name.replace('_', '[_-]')}.tar.gz"))
        with tarfile.open(archive) as file:
            file.extractall(CACHE, filter="data")
    return CACHE / name


def main(algorithm: str, *arguments: str) -> int:
    if algorithm not in SEATS:
        raise SystemExit(f"No seat {algorithm!r}, choose one of {', '.join(SEATS)}.")
    seat = SEATS[algorithm]
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "SB3_FLOW_SEAT": algorithm, "PYTHONPATH": path}
    ignored = [f"--ignore=tests/{name}" for name in seat.ignored]
    command = [sys.executable, "-m", "pytest", "-p", "seat", "-q", "--no-header", "-p", "no:cacheprovider", *ignored]
    # in a copy, since some tests write beside themselves and seats may run at the same time
    with tempfile.TemporaryDirectory() as place:
        folder = shutil.copytree(fetch(seat.package), Path(place) / "suite")
        tests = [f"tests/{name}" for name in seat.files] or ["tests"]
        return subprocess.run([*command, *tests, *arguments], cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(*(sys.argv[1:] or ["RQL"])))
