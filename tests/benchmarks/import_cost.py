"""
Seconds that ``import sb3_flow`` takes beside ``import stable_baselines3, sb3_contrib``, in alternating fresh processes.

    python tests/benchmarks/import_cost.py --repeats 10
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter

BASE, OURS = "import stable_baselines3, sb3_contrib", "import sb3_flow"
NAMES = "; import sys; print(*sys.modules)"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""Installed packages have their bytecode, which this package's files shall have, too."""


def measure(code: str) -> tuple[float, float]:
    """:return: seconds by the clock, and seconds of processor time"""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env=ENVIRONMENT)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, env=ENVIRONMENT)


def modules(code: str) -> set[str]:
    """:return: names of the modules that some code imports"""
    return set(_run("-c", code + NAMES).stdout.split())


def own_times(code: str) -> dict[str, float]:
    """:return: seconds that each module's own lines take"""
    lines = _run("-X", "importtime", "-c", code).stderr.splitlines()
    rows = [line.removeprefix("import time:").split("|") for line in lines if line.count("|") == 2]
    return {name.strip(): int(own) / 1e6 for own, _, name in rows[1:]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    measure(BASE), measure(OURS)  # files come into memory
    times = [(measure(BASE), measure(OURS)) for _ in range(repeats)]
    for i, kind in enumerate(("by the clock", "of processor time")):
        base, ours = (statistics.median(pair[j][i] for pair in times) for j in (0, 1))
        print(f"seconds {kind}: {base:.2f} for `{BASE}`, {ours:.2f} for `{OURS}`, ratio {ours / base:.2f}")
    added = modules(OURS) - modules(BASE)
    print(f"{len(added)} modules more:", dict(Counter(name.split(".")[0] for name in added).most_common(8)))
    costs = own_times(OURS)
    packages = Counter()
    for name in added & costs.keys():
        packages[name.split(".")[0]] += costs[name]
    print("seconds in these:", {name: round(seconds, 3) for name, seconds in packages.most_common(8)})
    for name in sorted(added & costs.keys(), key=costs.__getitem__, reverse=True)[:10]:
        print(f"  {costs[name]:.3f} {name}")
