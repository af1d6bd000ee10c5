"""What ``test_ranks.py`` runs on two ranks, and on one rank for comparison: ``python tests/ranks_program.py RANK FOLDER``."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
import torch.distributed as dist
from goal_tasks import Reach, wandering
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from tasks import PointEnv

import sb3_flow.fmq.fmq
import sb3_flow.fql.fql
import sb3_flow.rql.rql
from sb3_flow import DSRL, FMQ, FQL, QAM, RLPD, RQL, HerReplayBuffer, OfflineDataset
from sb3_flow.common import ranks

STEPS, BATCH = 4, 12
# a small epsilon would turn rounding errors of gradients near zero into whole steps
COMMON = {"batch_size": BATCH, "learning_rate": 0.01, "gamma": 0.9, "horizon_length": 2, "tau": 0.1}
COMMON["policy_kwargs"] = {"net_arch": [16, 16], "optimizer_kwargs": {"eps": 1e-2}}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "rql": (RQL, {"n_critics": 3}),
    "rql-bc": (RQL, {"n_critics": 2, "objective": "bc", "backend": "torch"}),
    "fql": (FQL, {"normalize_q_loss": True}),
    "fql-best": (FQL, {"actor_type": "best_of_n", "n_candidates": 3, "backend": "torch"}),
    "fmq": (FMQ, {"n_candidates": 3, "warmup_steps": 1, "anneal_end_step": 2}),
    "fmq-online": (FMQ, {"n_candidates": 3, "diagonal_weight": 0.5, "reanchor_every": 2}),
    "rlpd": (RLPD, {"policy_delay": 2, "bc_alpha": 0.1, "n_critics": 3}),
    "dsrl": (DSRL, {"n_critics": 2, "n_candidates": 2}),
    "qam": (QAM, {"n_critics": 2, "edit_scale": 0.1, "max_grad_norm": 0.1}),
    "hindsight": (FQL, {"replay_buffer_class": HerReplayBuffer}),
}


def data(seed: int = 0) -> OfflineDataset:
    rng, n = np.random.default_rng(seed), 200
    ends = np.arange(n) % 20 == 19
    spaces = {"observation_space": PointEnv().observation_space, "action_space": PointEnv().action_space}
    observations, actions = rng.normal(size=(n, 2)).astype(np.float32), rng.uniform(-2, 2, (n, 2)).astype(np.float32)
    return OfflineDataset.from_arrays(observations, actions, rng.normal(size=n), ends, ends, **spaces)


def data_of(case: str) -> OfflineDataset:
    return wandering(10) if case == "hindsight" else data()


def build(case: str, rank: int = 0, **changed: Any) -> Any:
    """Make the model of a case; other ranks have another seed and other statistics, which the first rank's replace."""
    algorithm, options = CASES[case]
    env = None
    if case == "rlpd":
        env = VecNormalize(DummyVecEnv([lambda: PointEnv()]))
        env.obs_rms.mean, env.obs_rms.var, env.obs_rms.count = np.array([0.3 + rank, -0.2]), np.array([2.0, 0.5]), 10.0
    elif case == "hindsight":
        env = DummyVecEnv([Reach])
    given = {**COMMON, **options, **changed}
    policy = "MultiInputPolicy" if case == "hindsight" else "MlpPolicy"
    return algorithm(policy, env, offline_dataset=data_of(case), device="cpu", seed=rank or 5, **given)


def weights(model: Any) -> dict[str, th.Tensor]:
    return {name: value.clone() for name, value in model.policy.state_dict().items()}


def run(case: str, folder: Path, rank: int = 0) -> dict[str, th.Tensor]:
    """Train, and leave the metrics in a file."""
    model = build(case, rank)
    model.set_logger(configure(str(folder / case), ["json"] if rank == 0 else []))
    if case == "fmq-online":
        model.learn_offline(data(), 1, log_interval=1)
        model._start_online()
        model.train(STEPS, BATCH)
    else:
        model.learn_offline(data_of(case), STEPS, log_interval=STEPS)
    return weights(model)


class Stop(BaseCallback):
    """Stops in the third step."""

    def _on_step(self) -> bool:
        return self.n_calls < 3


def resumed(folder: Path, rank: int) -> dict[str, th.Tensor]:
    model = build("rql", rank).learn_offline(data(), 2)
    if rank == 0:
        model.save(folder / "half")
    dist.barrier()
    model = RQL.load(folder / "half", device="cpu")
    assert model.offline_updates == 2
    return weights(model.learn_offline(data(), STEPS - 2))


def first_rows(values: Any, dim: int = 0) -> Any:
    """A mistake: every rank has its rows of the batch, but the first rows of the noise."""
    own = ranks.own_rows(values, dim)
    if not isinstance(values, tuple):
        return values.narrow(dim, 0, own.shape[dim])
    return tuple(one if hasattr(one, "_fields") else whole[: len(one)] for one, whole in zip(own, values, strict=True))


BROKEN: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    "broken-rql": ("rql", sb3_flow.rql.rql, "own_rows", first_rows),
    "broken-fql": ("fql", sb3_flow.fql.fql, "mean_over_ranks", lambda mean: mean),
    "broken-fmq": ("fmq-online", sb3_flow.fmq.fmq, "mean_over_ranks", lambda mean: mean),
}


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, RuntimeError, FloatingPointError) as error:
        return str(error)
    return "nothing was raised"


def end_in_the_middle(rank: int) -> str:
    """The last rank is killed in its third step."""
    model = build("rql", rank)
    train = model.train

    def train_or_end(*args: Any, **kwargs: Any) -> None:
        if rank == 1 and model.num_timesteps == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        train(*args, **kwargs)

    model.train = train_or_end
    return refusal(lambda: model.learn_offline(data(), STEPS))


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    th.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    found: dict[str, Any] = {case: run(case, folder / "two", rank) for case in CASES}
    found["resumed"] = resumed(folder, rank)
    for name, (case, module, function, mistake) in BROKEN.items():
        right = getattr(module, function)
        setattr(module, function, mistake)
        found[name] = run(case, folder / name, rank)
        setattr(module, function, right)
    stop = Stop()
    stopped = build("rql", rank).learn_offline(data(), STEPS, callback=stop)
    th.save(found, folder / f"weights{rank}.pt")
    told = {
        "stopped": [stopped.offline_updates, stop.n_calls],
        "shares": refusal(lambda: build("rql", rank, batch_size=5).learn_offline(data(), 1)),
        "steps": refusal(lambda: build("rql", rank).learn_offline(data(), 1 + rank)),
        "arguments": refusal(lambda: build("rql", rank, alpha=1.0 + rank).learn_offline(data(), 1)),
        "data": refusal(lambda: build("rql", rank).learn_offline(data(seed=rank), 1)),
        "online": refusal(lambda: build("rql", rank, offline_steps=1).learn(5)),
        "ended": end_in_the_middle(rank),
    }
    (folder / "told.json").write_text(json.dumps(told))  # by the first rank: the other has ended
    os._exit(0)  # torch's threads to the ended rank may abort this process while the interpreter ends


def run_on_two(program, folder):
    """Start a program of this folder as rank 0 and as rank 1, and wait; the last thing that rank 1 does is to be killed."""
    command = [sys.executable, str(Path(__file__).with_name(program))]
    with (folder / "output").open("w") as output:
        processes = [subprocess.Popen([*command, str(rank), str(folder)], stdout=output, stderr=output) for rank in (0, 1)]
        try:
            codes = [process.wait(timeout=120) for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert codes == [0, -9], (folder / "output").read_text()


if __name__ == "__main__":
    main()
