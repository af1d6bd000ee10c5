"""
The front page's picture: RQL and FMQ from logged data to online, several seeds with bands, beside the speed of PPO.

Run by hand: ``python -m tests.benchmarks.front_page --work FOLDER --out docs/front_page.png [--sbx-python venv/bin/python]``.
Left: OGBench's pointmaze-medium task 1, local data of 200 episodes (statistically, not bitwise, the published data), gradient
steps on the data, then environment steps; share of the evaluation's episodes that reach the goal, interquartile mean over the
seeds with its 95 % bootstrap interval. Right: environment steps per second of a whole ``learn()``, see ``ppo_throughput``.
A run that was interrupted goes on: nothing that lies in the folder is made again. ``--part`` makes one half alone; the
picture needs both.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch as th
from matplotlib.figure import Figure
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from sb3_flow import FMQ, RQL, OfflineDataset
from sb3_flow.common.statistics import bootstrap_interval
from sb3_flow.data.generate import generate
from sb3_flow.envs import SuccessInfo
from sb3_flow.plotting.figures import COLOURS, GRAY, STYLES, finish, new_figure, plain
from tests.benchmarks.ppo_throughput import SETTINGS, run

ENV_ID, DATASET = "pointmaze-medium-singletask-v0", "pointmaze-medium-navigate"
OFFLINE_STEPS, ONLINE_STEPS, EVERY, EPISODES = 5_000, 2_500, 1_250, 20
COMMON: dict[str, Any] = {
    "learning_rate": 1e-3,
    "tau": 0.02,
    "gamma": 0.995,
    "horizon_length": 10,
    "offline_fraction": 0.5,
    "policy_kwargs": {"net_arch": [128, 128, 128]},
}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    'RQL, acting_mode="sample"': (RQL, {"alpha": 5.0, "expectile": 0.7, "n_critics": 2, "acting_mode": "sample"}),
    "FMQ, best of 8 (default mode)": (FMQ, {"n_candidates": 8, "warmup_steps": 500, "anneal_end_step": 3_000}),
}
PROGRAMS = ("SB3", "SBX", "rlox", "ours, torch", "ours")
SHOWN = {"CartPole-v1\n(2048, 64, 10)": 0, "CartPole-v1\n(128, 256, 4)": 1, "HalfCheetah-v5\n(256, 64, 10)": 2}


def algorithm_of(name: str) -> str:
    """:return: the folder of a model's runs"""
    return MODELS[name][0].__name__


def learn(name: str, seed: int, folder: Path, dataset: OfflineDataset) -> None:
    """Train one model offline, then online, and leave ``evaluations.npz`` in the folder."""
    if (folder / "done").exists():
        return
    algorithm, settings = MODELS[name]

    def environments(n_envs: int, training: bool) -> VecNormalize:
        env = make_vec_env(ENV_ID, n_envs=n_envs, seed=seed, wrapper_class=SuccessInfo)
        return VecNormalize(env, training=training, norm_reward=False)

    model = algorithm("MlpPolicy", environments(1, True), seed=seed, **COMMON, **settings)
    evaluation = EvalCallback(
        environments(10, False), n_eval_episodes=EPISODES, eval_freq=EVERY, log_path=str(folder), verbose=0
    )
    model.learn_offline(dataset, OFFLINE_STEPS, evaluation)
    model.learn(ONLINE_STEPS, evaluation)
    (folder / "done").touch()
    print(f"{name}, seed {seed}: done", flush=True)


def measure(work: Path, rounds: int, sbx_python: str | None) -> dict[str, dict[str, list[float]]]:
    """:return: environment steps per second of every round, by setting and program"""
    file = work / "speed.json"
    found: dict[str, dict[str, list[float]]] = json.loads(file.read_text()) if file.exists() else {}
    for title, number in SHOWN.items():
        values = list(SETTINGS.values())[number]
        by_program = found.setdefault(title, {})
        for _ in range(rounds):
            for program in PROGRAMS:
                python = sbx_python if program == "SBX" else sys.executable
                # rlox steps a CartPole of its own, and no MuJoCo
                if python is None or (program == "rlox" and values[0] != "CartPole-v1"):
                    continue
                if len(by_program.setdefault(program, [])) < rounds:
                    by_program[program].append(run(python, program, values))
                    file.write_text(json.dumps(found))
    return found


def read(folder: Path, seeds: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """:return: steps of the evaluations, shape ``(T,)``, and the share of successful episodes, shape ``(n_seeds, T)``"""
    logs = [np.load(folder / str(seed) / "evaluations.npz") for seed in seeds]
    steps, offline = logs[0]["timesteps"], logs[0]["offline"]
    return np.where(offline, steps, steps + OFFLINE_STEPS), np.stack([log["successes"].mean(axis=1) for log in logs])


def draw(work: Path, seeds: list[int], speed: dict[str, dict[str, list[float]]], out: Path) -> Figure:
    """:return: both halves of the picture"""
    figure = new_figure(11.5, 4.0)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    plain(left)
    for i, name in enumerate(MODELS):
        steps, successes = read(work / algorithm_of(name), seeds)
        estimates = [bootstrap_interval(scores) for scores in successes.T]
        low, high = [estimate.low for estimate in estimates], [estimate.high for estimate in estimates]
        left.plot(steps, [estimate.value for estimate in estimates], STYLES[i], color=COLOURS[i], marker="o", ms=4, label=name)
        left.fill_between(steps, low, high, color=COLOURS[i], alpha=0.2, linewidth=0)
    left.axvline(OFFLINE_STEPS, color=GRAY, linewidth=0.8)
    left.set(xlabel="gradient steps on data; right of the line environment steps", ylabel="episodes that reach the goal")
    left.set_ylim(-0.03, 1.03)
    left.legend(frameon=False)
    left.set_title(f"From logged data to online: {len(seeds)} seeds, 95 % bands", fontsize=10)
    plain(right)
    programs = [program for program in PROGRAMS if any(program in found for found in speed.values())]
    width = 0.8 / len(programs)
    for i, program in enumerate(programs):
        places, heights = [], []
        for j, found in enumerate(speed.values()):
            if program in found:
                places.append(j + (i - (len(programs) - 1) / 2) * width)
                heights.append(statistics.median(found[program]) / statistics.median(found["SB3"]))
        label = {"ours": "sb3_flow", "ours, torch": 'sb3_flow, backend="torch"'}.get(program, program)
        colour = GRAY if program == "SB3" else COLOURS[programs.index(program) - 1]
        bars = right.bar(places, heights, width * 0.92, label=label, color=colour)
        right.bar_label(bars, fmt="%.1f", fontsize=7)
    right.set_xticks(range(len(speed)), list(speed), fontsize=8)
    right.set(ylabel="environment steps per second / SB3's")
    right.set_title("PPO: speed of learn(), one thread, 8 environments", fontsize=10)
    right.margins(y=0.3)  # room for the legend above the bars
    right.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
    return finish(figure, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for data, runs and measurements")
    parser.add_argument("--out", type=Path, default=Path("docs/front_page.png"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sbx-python", default=None, help="of an environment with sbx-rl")
    parser.add_argument("--part", choices=("runs", "speed", "both"), default="both")
    arguments = parser.parse_args()
    th.set_num_threads(1)
    work: Path = arguments.work
    seeds = list(range(arguments.seeds))
    if arguments.part != "speed":
        file = work / f"{DATASET}-v0.npz"
        if not file.exists():
            work.mkdir(parents=True, exist_ok=True)
            generate(DATASET, 200, workers=1, seed=0, out=work)
        dataset = OfflineDataset.load(f"ogbench:{DATASET}-singletask-v0@{file}")
        for seed in seeds:
            for name in MODELS:
                learn(name, seed, work / algorithm_of(name) / str(seed), dataset)
    if arguments.part != "runs":
        for title, found in measure(work, arguments.rounds, arguments.sbx_python).items():
            medians = {program: statistics.median(values) for program, values in found.items()}
            print(title.replace("\n", " "), {program: f"{value:.0f}" for program, value in medians.items()})
    if arguments.part != "speed":
        for name in MODELS:
            steps, successes = read(work / algorithm_of(name), seeds)
            estimates = [bootstrap_interval(scores) for scores in successes.T]
            texts = [f"{step}: {estimate.value:.2f}" for step, estimate in zip(steps, estimates, strict=True)]
            print(f"{name}, success by steps: {', '.join(texts)}")
    if arguments.part == "both":
        draw(work, seeds, measure(work, arguments.rounds, arguments.sbx_python), arguments.out)
        print(arguments.out)


if __name__ == "__main__":
    main()
