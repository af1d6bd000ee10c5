"""
The kernels' tests with every block of memory between pages that cannot be touched: reading or writing one number too far, or
memory that was freed, ends the process.

Run by hand, on Linux with gcc: ``python -m tests.guard_pages`` (some minutes), or with other test files as arguments. Each run
says how many blocks were guarded; the last one reads too far on purpose and must be killed.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = [
    *("test_kernels.py", "test_fused_safety.py", "test_kernels_advantages.py", "test_kernels_groups.py"),
    *("test_kernels_rewards.py", "test_advantage_scan.py", "test_native_update.py"),
]
TOO_FAR = """
import torch as th
from tests.guard_pages import guarding
from sb3_flow.flow import EnsembleMLP, fused
ensemble = EnsembleMLP(2, 4, [8])
ensemble(th.randn(5, 4))
fused.check = lambda *arguments: None
layers = fused.FusedMLP(list(zip(ensemble.weights, ensemble.biases))).layers
with th.no_grad(), guarding():
    fused._Forward(*fused.read(layers), layers, 6)(th.randn(5, 4))
"""


class guarding:
    """Context in which blocks are guarded."""

    def __enter__(self) -> None:
        ctypes.c_int.in_dll(ctypes.CDLL(None), "guard_pages_on").value = 1

    def __exit__(self, *error: object) -> None:
        ctypes.c_int.in_dll(ctypes.CDLL(None), "guard_pages_on").value = 0


def pytest_configure() -> None:
    """Give each array that kernels leave for each other a block of its own."""
    from sb3_flow.fused import launch

    launch.PIECE, launch.ALIGNMENT = 0, 1


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Guard what a test asks for; what is imported and compiled before needs no guard."""
    with guarding():
        return (yield)


def pytest_sessionfinish() -> None:
    """Say how much was guarded."""
    blocks = ctypes.c_ulong.in_dll(ctypes.CDLL(None), "guard_pages_blocks").value
    print(f"\n{blocks} blocks were guarded, pages without access {os.environ['GUARD_PAGES']} them")


def main() -> None:
    files = sys.argv[1:] or [str(HERE / name) for name in FILES]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "guard_pages.so"
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, HERE / "guard_pages.c", "-ldl"], check=True)
        environment = {**os.environ, "LD_PRELOAD": str(library), "PYTHONFAULTHANDLER": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE)])
        failed = False
        for side in ("after", "before"):
            command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.guard_pages", *files]
            failed |= subprocess.run(command, env={**environment, "GUARD_PAGES": side}).returncode != 0
        run = subprocess.run([sys.executable, "-c", TOO_FAR], env={**environment, "GUARD_PAGES": "after"}, capture_output=True)
        caught = run.returncode == -signal.SIGSEGV
        print("reading a row too far was", "caught" if caught else f"NOT caught: {run.stderr.decode()}")
    sys.exit(failed or not caught)


if __name__ == "__main__":
    main()
