"""Random cases in processes of their own: a crash is a failure of the case that ran, after which the next one goes on."""

import argparse
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

SHOWN = 5
"""Failures of a name that are printed in full."""
CRASHES = 20
"""Crashes of a name after which it is given up."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options by which :func:`run` tells a child its work."""
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help=argparse.SUPPRESS)


def child(
    options: argparse.Namespace, name: str, outcomes: Sequence[str], attack: Callable[[int, int], str], failure: type
) -> None:
    """
    Run cases of one name; a file holds the case that runs and the counts so far.

    :param options: of the command line
    :param name: of an entry or a kind
    :param outcomes: what ``attack`` may return, and "failures"
    :param attack: runs a case, given seed and case
    :param failure: the exception by which it fails
    """
    faulthandler.enable()
    counts, until = Counter[str](), time.perf_counter() + options.seconds  # without the time of the imports
    descriptor = os.open(options.child, os.O_WRONLY | os.O_CREAT)

    def note(case: int) -> None:
        os.pwrite(descriptor, " ".join(map(str, (case, *(counts[key] for key in outcomes)))).ljust(60).encode(), 0)

    case = options.first
    while case < options.cases and time.perf_counter() < until:
        note(case)
        try:
            counts[attack(options.seed, case)] += 1
        except failure as error:
            counts["failures"] += 1
            if counts["failures"] <= SHOWN:
                print(f"  {name} --seed {options.seed} --case {case}: {error}", flush=True)
        case += 1
    note(case)


def run(module: str, name: str, seed: int, cases: int, outcomes: Sequence[str], seconds: float = float("inf")) -> Counter[str]:
    """
    Run cases of one name in processes of their own.

    :param module: whose command line a child takes
    :param name: of an entry or a kind
    :param seed: of all cases
    :param cases: how many
    :param outcomes: names of the counts
    :param seconds: after which no further case starts
    :return: counts, "crashes" among them
    """
    total, first, start = Counter[str](), 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder) / "progress"
        while first < cases and total["crashes"] < CRASHES:
            progress.write_text(" ".join(map(str, (first, *(0 for _ in outcomes)))))
            left = max(1.0, seconds - (time.perf_counter() - start) * bool(first))
            command = [sys.executable, "-m", module, name, "--seed", str(seed), "--cases", str(cases)]
            command += ["--child", str(progress), "--first", str(first), "--seconds", str(left)]
            ended = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
            case, *counts = map(int, progress.read_text().split())
            total.update(dict(zip(outcomes, counts, strict=True)))
            code = ended.returncode
            if code == 0:
                break
            reason = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
            where = [line for line in lines if line.startswith("File ")][:3] + ([] if code < 0 else lines[-1:])
            print(f"  {name} --seed {seed} --case {case}: the process ended with {reason} at {'; '.join(where)}", flush=True)
            total.update(crashes=1, failures=1)
            first = case + 1
    return total
