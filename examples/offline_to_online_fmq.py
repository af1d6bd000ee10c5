"""
From logged data to online: FMQ on a point maze of OGBench, one model through both phases, and its learning curve.

The dataset is made on this machine (OGBench's scripted walk to one random junction after another; statistically, not bitwise,
the published data) and kept for the next run. The goal is hidden from the walks. The offline phase is short on purpose, so
that the online phase has something left to learn.

    python examples/offline_to_online_fmq.py --out demo_output
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import ogbench  # noqa: F401  (registers the environments)
import torch as th
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from sb3_flow import FMQ, OfflineDataset
from sb3_flow.data.generate import generate
from sb3_flow.envs import SuccessInfo

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ENV_ID = "pointmaze-medium-singletask-v0"  # reward -1 per step until the goal, 1000 steps
DATASET = "pointmaze-medium-navigate"


def make_env(n_envs: int, training: bool) -> VecNormalize:
    """Observations are standardised; the statistics come from the dataset."""
    return VecNormalize(make_vec_env(ENV_ID, n_envs, wrapper_class=SuccessInfo, seed=0), training=training, norm_reward=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=40, help="episodes of the dataset")
    parser.add_argument("--episode-length", type=int, default=None, help="rows of an episode (default: as published)")
    parser.add_argument("--offline-steps", type=int, default=600, help="gradient steps on the dataset")
    parser.add_argument("--online-steps", type=int, default=4_000, help="environment steps afterwards")
    parser.add_argument("--eval-episodes", type=int, default=10, help="episodes of each evaluation")
    parser.add_argument("--workers", type=int, default=2, help="processes that make the dataset")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="folder of data, model and picture")
    arguments = parser.parse_args()
    out = arguments.out / "offline_to_online_fmq"
    th.set_num_threads(2)

    file = out / f"data-{arguments.episodes}" / f"{DATASET}-v0.npz"
    if not file.exists():
        length, workers = arguments.episode_length, arguments.workers
        generate(DATASET, arguments.episodes, workers=workers, seed=0, out=file.parent, episode_length=length)
    dataset = OfflineDataset.load(f"ogbench:{DATASET}-singletask-v0@{file}")
    print(dataset.summary())

    model = FMQ(
        *("MlpPolicy", make_env(1, training=True)),
        learning_rate=1e-3,
        learning_starts=0,
        tau=0.02,
        gamma=0.995,
        train_freq=4,
        horizon_length=10,
        n_candidates=8,
        warmup_steps=300,
        anneal_end_step=arguments.offline_steps,
        offline_fraction=0.5,
        policy_kwargs={"net_arch": [128, 128, 128]},
        seed=0,
        device="cpu",
    )
    curves = {}
    for phase, steps in (("offline", arguments.offline_steps), ("online", arguments.online_steps)):
        callback = EvalCallback(
            make_env(min(10, arguments.eval_episodes), training=False),
            n_eval_episodes=arguments.eval_episodes,
            eval_freq=max(1, steps // 2),
            log_path=str(out / phase),
            verbose=0,
        )
        if phase == "offline":
            model.learn_offline(dataset, steps, callback, progress_bar=True)
        else:
            model.learn(steps, callback, progress_bar=True)
        curves[phase] = np.load(out / phase / "evaluations.npz")
        for at, returns, successes in zip(*(curves[phase][key] for key in ("timesteps", "results", "successes")), strict=True):
            step = "gradient step" if phase == "offline" else "environment step"
            print(f"{phase}, {step} {at:5d}: success {np.mean(successes):4.2f}, return {np.mean(returns):7.1f}")
    model.save(out / "model")

    figure, axis = plt.subplots(figsize=(7, 4))
    offset = 0
    for phase, curve in curves.items():
        axis.plot(offset + curve["timesteps"], curve["results"].mean(axis=1), marker="o", label=phase)
        offset = arguments.offline_steps
    axis.set(
        xlabel="gradient steps, then environment steps", ylabel=f"return ({arguments.eval_episodes} episodes)", title=ENV_ID
    )
    axis.legend()
    figure.savefig(out / "curve.png", dpi=150, bbox_inches="tight")
    print(f"picture: {out / 'curve.png'}, model: {out / 'model.zip'}")


if __name__ == "__main__":
    main()
