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
import sys
import time
from collections import Counter

from tests import child_runner

COUNTED = ("equal", "refused", "failures")


def run(name: str, seed: int, cases: int) -> Counter[str]:
    """:return: counts of one entry, attacked in processes of its own"""
    return child_runner.run("tests.attack", name, seed, cases, COUNTED)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entries", nargs="*", help="names; all if there are none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10_000, help="of each entry")
    parser.add_argument("--case", type=int, help="run this one alone, in this process")
    parser.add_argument("--bounds", action="store_true", help="compile checks of all indices into the loops")
    child_runner.add_options(parser)
    options = parser.parse_args()
    if options.bounds:
        os.environ["NUMBA_BOUNDSCHECK"] = "1"
    from tests.attack.engine import Failure
    from tests.attack.entries import ENTRIES

    if options.child is not None:
        name = options.entries[0]
        child_runner.child(options, name, COUNTED, ENTRIES[name].attack, Failure)
        return
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
