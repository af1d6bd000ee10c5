"""
What a file is worth when the process is killed while it is written: SIGKILL at random moments of ``save``.

Run by hand: ``python -m tests.benchmarks.kill_during_save [--kills 50] [--models PPO GRPO RecurrentPPO RQL]``. There is a
file of a model already; a process saves a changed model to the same path and is killed, at a moment that is drawn uniformly
from twice the time that a save takes; then the file is loaded. Printed are the loads that found the previous model, the new
one, and neither, and how many kills struck while the new file was being written. SB3's own PPO, which writes in place, is
there for comparison.
"""

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import stable_baselines3
import torch as th
from gymnasium import spaces

import sb3_flow
from sb3_flow.offline_to_online.offline_env import SpacesOnlyVecEnv

MODELS = ("PPO", "GRPO", "RecurrentPPO", "RQL", "MaskablePPO", "GSPO", "AsyncPPO", "FMQ", "FQL", "RLPD", "DSRL")


def build(name: str) -> Any:
    """:return: a model with networks large enough that writing them takes a while"""
    observations = spaces.Box(-1, 1, (24,), np.float32)
    actions = spaces.Discrete(4) if name == "MaskablePPO" else spaces.Box(-1, 1, (6,), np.float32)
    env = SpacesOnlyVecEnv(observations, actions)
    kwargs: dict[str, Any] = {"device": "cpu", "policy_kwargs": {"net_arch": [256, 256]}}
    if name in ("GRPO", "GSPO"):
        kwargs |= {"group_by": "none"}
        env.num_envs = 2
    policy = "MlpLstmPolicy" if name == "RecurrentPPO" else "MlpPolicy"
    kwargs |= {"buffer_size": 1000} if name in ("RQL", "FMQ", "FQL", "RLPD", "DSRL") else {"n_steps": 8, "batch_size": 8}
    return getattr(stable_baselines3 if name == "SB3" else sb3_flow, "PPO" if name == "SB3" else name)(policy, env, **kwargs)


def outcome(model: Any, path: Path, delay: float) -> tuple[str, bool]:
    """
    :param model: whose ``num_timesteps`` tells the previous file (1) from the new one (2)
    :param path: of the file
    :param delay: seconds from the beginning of the save to the kill
    :return: what the file is after the kill, and whether the kill struck while the new one was being written
    """
    model.num_timesteps = 1
    model.save(path)
    model.num_timesteps = 2
    begun_read, begun = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begun, b"x")
        model.save(path)
        time.sleep(60)
        os._exit(0)
    os.read(begun_read, 1)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(begun_read)
    os.close(begun)
    unfinished = (path.parent / f".{path.name}.tmp").exists()
    try:
        steps = type(model).load(path, device="cpu").num_timesteps
    except Exception as error:
        return f"neither ({type(error).__name__})", unfinished
    return {1: "previous", 2: "new"}[steps], unfinished


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--models", nargs="+", choices=(*MODELS, "SB3"), default=["PPO", "GRPO", "RecurrentPPO", "RQL", "SB3"])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    th.set_num_threads(1)  # the children are forks
    moments = random.Random(arguments.seed)
    for name in arguments.models:
        model = build(name)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.zip"
            times = []
            for _ in range(5):
                begin = time.perf_counter()
                model.save(path)
                times.append(time.perf_counter() - begin)
            longest = max(times[1:])
            found = [outcome(model, path, moments.uniform(0, 2 * longest)) for _ in range(arguments.kills)]
        counts = Counter(what for what, _ in found)
        neither = ", ".join(f"{count} {what}" for what, count in counts.items() if what.startswith("neither"))
        print(
            f"{'SB3 PPO' if name == 'SB3' else name:<13} {arguments.kills} kills in {2000 * longest:.0f} ms: loaded the "
            f"previous model {counts['previous']}, the new one {counts['new']}, {neither or '0 neither'}"
            + ("" if name == "SB3" else f"; {sum(one for _, one in found)} struck while the new file was being written"),
            flush=True,
        )


if __name__ == "__main__":
    main()
