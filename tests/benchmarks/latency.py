"""
Time of one action on the CPU: SB3's SAC and every way of acting of ours, with the same hidden layers.

Run by hand: ``python tests/benchmarks/latency.py --threads 1``; with ``--exported`` the policies' ONNX files, run by
onnxruntime from the same observation and given noise, stand beside ``predict``. Calls alternate between the policies, so that
all of them see the same machine; medians, and their ratios.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import SAC

from sb3_flow import DSRL, FMQ, FQL, QAM, RLPD, RQL, export


class Spaces(gym.Env):
    """An environment that is never stepped."""

    observation_space = spaces.Box(-1, 1, (55,))
    action_space = spaces.Box(-1, 1, (5,))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        return np.zeros(55, np.float32), {}


def exported(model: Any, observation: np.ndarray, threads: int) -> Callable[[], object]:
    """:return: a decision of the model's exported file"""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder:
        export(model, f"{folder}/policy.onnx")
        session = onnxruntime.InferenceSession(f"{folder}/policy.onnx", options)
    shapes = {each.name: (1, *each.shape[1:]) for each in session.get_inputs()}
    inputs = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    return lambda: session.run(None, inputs | {"observation": observation[None]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--exported", action="store_true")
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 256])
    arguments = parser.parse_args()
    th.set_num_threads(arguments.threads)

    def build(algorithm: Any, **settings: Any) -> Any:
        policy_kwargs = {"net_arch": arguments.hidden}  # not shared: SAC writes into its own
        return algorithm("MlpPolicy", Spaces(), policy_kwargs=policy_kwargs, device="cpu", seed=0, **settings)

    models = {
        "SAC (SB3)": build(SAC),
        "FMQ, one step": build(FMQ, acting_mode="sample"),
        "RQL, 10 steps": build(RQL, flow_steps=10, n_critics=2, acting_mode="sample"),
        "RLPD": build(RLPD),
        "FQL, one step": build(FQL),
        "DSRL, 10 steps": build(DSRL),
        "QAM, 10 steps": build(QAM),
        "FQL, best of 32": build(FQL, actor_type="best_of_n"),
        "FMQ, best of 32": build(FMQ, acting_mode="best_of_n"),
        "FMQ, QGBS": build(FMQ, acting_mode="qgbs"),
    }
    observation = np.zeros(55, np.float32)
    calls: dict[str, Callable[[], object]] = {}
    for name, model in models.items():
        for kind, fixed in (("deterministic", True), ("stochastic", False)):
            calls[f"{name}, {kind}"] = partial(model.predict, observation, deterministic=fixed)
        if arguments.exported and model.__class__ is not SAC and getattr(model, "acting_mode", "") != "qgbs":
            calls[f"{name}, exported"] = exported(model, observation, arguments.threads)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(arguments.calls + 20):
        for name, call in calls.items():
            call()  # so that each finds what it needs in the caches
            start = time.perf_counter()
            call()
            if i >= 20:
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    sac, one_step = medians["SAC (SB3), deterministic"], medians["FMQ, one step, deterministic"]
    print(f"hidden layers {arguments.hidden}, {arguments.threads} thread(s), one observation of 55 numbers")
    print(f"{'':<32} {'us':>7} {'/ SAC':>7} {'/ one step':>11}")
    for name, median in medians.items():
        print(f"{name:<32} {1e6 * median:7.0f} {median / sac:7.2f} {median / one_step:11.2f}")


if __name__ == "__main__":
    main()
