"""
Time of storing one step and sampling one batch (``TrajectoryReplayBuffer``), by the number of trajectories.

Run by hand: ``python tests/benchmarks/sampling.py``. The number of rows stays the same, so that trajectories become shorter
as they become more: in a ring of online steps that is full, in an offline dataset beside a short ring, and in both. Calls
alternate between the numbers in random order, so that all of them see the same machine and the same caches; medians, and
means, which also see what seldom happens. ``PYTHONPATH=<another checkout>`` times another version.
"""

import argparse
import random
import statistics
import time

import numpy as np
import torch as th
from gymnasium import spaces

import sb3_flow
from sb3_flow.data import OfflineDataset, TrajectoryReplayBuffer

OBSERVATIONS, ACTIONS = spaces.Box(-np.inf, np.inf, (4,)), spaces.Box(-1, 1, (1,))


def dataset_of(n_trajectories: int, n_rows: int) -> OfflineDataset:
    ends = (np.arange(n_rows) + 1) % (n_rows // n_trajectories) == 0
    return OfflineDataset(
        np.zeros((n_rows, 4), np.float32),
        np.zeros((n_rows, 1), np.float32),
        np.zeros(n_rows, np.float32),
        ends & (np.arange(n_rows) % 3 == 0),
        ends,
        np.zeros((n_trajectories, 4), np.float32),
        OBSERVATIONS,
        ACTIONS,
    )


def fill(buffer: TrajectoryReplayBuffer, n_trajectories: int) -> None:
    """As after ``add`` in every row of the ring, but without the minutes."""
    length = buffer.buffer_size // n_trajectories
    online = buffer.trajectories
    for end in range(length - 1, buffer.buffer_size, length):
        online.clock = end
        online.step(np.ones(1))
    buffer.dones[length - 1 :: length] = 1.0
    buffer.terminated[length - 1 :: length] = np.arange(n_trajectories)[:, None] % 2
    buffer.full = True


def buffer_of(where: str, n_trajectories: int, n_rows: int, sampling: str) -> TrajectoryReplayBuffer:
    n_online = 10_000 if where == "offline" else n_rows
    buffer = TrajectoryReplayBuffer(n_online, OBSERVATIONS, ACTIONS, "cpu", sampling=sampling, horizon_length=2)
    buffer.generator = th.Generator().manual_seed(0)
    if where != "online":
        buffer.set_offline(dataset_of(n_trajectories, n_rows))
    fill(buffer, 100 if where == "offline" else n_trajectories)
    return buffer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, nargs="+", default=[10**2, 10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--rows", type=int, default=2 * 10**6)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--where", nargs="+", default=["online", "offline", "both"])
    arguments = parser.parse_args()
    th.set_num_threads(1)
    print(f"{sb3_flow.__file__}: {arguments.rows} rows, batches of {arguments.batch_size}; microseconds, median (mean)")
    step = (np.zeros((1, 4), np.float32), np.zeros((1, 4), np.float32), np.zeros((1, 1), np.float32), np.zeros(1))
    for where in arguments.where:
        for sampling in ("trajectory", "transition"):
            buffers = {n: buffer_of(where, n, arguments.rows, sampling) for n in arguments.trajectories}
            times: dict[int, list[tuple[float, float]]] = {n: [] for n in buffers}
            for i in range(arguments.calls + 20):
                for n in random.sample(list(buffers), len(buffers)):
                    buffer = buffers[n]
                    done = np.full(1, (i + 1) % max(arguments.rows // n, 1) == 0, np.float32)
                    start = time.perf_counter()
                    buffer.add(*step, done, [{}])
                    added = time.perf_counter()
                    buffer.sample(arguments.batch_size)
                    times[n].append((added - start, time.perf_counter() - added))
            first = None
            print(f"\n{where}, sampling={sampling!r}\n{'trajectories':>12} {'add':>16} {'sample':>16} {'together':>16} ratio")
            for n, pairs in times.items():
                kept = [(add, sample, add + sample) for add, sample in pairs[20:]]
                columns = [(1e6 * statistics.median(c), 1e6 * statistics.mean(c)) for c in zip(*kept, strict=True)]
                first = first or columns[2][0]
                shown = " ".join(f"{median:8.0f} ({mean:5.0f})" for median, mean in columns)
                print(f"{n:12} {shown} {columns[2][0] / first:5.2f}")


if __name__ == "__main__":
    main()
