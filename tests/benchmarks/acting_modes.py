"""
Success of a policy's modes of acting, of models that the bench has trained: what RQL's default mode is chosen by.

Run by hand, after ``python -m sb3_flow.zoo bench --suite cpu --algos rql``:

    python -m tests.benchmarks.acting_modes --algorithm rql --out bench/cpu

Each model at the end of a phase acts in every mode, with the bench's evaluation (fresh noise; ``zero`` needs none). Rows go to
``acting_<algorithm>.csv`` in ``--out``; the same command goes on after it was killed. A table over all models ends it.
"""

import argparse
from pathlib import Path
from typing import Any

import torch as th
from stable_baselines3.common.vec_env import VecNormalize

from sb3_flow.common.statistics import success_interval
from sb3_flow.zoo.bench.command import run_folder
from sb3_flow.zoo.bench.results import add_row, read_rows, short_name
from sb3_flow.zoo.bench.suites import load_suite, plans
from sb3_flow.zoo.bench.training import EVALUATION_ENVS, environment, evaluate
from sb3_flow.zoo.registry import ALGORITHMS

COLUMNS = ("task", "seed", "steps", "mode", "episodes", "score")


def set_mode(model: Any, mode: str) -> None:
    """:param mode: a mode of acting; ``best_of_n`` ends with its number of candidates, as ``best_of_4`` does"""
    if mode.startswith("best_of_"):
        model.policy.n_candidates = int(mode.rsplit("_", 1)[1])
        mode = "best_of_n"
    model.set_acting_mode(mode)


def report(rows: list[dict[str, str]], modes: list[str]) -> None:
    """Print a line for each model, and means over all."""
    ends = sorted({(row["task"], int(row["seed"]), int(row["steps"])) for row in rows})
    print(f"\n{'':<54}" + "".join(f"{mode:>20}" for mode in modes))
    for task, seed, steps in ends:
        line = f"{f'{short_name(task)}, seed {seed}, {steps} steps':<54}"
        for mode in modes:
            key = (task, str(seed), str(steps), mode)
            found = [row for row in rows if (row["task"], row["seed"], row["steps"], row["mode"]) == key]
            text = ""
            if found:
                share, low, high = success_interval(float(found[0]["score"]), int(found[0]["episodes"]))
                text = f"{share:.2f} [{low:.2f}, {high:.2f}]"
            line += f"{text:>20}"
        print(line)
    means = []
    for mode in modes:
        scores = [float(row["score"]) for row in rows if row["mode"] == mode]
        means.append(f"{sum(scores) / max(1, len(scores)):.2f} ({len(scores)} models)")
    print(f"{'mean':<54}" + "".join(f"{mean:>20}" for mean in means))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="cpu")
    parser.add_argument("--algorithm", default="rql")
    parser.add_argument("--tasks", nargs="+", help="of the suite (default: all that have models)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--modes", nargs="+", default=["sample", "zero", "best_of_4", "best_of_32"])
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("bench/cpu"), help="folder of the bench")
    arguments = parser.parse_args()
    th.set_num_threads(1)
    file = arguments.out / f"acting_{arguments.algorithm}.csv"
    for plan in plans(load_suite(arguments.suite), arguments.tasks, [arguments.algorithm], arguments.seeds):
        for steps in (str(plan.offline_steps), str(plan.offline_steps * plan.offline + plan.online_steps)):  # ends of phases
            folder = run_folder(arguments.out, plan) / f"checkpoint-{steps}"
            if not folder.exists():
                continue
            keys = {mode: (plan.task, str(plan.seed), steps, mode, str(arguments.episodes)) for mode in arguments.modes}
            done = {tuple(row[name] for name in COLUMNS[:-1]) for row in read_rows(file, COLUMNS)}
            todo = [mode for mode in arguments.modes if keys[mode] not in done]
            if not todo:
                continue
            env = environment(plan, EVALUATION_ENVS, training=False)
            if isinstance(env, VecNormalize):
                env = VecNormalize.load(str(folder / "vecnormalize.pkl"), env.venv)
                env.training = env.norm_reward = False
            algorithm: Any = ALGORITHMS[plan.algo]
            model = algorithm.load(folder / "model.zip", device="cpu")
            for mode in todo:
                set_mode(model, mode)
                model.set_random_seed(plan.seed)  # the same noise, whatever was evaluated before
                score = evaluate(model, env, arguments.episodes, plan.seed)
                add_row(file, dict(zip(COLUMNS, (*keys[mode], f"{score:g}"), strict=True)), COLUMNS, COLUMNS[:-1])
                print(f"{plan.task} seed {plan.seed}, {steps} steps, {mode}: {score:.2f}", flush=True)
            env.close()
    rows = [row for row in read_rows(file, COLUMNS) if row["episodes"] == str(arguments.episodes)]
    report(rows, arguments.modes)


if __name__ == "__main__":
    main()
