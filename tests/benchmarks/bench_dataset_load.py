"""
Time and peak memory until an offline dataset is loaded and trains.

    python tests/benchmarks/bench_dataset_load.py [--rows N] [--compressed]

Random data with the sizes of OGBench's puzzle-3x3 (55 observations, 5 actions) go into a temporary folder, in OGBench's
layout (labelled for a task of the environment) and as a plain .npz file. Each load, and a model's first gradient step on
it, runs in a fresh process, after the imports; the ratio is the peak memory above what the process had just before, over
the bytes of the arrays that result. OGBench labels with its simulator, whose size does not depend on the data: the lines
"ogbench" are of a process that has made one before, "+ simulator" of one that has not. Linux only (uses /proc).
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

CHILD = """
import gc, re, sys, time
from pathlib import Path
import numpy as np
from sb3_flow import RQL, OfflineDataset
if sys.argv[1].startswith("ogbench:"):
    import gymnasium, ogbench
    if not sys.argv[4]:
        gymnasium.make("puzzle-3x3-singletask-v0").reset()
def memory(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
ends = np.arange(10) == 9
tiny = OfflineDataset.from_arrays(np.zeros((10, int(sys.argv[2]))), np.zeros((10, 5)), np.zeros(10), ends, ends)
small = {"n_critics": 2, "policy_kwargs": {"net_arch": [64]}, "buffer_size": 1}
model = RQL("MlpPolicy", None, horizon_length=5, offline_dataset=tiny, **small)
model.learn_offline(tiny, 1)
mmap_dir = sys.argv[3] or None
gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = memory("VmRSS")
start = time.perf_counter()
data = OfflineDataset.load(sys.argv[1], mmap_dir=mmap_dir)
loaded = time.perf_counter() - start
model.learn_offline(data, 1)
ready = time.perf_counter() - start
peak = memory("VmHWM")
arrays = [data.observations, data.final_observations, data.actions, data.rewards, data.terminated, data.trajectory_ends]
size = sum(array.nbytes for array in arrays)
kind = sys.argv[1].split(":")[0] + (" -> mmap" if mmap_dir else "") + sys.argv[4]
print(f"{kind:30} {len(data):9d} rows {size / 1e6:7.1f} MB  loaded {loaded:5.2f} s  first update done {ready:5.2f} s"
      f"  peak +{(peak - before) / 1024:6.1f} MiB  ratio {(peak - before) * 1024 / size:.2f}")
"""


def save(path: Path, arrays: dict[str, np.ndarray], compression: int) -> None:
    """Write the arrays as an .npz file."""
    with zipfile.ZipFile(path, "w", compression, compresslevel=1) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, array)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--observations", type=int, default=55)
    parser.add_argument("--compressed", action="store_true", help="as OGBench's own files are; reading is slower")
    args = parser.parse_args()
    compression = zipfile.ZIP_DEFLATED if args.compressed else zipfile.ZIP_STORED
    rng = np.random.default_rng(0)
    episodes = max(1, args.rows // 1000)
    extra = np.zeros((episodes, 1001), bool)
    extra[:, -1] = True
    rows = extra.size
    observations = rng.standard_normal((rows, args.observations), dtype=np.float32)
    actions = rng.uniform(-1, 1, (rows, 5)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        raw, plain = Path(folder, "raw.npz"), Path(folder, "plain.npz")
        qpos = rng.standard_normal((rows, 23), dtype=np.float32)
        arrays = {"observations": observations, "actions": actions, "terminals": extra.reshape(-1), "qpos": qpos, "qvel": qpos}
        save(raw, {**arrays, "button_states": rng.integers(0, 2, (rows, 9))}, compression)
        ends = np.zeros(rows, bool)
        ends[999::1000] = True
        arrays = {"observations": observations, "actions": actions, "rewards": observations[:, 0]}
        save(plain, {**arrays, "terminated": np.zeros(rows, bool), "trajectory_ends": ends}, compression)
        del observations, actions, qpos, arrays
        ogbench = f"ogbench:puzzle-3x3-play-singletask-v0@{raw}"
        kinds = (f"npz:{plain}", ""), (ogbench, ""), (ogbench, " + simulator")
        for (i, (location, extra)), mapped in itertools.product(enumerate(kinds), (False, True)):
            mmap_dir = f"{folder}/mapped-{i}" if mapped else ""
            command = [sys.executable, "-W", "ignore", "-c", CHILD, location, str(args.observations), mmap_dir, extra]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
