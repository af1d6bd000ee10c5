"""
Environment steps per second of a whole ``learn()``: SB3, SBX, rlox and ours, the same hyperparameters, one thread each.

Run by hand: ``python -m tests.benchmarks.ppo_throughput --rounds 5 [--sbx-python venv/bin/python]``. Every program runs in a
process of its own, and processes alternate within a round, so that all of them see the same machine; each learns once for a
few iterations (imports, compilation) before the clock starts. SBX needs JAX, and runs in an environment of its own
(``pip install sbx-rl``) whose Python is named by ``--sbx-python``; rlox is in the ``[dev]`` extra
and steps a CartPole of its own.
Printed are medians over the rounds, and ratios of them.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

SETTINGS = {
    "CartPole-v1, 8 envs, SB3's defaults (2048, 64, 10)": ("CartPole-v1", 8, 2048, 64, 10, 2),
    "CartPole-v1, 8 envs (128, 256, 4)": ("CartPole-v1", 8, 128, 256, 4, 60),
    "HalfCheetah-v5, 8 envs (256, 64, 10)": ("HalfCheetah-v5", 8, 256, 64, 10, 10),
    "HalfCheetah-v5, 1 env, SB3's defaults (2048, 64, 10)": ("HalfCheetah-v5", 1, 2048, 64, 10, 5),
}

# executed in a fresh interpreter with `name, env_id, n_envs, n_steps, batch_size, n_epochs, iterations` defined
PROGRAM = """
import json, time
settings = dict(n_steps=n_steps, batch_size=batch_size, n_epochs=n_epochs)
steps = n_envs * n_steps * iterations
if name == "rlox":
    import torch
    torch.set_num_threads(1)
    from rlox.algorithms.ppo import PPO
    PPO(env_id, n_envs=n_envs, seed=0, learning_rate=3e-4, **settings).train(n_envs * n_steps)
    model = PPO(env_id, n_envs=n_envs, seed=0, learning_rate=3e-4, **settings)
    start = time.perf_counter()
    model.train(steps)
else:
    from stable_baselines3.common.env_util import make_vec_env
    if name == "SBX":
        from sbx import PPO
    elif name == "SB3":
        from stable_baselines3 import PPO
    elif name == "ours, asynchronous":
        from sb3_flow import AsyncPPO as PPO
    else:
        from sb3_flow import PPO
    if name.startswith("ours"):
        settings["backend"] = "torch" if name == "ours, torch" else "native"
    if name != "SBX":
        import torch
        torch.set_num_threads(1)
        settings["device"] = "cpu"
    model = PPO("MlpPolicy", make_vec_env(env_id, n_envs=n_envs, seed=0), seed=0, **settings)
    model.learn(n_envs * n_steps)
    start = time.perf_counter()
    model.learn(steps)
print(json.dumps(steps / (time.perf_counter() - start)))
"""


def run(python: str, name: str, values: tuple) -> float:
    """:return: environment steps per second"""
    names = ("env_id", "n_envs", "n_steps", "batch_size", "n_epochs", "iterations")
    header = "\n".join(f"{key} = {value!r}" for key, value in zip(("name", *names), (name, *values), strict=True))
    guarded = header + "\nif __name__ == '__main__':\n" + "\n".join("    " + line for line in PROGRAM.splitlines())
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS", "RAYON", "NUMBA")}
    environment = {**os.environ, **threads, "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"}
    done = subprocess.run([python, "-c", guarded], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:  # the other programs' figures are not lost
        print(f"{name}: {done.stderr[-500:]}", file=sys.stderr, flush=True)
        return float("nan")
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settings", type=int, nargs="+", default=range(len(SETTINGS)), help="numbers of the settings")
    parser.add_argument("--programs", nargs="+", default=["SB3", "SBX", "rlox", "ours, torch", "ours", "ours, asynchronous"])
    parser.add_argument("--sbx-python", default=None, help="of an environment with sbx-rl")
    arguments = parser.parse_args()
    programs = [name for name in arguments.programs if name != "SBX" or arguments.sbx_python]
    for number in arguments.settings:
        title, values = list(SETTINGS.items())[number]
        found: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(arguments.rounds):
            for name in programs:
                found[name].append(run(arguments.sbx_python if name == "SBX" else sys.executable, name, values))
        medians = {name: statistics.median(numbers) for name, numbers in found.items()}
        base = medians.get("SB3", next(iter(medians.values())))
        print(f"\n{title}: environment steps per second, median of {arguments.rounds} rounds", flush=True)
        for name, median in medians.items():
            spread = f"{min(found[name]):.0f} to {max(found[name]):.0f}"
            print(f"  {name:<20} {median:9.0f}   {median / base:5.2f} x SB3   ({spread})", flush=True)


if __name__ == "__main__":
    main()
