"""
Give ``OfflineDataset.load`` files of all kinds with mutated structure: keys, shapes, dtypes, lengths, values that break rules.

Of each file it is known whether it is right. One that is must be taken and hold what it says, any other must be refused by a
ValueError; anything else is a failure. Each kind runs in a process of its own, where a crash is a failure of the case that
ran, after which the next one goes on. The same seed gives the same cases.

    python -m tests.fuzz_datasets                          all kinds, 1,000 cases each
    python -m tests.fuzz_datasets --minutes 10             for ten minutes, shared among the kinds
    python -m tests.fuzz_datasets npz --case 1234          one case again, in this process
"""

import argparse
import faulthandler
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

SHOWN = 5
"""Failures of a kind that are printed in full."""
CRASHES = 20
"""Crashes of a kind after which it is given up."""
COUNTED = ("taken", "refused", "failures")


def child(name: str, seed: int, first: int, cases: int, seconds: float, progress: Path) -> None:
    """Run cases of one kind; the file holds the case that runs and the counts so far."""
    from tests.fuzz_datasets.engine import Failure, attack

    faulthandler.enable()
    gc.freeze()  # loading collects garbage, which takes long among all modules
    counts, until = Counter[str](), time.perf_counter() + seconds  # without the time of the imports
    descriptor = os.open(progress, os.O_WRONLY | os.O_CREAT)

    def note(case: int) -> None:
        os.pwrite(descriptor, " ".join(map(str, (case, *(counts[key] for key in COUNTED)))).ljust(60).encode(), 0)

    case = first
    while case < cases and time.perf_counter() < until:
        note(case)
        try:
            counts[attack(name, seed, case)] += 1
        except Failure as failure:
            counts["failures"] += 1
            if counts["failures"] <= SHOWN:
                print(f"  {name} --seed {seed} --case {case}: {failure}", flush=True)
        case += 1
    note(case)


def run(name: str, seed: int, cases: int, seconds: float) -> Counter[str]:
    """:return: counts of one kind, in processes of its own"""
    total, first, start = Counter[str](), 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder) / "progress"
        while first < cases and total["crashes"] < CRASHES:
            progress.write_text(f"{first} 0 0 0")
            command = [sys.executable, "-m", "tests.fuzz_datasets", name, "--seed", str(seed), "--cases", str(cases)]
            command += [
                "--child",
                str(progress),
                "--first",
                str(first),
                "--seconds",
                str(max(1.0, seconds - (time.perf_counter() - start) * bool(first))),
            ]
            ended = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
            case, *counts = (int(number) for number in progress.read_text().split())
            total.update(dict(zip(COUNTED, counts, strict=True)))
            if ended.returncode == 0:
                break
            code = ended.returncode
            reason = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            where = [line.strip() for line in ended.stderr.splitlines() if line.strip()][-1:]
            print(f"  {name} --seed {seed} --case {case}: the process ended with {reason}: {'; '.join(where)}", flush=True)
            total.update(crashes=1, failures=1)
            first = case + 1
    return total


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="names; all if there are none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="of each kind; 1,000 without --minutes")
    parser.add_argument("--minutes", type=float, help="stop after this time, shared among the kinds")
    parser.add_argument("--case", type=int, help="run this one alone, in this process")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.kinds[0], options.seed, options.first, options.cases, options.seconds, options.child)
        return
    from tests.fuzz_datasets.engine import KINDS, attack

    unknown = set(options.kinds) - set(KINDS)
    if unknown:
        parser.error(f"unknown kinds {sorted(unknown)}; there are {', '.join(KINDS)}")
    kinds = options.kinds or list(KINDS)
    if options.case is not None:
        for name in kinds:
            print(name, attack(name, options.seed, options.case))
        return
    cases = options.cases or (1_000 if options.minutes is None else sys.maxsize)
    seconds = float("inf") if options.minutes is None else 60 * options.minutes / len(kinds)
    failures = 0
    print(f"{'kind':12}{'taken':>10}{'refused':>10}{'failures':>10}{'seconds':>10}")
    for name in kinds:
        start = time.perf_counter()
        counts = run(name, options.seed, cases, seconds)
        failures += counts["failures"]
        took = time.perf_counter() - start
        print(f"{name:12}" + "".join(f"{counts[key]:10}" for key in COUNTED) + f"{took:10.1f}", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
