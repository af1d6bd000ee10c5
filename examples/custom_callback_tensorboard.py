"""
A callback of your own that writes numbers and pictures to TensorBoard, in the offline phase and online.

It is SB3's `BaseCallback`, called at each gradient step offline and at each time step online, which is also what the x-axis
counts. This one looks at the actions that the flow policy samples in one state, Pendulum hanging down: how they are spread,
and how many of them push left. The dataset is random actions, from SB3's SAC before it starts to learn.

    python examples/custom_callback_tensorboard.py --out demo_output
    tensorboard --logdir demo_output/tensorboard
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import torch as th
from stable_baselines3 import SAC
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sb3_flow import RQL, OfflineDataset

matplotlib.use("Agg")
from matplotlib import pyplot as plt


class Samples(BaseCallback):
    """
    :param observation: the state to look at
    :param every: steps between two looks
    """

    def __init__(self, observation: np.ndarray, every: int):
        super().__init__()
        self.observations, self.every = np.repeat(observation[None], 500, axis=0), every

    def _on_step(self) -> bool:
        if self.n_calls % self.every == 0:
            actions, _ = self.model.predict(self.observations, deterministic=False)
            self.logger.record("samples/deviation", actions.std())
            self.logger.record("samples/share_left", (actions < 0).mean())
            figure, axis = plt.subplots()
            axis.hist(actions.ravel(), bins=40, range=(-2, 2))
            axis.set(xlabel="torque", title=f"500 sampled actions, step {self.num_timesteps}")
            self.logger.record("samples/actions", Figure(figure, close=True), exclude=("stdout", "log", "json", "csv"))
            self.logger.dump(self.num_timesteps)
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-steps", type=int, default=5_000, help="time steps of the dataset")
    parser.add_argument("--steps", type=int, default=2_000, help="gradient steps offline, and time steps online")
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="folder of the logs")
    arguments = parser.parse_args()
    th.set_num_threads(1)  # small networks are slower with more

    sac = SAC("MlpPolicy", "Pendulum-v1", learning_starts=arguments.data_steps, seed=0, device="cpu")
    sac.learn(arguments.data_steps)
    dataset = OfflineDataset.from_replay_buffer(sac.replay_buffer)
    model = RQL(
        *("MlpPolicy", "Pendulum-v1"),
        learning_rate=1e-3,
        tau=0.02,
        alpha=0.3,
        n_critics=2,
        acting_mode="sample",
        policy_kwargs={"net_arch": [64, 64]},
        tensorboard_log=str(arguments.out / "tensorboard"),
        seed=0,
        device="cpu",
    )
    callback = Samples(np.array([-1.0, 0.0, 0.0], np.float32), every=max(1, arguments.steps // 10))
    model.learn_offline(dataset, arguments.steps, callback, tb_log_name="samples_offline")
    offline = model.logger.dir
    model.learn(arguments.steps, callback, tb_log_name="samples_online")

    print(f"{'phase':<8} {'key':<28} {'points':>6} {'first':>14} {'last':>16}")
    for phase, folder in (("offline", offline), ("online", model.logger.dir)):
        events = EventAccumulator(folder, {"images": 0}).Reload()  # all of them
        print(f"{phase:<8} {'samples/actions (pictures)':<28} {len(events.Images('samples/actions')):6}")
        for key in ("samples/deviation", "samples/share_left", "train/critic_loss", "rollout/ep_rew_mean"):
            if key in events.Tags()["scalars"]:
                points = events.Scalars(key)
                shown = (f"{point.value:.2f} ({point.step})" for point in (points[0], points[-1]))
                print(f"{phase:<8} {key:<28} {len(points):6} {next(shown):>14} {next(shown):>16}")
    print(f"tensorboard --logdir {arguments.out / 'tensorboard'}")


if __name__ == "__main__":
    main()
