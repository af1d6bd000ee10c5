"""
Memory and speed of training by the number of rows and by how a dataset is kept.

    python tests/benchmarks/dataset_memory.py [--rows N ...] [--kinds KIND ...] [--compressed]

``memory``: an .npz file, read whole. ``mapped``: a folder of ``OfflineDataset.save``, sparse files but for the ends of the
trajectories, so that 10^8 rows need little disk. ``turns``: a folder of .npz files with 10^6 rows each, all the same file
under many names, which take turns in memory. ``converted``: the same folder with ``mmap_dir``, which needs the disk. Each runs
in a fresh process, whose anonymous memory (RssAnon, without mapped files) is read every 10 ms: the peak until the dataset is
loaded, and the peak while a model trains on it. Samples are batches from the replay buffer alone, updates are RQL's with small
networks; turns last 100 gradient steps per file here, so that reading (the last column) is in the figures. Linux only.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np
from gymnasium import spaces

from sb3_flow.data.columns import Allocate, Parts
from sb3_flow.data.storage import write_folder

FILE_ROWS, LENGTH, BATCH = 10**6, 1000, 256
LARGEST = {"memory": 10**7, "mapped": 10**8, "turns": 10**8, "converted": 10**7}
"""Kinds, and the most rows of each that run unless --kinds names it."""

CHILD = """
import json, sys, time
from sb3_flow import RQL, OfflineDataset
location, options, updates, batch = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
def tell(**found):
    print(json.dumps(found), flush=True)
read, reads = OfflineDataset.of_turn.__func__, []
def timed(cls, *given):
    start = time.perf_counter()
    made = read(cls, *given)
    reads.append(time.perf_counter() - start)
    return made
OfflineDataset.of_turn = classmethod(timed)
tell(imported=0)
start = time.perf_counter()
data = OfflineDataset.load(location, **options)
tell(load_s=time.perf_counter() - start)
model = RQL("MlpPolicy", None, horizon_length=5, batch_size=batch, buffer_size=1, offline_dataset=data, n_critics=2,
            policy_kwargs={"net_arch": [64]}, seed=0)
model.learn_offline(data, 10, log_interval=None)
sample = model.replay_buffer.sample
for _ in range(20):
    sample(batch)
start = time.perf_counter()
for _ in range(200):
    sample(batch)
tell(samples_per_s=200 / (time.perf_counter() - start))
start = time.perf_counter()
model.learn_offline(data, updates, log_interval=None)
took = time.perf_counter() - start
tell(updates_per_s=updates / took, reads=sum(reads))
"""


def arrays(rows: int, observations: int, actions: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "observations": rng.standard_normal((rows, observations), dtype=np.float32),
        "actions": rng.uniform(-1, 1, (rows, actions)).astype(np.float32),
        "rewards": rng.standard_normal(rows).astype(np.float32),
        "terminated": (np.arange(rows) + 1) % LENGTH == 0,
        "trajectory_ends": (np.arange(rows) + 1) % LENGTH == 0,
    }


def save(path: Path, contents: dict[str, np.ndarray], compressed: bool) -> None:
    """Write an .npz file, quicker than NumPy compresses."""
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind, compresslevel=1) as archive:
        for name, array in contents.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, array)


def save_sparse(path: Path, rows: int, observations: int, actions: int) -> None:
    """Write a dataset folder of zeros, whose files take the disk of the ends of trajectories alone."""

    def fill(allocate: Allocate) -> Parts:
        ends = allocate("trajectory_ends", (rows,), bool)
        ends[LENGTH - 1 :: LENGTH] = True
        return Parts(
            allocate("observations", (rows, observations), np.float32),
            allocate("actions", (rows, actions), np.float32),
            allocate("rewards", (rows,), np.float32),
            allocate("terminated", (rows,), bool),
            ends,
            allocate("final_observations", (rows // LENGTH, observations), np.float32),
            spaces.Box(-np.inf, np.inf, (observations,)),
            spaces.Box(-1, 1, (actions,)),
        )

    write_folder(path, fill, "zeros", None)


def prepare(folder: Path, kind: str, rows: int, args: argparse.Namespace) -> tuple[str, dict[str, object]]:
    """:return: location and options of a dataset"""
    sizes = args.observations, args.actions
    if kind == "mapped":
        save_sparse(folder / "data", rows, *sizes)
        return f"npz:{folder / 'data'}", {}
    if kind == "memory":
        save(folder / "data.npz", arrays(rows, *sizes), args.compressed)
        return f"npz:{folder / 'data.npz'}", {}
    first = folder / "files" / "data-000.npz"
    first.parent.mkdir()
    save(first, arrays(min(rows, FILE_ROWS), *sizes), args.compressed)
    for number in range(1, rows // FILE_ROWS):
        os.link(first, first.with_name(f"data-{number:03}.npz"))
    turns = {"max_memory": args.max_memory, "steps_per_file": 100}
    return f"npz:{first.parent}", {"mmap_dir": str(folder / "mapped")} if kind == "converted" else turns


def measure(location: str, options: dict[str, object], updates: int) -> dict[str, float]:
    """Run a child; the peaks of its memory are kept for each part of its work."""
    command = [sys.executable, "-W", "ignore", "-c", CHILD, location, json.dumps(options), str(updates), str(BATCH)]
    with tempfile.TemporaryFile("w+") as told, subprocess.Popen(command, stdout=told) as child:
        peaks: dict[int, int] = {}
        while child.poll() is None:
            status = Path(f"/proc/{child.pid}/status").read_text()
            part = os.pread(told.fileno(), 10_000, 0).count(b"\n")
            if found := re.search(r"RssAnon:\s+(\d+) kB", status):
                peaks[part] = max(peaks.get(part, 0), int(found[1]))
            time.sleep(0.01)
        if child.returncode:
            raise SystemExit(f"the child failed with {child.returncode}")
        told.seek(0)
        result = {name: value for line in told for name, value in json.loads(line).items()}
    loading = max(value for part, value in peaks.items() if part <= 1)
    training = max(value for part, value in peaks.items() if part > 1)
    return result | {"loading_mib": loading / 1024, "training_mib": training / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10**5, 10**6, 10**7, 10**8])
    parser.add_argument("--kinds", nargs="+", choices=LARGEST)
    parser.add_argument("--observations", type=int, default=55, help="as of OGBench's puzzle-3x3")
    parser.add_argument("--actions", type=int, default=5)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--max-memory", type=int, default=1 << 30, help="of the files that take turns")
    parser.add_argument("--compressed", action="store_true", help="files as OGBench's own; reading is slower")
    parser.add_argument("--folder", help="where the files are made (default: the system's temporary folder)")
    args = parser.parse_args()
    heads = ("rows", 10), ("kept", -10), ("loaded", 8), ("peak MiB loading", 17), ("training", 9)
    heads += ("samples/s", 10), ("updates/s", 10), ("reads", 6)
    print(*(f"{head:{'>' if width > 0 else '<'}{abs(width)}}" for head, width in heads))
    for rows in args.rows:
        for kind in args.kinds or [kind for kind, most in LARGEST.items() if rows <= most]:
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                found = measure(*prepare(Path(folder), kind, rows, args), args.updates)
            print(
                f"{rows:10} {kind:10} {found['load_s']:6.1f} s {found['loading_mib']:17.0f} {found['training_mib']:9.0f} "
                f"{found['samples_per_s']:10.0f} {found['updates_per_s']:10.0f} {found['reads']:4.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
