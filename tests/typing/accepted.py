"""Code as users write it, which a type checker must accept; ``tests/test_typing.py`` runs mypy on this file."""

from typing import assert_type

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import CallbackList, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize

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
    FlowMapPolicy,
    GroupedStart,
    HerReplayBuffer,
    MaskablePPO,
    OfflineDataset,
    RecurrentPPO,
)
from sb3_flow.common.checkpoints import CheckpointCallback, latest_checkpoint
from sb3_flow.common.statistics import bootstrap_interval, interquartile_mean
from sb3_flow.data import TrajectoryReplayBuffer
from sb3_flow.data.generate import generate
from sb3_flow.envs import EnvPoolVecEnv, SparseReward, SuccessInfo
from sb3_flow.hub import load_from_hub, push_to_hub
from sb3_flow.kernels import compute_gae, compute_group_advantages, compute_vtrace
from sb3_flow.offline_to_online import OfflineToOnlineAlgorithm, compare_acting
from sb3_flow.plotting import FlowVisualisationCallback, action_flow, flow_values, importance_ratios, learning_curves


def data(rows: np.ndarray, buffer: ReplayBuffer) -> OfflineDataset:
    flags = np.zeros(len(rows), dtype=bool)
    OfflineDataset.from_arrays(rows, rows, rows[:, 0], flags, flags, rows)
    dataset = OfflineDataset.from_arrays(
        observations={"position": rows},
        actions=rows,
        rewards=rows[:, 0].tolist(),
        terminated=flags,
        trajectory_ends=flags,
        observation_space=spaces.Dict(),
        action_space=spaces.Box(-1, 1, (2,)),
    )
    assert_type(dataset.summary(), str)
    assert_type(dataset.sparse_rewards(), OfflineDataset)
    assert_type(dataset.behaviour_return.value, float)
    dataset.save("folder")
    dataset.fit_vec_normalize(VecNormalize(make_vec_env("Pendulum-v1")))
    OfflineDataset.from_replay_buffer(buffer)
    assert_type(generate("cube-single-play", 100, workers=2, out="data").exists(), bool)
    return OfflineDataset.load("npz:folder", mmap_dir="elsewhere")


def offline_to_online(dataset: OfflineDataset, observation: np.ndarray) -> None:
    env = SparseReward(SuccessInfo(gym.make("cube-single-play-singletask-task1-v0", render_mode="rgb_array")))
    callbacks = CallbackList(
        [
            CheckpointCallback(1000, "checkpoints", save_replay_buffer=True),
            EvalCallback(env, eval_freq=1000),
            FlowVisualisationCallback(1000, observation, (0, 1), save_path="pictures"),
        ]
    )
    rql = RQL("MlpPolicy", env, alpha=0.3, horizon_length=5, acting_mode="best_of_n", sampling="trajectory", device="cpu")
    rql.learn_offline(dataset, 1000, callback=callbacks, log_interval=None, eval_env=env, progress_bar=True)
    rql.set_acting_mode("qgbs", beam_width=4)
    assert_type(rql.learn(total_timesteps=1000, callback=callbacks), RQL)
    actions, state = rql.predict(observation, deterministic=True)
    assert_type(actions, np.ndarray)
    rql.predict(observation, state, episode_start=np.ones(1, dtype=bool))
    rql.save("model")
    rql.save_replay_buffer("buffer")
    assert_type(RQL.load("model", env=env, device="cpu"), RQL)
    compare_acting(rql, env, n_episodes=10)

    fmq = FMQ(
        "MultiInputPolicy",
        None,
        3e-4,
        offline_dataset="ogbench:cube-single-play-singletask-task1-v0",
        offline_steps=1000,
        offline_fraction=0.5,
        n_candidates=16,
        backend="torch",
        replay_buffer_class=TrajectoryReplayBuffer,
        policy_kwargs={"net_arch": [256, 256]},
        device=th.device("cpu"),
    )
    FMQ(FlowMapPolicy, env, radius="published", eta=0.3, storage="cpu")
    assert_type(fmq.learn_offline("npz:folder", 10), FMQ)
    fql = FQL("MlpPolicy", env, actor_type="best_of_n", q_aggregation="min", n_candidates=16, horizon_length=5)
    FQL("FlowPolicy", env, alpha=3.0, normalize_q_loss=True, acting_mode=None)
    assert_type(fql.learn_offline(dataset, 10), FQL)
    rlpd = RLPD(
        "MlpPolicy", env, ent_coef="auto_0.1", target_entropy=-1.0, rho=0.5, backup_entropy=False, offline_dataset=dataset
    )
    assert_type(rlpd.learn(10), RLPD)
    HerReplayBuffer(10, spaces.Dict(), spaces.Box(-1, 1, (2,)), None, "cpu", goal_selection_strategy="final", horizon_length=5)
    RLPD("MultiInputPolicy", env, replay_buffer_class=HerReplayBuffer, replay_buffer_kwargs={"n_sampled_goal": 4})
    dsrl = DSRL("MlpPolicy", env, noise_scale=0.8, rho=0.0, ent_coef=0.1, target_entropy="auto", decoder=fmq)
    DSRL("FlowPolicy", env, decoder="flow.zip", n_candidates=4, acting_mode="best_of_n", ent_coef="auto_0.1")
    DSRL("FlowPolicy", env, decoder=fmq.policy, horizon_length=5)
    assert_type(dsrl.learn_offline(dataset, 10), DSRL)
    qam = QAM("MlpPolicy", env, inv_temp=3.0, edit_scale=0.1, ent_coef="auto_0.1", target_entropy=-2.0, horizon_length=5)
    QAM("FlowPolicy", env, rho=0.0, max_grad_norm=None, acting_mode="best_of_n", n_candidates=4)
    assert_type(qam.learn_offline(dataset, 10), QAM)
    algorithms: list[OfflineToOnlineAlgorithm] = [rql, fmq, fql, rlpd, dsrl, qam]
    evaluate_policy(algorithms[0], env, n_eval_episodes=5)


def on_policy(observation: np.ndarray) -> None:
    env = make_vec_env("CartPole-v1", n_envs=8)
    ppo = PPO("MlpPolicy", env, n_steps=128, clip_range=lambda left: 0.2 * left, advantage="vtrace", backend="auto", seed=0)
    assert_type(ppo.learn(1000, progress_bar=True, callback=lambda _locals, _globals: True), PPO)
    assert_type(PPO.load("model"), PPO)
    PPO("MlpPolicy", "CartPole-v1", kl_coef=0.1, reference_policy="model")
    GRPO("MlpPolicy", env, group_size=4, credit="outcome", baseline="loo", scale="batch").learn(1000)
    GSPO("MlpPolicy", env, n_steps=100, group_size=4, length_scaled_clip=False).learn(1000)
    RecurrentPPO("MlpLstmPolicy", env, recompute_advantages="auto").learn(1000)
    MaskablePPO("MlpPolicy", env, clip_range_high=0.3).learn(1000, use_masking=True)
    asynchronous = AsyncPPO("MlpPolicy", lambda: VecMonitor(EnvPoolVecEnv("CartPole-v1", num_envs=8)), mode="free")
    assert_type(asynchronous.learn(1000), AsyncPPO)
    actions, _ = asynchronous.predict(observation)
    assert_type(actions, np.ndarray)
    GroupedStart(gym.make("CartPole-v1"), group=0, member=1, seed=3)


def arrays(rewards: np.ndarray, values: np.ndarray) -> np.ndarray:
    advantages, _returns = compute_gae(rewards, values, last_values=0.0, gamma=0.99, gae_lambda=0.95)
    targets, _, _ = compute_vtrace(rewards, rewards, values, rho_bar=1.0)
    assert_type(targets, np.ndarray)
    compute_group_advantages([[1.0, 2.0]], baseline="loo", scale="none")
    return advantages


def pictures(model: PPO, flow: RQL, observation: np.ndarray) -> float:
    learning_curves({"RQL": ["runs/1", "runs/2"]}, quantity="success", source="evaluations", path="curves.png")
    learning_curves("runs/1").savefig("one.png")
    action_flow(flow, observation, dimensions=(0, 1))
    flow_values(flow.policy, observation, n_samples=16)
    importance_ratios(model, clip_range=0.2)
    latest_checkpoint("checkpoints")
    return bootstrap_interval([1.0, 2.0, 3.0], interquartile_mean).low


def hub(model: RQL, env: VecNormalize) -> str:
    loaded = load_from_hub("me/rql", RQL, env=gym.make("Pendulum-v1"), revision="main", device="cpu")
    assert_type(loaded, RQL)
    return push_to_hub(model, "me/rql", env, n_eval_episodes=20, private=True)
