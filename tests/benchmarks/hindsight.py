"""
What hindsight gains on a task with goals and a sparse reward, with chunks of five actions: a line for each seed.

    python -m tests.benchmarks.hindsight --seeds 0 1 2

``Reach`` of ``tests/goal_tasks.py`` is learnt online by RLPD and offline by FQL, from episodes of a behaviour that knows no
goals, with ``HerReplayBuffer(n_sampled_goal=4)`` and without hindsight (``n_sampled_goal=0``).
"""

import argparse
import time

import torch as th

from tests.goal_tasks import success_rate, wandering


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000, help="environment steps online, gradient steps offline")
    arguments = parser.parse_args()
    th.set_num_threads(1)
    print(f"share of the dataset's steps that are at their goals: {(wandering().rewards == 0).mean():.4f}")
    print(f"{'phase':8} {'seed':>4} {'with hindsight':>15} {'without':>8} {'seconds':>8}")
    for phase in ("online", "offline"):
        for seed in arguments.seeds:
            start = time.perf_counter()
            rates = [success_rate(phase, n_sampled_goal, seed, arguments.steps) for n_sampled_goal in (4, 0)]
            print(f"{phase:8} {seed:4} {rates[0]:15.3f} {rates[1]:8.3f} {time.perf_counter() - start:8.1f}", flush=True)


if __name__ == "__main__":
    main()
