"""
Install the wheel into an empty environment away from the checkout, and use it there as a stranger would.

    python -m tests.release.wheel dist

`dist` holds one source distribution and the wheel that was built from it (`make dist`). First the package is installed alone,
and `check_bare.py` tries it without extras and where it cannot be written. Then the extras are installed, and a part of the
tests in the source distribution runs: all code of the manual, the examples, the zoo's commands, older files. The folder
`sb3_flow` of the source distribution is deleted before, and `check_installed.py` makes sure that the installed package is
imported.
"""

import argparse
import os
import shutil
import subprocess
import tarfile
import tempfile
import venv
from pathlib import Path

CHECKS = [f"tests/release/check_{name}.py" for name in ("installed", "bare")]
TESTED = """
readme examples add_an_algorithm typing
hub zoo_hub zoo zoo_configs zoo_mistakes bench sweep environments envpool
older_files newer_files load_into_stock compiled_cache fork_server
"""


def try_out(dist: Path, work: Path) -> None:
    """
    Install and test.

    :param dist: a folder with one source distribution and one wheel
    :param work: an empty folder outside the checkout
    """
    (source,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    with tarfile.open(source) as archive:
        archive.extractall(work, filter="data")
    copy = work / source.name.removesuffix(".tar.gz")
    shutil.rmtree(copy / "sb3_flow")
    venv.create(work / "venv", with_pip=True)
    python = str(work / "venv" / "bin" / "python")
    # no path of the checkout's
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*command: str) -> None:
        print("$ python", *command, flush=True)
        subprocess.run([python, *command], cwd=copy, env=environment, check=True)

    def install(*requirements: str) -> None:
        run("-m", "pip", "install", "--quiet", "--constraint", "constraints.txt", *requirements)
        run("-m", "pip", "check")

    install("torch")
    install(str(wheel.resolve()))
    run("-c", "import sb3_flow; print(sb3_flow.__version__, sb3_flow.__file__)")
    run("-m", "sb3_flow.zoo", "--help")
    install("pytest")
    run("-m", "pytest", *CHECKS)
    install(f"{wheel.resolve()}[dev,envpool]")
    run("-m", "pytest", CHECKS[0], *(f"tests/test_{name}.py" for name in TESTED.split()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, help="a folder with one source distribution and one wheel")
    with tempfile.TemporaryDirectory() as folder:
        try_out(parser.parse_args().dist, Path(folder))
