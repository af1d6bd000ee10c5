"""
The main job on real input, in one script: data, offline training, evaluation, going on online.

Makes an OGBench dataset on this machine (point mass in a maze; statistically, not bitwise, the published data), trains
Reversal Q-Learning on it without touching the environment, compares it with the policy that made the data and with
behaviour cloning by the same network, and continues online; then trains FMQ, whose policy acts in one network evaluation, on
the same data. Prints one table, writes TensorBoard logs and a picture.

    python examples/demo.py --out demo_output
"""

import argparse
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import numpy as np
import ogbench  # noqa: F401  (registers the environments)
import torch as th
from matplotlib import pyplot as plt
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, sync_envs_normalization

from sb3_flow import FMQ, RQL, OfflineDataset
from sb3_flow.common.statistics import success_interval
from sb3_flow.data.generate import generate
from sb3_flow.data.oracles import NAVIGATE_NOISE, maze_cells
from sb3_flow.envs import SuccessInfo

ENV_ID = "pointmaze-medium-singletask-v0"  # start (1, 1), goal (6, 6), reward -1 per step until the goal, 1000 steps
DATASET = "pointmaze-medium-navigate"
EPISODES = 50  # of every row of the table
CURVE_EPISODES = 10  # of every point of the curves

# Measured on this task, with networks for a CPU
SETTINGS = dict(learning_rate=1e-3, batch_size=128, tau=0.02, gamma=0.995, horizon_length=10, offline_fraction=0.5)
NETWORKS = {"net_arch": [128, 128, 128]}
BEST_OF = 8  # samples, of which the critics choose one
RQL_SETTINGS = {**SETTINGS, "alpha": 5.0, "expectile": 0.7, "n_critics": 2, "flow_steps": 5, "n_candidates": BEST_OF}
FMQ_SETTINGS = {**SETTINGS, "n_candidates": BEST_OF, "warmup_steps": 500, "anneal_end_step": 2_000}

Episodes = tuple[np.ndarray, np.ndarray]  # successes and returns


def make_env(n_envs: int, training: bool) -> VecNormalize:
    """Observations are standardised; the statistics come from the dataset."""
    env = make_vec_env(ENV_ID, n_envs=n_envs, wrapper_class=SuccessInfo)
    return VecNormalize(env, training=training, norm_reward=False)


def evaluate(model: RQL | FMQ, env: VecEnv) -> Episodes:
    """``deterministic=True``, SB3's default: noise is a function of the observation."""
    successes: list[bool] = []

    def note_success(local: dict, _: dict) -> None:
        if local["done"]:
            successes.append(local["info"]["is_success"])

    sync_envs_normalization(model.get_env(), env)
    np.random.seed(0)  # OGBench draws its start noise from NumPy's global generator
    returns, _ = evaluate_policy(model, env, n_eval_episodes=EPISODES, callback=note_success, return_episode_rewards=True)
    return np.array(successes), np.array(returns)


def behave(seed: int = 0) -> Episodes:
    """The scripted policy that made the data, from the task's start: it walks to one random junction after another."""
    env = make_vec_env(ENV_ID, n_envs=1, wrapper_class=SuccessInfo).envs[0]
    maze, rng = env.unwrapped, np.random.default_rng(seed)
    np.random.seed(seed)
    _, junctions = maze_cells(maze.maze_map)
    successes, returns = [], []
    for _ in range(EPISODES):
        env.reset()
        goal, total, done = None, 0.0, False
        while not done:
            xy = maze.get_xy()
            if goal is None or np.linalg.norm(xy - goal) < 0.5:
                goal = np.array(maze.ij_to_xy(junctions[rng.integers(len(junctions))]))
            direction = maze.get_oracle_subgoal(xy, goal)[0] - xy
            direction = direction / (np.linalg.norm(direction) + 1e-6)
            action = np.clip(direction + rng.normal(0, NAVIGATE_NOISE, 2), -1, 1).astype(np.float32)
            _, reward, terminated, truncated, info = env.step(action)
            total, done = total + float(reward), terminated or truncated
        successes.append(info["is_success"])
        returns.append(total)
    return np.array(successes), np.array(returns)


def row(name: str, episodes: Episodes) -> str:
    """Mean and 95% interval: Wilson's for the success rate, normal for the return."""
    success, returns = episodes
    share, low, high = success_interval(success.mean(), len(success))
    error = 1.96 * returns.std(ddof=1) / np.sqrt(len(returns))
    return f"{name:<52} {share:4.2f} [{low:4.2f}, {high:4.2f}]   {returns.mean():7.1f} +- {error:5.1f}"


def rows_of_modes(name: str, model: RQL, env: VecEnv) -> list[str]:
    """One row of the paper's protocol, and one of the mode that the model goes on with."""
    rows = []
    for mode, text in (("sample", "one sample"), ("best_of_n", f"best of {BEST_OF} samples")):
        model.set_acting_mode(mode)
        rows.append(row(f"{name}, {text}", evaluate(model, env)))
    return rows


def cost(name: str, model: RQL | FMQ, evaluations: str) -> str:
    """What one decision costs: median of 200 calls."""
    observation, times = np.zeros((1, 2), np.float32), []
    for _ in range(200):
        start = time.perf_counter()
        model.predict(observation, deterministic=True)
        times.append(time.perf_counter() - start)
    return f"{name:<24} {evaluations:<44} {1e3 * np.median(times):6.2f} ms"


def plot(out: Path, curves: dict[str, tuple[np.ndarray, np.ndarray]], behaviour: Episodes, offline_steps: int) -> None:
    figure, axis = plt.subplots(figsize=(7, 4))
    for (name, (steps, returns)), colour in zip(curves.items(), ("tab:blue", "tab:orange", "tab:green"), strict=True):
        mean, error = returns.mean(axis=1), 1.96 * returns.std(axis=1, ddof=1) / np.sqrt(returns.shape[1])
        axis.plot(steps, mean, marker="o", label=name, color=colour)
        axis.fill_between(steps, mean - error, mean + error, alpha=0.2, color=colour)
    axis.axhline(behaviour[1].mean(), color="gray", linestyle="--", label="policy that made the data")
    axis.axvline(offline_steps, color="black", linewidth=0.8)
    axis.text(offline_steps, 0.5, "online from here ", ha="right", transform=axis.get_xaxis_transform())
    axis.set(xlabel="gradient steps", ylabel=f"return ({CURVE_EPISODES} episodes, 95%)", title=ENV_ID)
    axis.legend(loc="center left", fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "demo.png", dpi=150)


def read_curve(folder: Path, offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
    log = np.load(folder / "evaluations.npz")
    return log["timesteps"] + offset, log["results"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="folder for data, logs and the picture")
    parser.add_argument("--offline-steps", type=int, default=7_500, help="gradient steps on the dataset")
    parser.add_argument("--online-steps", type=int, default=2_500, help="environment steps afterwards")
    parser.add_argument("--fmq-steps", type=int, default=2_000, help="gradient steps of FMQ on the dataset")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of torch; two that share a busy core wait for each other")
    arguments = parser.parse_args()
    th.set_num_threads(arguments.threads)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)

    say(f"making the dataset {DATASET} (200 episodes; local: statistically, not bitwise, the published one)")
    file = out / "data" / f"{DATASET}-v0.npz"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        generate(DATASET, 200, workers=2, val_episodes=1, seed=0, out=file.parent)
    dataset = OfflineDataset.load(f"ogbench:{DATASET}-singletask-v0@{file}")
    print(dataset.summary())
    behaviour = behave()

    def callback(name: str, every: int) -> EvalCallback:
        env, path = make_env(10, training=False), str(out / name)
        return EvalCallback(env, n_eval_episodes=CURVE_EPISODES, eval_freq=every, log_path=path, verbose=0)

    def build(algorithm: Any, name: str, **settings: object) -> Any:
        logs = str(out / "tensorboard" / name)
        env = make_env(1, training=True)
        return algorithm("MlpPolicy", env, seed=arguments.seed, tensorboard_log=logs, policy_kwargs=NETWORKS, **settings)

    say(f"behaviour cloning, {arguments.offline_steps} gradient steps")
    bc = build(RQL, "bc", objective="bc", acting_mode="sample", **RQL_SETTINGS)
    bc.learn_offline(dataset, arguments.offline_steps, callback("bc", max(1, arguments.offline_steps // 2)), progress_bar=True)
    eval_env = make_env(10, training=False)
    table = [row("policy that made the data, from the task's start", behaviour)]
    table.append(row("behaviour cloning", evaluate(bc, eval_env)))

    say(f"RQL offline, {arguments.offline_steps} gradient steps")
    model = build(RQL, "rql", acting_mode="best_of_n", **RQL_SETTINGS)
    model.learn_offline(
        dataset, arguments.offline_steps, callback("offline", max(1, arguments.offline_steps // 4)), progress_bar=True
    )
    table += rows_of_modes("RQL offline", model, eval_env)
    model.save(out / "rql_offline")
    model.get_vec_normalize_env().save(out / "rql_offline_vecnormalize.pkl")

    say(f"RQL online, {arguments.online_steps} environment steps")
    model = RQL.load(out / "rql_offline", env=model.get_env())  # as a user would, on another day
    model.set_offline_dataset(dataset)
    model.learn(arguments.online_steps, callback("online", arguments.online_steps // 2), progress_bar=True)
    table += rows_of_modes("RQL after online", model, eval_env)
    model.save(out / "rql_online")
    model.get_vec_normalize_env().save(out / "rql_online_vecnormalize.pkl")

    say(f"FMQ offline, {arguments.fmq_steps} gradient steps")
    fmq = build(FMQ, "fmq", **FMQ_SETTINGS)
    fmq.learn_offline(dataset, arguments.fmq_steps, progress_bar=True)
    fmq.save(out / "fmq_offline")
    table.append(row(f"FMQ offline, best of {BEST_OF} one-step samples", evaluate(fmq, eval_env)))
    costs = []
    for acting, name, modes in ((model, "RQL", ("sample", "best_of_n")), (fmq, "FMQ", ("sample", "best_of_n", "qgbs"))):
        for mode in modes:
            acting.set_acting_mode(mode)
            counts = acting.policy.network_evaluations
            costs.append(cost(f"{name}, {mode}", acting, f"{counts['actor']} of the actor, {counts['critic']} of the critic"))

    curves = {
        "behaviour cloning": read_curve(out / "bc"),
        "RQL offline": read_curve(out / "offline"),
        "RQL online": read_curve(out / "online", offset=arguments.offline_steps),
    }
    plot(out, curves, behaviour, arguments.offline_steps)
    print(f"\n{ENV_ID}, seed {arguments.seed}, {EPISODES} episodes a row, 95% intervals; local data")
    print(f"{'':<52} {'success':<18}    {'return':>7}")
    print("\n".join(table))
    print(f"\nnetwork evaluations and time of one decision (a chunk of {model.horizon_length} actions, one environment)")
    print("\n".join(costs))
    say(f"done: {out / 'demo.png'}, models in {out}, TensorBoard logs: tensorboard --logdir {out / 'tensorboard'}")


if __name__ == "__main__":
    main()
