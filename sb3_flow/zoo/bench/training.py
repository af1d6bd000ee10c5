"""A run of the bench: a task, an algorithm and a seed, trained offline and online and evaluated on the way; resumable."""

import json
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import configure
from stable_baselines3.common.type_aliases import PolicyPredictor
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, sync_envs_normalization

from sb3_flow.common.episodes import play
from sb3_flow.data import OfflineDataset
from sb3_flow.offline_to_online import OfflineToOnlineAlgorithm
from sb3_flow.version import __version__
from sb3_flow.zoo.bench.suites import Plan
from sb3_flow.zoo.registry import ALGORITHMS

EVALUATION_ENVS = 10
SPACING = 1_000
"""Between the first evaluation environments of two seeds: the others count on from them."""


@dataclass
class Progress:
    """
    What a checkpoint says besides the model.

    :param steps: of the evaluations, gradient steps offline, and environment steps online counted on from their end
    :param scores: mean success of the evaluations (mean return without ``is_success``)
    :param seconds: wall-clock time so far, of training and evaluating
    :param plan: ``Plan.decided`` of the run
    """

    plan: str
    steps: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    seconds: float = 0.0


def run(plan: Plan, folder: Path, dataset: str) -> dict[str, Any]:
    """
    Make a run, or go on from its last checkpoint, and give its row. Checkpoints are made at evaluations. A run that was killed
    gives the same row as a run that was not, but for its time.

    :param plan: the run
    :param folder: of the run's checkpoints
    :param dataset: location of the data
    :return: the row, see ``sb3_flow.zoo.bench.results.COLUMNS``
    :raises ValueError: if the folder has a checkpoint that was made with other settings
    """
    data = OfflineDataset.load(dataset)
    model, progress, saved = _begin(plan, folder, data)
    offline_steps = plan.offline_steps if plan.offline else 0
    evaluations = environment(plan, min(EVALUATION_ENVS, plan.n_final_episodes), training=False)
    while True:
        began = time.monotonic()
        offline = model.offline_updates < offline_steps
        done, until = (model.offline_updates, offline_steps) if offline else (model.num_timesteps, plan.online_steps)
        if done >= until:
            break
        steps = min(plan.eval_freq, until - done)
        np.random.seed((plan.seed, int(offline), done))  # OGBench draws from NumPy's global generator
        if offline:
            model.learn_offline(data, steps, log_interval=None)
        else:
            env = model.get_env()
            assert env is not None
            env.seed(plan.seed + done)
            model.set_env(env)  # begins an episode, as after a checkpoint
            model.learn(steps, log_interval=10**9, reset_num_timesteps=False)
        final = done + steps >= until
        if isinstance(evaluations, VecNormalize):
            sync_envs_normalization(model.get_env(), evaluations)  # type: ignore[arg-type]
        score = evaluate(model, evaluations, plan.n_final_episodes if final else plan.n_eval_episodes, plan.seed)
        progress.steps.append(done + steps + (0 if offline else offline_steps))
        progress.scores.append(score)
        progress.seconds += time.monotonic() - began
        saved = _save(model, progress, folder, saved, plan)
    row = _row(plan, progress, offline_steps, len(data))
    evaluations.close()
    return row


def _row(plan: Plan, progress: Progress, offline_steps: int, rows: int) -> dict[str, Any]:
    at = dict(zip(progress.steps, progress.scores, strict=True))
    return {
        "task": plan.task,
        "algorithm": plan.algorithm,
        "seed": plan.seed,
        "offline": at.get(offline_steps, ""),
        "online": at[offline_steps + plan.online_steps] if plan.online_steps else "",
        "steps": " ".join(map(str, progress.steps)),
        "scores": " ".join(f"{score:g}" for score in progress.scores),
        "rows": rows,
        "minutes": round(progress.seconds / 60, 2),
        "version": __version__,
        "plan": plan.decided,
    }


def _begin(plan: Plan, folder: Path, data: OfflineDataset) -> tuple[OfflineToOnlineAlgorithm, Progress, Path | None]:
    """Load the last checkpoint, or make a model."""
    algorithm: Any = ALGORITHMS[plan.algo]
    env = environment(plan, 1, training=True)
    whole = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    if not whole:
        model = algorithm(_policy(env), env, seed=plan.seed, device="auto", **plan.settings)
        progress, saved = Progress(plan.decided), None
    else:
        saved = whole[-1]
        progress = Progress(**{"plan": "", **json.loads((saved / "progress.json").read_text())})
        if progress.plan != plan.decided:
            there = progress.plan or "not recorded"
            raise ValueError(
                f"The checkpoint {saved} was made with other settings ({there} there, {plan.decided} now): remove {folder}, "
                "or give another --out."
            )
        if isinstance(env, VecNormalize):
            env = VecNormalize.load(str(saved / "vecnormalize.pkl"), env.venv)
        model = algorithm.load(saved / "model.zip", env=env)
        if (saved / "replay_buffer.pkl").exists():
            model.load_replay_buffer(saved / "replay_buffer.pkl")
    model.set_logger(configure(None, []))
    model.set_offline_dataset(data)
    return model, progress, saved


def _save(model: OfflineToOnlineAlgorithm, progress: Progress, folder: Path, before: Path | None, plan: Plan) -> Path:
    """
    Write a checkpoint, which is there as a whole or not at all, and remove the one before, unless a phase ended there. A
    finished run needs no replay buffer.
    """
    final = folder / f"checkpoint-{progress.steps[-1]}"
    new = folder / f".{final.name}"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    model.save(new / "model.zip")
    if 0 < model.num_timesteps < plan.online_steps:
        model.save_replay_buffer(new / "replay_buffer.pkl")
    normalizer = model.get_vec_normalize_env()
    if normalizer is not None:
        normalizer.save(str(new / "vecnormalize.pkl"))
    (new / "progress.json").write_text(json.dumps(vars(progress)))
    new.rename(final)
    end_of_phase = plan.offline and before is not None and before.name == f"checkpoint-{plan.offline_steps}"
    if before is not None and not end_of_phase:
        shutil.rmtree(before)
    return final


def _policy(env: VecEnv) -> str:
    shape = env.observation_space.shape
    return "MultiInputPolicy" if shape is None else "CnnPolicy" if len(shape) == 3 else "MlpPolicy"


def environment(plan: Plan, n_envs: int, training: bool) -> VecEnv:
    """
    Make the environments of a run. Those that normalise observations have no statistics yet.

    :param plan: the run
    :param n_envs: their number
    :param training: whether statistics follow what the environments give
    """
    env = make_vec_env(plan.task, n_envs=n_envs, seed=plan.seed)
    return VecNormalize(env, training=training, norm_reward=False) if plan.normalize else env


def evaluate(policy: PolicyPredictor, env: VecEnv, episodes: int, seed: int) -> float:
    """
    Give the mean success of episodes in which the policy draws fresh noise, as papers evaluate; else the mean return.

    :param policy: decides
    :param env: the environments, with the statistics that the policy was trained with
    :param episodes: their number, of all environments together
    :param seed: of the tasks; models draw noise from their own generators, which are saved
    """
    np.random.seed(seed)  # OGBench draws from NumPy's global generator
    env.seed(SPACING * seed)
    returns, success_rate = play(policy, env, episodes, deterministic=False)
    return float(np.mean(returns)) if success_rate is None else success_rate
