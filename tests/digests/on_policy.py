"""Runs of the PPO family: each backend, advantage, policy loss and kind of action."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_flow import GRPO, GSPO, PPO, AsyncPPO, GroupedStart, MaskablePPO, MaskableRecurrentPPO, RecurrentPPO
from tests.digests.running import Cases, logged, predictions
from tests.on_policy import ACTION_SPACES, DICT, IMAGE, walks

CASES: Cases = {}

SMALL: dict[str, Any] = {"n_steps": 32, "batch_size": 16, "n_epochs": 3, "learning_rate": 1e-3, "seed": 1, "device": "cpu"}
SMALL |= {"policy_kwargs": {"net_arch": [16, 16]}}
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "vtrace": {"advantage": "vtrace", "rho_bar": 0.9, "c_bar": 0.8},
    "dual_clip": {"policy_loss": "dual_clip", "dual_clip": 1.5, "clip_range_high": 0.3},
    "gspo": {"policy_loss": "gspo"},
    "gspo_token": {"policy_loss": "gspo_token", "ent_coef": 0.01},
    "decoupled": {"policy_loss": "decoupled", "rho_bar": 1.2},
    "reference": {"reference_policy": "initial", "kl_coef": 0.2, "clip_range_vf": 0.3},
    "target_kl": {"target_kl": 1e-4, "normalize_advantage": False, "clip_range": LinearSchedule(0.2, 0.05, 1.0)},
    "recompute_epoch": {"recompute_advantages": "epoch"},
}
TORCH_ONLY: dict[str, dict[str, Any]] = {
    "recompute_minibatch": {"recompute_advantages": "minibatch"},
    "sde": {"use_sde": True, "sde_sample_freq": 4},
    "elu": {"policy_kwargs": {"net_arch": [16], "activation_fn": th.nn.ELU}},
}
NATIVE_ONLY: dict[str, dict[str, Any]] = {"relu": {"policy_kwargs": {"net_arch": [16, 8], "activation_fn": th.nn.ReLU}}}


def on_policy(algorithm: Any, policy: str, env: VecEnv, steps: int = 256, **options: Any) -> Any:
    model = algorithm(policy, env, **{**SMALL, **options})
    values = logged(model)
    model.learn(steps)
    masks = {"action_masks": np.array([[True, False, True]] * 5)} if algorithm in (MaskablePPO, MaskableRecurrentPPO) else {}
    found = [model, values.kept, predictions(model, **masks), model.num_timesteps, getattr(model, "chosen_backend", None)]
    if isinstance(model, AsyncPPO):
        model.close()
    return found


def carts(wrapper: Any = None, n: int = 2) -> VecEnv:
    return make_vec_env("CartPole-v1", n, seed=0, wrapper_class=wrapper)


def pendulums(n: int = 2) -> VecEnv:
    return VecNormalize(make_vec_env("Pendulum-v1", n, seed=0))


ENVS: dict[str, Callable[[], VecEnv]] = {"CartPole": carts, "Pendulum": pendulums}
for backend, others in (("native", NATIVE_ONLY), ("torch", TORCH_ONLY), ("auto", {})):
    for env_name, make in ENVS.items():
        for variant, arguments in {**(VARIANTS if backend != "auto" else {"defaults": {}}), **others}.items():
            if not (variant == "sde" and env_name == "CartPole"):
                options = {"backend": backend, **arguments}
                CASES[f"ppo {backend} {env_name} {variant}"] = lambda make=make, options=options: on_policy(
                    PPO, "MlpPolicy", make(), **options
                )
for name, action_space in ACTION_SPACES.items():
    CASES[f"ppo native walk {name}"] = lambda action_space=action_space: on_policy(
        PPO, "MlpPolicy", walks(3, action_space), backend="native"
    )
CASES["ppo torch dict"] = lambda: on_policy(PPO, "MultiInputPolicy", walks(2, ACTION_SPACES["box"], DICT), backend="torch")
CASES["ppo torch image"] = lambda: on_policy(
    *(PPO, "CnnPolicy", walks(2, ACTION_SPACES["discrete"], IMAGE), 64), policy_kwargs={}, backend="torch"
)
for variant in ("defaults", "vtrace", "dual_clip", "gspo", "decoupled", "reference", "target_kl"):
    CASES[f"maskable_ppo {variant}"] = lambda options=VARIANTS[variant]: on_policy(
        MaskablePPO, "MlpPolicy", walks(2, ACTION_SPACES["discrete"]), **options
    )
    CASES[f"recurrent_ppo {variant}"] = lambda options=VARIANTS[variant]: on_policy(
        *(RecurrentPPO, "MlpLstmPolicy", walks(2, ACTION_SPACES["box"]), 128),
        **{**options, "policy_kwargs": {"net_arch": [8], "lstm_hidden_size": 8}},
    )
    CASES[f"maskable_recurrent_ppo {variant}"] = lambda options=VARIANTS[variant]: on_policy(
        *(MaskableRecurrentPPO, "MlpGruPolicy", walks(2, ACTION_SPACES["discrete"]), 128),
        **{**options, "policy_kwargs": {"net_arch": [8], "lstm_hidden_size": 8}},
    )
for variant, options in {
    "lockstep": {"mode": "lockstep"},
    "lockstep torch decoupled": {"mode": "lockstep", "policy_loss": "decoupled", "backend": "torch"},
    "sync gae": {"mode": "sync", "advantage": "gae"},
}.items():
    CASES[f"async_ppo {variant}"] = lambda options=options: on_policy(AsyncPPO, "MlpPolicy", pendulums(), **options)
for variant, options in {
    "defaults": {},
    "torch": {"backend": "torch"},
    "outcome group": {"credit": "outcome", "baseline": "mean", "scale": "group", "ddof": 1, "aggregation": "episode"},
    "pooled": {"credit": "pooled", "baseline": "median", "scale": "none", "aggregation": "constant"},
    "process": {"credit": "process"},
    "critic": {"baseline": "critic", "backend": "torch"},
    "reference": {"kl_coef": 0.1, "reference_policy": "initial", "shared_noise": True},
}.items():
    options = {"group_size": 3, "n_steps": 60, "batch_size": 32, **options}
    CASES[f"grpo {variant}"] = lambda options=options: on_policy(GRPO, "MlpPolicy", carts(GroupedStart, 6), 400, **options)
for variant, options in {"defaults": {}, "token": {"policy_loss": "gspo_token", "length_scaled_clip": False}}.items():
    options = {"group_size": 3, "n_steps": 60, "batch_size": 32, **options}
    CASES[f"gspo {variant}"] = lambda options=options: on_policy(GSPO, "MlpPolicy", carts(GroupedStart, 6), 400, **options)
