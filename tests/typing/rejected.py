"""Mistakes that a type checker must find, each in a line that is marked; ``tests/test_typing.py`` runs mypy on this file."""

import gymnasium as gym
import numpy as np
from stable_baselines3.common.env_util import make_vec_env

from sb3_flow import (
    DSRL,
    FMQ,
    FQL,
    GRPO,
    GSPO,
    PPO,
    QAM,
    RLPD,
    RQL,
    AsyncPPO,
    GroupedStart,
    HerReplayBuffer,
    MaskablePPO,
    OfflineDataset,
    RecurrentPPO,
)
from sb3_flow.common.checkpoints import latest_checkpoint
from sb3_flow.common.statistics import bootstrap_interval
from sb3_flow.data.generate import generate
from sb3_flow.envs import EnvPoolVecEnv, RobomimicTask
from sb3_flow.kernels import compute_gae
from sb3_flow.plotting import FlowVisualisationCallback, importance_ratios, learning_curves

env = make_vec_env("Pendulum-v1")
rows = np.zeros((4, 2), np.float32)
dataset = OfflineDataset.from_arrays(rows, rows, rows[:, 0], observation_spaces=env.observation_space, action_space=3)  # wrong
OfflineDataset.load(4)  # wrong
OfflineDataset.load("npz:folder", mmap=True)  # wrong
dataset.save()  # wrong
number: int = dataset.summary()  # wrong
dataset.fit_vec_normalize(env)  # wrong
generate("cube-single-play", episodes="100")  # wrong

RQL("MlpPolicy")  # wrong
RQL("MlpPolicy", env, alfa=0.3)  # wrong
RQL("MlpPolicy", env, batch_size="256")  # wrong
FMQ("MlpPolicy", env, n_candidate=16)  # wrong
RQL("MlpPolicy", env, acting_mode="greedy")  # wrong
RQL("MlpPolicy", env, sampling="step")  # wrong
RQL("MlpPolicy", env, backend="cuda")  # wrong
FMQ("MlpPolicy", env, distillation="meanflow")  # wrong
FMQ("MlpPolicy", env, online_rule="imitate")  # wrong
FQL("MlpPolicy", env, actor="distilled")  # wrong
FQL("MlpPolicy", env, actor_type="one_step")  # wrong
FQL("MlpPolicy", env, q_aggregation="first")  # wrong
RLPD("MlpPolicy", env, num_qs=10)  # wrong
RLPD("MlpPolicy", env, rho="mean")  # wrong
RLPD("MlpPolicy", env, use_sde=True)  # wrong
HerReplayBuffer(10, env.observation_space, env.action_space, n_sampled_goal="four")  # wrong
HerReplayBuffer(10, env.observation_space, env.action_space, compute_reward=0.0)  # wrong
DSRL("MlpPolicy", env, search={"beam_width": 2})  # wrong
DSRL("MlpPolicy", env, decoder=3)  # wrong
QAM("MlpPolicy", env, edit=0.1)  # wrong
QAM("MlpPolicy", env, max_grad_norm="1")  # wrong
QAM("MlpPolicy", env, acting_mode="edit")  # wrong
model = RQL("MlpPolicy", env)
model.learn()  # wrong
model.learn_offline(dataset)  # wrong
model.learn_offline(rows, 1000)  # wrong
model.set_acting_mode(3)  # wrong
model.set_acting_mode("best")  # wrong
model.predict(observations=rows)  # wrong

PPO("MlpPolicy", env, n_step=128)  # wrong
PPO("MlpPolicy", env, clip_range="0.2")  # wrong
PPO("MlpPolicy", env, advantage="v-trace")  # wrong
PPO("MlpPolicy", env, policy_loss="clipped")  # wrong
PPO("MlpPolicy", env, recompute_advantages="always")  # wrong
AsyncPPO("MlpPolicy", env, mode="fast")  # wrong
AsyncPPO("MlpPolicy", env, advantage="group")  # wrong
GRPO("MlpPolicy", env, group_size=None)  # wrong
GRPO("MlpPolicy", env, baseline="max")  # wrong
GSPO("MlpPolicy", env, policy_loss="clip")  # wrong
GSPO("MlpPolicy", env, clip_rang=0.2)  # wrong
MaskablePPO("MlpPolicy", env, use_sde=True)  # wrong
RecurrentPPO("MlpLstmPolicy", env, lstm_hidden_size=64)  # wrong
GroupedStart(gym.make("CartPole-v1"), number=1)  # wrong
EnvPoolVecEnv("CartPole-v1", num_envs="8")  # wrong
RobomimicTask("can.hdf5", render_mode="human")  # wrong

compute_gae(rows, rows, 0.0)  # wrong
learning_curves("runs", quantity="reward")  # wrong
learning_curves("runs", source="tensorboard")  # wrong
learning_curves("runs").save("curves.png")  # wrong
importance_ratios(model, clip="0.2")  # wrong
FlowVisualisationCallback(plot_freq="often")  # wrong
print(bootstrap_interval([1.0, 2.0]).mean)  # wrong
print(latest_checkpoint("checkpoints").name)  # wrong
