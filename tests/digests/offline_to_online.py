"""Runs of the offline-to-online algorithms and FlowMapPolicy: offline, then online, then every way of acting."""

from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize

from sb3_flow import DSRL, FMQ, FQL, QAM, RLPD, RQL, FlowMapPolicy
from tests.digests.running import Cases, logged, predictions
from tests.tasks import PointEnv, collect

CASES: Cases = {}

OFFLINE: dict[str, Any] = {"batch_size": 16, "learning_rate": 1e-3, "buffer_size": 80, "tau": 0.05, "seed": 1}
OFFLINE |= {"n_candidates": 4, "policy_kwargs": {"net_arch": [16, 16]}, "device": "cpu", "learning_starts": 10}


def acting(model: Any) -> list[Any]:
    """:return: actions of every mode that the policy has"""
    found = []
    for mode in ("zero", "sample", "best_of_n", "qgbs", "guided"):
        if mode not in model.policy.acting_modes:
            continue
        model.set_acting_mode(mode, **({"beam_width": 2, "branches": 2} if mode == "qgbs" else {}))
        found.append(predictions(model))
    return found


def offline_to_online(
    algorithm: Any, policy: str, kind: str = "box", n_envs: int = 2, normalised: bool = False, offline: int = 8, **options: Any
) -> Any:
    env: VecEnv = DummyVecEnv([lambda: PointEnv(kind)] * n_envs)
    model = algorithm(policy, VecNormalize(env) if normalised else env, **{**OFFLINE, **options})
    values, found = logged(model), []
    if offline:
        model.learn_offline(collect(PointEnv(kind), episodes=4), offline, log_interval=3)
        found = [dict(model.get_parameters()), predictions(model)]
    model.learn(60, log_interval=1)
    return [found, model, values.kept, acting(model), model.chosen_backend, model.num_timesteps, model.offline_updates]


NETS = {"native": {"backend": "native"}, "torch": {"backend": "torch"}, "auto": {"backend": "auto"}}
RELU = {"backend": "torch", "policy_kwargs": {"net_arch": [16], "activation_fn": th.nn.ReLU}}
ALL: dict[str, dict[str, Any]] = {
    **NETS,
    "relu": RELU,
    "chunks": {"horizon_length": 3, "normalised": True, "backend": "native"},
    "chunks torch": {"horizon_length": 3, "offline_fraction": 0.5, "backend": "torch"},
    "transitions": {"sampling": "transition", "offline_fraction": 0.25, "train_freq": 4, "gradient_steps": 2},
    "dict": {"policy": "MultiInputPolicy", "kind": "dict", "normalised": True, "horizon_length": 2},
    "online": {"offline": 0, "n_envs": 1},
    "device": {"storage": "device", "horizon_length": 2},
    "noise": {"action_noise": NormalActionNoise(np.zeros(2), 0.1 * np.ones(2)), "learning_rate": LinearSchedule(1e-3, 0, 1.0)},
}
RQL_ONLY: dict[str, dict[str, Any]] = {
    "published": {"alpha": 0.3, "expectile": 0.9, "rho": 0.0, "n_critics": 3, "flow_steps": 4},
    "bc": {"objective": "bc"},
    "memory": {"optimize_memory_usage": True},
    "n_step": {"n_steps": 3, "offline": 0},
}
FMQ_ONLY: dict[str, dict[str, Any]] = {
    "lsd": {"distillation": "lsd", "warmup_steps": 3, "execution_horizon": 1, "horizon_length": 2},
    "psd": {"distillation": "psd", "warmup_steps": 3, "anneal_end_step": 10, "n_sampling_steps": 2},
    "mf": {"distillation_weight": 0.5, "diagonal_weight": 0.5, "warmup_steps": 3, "anneal_end_step": 10},
    "published": {"radius": "published", "eta": 0.3, "guidance_critic": "min", "guidance_at": "actor", "reanchor_every": 5},
    "constant": {"adaptive_radius": False, "normalize_gradient": False, "guidance_critic": "mean", "q_aggregation": "min"},
    "bc": {"online_rule": "bc"},
}
FQL_ONLY: dict[str, dict[str, Any]] = {
    "best of n": {"actor_type": "best_of_n", "normalised": True},
    "normalized": {"alpha": 1.0, "normalize_q_loss": True, "q_aggregation": "min"},
}
DSRL_ONLY: dict[str, dict[str, Any]] = {"own": {"noise_scale": 0.5, "rho": 0.5}, "one candidate": {"n_candidates": 1}}
QAM_ONLY: dict[str, dict[str, Any]] = {"edits": {"edit_scale": 0.1, "inv_temp": 3.0}}
RLPD_ONLY: dict[str, dict[str, Any]] = {"qam": {"rho": 0.5, "backup_entropy": False, "bc_alpha": 0.1}}
FEW = {RQL: {"flow_steps": 3, "n_critics": 2}, FMQ: {}, FQL: {"flow_steps": 3}, DSRL: {"flow_steps": 3, "n_critics": 2}}
FEW |= {QAM: {"flow_steps": 3, "n_critics": 2}, RLPD: {"n_critics": 3}}
OWN = {RQL: RQL_ONLY, FMQ: FMQ_ONLY, FQL: FQL_ONLY, DSRL: DSRL_ONLY, QAM: QAM_ONLY, RLPD: RLPD_ONLY}
for algorithm, own in OWN.items():
    few = FEW[algorithm]
    own = {**ALL, **own}
    for variant, options in own.items():
        options = {"policy": "MlpPolicy", **few, **options}
        CASES[f"{algorithm.__name__.lower()} {variant}"] = lambda algorithm=algorithm, options=options: offline_to_online(
            algorithm, **options
        )


class Reach(PointEnv):
    """The point's way to a goal, for hindsight."""

    def __init__(self) -> None:
        super().__init__()
        box = spaces.Box(-np.inf, np.inf, (2,))
        self.observation_space = spaces.Dict({"observation": box, "achieved_goal": box, "desired_goal": box})

    def observe(self) -> dict[str, np.ndarray]:
        here = self.x.astype(np.float32)
        return {"observation": here, "achieved_goal": here, "desired_goal": np.zeros(2, np.float32)}

    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, _: Any) -> np.ndarray:
        return -np.linalg.norm(achieved - desired, axis=-1)


for algorithm, few in FEW.items():

    def images(algorithm: Any = algorithm, few: dict[str, Any] = few) -> Any:
        small = {
            **few,
            "policy_kwargs": {"net_arch": [8], "features_extractor_kwargs": {"features_dim": 8}},
            "buffer_size": 40,
        }
        return offline_to_online(algorithm, "CnnPolicy", "image", 1, offline=2, train_freq=10, **small)

    def hindsight(algorithm: Any = algorithm, few: dict[str, Any] = few) -> Any:
        options = {**OFFLINE, **few, "replay_buffer_class": HerReplayBuffer, "learning_starts": 30}
        model = algorithm("MultiInputPolicy", DummyVecEnv([Reach]), **options)
        values = logged(model)
        model.learn(60, log_interval=1)
        return [model, values.kept, acting(model)]

    CASES[f"{algorithm.__name__.lower()} images"] = images
    CASES[f"{algorithm.__name__.lower()} hindsight"] = hindsight


def behaviour_cloning() -> Any:
    found = []
    for options in (
        {"backend": "native"},
        {"backend": "torch", "horizon_length": 2, "distillation": "psd", "warmup_steps": 2},
    ):
        env = PointEnv()
        policy = FlowMapPolicy(
            *(env.observation_space, env.action_space, lambda _: 1e-3),
            **{"n_critics": 0, "net_arch": [16, 16], "noise_seed": 4, **options},
        )
        policy.learn_behaviour(collect(env, episodes=4), 8, batch_size=16, seed=2)
        found += [policy.state_dict(), predictions(policy)]
    return found


CASES["flow_map_policy behaviour cloning"] = behaviour_cloning
