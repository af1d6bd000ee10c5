"""
Time of GAE and V-trace: SB3's rollout buffer, rlox, stateset_rl_core, TorchRL (if installed), ours, and a copy of the bytes.

Run by hand: ``OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1 python tests/benchmarks/advantages.py``. Calls alternate between the
implementations, so that all of them see the same machine; medians in microseconds, Python's call and all checks included.
float32, 1 % of the steps end an episode. stateset_rl_core computes in float64, knows neither ends of episodes nor returns;
rlox's V-trace takes one environment at a time. Layouts are each library's own, prepared beforehand. The floor moves 20 bytes
per entry (three arrays read, two written).
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import rlox
import stateset_rl_core
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer

from sb3_flow.kernels import compute_gae, compute_gae_sb3, compute_vtrace

try:
    from torchrl.objectives.value import functional as torchrl
except ImportError:
    torchrl = None

SHAPES = ((2048, 1), (2048, 8), (128, 64), (1024, 256))
GAMMA, LAMBDA = 0.99, 0.95
PEERS = ("SB3", "rlox", "stateset", "TorchRL")
Calls = dict[str, Callable[[], object]]


def copy_floor(n_steps: int, n_envs: int) -> Callable[[], object]:
    source = np.ones(10 * n_steps * n_envs, np.uint8)
    return partial(np.copyto, np.ones_like(source), source)


def arrays(n_steps: int, n_envs: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shape = (n_steps, n_envs)
    ends = rng.random((n_steps + 1, n_envs)) < 0.01
    return {
        "rewards": rng.standard_normal(shape).astype(np.float32),
        "values": rng.standard_normal(shape).astype(np.float32),
        "log_rhos": (0.2 * rng.standard_normal(shape)).astype(np.float32),
        "starts": ends[:-1].astype(np.float32),
        "dones": ends[1:],
        "last_values": rng.standard_normal(n_envs).astype(np.float32),
    }


def torch_arguments(a: dict[str, Any]) -> tuple[th.Tensor, ...]:
    """TorchRL's layout is (N, T, 1): values, those of the successors, rewards, ends."""
    following = np.concatenate([a["values"][1:], a["last_values"][None]])
    columns = (a["values"], following, a["rewards"], a["dones"])
    return tuple(th.as_tensor(np.ascontiguousarray(x.T))[..., None] for x in columns)


def gae_calls(a: dict[str, Any]) -> Calls:
    n_steps, n_envs = a["rewards"].shape
    box = spaces.Box(-1, 1, (1,))
    buffer = RolloutBuffer(n_steps, box, box, gae_lambda=LAMBDA, gamma=GAMMA, n_envs=n_envs)
    buffer.rewards, buffer.values, buffer.episode_starts = a["rewards"], a["values"], a["starts"]
    flat = [np.ascontiguousarray(a[name].T, np.float32).ravel() for name in ("rewards", "values", "dones")]
    longer = np.concatenate([a["values"], a["last_values"][None]]).astype(np.float64)
    lists = [[np.ascontiguousarray(x[:, n]) for n in range(n_envs)] for x in (a["rewards"].astype(np.float64), longer)]
    stateset: Callable[[], object] = partial(stateset_rl_core.batch_compute_gae, *lists, GAMMA, LAMBDA)
    if n_envs == 1:
        stateset = partial(stateset_rl_core.compute_gae, lists[0][0], lists[1][0], GAMMA, LAMBDA)
    factors = {"gamma": GAMMA, "gae_lambda": LAMBDA}
    ours = {"last_values": a["last_values"], **factors}
    nowhere = np.zeros_like(a["dones"])
    sb3_form = a["rewards"], a["values"], a["starts"], a["last_values"], a["dones"][-1], GAMMA, LAMBDA
    calls: Calls = {
        "SB3": partial(buffer.compute_returns_and_advantage, th.as_tensor(a["last_values"]), a["dones"][-1]),
        "rlox": partial(rlox.compute_gae_batched_f32, *flat, a["last_values"], n_steps, GAMMA, LAMBDA),
        "stateset": stateset,
        "ours": partial(compute_gae, a["rewards"], a["values"], terminated=a["dones"], **ours),
        "ours, time limits": partial(
            compute_gae,
            a["rewards"],
            a["values"],
            terminated=nowhere,
            truncated=a["dones"],
            final_values=a["values"],
            **ours,
        ),
        "ours, SB3's bits": partial(compute_gae_sb3, *sb3_form),
    }
    if torchrl is not None:
        calls["TorchRL"] = partial(torchrl.vec_generalized_advantage_estimate, GAMMA, LAMBDA, *torch_arguments(a))
    return calls


def vtrace_calls(a: dict[str, Any]) -> Calls:
    columns = [np.ascontiguousarray(a[name].T, np.float32) for name in ("log_rhos", "rewards", "values", "dones")]

    def rlox_columns() -> list[object]:
        return [
            rlox.compute_vtrace(*(x[n] for x in columns), last, GAMMA, 1.0, 1.0)
            for n, last in enumerate(a["last_values"].tolist())
        ]

    ours = {"last_values": a["last_values"], "terminated": a["dones"], "gamma": GAMMA}
    calls: Calls = {
        "rlox": rlox_columns,
        "ours": partial(compute_vtrace, a["log_rhos"], a["rewards"], a["values"], **ours),
    }
    if torchrl is not None:
        log_rhos = th.as_tensor(columns[0])[..., None]
        calls["TorchRL"] = partial(
            torchrl.vtrace_advantage_estimate, GAMMA, log_rhos, th.zeros_like(log_rhos), *torch_arguments(a)
        )
    return calls


def medians(calls: Calls, seconds: float) -> dict[str, float]:
    """In microseconds; slow calls are made less often."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(3):
        for call in calls.values():
            call()
    end = time.perf_counter() + seconds
    rounds = 0
    while time.perf_counter() < end or rounds < 10:
        for name, call in calls.items():
            past = times[name]
            if rounds % 50 == 0 or past[0] < 2e-3:
                start = time.perf_counter()
                call()
                past.append(time.perf_counter() - start)
        rounds += 1
    return {name: 1e6 * statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="per cell")
    seconds = parser.parse_args().seconds
    th.set_num_threads(1)
    for title, build in (("GAE", gae_calls), ("V-trace", vtrace_calls)):
        for shape in SHAPES:
            calls = build(arrays(*shape))
            results = medians({**calls, "copy floor": copy_floor(*shape)}, seconds)
            ours, peers = results["ours"], {name: results[name] for name in PEERS if name in results}
            fastest = min(peers, key=lambda name: peers[name])
            print(f"\n{title} {shape}: {ours / results['copy floor']:.1f} x floor, ", end="")
            print(f"{peers[fastest] / ours:.2f} x as fast as the fastest peer ({fastest})")
            for name, median in results.items():
                print(f"  {name:<20} {median:10.2f} us {median / ours:10.2f} x ours", flush=True)


if __name__ == "__main__":
    main()
