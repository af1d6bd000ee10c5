"""
Seconds of a small bench with one worker and with two, alternating; its runs have the networks of suite cpu.

    python -m tests.benchmarks.bench_workers --repeats 3
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

TASK = "pointmaze-medium-navigate-singletask-task1-v0"
NETWORKS = {"net_arch": [128, 128, 128], "n_critics": 2}


def suite(steps: int) -> dict[str, object]:
    """Four runs with one seed, as long as each other."""
    budget = {"offline_steps": steps, "online_steps": 0, "eval_freq": steps, "n_final_episodes": 10, "normalize": True}
    entries = {f"rql-{alpha}": {"algo": "rql", "settings": {"alpha": alpha}} for alpha in (1.0, 2.0, 3.0, 4.0)}
    shared = {"horizon_length": 5, "flow_steps": 5, "policy_kwargs": NETWORKS}
    return {**budget, "settings": shared, "tasks": {TASK: {"episodes": 20}}, "algorithms": entries}


def seconds(path: Path, workers: int) -> float:
    """Time the command, from its start to its end; the dataset is there."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "sb3_flow.zoo", "bench", "--suite", str(path), "--seeds", "0"]
        options = ["--workers", str(workers), "--out", out, "--data", str(path.parent)]
        began = time.perf_counter()
        quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}
        subprocess.run([*command, *options], check=True, capture_output=True, env=quiet)
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1_500, help="gradient steps of a run")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "suite.yml"
        path.write_text(yaml.safe_dump(suite(1)))
        seconds(path, 1)  # makes the dataset and compiles
        path.write_text(yaml.safe_dump(suite(arguments.steps)))
        times = [(seconds(path, 1), seconds(path, 2)) for _ in range(arguments.repeats)]
    for one, two in times:
        print(f"four runs: {one:.1f} s with one worker, {two:.1f} s with two, ratio {one / two:.2f}")
    print(f"median ratio: {statistics.median(one / two for one, two in times):.2f}")


if __name__ == "__main__":
    main()
