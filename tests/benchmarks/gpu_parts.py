"""The parts of ``gpu.py``: ``python3 -m tests.benchmarks.gpu_parts rates --dry-run`` runs one by itself."""

import argparse
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import stable_baselines3
import torch as th
from stable_baselines3.common.logger import Logger
from torch.utils.flop_counter import FlopCounterMode

import sb3_flow
from sb3_flow.execution import UpdateRunner
from tests.benchmarks.gpu_setting import ACTION, OBSERVATION, Setting, dataset
from tests.benchmarks.reference_process import Reference, write_transitions
from tests.flow_variants import VARIANTS
from tests.tape import Tape
from tests.torch_cartpole import TorchCartPole

ALGORITHMS = ("RQL", "FMQ", "FQL", "RLPD", "DSRL", "QAM")


def machine(setting: Setting) -> None:
    print(f"torch {th.__version__}, sb3_flow {sb3_flow.__version__}, {platform.processor() or platform.machine()}")
    if setting.dry:
        print("a dry run on the CPU: figures below mean nothing")
        return
    print(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.strip())
    a = th.randn(8192, 8192, device="cuda")
    for precision in ("highest", "high"):
        th.set_float32_matmul_precision(precision)
        rate = setting.rate(lambda n: [a @ a for _ in range(n)], at_once=5)
        print(f"matrix products of 8192 x 8192, float32_matmul_precision {precision}: {2 * 8192**3 * rate / 1e12:.0f} TFLOP/s")
    x = th.randn(2**28, device="cuda")
    print(f"copies: {2 * 4 * 2**28 * setting.rate(lambda n: [x.clone() for _ in range(n)], at_once=5) / 1e12:.2f} TB/s")


def difference(one: Any, other: Any) -> float:
    """:return: the largest distance between the weights of two models, relative to their size"""
    pairs = zip(one.policy.parameters(), other.policy.parameters(), strict=True)
    return max(float((a - b).detach().norm() / (a.detach().norm() + 1e-12)) for a, b in pairs)


def equality(setting: Setting) -> None:
    """Compare graph and eager over 100 updates, and a graph that was saved and loaded in the middle with one that went on."""
    updates = 20 if setting.dry else 100
    small: dict[str, Any] = {"policy_kwargs": {"net_arch": [8, 8] if setting.dry else [256, 256]}, "batch_size": 64}
    print("largest relative distance of weights after", updates, "updates: graph and eager; resumed and uninterrupted")
    for name, (algorithm, options) in VARIANTS.items():
        eager, graph, first = (setting.build(algorithm, kind, **small, **options) for kind in ("eager", "graph", "graph"))
        for model, n in ((eager, updates), (graph, updates), (first, updates // 2)):
            model.train(n, model.batch_size)
        with tempfile.TemporaryDirectory() as folder:
            first.save(Path(folder) / "model")
            resumed = algorithm.load(Path(folder) / "model", device=setting.device)
        resumed.set_logger(Logger(None, []))
        resumed.set_offline_dataset(graph.offline_dataset)
        resumed.replay_buffer.offline_only = True
        if setting.dry:
            resumed._runner = UpdateRunner("graph", resumed.device, recorder=Tape())
        resumed.train(updates - updates // 2, resumed.batch_size)
        streams = [model.random_streams.get_state() for model in (eager, graph, resumed)]
        alike = all(th.equal(streams[0][key][1], other[key][1]) for key in streams[0] for other in streams[1:])
        said = graph._runner.why_eager or "recorded"
        print(f"{name:16} {difference(graph, eager):.1e}  {difference(resumed, graph):.1e}  streams alike: {alike}  {said}")


class Looks(sb3_flow.RQL):
    """An algorithm whose update cannot be recorded."""

    def update(self, batch: Any, generator: th.Generator) -> dict[str, th.Tensor]:
        metrics = super().update(batch, generator)
        return {**metrics, "seen": th.full_like(metrics["target_mean"], metrics["target_mean"].item())}


def recordings(setting: Setting) -> None:
    """Say whether updates are recorded again, fail to be recorded without damage, and whether PPO's steps are its steps."""

    def train(model: Any) -> str:
        model.train(10, 16)
        return str(model._runner.why_eager or "recorded")

    small: dict[str, Any] = {"policy_kwargs": {"net_arch": [8, 8]}, "batch_size": 16}
    first, looks, last = (setting.build(kind, "graph", **small) for kind in (sb3_flow.RQL, Looks, sb3_flow.RQL))
    print("an update:", train(first))
    first.set_parameters(first.get_parameters())
    print("after other parameters:", train(first))
    print("an update that looks at its data:", train(looks))
    if not setting.dry:
        th.cuda.empty_cache()
        numbers = th.rand(3, device="cuda").tolist()
        print("afterwards: default stream", th.cuda.current_stream() == th.cuda.default_stream(), "random numbers", numbers)
    print("the next model:", train(last), "and the first:", train(first))
    found = []
    for execution in ("eager", "graph"):
        env, fused = TorchCartPole(16, setting.device), {"optimizer_kwargs": {"fused": True}}
        given: dict[str, Any] = {"n_steps": 32, "batch_size": 64, "n_epochs": 2, "seed": 0, "policy_kwargs": fused}
        given |= {"backend": "torch", "execution": "auto" if setting.dry else execution, "device": setting.device}
        model = sb3_flow.PPO("MlpPolicy", env, **given)
        if setting.dry and execution == "graph":
            model.recorded_steps.runner = UpdateRunner("graph", model.device, recorder=Tape())
        found.append(model.learn(4 * 16 * 32))
    said = found[1].recorded_steps.runner.why_eager or "recorded"
    print(f"PPO, graph and eager after 4 rollouts: {difference(*found):.1e}  {said}")


def kernels(model: Any, updates: int, setting: Setting) -> tuple[float, float]:
    """:return: kernels of an update, and the share of the time in which the GPU runs one"""
    if setting.dry:
        return float("nan"), float("nan")
    setting.wait()
    with th.profiler.profile(activities=[th.profiler.ProfilerActivity.CUDA]) as profile:
        model.train(updates, model.batch_size)
        setting.wait()
    events = [event for event in profile.events() if event.device_type == th.autograd.DeviceType.CUDA]
    span = max(event.time_range.end for event in events) - min(event.time_range.start for event in events)
    return len(events) / updates, sum(event.time_range.elapsed_us() for event in events) / span


def rates(setting: Setting) -> None:
    """Print updates per second of every algorithm."""
    print(
        "updates per second (eager; graph; graph with TF32), kernels of an update, busy share of the graph, GFLOP, peak memory"
    )
    for size in setting.sizes:
        for algorithm in ALGORITHMS:
            if time.monotonic() > setting.until - 15 and not setting.dry:
                print(f"{size} {algorithm}: left out, no time")
                continue
            found = []
            th.set_float32_matmul_precision("highest")
            eager, graph = (setting.model(algorithm, size, execution) for execution in ("eager", "graph"))
            eager.train(5, eager.batch_size)
            with FlopCounterMode(display=False) as counter:
                eager.train(1, eager.batch_size)
            if not setting.dry:
                th.cuda.reset_peak_memory_stats()
            for model, precision in ((eager, "highest"), (graph, "highest"), (graph, "high")):
                th.set_float32_matmul_precision(precision)
                found.append(setting.rate(lambda n: model.train(n, model.batch_size)))  # noqa: B023
            th.set_float32_matmul_precision("highest")
            number, busy = kernels(graph, 50, setting)
            memory = 0.0 if setting.dry else th.cuda.max_memory_allocated() / 1e9
            print(
                f"{size:5} {algorithm:5} {found[0]:8.0f} {found[1]:8.0f} {found[2]:8.0f}   {number:6.0f} {busy:5.0%} "
                f"{counter.get_total_flops() / 1e9:7.1f} {memory:6.2f} GB  {graph._runner.why_eager or 'recorded'}",
                flush=True,
            )


def jax(setting: Setting) -> None:
    """Print RQL's updates per second beside its published JAX implementation's, at the same precision, in turns."""
    if setting.rql is None:
        print("left out: no checkout was given (--rql)")
        return
    data = dataset(2_000 if setting.dry else 100_000)
    for size in setting.sizes:
        for precision, of_jax in (("highest", "highest"), ("high", "tensorfloat32")):
            th.set_float32_matmul_precision(precision)
            ours = setting.model("RQL", size, "graph", data=data)
            with tempfile.TemporaryDirectory() as folder:
                write_transitions(data, None, Path(folder) / "transitions.npz")
                platforms = {"JAX_PLATFORMS": setting.device, "JAX_DEFAULT_MATMUL_PRECISION": of_jax}
                theirs = Reference(sys.executable, setting.rql, ours, Path(folder) / "transitions.npz", platforms)
                of_theirs = setting.rate(lambda n: theirs.ask("update", n=n))  # noqa: B023
                of_ours = setting.rate(lambda n: ours.train(n, ours.batch_size))  # noqa: B023
                theirs.close()
            print(
                f"{size:5} {precision:8} ours {of_ours:8.0f}  JAX {of_theirs:8.0f}  ratio {of_ours / of_theirs:.2f}",
                flush=True,
            )


def ppo(setting: Setting) -> None:
    """Print steps per second of PPO on environments of the device, beside SB3's PPO through NumPy."""
    for n_envs, batch_size in ((16, 64),) if setting.dry else ((4096, 16384), (1024, 4096), (1024, 512)):
        n_steps = 8 if setting.dry else 32
        given: dict[str, Any] = {
            "n_steps": n_steps,
            "batch_size": batch_size,
            "n_epochs": 4,
            "seed": 0,
            "device": setting.device,
        }
        models = {
            "SB3": stable_baselines3.PPO("MlpPolicy", TorchCartPole(n_envs, setting.device), **given),
            "ours": sb3_flow.PPO("MlpPolicy", TorchCartPole(n_envs, setting.device), **given),
        }
        found = {}
        for name, model in models.items():
            found[name] = setting.rate(
                lambda n: model.learn(n * n_steps * n_envs, reset_num_timesteps=False),  # noqa: B023
                at_once=1,
            ) * (n_steps * n_envs)
        print(
            f"{n_envs} environments, batches of {batch_size}: SB3 {found['SB3']:9.0f} steps/s, ours {found['ours']:9.0f}, "
            f"ratio {found['ours'] / found['SB3']:.2f}",
            flush=True,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PPO on a GPU
        model = sb3_flow.PPO("MlpPolicy", TorchCartPole(64, setting.device), n_steps=32, batch_size=512, device=setting.device)
    since = time.perf_counter()
    model.learn(2_000 if setting.dry else 500_000)
    returns = [one["r"] for one in model.ep_info_buffer] or [0.0]
    print(
        f"learning: mean return {np.mean(returns):.0f} after {model.num_timesteps} steps, {time.perf_counter() - since:.0f} s"
    )


def storage(setting: Setting) -> None:
    """Print RQL's updates per second with steps on the device and in the host's memory, offline and in an online phase."""
    for place in ("device", "cpu"):
        model = setting.model("RQL", "small", "graph", storage=place)
        offline = setting.rate(lambda n: model.train(n, model.batch_size))  # noqa: B023
        online = setting.build(
            sb3_flow.RQL,
            "graph",
            **{"storage": place, "policy_kwargs": {"net_arch": [8, 8] if setting.dry else [256, 256]}},
        )
        env = gym.wrappers.TimeLimit(_Random(), 200)
        online.set_env(env)
        online.replay_buffer.offline_only = False
        online.learn(120)
        steps = setting.rate(lambda n: online.learn(n, reset_num_timesteps=False), at_once=50 if setting.dry else 500)  # noqa: B023
        print(
            f"storage={place}: offline {offline:8.0f} updates/s, online {steps:8.0f} steps/s with an update each", flush=True
        )


class _Random(gym.Env[np.ndarray, np.ndarray]):
    """An environment that costs nothing."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (OBSERVATION,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (ACTION,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.x = self.np_random.normal(size=OBSERVATION).astype(np.float32)
        return self.x, {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self.x, float(action[0]), False, False, {}


def precision(setting: Setting) -> None:
    """Print how far TF32 leads the losses of RQL away from float32, beside another seed of float32."""
    updates = 20 if setting.dry else 2_000
    finals = {}
    for name, kind, seed in (("float32", "highest", 0), ("TF32", "high", 0), ("float32, another seed", "highest", 1)):
        th.set_float32_matmul_precision(kind)
        model = setting.model("RQL", "small", "graph", seed=seed)
        model.train(updates, model.batch_size)
        written: dict[str, float] = {}
        model._metrics.flush(_Recorder(written))
        finals[name] = written
    th.set_float32_matmul_precision("highest")
    for metric in finals["float32"]:
        print(f"{metric:22}" + "  ".join(f"{name}: {found[metric]:9.5f}" for name, found in finals.items()))


class _Recorder(Logger):
    def __init__(self, written: dict[str, float]) -> None:
        super().__init__(None, [])
        self.written = written

    def record(self, key: str, value: Any, exclude: Any = None) -> None:
        self.written[key] = value


def packing(setting: Setting) -> None:
    """Print the updates per second of several processes on one device."""
    subprocess.run([sys.executable, "-m", "tests.benchmarks.packing", "--device", setting.device], check=True)


def main() -> None:
    parts = {part.__name__: part for part in (machine, equality, recordings, rates, jax, ppo, storage, precision, packing)}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=parts)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--rql", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*rows are left out|.*You are trying to run PPO on the GPU|.*shorter")
    parts[given.part](Setting(given))


if __name__ == "__main__":
    main()
