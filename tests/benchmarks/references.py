"""
Our algorithms beside their published JAX implementations: updates per second, and success after training on the same data.

Run by hand: ``python -m tests.benchmarks.references speed --jax-python venv/bin/python --rql rql --qc qc --qam qam``, and
``learn`` likewise. ``--rql``, ``--qc`` and ``--qam`` are checkouts of github.com/aoberai/rql, github.com/ColinQiyangLi/qc (FQL
and best of n with chunks) and github.com/ColinQiyangLi/qam (DSRL, QAM, RLPD); ``--jax-python`` belongs to an environment with
what they import: jax, flax, optax, distrax, ml_collections, einops, tfp-nightly. FMQ is left out: its implementation is not
available.

Settings are those of the bench's suite; the published implementation gets every argument of our model under its own name, the
same transitions, normalised alike, and draws its batches with its own sampler.

``speed``: both take turns on the same cores (``--threads``; pinned where the system can). The ratio is the median over the
turns with its 95 % bootstrap interval, of wall-clock time and of CPU time, which another process disturbs less. More than one
thread needs an idle machine: threads that wait for each other spin while another process has their core.
``learn``: both are trained for the suite's gradient steps and evaluated by the bench's evaluation; with ``--online`` the
suite's environment steps follow, with half of each batch from the data (not for RQL, whose sampler has no such batches).
RLPD has no offline phase, and always makes them. Rows go to ``references.csv`` in ``--out``, and the same command goes on
after it was killed: finished runs are not made again. ``--ours`` takes our rows from results of ``sb3_flow.zoo bench``.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_flow import OfflineDataset
from sb3_flow.common.statistics import bootstrap_interval, success_interval
from sb3_flow.offline_to_online import OfflineToOnlineAlgorithm
from sb3_flow.zoo.bench.command import locate_data
from sb3_flow.zoo.bench.results import PHASES, add_row, read_rows
from sb3_flow.zoo.bench.suites import Plan, Settings, load_suite, plans
from sb3_flow.zoo.bench.training import EVALUATION_ENVS, environment, evaluate, run
from sb3_flow.zoo.registry import ALGORITHMS
from tests.benchmarks.reference_process import Reference, write_transitions

CHECKOUTS = {"rql": "rql", "fql": "qc", "fql-best-of-n": "qc", "dsrl": "qam", "qam": "qam", "rlpd": "qam"}
SETTINGS_OF, OBSERVATION, ACTION = "cube-single-play-singletask-task1-v0", 37, 5  # the dimensions are those of cube-double
NETWORKS: Settings = {"batch_size": 256, "horizon_length": 5, "policy_kwargs": {"net_arch": [256] * 3, "n_critics": 2}}
COLUMNS = ("task", "algorithm", "implementation", "seed", *PHASES, "episodes", "minutes", "plan")
KEY = ("task", "algorithm", "implementation", "seed", "plan")
AT_ONCE = 500
"""Updates of a question; if this process is killed, its worker ends with the question under way."""
OF_EVALUATIONS = ("eval_freq", "n_eval_episodes")
"""What a plan says besides what decides the scores at the ends of the phases."""


def build(plan: Plan, dataset: OfflineDataset) -> OfflineToOnlineAlgorithm:
    """Make our model of a plan, ready for updates on the data."""
    algorithm: Any = ALGORITHMS[plan.algo]
    model: OfflineToOnlineAlgorithm = algorithm(
        "MlpPolicy", None, offline_dataset=dataset, device="cpu", seed=plan.seed, **plan.settings
    )
    model.set_logger(configure(None, []))
    model.set_offline_dataset(dataset)
    return model


@contextmanager
def reference(
    given: argparse.Namespace, plan: Plan, model: OfflineToOnlineAlgorithm, dataset: OfflineDataset, env: VecEnv | None
) -> Iterator[Reference]:
    """Start the published implementation of a plan, and end it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "transitions.npz"
        write_transitions(dataset, env, file)
        checkout = getattr(given, CHECKOUTS[plan.algorithm])
        theirs = Reference(given.jax_python, checkout, model, file)
        try:
            yield theirs
        finally:
            theirs.close()


def speed(given: argparse.Namespace) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.threads])  # the worker inherits this
    n, rng = 100_000, np.random.default_rng(0)
    observations = rng.normal(size=(n, OBSERVATION)).astype(np.float32)
    dataset = OfflineDataset.from_arrays(
        observations,
        rng.uniform(-1, 1, size=(n, ACTION)).astype(np.float32),
        rng.normal(size=n),
        np.zeros(n, bool),
        np.arange(n) % 1000 == 999,
        np.roll(observations, -1, axis=0),
    )
    print(
        f"{given.threads} threads, {given.turns} turns of {given.updates} updates, {OBSERVATION}-dim observations, {NETWORKS}"
    )
    suite = load_suite(given.suite)
    for algorithm in given.algorithms:
        (plan,) = plans(suite, [SETTINGS_OF], [algorithm], [0])
        settings = {**plan.settings, **NETWORKS}
        settings.pop("flow_steps", None)  # the published 10 is the default
        plan = dataclasses.replace(plan, settings=settings)
        ours = build(plan, dataset)
        ours.train(3, ours.batch_size)  # compiles the kernels
        turns: list[tuple[float, float, float, float]] = []
        with reference(given, plan, ours, dataset, None) as theirs:
            for turn in range(given.turns + 1):
                wall, cpu = time.perf_counter(), time.process_time()
                ours.train(given.updates, ours.batch_size)
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                answer = theirs.ask("update", n=given.updates)
                if turn > 0:  # the first warms up
                    turns.append((wall, answer["seconds"], cpu, answer["cpu_seconds"]))
        of_ours, of_theirs = ([given.updates / turn[i] for turn in turns] for i in (0, 1))
        ratios = {"wall-clock": [turn[1] / turn[0] for turn in turns], "CPU": [turn[3] / turn[2] for turn in turns]}
        texts = []
        for name, values in ratios.items():
            value, low, high = bootstrap_interval(values, np.median)
            texts.append(f"{value:.2f} [{low:.2f}, {high:.2f}] by {name} time")
        cores = " and ".join(f"{sum(turn[i + 2] for turn in turns) / sum(turn[i] for turn in turns):.2f}" for i in (0, 1))
        print(
            f"{algorithm:<13} ours {statistics.median(of_ours):6.1f} updates/s, theirs {statistics.median(of_theirs):6.1f};"
            f" ours / theirs {', '.join(texts)} (cores in use: {cores})",
            flush=True,
        )


def learn(given: argparse.Namespace) -> None:
    file: Path = given.out / "references.csv"
    given.out.mkdir(parents=True, exist_ok=True)
    for plan in planned(given):
        location = locate_data(plan, given.data)
        for implementation in ("ours", "theirs"):
            key = (plan.task, plan.algorithm, implementation, str(plan.seed), plan.decided)
            if key in {key_of(row) for row in read_rows(file, COLUMNS)}:
                continue
            row = from_bench(given, plan) if implementation == "ours" else None
            if row is None:
                began = time.monotonic()
                if implementation == "ours":
                    settings = hashlib.sha256(plan.decided.encode()).hexdigest()[:8]
                    folder = given.out / "ours" / plan.task / plan.algorithm.replace(" ", "_") / str(plan.seed) / settings
                    row = run(plan, folder, location)
                else:
                    row = train_reference(given, plan, OfflineDataset.load(location))
                    row["minutes"] = round((time.monotonic() - began) / 60, 2)
            scores = {phase: row.get(phase, "") for phase in PHASES}
            named = dict(zip(KEY, key, strict=True)) | scores
            add_row(file, named | {"episodes": plan.n_final_episodes, "minutes": row["minutes"]}, COLUMNS, KEY)
            print(plan.task, plan.algorithm, implementation, "seed", plan.seed, scores, flush=True)
    report(read_rows(file, COLUMNS))


def planned(given: argparse.Namespace) -> list[Plan]:
    """List the runs: those of the suite, algorithms with an offline phase without what comes after it unless asked for."""
    suite = load_suite(given.suite)
    episodes = given.episodes or suite.n_final_episodes
    found = []
    for algorithm in given.algorithms:
        for plan in plans(suite, given.tasks, [algorithm], given.seeds):
            offline = given.steps or plan.offline_steps if plan.offline else plan.offline_steps
            if plan.offline:
                online = plan.online_steps if given.online else 0
            else:
                online = given.steps or plan.online_steps
            found.append(dataclasses.replace(plan, offline_steps=offline, online_steps=online, n_final_episodes=episodes))
    return sorted(found, key=lambda plan: plan.seed)


def from_bench(given: argparse.Namespace, plan: Plan) -> dict[str, Any] | None:
    """Find our row among those of the bench, if it was made with the same settings."""
    left_out = OF_EVALUATIONS if plan.online_steps else (*OF_EVALUATIONS, "online_steps")

    def decided(text: str) -> dict[str, Any]:
        return {name: value for name, value in json.loads(text).items() if name not in left_out}

    for row in read_rows(given.ours) if given.ours else []:
        if (row["task"], row["algorithm"], int(row["seed"])) == plan.key and decided(row["plan"]) == decided(plan.decided):
            # the bench's minutes have both phases
            return {**row, "online": row["online"] if plan.online_steps else "", "minutes": ""}
    return None


def train_reference(given: argparse.Namespace, plan: Plan, dataset: OfflineDataset) -> dict[str, Any]:
    """Train the published implementation and give its scores at the ends of the phases."""
    env = environment(plan, min(EVALUATION_ENVS, plan.n_final_episodes), training=False)
    if isinstance(env, VecNormalize):
        dataset.fit_vec_normalize(env)
    scores: dict[str, Any] = {}
    with reference(given, plan, build(plan, dataset), dataset, env) as theirs:
        if plan.offline:
            for done in range(0, plan.offline_steps, AT_ONCE):
                theirs.ask("update", n=min(AT_ONCE, plan.offline_steps - done))
            scores["offline"] = evaluate(theirs, env, plan.n_final_episodes, plan.seed)
        if plan.online_steps:
            learn_online(theirs, plan, dataset)
            scores["online"] = evaluate(theirs, env, plan.n_final_episodes, plan.seed)
    env.close()
    return scores


def learn_online(theirs: Reference, plan: Plan, dataset: OfflineDataset) -> None:
    """Make environment steps, and an update after each from ``learning_starts`` on; the statistics stay those of the data."""
    env = environment(plan, 1, training=False)
    if isinstance(env, VecNormalize):
        dataset.fit_vec_normalize(env)
    np.random.seed(plan.seed)
    policy: Any = theirs.model.policy
    observation: Any = env.reset()
    queue: list[Any] = []
    for step in range(plan.online_steps):
        starting = step < theirs.model.learning_starts
        if not queue:
            random = starting and not plan.offline
            queue = [np.random.uniform(-1, 1, dataset.actions.shape[1])] if random else list(theirs.decide(observation)[0])
        action = queue.pop(0)
        following, reward, done, infos = env.step(policy.unscale_action(action[None]))
        last: Any = infos[0]["terminal_observation"] if done[0] else following[0]  # type: ignore[index]
        terminated = done[0] and not infos[0].get("TimeLimit.truncated", False)
        transition = {
            **{"observations": observation[0].tolist(), "next_observations": last.tolist(), "actions": action.tolist()},
            **{"rewards": float(reward[0]), "terminals": float(done[0]), "masks": 1 - float(terminated)},
        }
        theirs.ask("add", transition=transition, size=plan.online_steps, update=not starting)
        observation, queue = following, [] if done[0] else queue
    env.close()


def key_of(row: dict[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in KEY)


def report(rows: list[dict[str, str]]) -> None:
    """Print the score of each run at the ends of its phases, with Wilson's 95 % interval if it is a success rate."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for row in rows:
        for phase in (phase for phase in PHASES if row[phase]):
            score, n = float(row[phase]), int(row["episodes"])
            text = f"seed {row['seed']}: {score:.2f}"
            if 0 <= score <= 1:
                _, low, high = success_interval(score, n)
                text += f" [{low:.2f}, {high:.2f}]"
            groups.setdefault((row["task"], row["algorithm"], phase, row["implementation"]), []).append(text)
    for (task, algorithm, phase, implementation), texts in sorted(groups.items()):
        print(f"{task} {algorithm}, {phase:<7} {implementation:<6} {'; '.join(texts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("speed", "learn"))
    parser.add_argument("--jax-python", required=True)
    for name in ("rql", "qc", "qam"):
        parser.add_argument(f"--{name}", type=Path, help="checkout")
    parser.add_argument("--algorithms", nargs="+", choices=list(CHECKOUTS), default=list(CHECKOUTS), metavar="NAME")
    parser.add_argument("--suite", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=20, help="of speed")
    parser.add_argument("--updates", type=int, default=50, help="of a turn")
    parser.add_argument("--tasks", nargs="+", help="of the suite (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, help="instead of the suite's")
    parser.add_argument("--online", action="store_true", help="of learn: the online phase, too")
    parser.add_argument("--episodes", type=int, help="of the evaluation, instead of the suite's")
    parser.add_argument("--ours", type=Path, help="results.csv of the bench")
    parser.add_argument("--data", type=Path, default=Path("bench/data"), help="the bench's folder of datasets")
    parser.add_argument("--out", type=Path, default=Path("bench/references"))
    given = parser.parse_args()
    for algorithm in given.algorithms:
        if getattr(given, CHECKOUTS[algorithm]) is None:
            sys.exit(f"error: {algorithm} needs --{CHECKOUTS[algorithm]}, see --help")
        if given.online and CHECKOUTS[algorithm] == "rql":
            sys.exit(f"error: --online: {algorithm}'s published sampler cannot draw half of a batch from the data")
    th.set_num_threads(given.threads)
    speed(given) if given.part == "speed" else learn(given)


if __name__ == "__main__":
    main()
