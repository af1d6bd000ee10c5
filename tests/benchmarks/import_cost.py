"""
Seconds that ``import sb3_flow`` takes beside ``import stable_baselines3, sb3_contrib``, in alternating fresh processes.

    python tests/benchmarks/import_cost.py --repeats 10
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter

BASE, OURS = "import stable_baselines3, sb3_contrib", "import sb3_flow"
NAMES = "; import sys; print(*sys.modules)"


def measure(code: str) -> tuple[float, float]:
    """:return: seconds by the clock, and seconds of processor time"""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def modules(code: str) -> set[str]:
    """:return: names of the modules that some code imports"""
    ended = subprocess.run([sys.executable, "-c", code + NAMES], capture_output=True, text=True, check=True)
    return set(ended.stdout.split())


def own_times(code: str) -> dict[str, float]:
    """:return: seconds that each module's own lines take"""
    ended = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True)
    rows = [
        line.removeprefix("import time:").split("|") for line in ended.stderr.splitlines() if line.startswith("import time:")
    ]
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
