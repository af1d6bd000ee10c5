"""
Everything that only a GPU can show, most valuable first, in about ten minutes, in one report: ``make gpu``.

``python3 -m tests.benchmarks.gpu`` runs each part in a process of its own, so that a part that fails or hangs costs its own
time alone, and writes what the parts print to ``--out``, with what was left out and why. It needs torch with CUDA, NumPy,
numba, gymnasium, stable-baselines3 and sb3-contrib. Those that are not installed are taken from the wheels of the folder that
the environment variable ``WHEELS`` names. ``--rql`` is a checkout of github.com/aoberai/rql, with what it imports, for the
part ``jax``. Without a GPU, or with ``--dry-run``, every part runs at a tiny size on the CPU, where a tape takes the place of
CUDA's graphs: this shows that the script works, and its figures mean nothing.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

PARTS = {
    "machine": 30,
    "equality": 120,
    "recordings": 40,
    "rates": 240,
    "jax": 120,
    "ppo": 120,
    "storage": 60,
    "precision": 60,
    "packing": 90,
}
"""Names of the parts in their order, with the most seconds of each."""
NEEDED = ("gymnasium", "stable_baselines3", "sb3_contrib", "numba", "cloudpickle", "farama_notifications")


def unpacked_wheels(folder: str | None, target: Path) -> list[str]:
    """:return: where the wheels of a folder were unpacked, for the packages that are not installed"""
    if all(importlib.util.find_spec(name) for name in NEEDED):
        return []
    for wheel in sorted(Path(folder).glob("*.whl")) if folder else ():
        zipfile.ZipFile(wheel).extractall(target)
    missing = [name for name in NEEDED if not importlib.util.find_spec(name) and not (target / name).exists()]
    if missing:
        sys.exit(f"Not installed, and not among the wheels of WHEELS={folder}: {', '.join(missing)}")
    return [str(target)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("gpu_report.md"))
    parser.add_argument("--seconds", type=float, default=600, help="for all parts; what does not fit is left out")
    parser.add_argument("--rql", type=Path, help="checkout for the part jax")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    began, lines = time.monotonic(), ["# What a GPU shows", ""]
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(__file__).resolve().parents[2]), *unpacked_wheels(os.environ.get("WHEELS"), Path(folder))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
        for part in given.parts:
            left = given.seconds - (time.monotonic() - began)
            lines += [f"## {part}", "", "```text"]
            if left < 10:
                lines.append(f"left out: {given.seconds:.0f} seconds are over")
            else:
                lines += run(part, given, environment, min(left, PARTS[part]))
            lines += ["```", ""]
            given.out.write_text("\n".join(lines))
    print(f"\n{given.out} was written in {time.monotonic() - began:.0f} s")


def run(part: str, given: argparse.Namespace, environment: dict[str, str], seconds: float) -> list[str]:
    """:return: the lines that a part prints, which are printed here, too"""
    print(f"\n--- {part} (at most {seconds:.0f} s)", flush=True)
    command = [sys.executable, "-m", "tests.benchmarks.gpu_parts", part, "--seconds", str(seconds)]
    command += ["--dry-run"] if given.dry_run else []
    command += ["--rql", str(given.rql.resolve())] if given.rql else []
    with subprocess.Popen(
        ["timeout", "--kill-after=5", str(round(seconds)), *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    if process.returncode:
        lines.append(f"ended with {process.returncode}" + (", out of time" if process.returncode in (124, 137) else ""))
        print(lines[-1])
    return lines


if __name__ == "__main__":
    main()
