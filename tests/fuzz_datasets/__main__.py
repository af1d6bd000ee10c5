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
import gc
import sys
import time
from collections import Counter
from functools import partial

from tests import child_runner

COUNTED = ("taken", "refused", "failures")


def run(name: str, seed: int, cases: int, seconds: float) -> Counter[str]:
    """:return: counts of one kind, in processes of its own"""
    return child_runner.run("tests.fuzz_datasets", name, seed, cases, COUNTED, seconds)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="names; all if there are none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="of each kind; 1,000 without --minutes")
    parser.add_argument("--minutes", type=float, help="stop after this time, shared among the kinds")
    parser.add_argument("--case", type=int, help="run this one alone, in this process")
    child_runner.add_options(parser)
    options = parser.parse_args()
    from tests.fuzz_datasets.engine import KINDS, Failure, attack

    if options.child is not None:
        gc.freeze()  # loading collects garbage, which takes long among all modules
        name = options.kinds[0]
        child_runner.child(options, name, COUNTED, partial(attack, name), Failure)
        return
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
