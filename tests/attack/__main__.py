"""
Attack every compiled entry with random input: shapes, dtypes, strides, numbers, indices, and things that are no arrays.

Every result must equal the plain twin's, or be a ValueError that names the argument (a TypeError for what is no array).
Arrays lie beside memory that nobody may touch. Each entry runs in a process of its own; a crash is a failure of the case that
ran, after which the next one goes on. The same seed gives the same cases.

    python -m tests.attack                               all entries, 10,000 cases each
    python -m tests.attack compute_gae --case 1234       one case again, in this process
    python -m tests.attack --bounds                      with numba's checks of indices compiled into the loops
"""

import argparse
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

SHOWN = 5
"""Failures of an entry that are printed in full."""
CRASHES = 20
"""Crashes of an entry after which it is given up."""


def child(name: str, seed: int, first: int, cases: int, progress: Path) -> None:
    """Run cases of one entry; the file holds the case that runs and the counts so far."""
    from tests.attack.engine import Failure
    from tests.attack.entries import ENTRIES

    faulthandler.enable()
    entry, counts, shown = ENTRIES[name], Counter[str](), 0
    descriptor = os.open(progress, os.O_WRONLY | os.O_CREAT)
    for case in range(first, cases):
        os.pwrite(descriptor, f"{case} {counts['equal']} {counts['refused']} {counts['failures']}\n".ljust(60).encode(), 0)
        try:
            counts[entry.attack(seed, case)] += 1
        except Failure as failure:
            counts["failures"] += 1
            if shown < SHOWN:
                print(f"  {name} --seed {seed} --case {case}: {failure}", flush=True)
            shown += 1
    os.pwrite(descriptor, f"{cases} {counts['equal']} {counts['refused']} {counts['failures']}\n".ljust(60).encode(), 0)


def run(name: str, seed: int, cases: int) -> Counter[str]:
    """:return: counts of one entry, attacked in processes of its own"""
    total, first = Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder) / "progress"
        while first < cases and total["crashes"] < CRASHES:
            progress.write_text(f"{first} 0 0 0\n")
            command = [sys.executable, "-m", "tests.attack", name, "--seed", str(seed), "--cases", str(cases)]
            command += ["--child", str(progress), "--first", str(first)]
            ended = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
            code = ended.returncode
            case, equal, refused, failures = map(int, progress.read_text().split())
            total.update(equal=equal, refused=refused, failures=failures)
            if code == 0:
                break
            reason = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            where = [line.strip() for line in ended.stderr.splitlines() if line.lstrip().startswith("File ")][:3]
            print(f"  {name} --seed {seed} --case {case}: the process ended with {reason} at {'; '.join(where)}", flush=True)
            total.update(crashes=1, failures=1)
            first = case + 1
    return total


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entries", nargs="*", help="names; all if there are none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10_000, help="of each entry")
    parser.add_argument("--case", type=int, help="run this one alone, in this process")
    parser.add_argument("--bounds", action="store_true", help="compile checks of all indices into the loops")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bounds:
        os.environ["NUMBA_BOUNDSCHECK"] = "1"
    if options.child is not None:
        child(options.entries[0], options.seed, options.first, options.cases, options.child)
        return
    from tests.attack.entries import ENTRIES

    if options.case is not None:
        faulthandler.enable()
        for name in options.entries:
            print(name, ENTRIES[name].attack(options.seed, options.case))
        return
    unknown = set(options.entries) - set(ENTRIES)
    if unknown:
        parser.error(f"unknown entries {sorted(unknown)}; there are {', '.join(ENTRIES)}")
    failures = 0
    print(f"{'entry':32}{'equal':>10}{'refused':>10}{'failures':>10}{'seconds':>10}")
    for name in options.entries or ENTRIES:
        start = time.perf_counter()
        counts = run(name, options.seed, options.cases)
        failures += counts["failures"]
        seconds = time.perf_counter() - start
        print(f"{name:32}{counts['equal']:10}{counts['refused']:10}{counts['failures']:10}{seconds:10.1f}", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
