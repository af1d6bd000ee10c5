"""
Every argument of every constructor does something: changed by itself, it changes weights, rollouts, actions or what is printed
of a tiny model; or it is refused, or warned of; or the tables below say why it does not.
"""

import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch as th
from on_policy import ACTION_SPACES, Walk, walks
from sb3_contrib.common.maskable.buffers import MaskableRolloutBuffer
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import VecEnv
from tasks import PointEnv, collect
from torch import nn

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
    MaskablePPO,
    MaskableRecurrentPPO,
    OfflineDataset,
    RecurrentPPO,
)
from sb3_flow.common.checks import arguments_of
from sb3_flow.data import TrajectoryReplayBuffer
from sb3_flow.ppo.async_ppo import OWN


class Refused:
    """A value that is a ValueError beside the others."""

    def __init__(self, given: Any) -> None:
        self.given = given


class Case:
    """
    :param given: the changed value
    :param beside: other arguments, without which it would have no effect
    """

    def __init__(self, given: Any, **beside: Any) -> None:
        self.given, self.beside = given, beside


class InProcess(AsyncPPO):
    """Without the collector process, which takes seconds."""

    _setup_learn = PPO._setup_learn
    collect_rollouts = PPO.collect_rollouts
    _act = PPO._act


class Halving(RolloutBuffer):
    def __init__(self, *args: Any, factor: float = 0.5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.factor = factor

    def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> Any:
        found = super()._get_samples(batch_inds, env)
        return found._replace(advantages=found.advantages * self.factor, returns=found.returns * self.factor)


class Halved(Halving, RolloutBuffer):
    pass


class HalvedMaskable(Halving, MaskableRolloutBuffer):
    pass


class Shifted(FlattenExtractor):
    def __init__(self, observation_space: Any, shift: float = 1.0) -> None:
        super().__init__(observation_space)
        self.shift = shift

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return super().forward(observations) + self.shift


class Paid(TrajectoryReplayBuffer):
    def sample(self, batch_size: int, env: Any = None) -> Any:
        found = super().sample(batch_size, env)
        return found._replace(rewards=found.rewards + 1.0)


# ------------------------------------------------------------------------------------------------------------------ the tables

GIVEN = {"policy", "env", "observation_space", "action_space"}
"""What a model is made of and for: another one is another model."""
ANY_MODEL = {
    "learning_rate": Case(0.02),
    "gamma": Case(0.5),
    "batch_size": Case(8),
    "stats_window_size": Case(7),
    "tensorboard_log": Case("runs"),
    "verbose": Case(1),
    "seed": Case(3),
    "_init_setup_model": Case(False),
}
TEACHER = {"kl_coef": 0.5, "reference_policy": "initial"}
ON_POLICY = ANY_MODEL | {
    "n_steps": Case(12),
    "n_epochs": Case(2),
    "gae_lambda": Case(0.5),
    "clip_range": Case(0.001),
    "clip_range_vf": Case(0.001),
    "normalize_advantage": Case(False),
    "ent_coef": Case(0.5),
    "vf_coef": Case(0.1),
    "max_grad_norm": Case(0.001),
    "use_sde": Case(True),
    "sde_sample_freq": Case(1, use_sde=True),
    "rollout_buffer_class": Case(Halved),
    "rollout_buffer_kwargs": Case({"factor": 0.1}, rollout_buffer_class=Halved),
    "target_kl": Case(1e-9),
    "advantage": Case("vtrace"),
    "policy_loss": Case("gspo"),
    "clip_range_high": Case(0.001),
    "dual_clip": Case(1.001, policy_loss="dual_clip"),
    "rho_bar": Case(5.0, advantage="vtrace"),
    "c_bar": Case(0.1, advantage="vtrace"),
    "kl_coef": Case(0.1, **TEACHER),
    "reference_policy": Case("teacher.zip", **TEACHER),
    "recompute_advantages": Case("minibatch"),
    "policy_kwargs": Case({"net_arch": [6]}),
}
COMPILED = {"backend": Case("native")}
MASKABLE = ON_POLICY | {
    "rollout_buffer_class": Case(HalvedMaskable),
    "rollout_buffer_kwargs": Case({"factor": 0.1}, rollout_buffer_class=HalvedMaskable),
}
GROUPS = (
    ON_POLICY
    | COMPILED
    | {
        "n_steps": Case(3),
        "clip_range_vf": Case(0.001, baseline="critic"),
        "vf_coef": Case(0.1, baseline="critic"),
        "normalize_advantage": Case(True),
        "group_size": Case(4),
        "group_by": Case("none"),
        "credit": Case("outcome"),
        "baseline": Case("mean"),
        "scale": Case("none"),
        "ddof": Case(1),
        "aggregation": Case("episode"),
        "shared_noise": Case(True),
    }
)
SEQUENCES = GROUPS | {
    "gamma": Case(0.5, credit="return_to_go"),
    "credit": Case("return_to_go"),
    "policy_loss": Case("gspo_token", credit="return_to_go"),
    "aggregation": Refused("episode"),
    "clip_range": Case(0.9),
    "length_scaled_clip": Case(False, clip_range=0.3),
    "batch_size": Case(24),
}
OFF_POLICY = ANY_MODEL | {
    "buffer_size": Case(14),
    "learning_starts": Case(9),
    "tau": Case(0.5),
    "train_freq": Case(4),
    "gradient_steps": Case(2),
    "action_noise": Case(NormalActionNoise(np.zeros(2), np.ones(2))),
    "replay_buffer_class": Case(Paid),
    "replay_buffer_kwargs": Case({"window_rule": "other"}),
    "n_steps": Case(3, offline_dataset=None),
    "horizon_length": Case(2),
    "offline_dataset": Case(None),
    "offline_steps": Case(3),
    "offline_fraction": Case(0.1),
    "backend": Case("native"),
    "policy_kwargs": Case({"net_arch": [6]}),
}
FLOW = OFF_POLICY | {
    "replay_buffer_kwargs": Case({"window_rule": "q_chunking"}, horizon_length=2),
    "optimize_memory_usage": Case(True),
    "sampling": Case("transition"),
    "flow_steps": Case(3),
    "alpha": Case(0.1),
    "expectile": Case(0.9),
    "n_critics": Case(3),
    "rho": Case(0.0),
    "ema_decay": Case(0.5),
    "objective": Case("bc"),
    "acting_mode": Case("best_of_n"),
    "search": Case({"beam_width": 2}, acting_mode="qgbs"),
    "n_candidates": Case(5, acting_mode="best_of_n"),
    "guidance": Case(3.0, acting_mode="guided"),
}
FLOW_MAP = OFF_POLICY | {
    "replay_buffer_kwargs": Case({"window_rule": "rql"}, horizon_length=2),
    "optimize_memory_usage": Refused(True),
    "sampling": Case("trajectory"),
    "execution_horizon": Case(1, horizon_length=2),
    "n_candidates": Case(5),
    "q_aggregation": Case("min"),
    "distillation": Case("psd"),
    "lsd_gradient": Case("diagonal", distillation="lsd"),
    "warmup_steps": Case(100),
    "anneal_end_step": Case(1),
    "online_rule": Case("bc"),
    "eta": Case(0.1, radius="published"),
    "adaptive_radius": Case(False),
    "beta": Case(2.0),
    "radius": Case("published"),
    "guidance_critic": Case("mean"),
    "guidance_at": Case("actor"),
    "normalize_gradient": Case(False),
    "distillation_weight": Case(0.5),
    "diagonal_weight": Case(0.5),
    "reanchor_every": Case(1),
    "n_sampling_steps": Case(3, acting_mode="sample"),
    "acting_mode": Case("sample"),
    "search": Case({"beam_width": 2}, acting_mode="qgbs"),
}
CLONED_FLOW = OFF_POLICY | {
    "replay_buffer_kwargs": Case({"window_rule": "rql"}, horizon_length=2),
    "optimize_memory_usage": Refused(True),
    "sampling": Case("trajectory"),
    "execution_horizon": Case(1, horizon_length=2),
    "actor_type": Case("best_of_n"),
    "flow_steps": Case(3),
    "alpha": Case(0.1),
    "normalize_q_loss": Case(True),
    "q_aggregation": Case("min"),
    "n_critics": Case(3),
    "n_candidates": Case(5, acting_mode="best_of_n"),
    "acting_mode": Case("best_of_n"),
    "search": Case({"beam_width": 2}, acting_mode="qgbs", actor_type="best_of_n"),
}
GAUSSIAN = OFF_POLICY | {
    "replay_buffer_kwargs": Case({"window_rule": "rql"}, horizon_length=2),
    "optimize_memory_usage": Refused(True),
    "sampling": Case("trajectory"),
    "execution_horizon": Case(1, horizon_length=2),
    "ent_coef": Case("auto_0.1"),
    "target_entropy": Case(-30.0, gradient_steps=3),
    "backup_entropy": Case(False),
    "n_critics": Case(2),
    "n_min_critics": Case(1),
    "rho": Case(0.5),
    "policy_delay": Case(2),
    "bc_alpha": Case(0.5),
    "n_candidates": Case(5, acting_mode="best_of_n"),
    "acting_mode": Case("best_of_n"),
}
STEERED = OFF_POLICY | {
    "replay_buffer_kwargs": Case({"window_rule": "rql"}, horizon_length=2),
    "optimize_memory_usage": Refused(True),
    "sampling": Case("trajectory"),
    "execution_horizon": Case(1, horizon_length=2),
    "noise_scale": Case(0.5),
    "flow_steps": Case(3),
    "decoder": Case("flow.zip", flow_steps=10),
    "rho": Case(0.0),
    "ent_coef": Case(0.1),
    "target_entropy": Case("auto"),
    "n_critics": Case(3),
    "n_candidates": Case(5),
    "acting_mode": Case("zero"),
}
FINE_TUNED_FLOW = OFF_POLICY | {
    "replay_buffer_kwargs": Case({"window_rule": "rql"}, horizon_length=2),
    "optimize_memory_usage": Refused(True),
    "sampling": Case("trajectory"),
    "execution_horizon": Case(1, horizon_length=2),
    "ent_coef": Case(0.1, edit_scale=0.5),
    "target_entropy": Case(-3.0, edit_scale=0.5),
    "flow_steps": Case(3),
    "inv_temp": Case(3.0),
    "edit_scale": Case(0.5),
    "n_critics": Case(3),
    "rho": Case(0.0),
    "max_grad_norm": Case(0.1),
    "n_candidates": Case(5, acting_mode="best_of_n"),
    "acting_mode": Case("zero"),
    "search": Case({"beam_width": 2}, acting_mode="qgbs"),
}
POLICY = {
    "lr_schedule": Case(lambda _: 0.1),
    "horizon_length": Case(2),
    "n_critics": Case(3),
    "n_candidates": Case(5),
    "acting_mode": Case("sample"),
    "n_sampling_steps": Case(3, acting_mode="sample"),
    "noise_seed": Case(5, acting_mode="sample"),
    "search": Case({"beam_width": 2}, acting_mode="qgbs"),
    "q_aggregation": Case("mean", n_candidates=30),
    "fourier_dim": Case(4),
    "distillation": Case("psd"),
    "lsd_gradient": Case("diagonal", distillation="lsd"),
    "warmup_steps": Case(100),
    "anneal_end_step": Case(1),
    "execution_horizon": Case(1, horizon_length=2),
    "net_arch": Case([6]),
    "activation_fn": Case(nn.Tanh),
    "features_extractor_class": Case(Shifted),
    "features_extractor_kwargs": Case({"shift": 2.0}, features_extractor_class=Shifted),
    "normalize_images": Case(False, observation_space=PointEnv("image").observation_space),
    "optimizer_class": Case(th.optim.SGD),
    "optimizer_kwargs": Case({"betas": (0.5, 0.5)}),
    "share_features_extractor": Case(True),
    "backend": Case("native"),
}
CASES: dict[type, dict[str, Any]] = {
    PPO: ON_POLICY | COMPILED,
    MaskablePPO: {name: case for name, case in MASKABLE.items() if "sde" not in name},
    RecurrentPPO: {name: case for name, case in ON_POLICY.items() if not name.startswith("rollout_buffer")},
    MaskableRecurrentPPO: {
        name: case for name, case in ON_POLICY.items() if "sde" not in name and not name.startswith("rollout_buffer")
    },
    GRPO: {name: case for name, case in GROUPS.items() if name in arguments_of(GRPO) and name != "gae_lambda"},
    GSPO: {name: case for name, case in SEQUENCES.items() if name in {*arguments_of(GSPO)} - {"gae_lambda", "dual_clip"}},
    AsyncPPO: {"advantage": Case("gae"), "policy_loss": Case("gspo")},
    RQL: FLOW,
    FMQ: FLOW_MAP,
    FQL: CLONED_FLOW,
    RLPD: GAUSSIAN,
    DSRL: STEERED,
    QAM: FINE_TUNED_FLOW,
    FlowMapPolicy: POLICY,
}
NO_GPU = "places on a GPU; without one there is the CPU alone"
COLLECTOR = (
    "of collectors, which are left out here; tests/test_async_ppo.py, test_collectors.py and test_ray_collectors.py show it"
)
NO_CRITIC = "SB3's, documented: there is no critic to estimate with; kept so that a script for PPO runs"
# What has no effect here, and why
IDLE: dict[type, dict[str, str]] = {
    PPO: {"device": NO_GPU, "execution": NO_GPU},
    **{one: {"device": NO_GPU} for one in (MaskablePPO, RecurrentPPO, MaskableRecurrentPPO)},
    GRPO: {"device": NO_GPU, "execution": NO_GPU, "gae_lambda": NO_CRITIC},
    GSPO: {
        "device": NO_GPU,
        "execution": NO_GPU,
        "gae_lambda": NO_CRITIC,
        "dual_clip": "of a loss that GSPO does not have; a warning says so",
    },
    AsyncPPO: dict.fromkeys(set(arguments_of(PPO)) - {"advantage", "policy_loss"} - GIVEN, "handed on to PPO, see there")
    | dict.fromkeys(OWN, COLLECTOR),
    **{one: {"device": NO_GPU, "storage": NO_GPU, "execution": NO_GPU} for one in (RQL, FMQ, FQL, RLPD, DSRL, QAM)},
    FlowMapPolicy: {},
}


def test_the_tables_are_complete():
    for called, cases in CASES.items():
        arguments = set(arguments_of(called)) - GIVEN
        assert arguments == set(cases) | set(IDLE[called]), called
        assert not set(cases) & set(IDLE[called]), called


# ------------------------------------------------------------------------------------------------------------ what is observed


@cache
def data() -> OfflineDataset:
    return collect(PointEnv(length=8), episodes=6)


def environments(called: type) -> VecEnv | PointEnv:
    if called in (GRPO, GSPO):
        return make_vec_env(lambda: Walk(ACTION_SPACES["box"]), 8, seed=0, wrapper_class=GroupedStart)
    return walks(4, ACTION_SPACES["discrete" if called in (MaskablePPO, MaskableRecurrentPPO) else "box"])


def on_policy(called: type, folder: Any, given: dict[str, Any]) -> Any:
    small = {"n_steps": 9, "batch_size": 12, "n_epochs": 3, "learning_rate": 0.05, "seed": 0, "device": "cpu"}
    small |= {"policy_kwargs": {"net_arch": [4]}, "clip_range": 0.1, "clip_range_high": 0.2 if called is GSPO else None}
    small |= {} if called in (MaskablePPO, RecurrentPPO, MaskableRecurrentPPO) else {"backend": "torch"}
    name, env = "MlpPolicy", environments(called)
    if called in (RecurrentPPO, MaskableRecurrentPPO):
        name = "MlpLstmPolicy"
        for one in (small, given):
            if "policy_kwargs" in one:
                one["policy_kwargs"] = {"lstm_hidden_size": 4, **one["policy_kwargs"]}
    if str(given.get("reference_policy")).endswith(".zip"):
        (InProcess if called is AsyncPPO else called)(name, env, **small | {"seed": 9}).save(folder / "teacher.zip")
    policy = given.pop("policy", name)
    model = (InProcess if called is AsyncPPO else called)(policy, env, **small | given)
    return model.learn(30) if hasattr(model, "policy") else model


def off_policy(called: type, given: dict[str, Any]) -> Any:
    own: dict[Any, dict[str, Any]] = {RQL: {"n_critics": 2, "flow_steps": 2}, FMQ: {"n_candidates": 3, "warmup_steps": 0}}
    own[RLPD] = {"n_candidates": 3, "n_critics": 3}
    small: dict[str, Any] = own.get(called, {"n_candidates": 3, "flow_steps": 2})
    small |= {"policy_kwargs": {"net_arch": [4]}, "learning_rate": 0.01, "batch_size": 6, "buffer_size": 100, "seed": 0}
    small |= {"learning_starts": 3, "offline_dataset": data(), "offline_steps": 2, "backend": "torch", "device": "cpu"}
    if "offline_dataset" in given and given["offline_dataset"] is None:
        small["offline_steps"] = 0
    if "decoder" in given:
        FQL("MlpPolicy", PointEnv(), policy_kwargs={"net_arch": [4]}, seed=9).save(given["decoder"])
    policy = given.pop("policy", "MlpPolicy")
    model = called(policy, PointEnv(length=8), **small | given)
    return model.learn(14) if hasattr(model, "policy") else model


def policy_alone(given: dict[str, Any]) -> Any:
    env = PointEnv("image" if "observation_space" in given else "box", length=8)
    small = {"net_arch": [4], "n_candidates": 3, "warmup_steps": 0, "backend": "torch", "fourier_dim": 2}
    small |= {"observation_space": env.observation_space, "action_space": env.action_space, "lr_schedule": lambda _: 0.01}
    th.manual_seed(0)
    policy = FlowMapPolicy(**{**small, **given})
    th.manual_seed(1)
    return policy.learn_behaviour(collect(env, 2) if env.kind == "image" else data(), 3, batch_size=8)


def observed(called: type, folder: Any, capsys: Any, given: dict[str, Any]) -> dict[str, bytes]:
    """:return: what there is to be seen of a tiny model after it has learned a little"""
    capsys.readouterr()
    given = dict(given)
    if called is FlowMapPolicy:
        model = policy = policy_alone(given)
    else:
        model = off_policy(called, given) if called in (RQL, FMQ, FQL, RLPD, DSRL, QAM) else on_policy(called, folder, given)
        policy = getattr(model, "policy", None)
    if policy is None:
        return {"built": b""}
    th.manual_seed(2)
    found = {name: weight.numpy().tobytes() for name, weight in policy.state_dict().items()}
    space = policy.observation_space
    observations = np.stack([np.full(space.shape, value, space.dtype) for value in (0, 1)])
    for deterministic in (False, True):
        actions, state = policy.predict(observations, deterministic=deterministic)
        found[f"actions {deterministic}"] = actions.tobytes()
    found["chunks"] = str(np.shape(state[0]) if state else None).encode()
    buffer = getattr(model, "rollout_buffer", getattr(model, "replay_buffer", None))
    found |= {name: part.tobytes() for name, part in vars(buffer).items() if isinstance(part, np.ndarray)} if buffer else {}
    if model is not policy:
        found["printed"] = str(bool(capsys.readouterr().out)).encode()
        found["window"] = str(model.ep_info_buffer.maxlen).encode()
        found["logged"] = str("runs" in str(model.logger.dir)).encode()
    else:
        found["shared"] = str(policy.critic.features_extractor is policy.actor.features_extractor).encode()
    found["backend"] = str(getattr(model, "chosen_backend", None)).encode()
    return found


BASES: dict[str, dict[str, bytes]] = {}


def base(called: type, folder: Any, capsys: Any, beside: dict[str, Any]) -> dict[str, bytes]:
    key = f"{called.__name__} {beside}"
    if key not in BASES:
        BASES[key] = observed(called, folder, capsys, beside)
    return BASES[key]


@pytest.mark.parametrize("called", CASES)
def test_nothing_changes_by_itself(called, tmp_path, capsys):
    assert observed(called, tmp_path, capsys, {}) == base(called, tmp_path, capsys, {})


EACH = [(called, name) for called in CASES for name in CASES[called]]


@pytest.mark.parametrize(("called", "name"), EACH, ids=lambda one: getattr(one, "__name__", one))
def test_an_argument_does_something(called, name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case = CASES[called][name]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*has no effect here")
        warnings.filterwarnings("ignore", message="No episode ended")
        if isinstance(case, Refused):
            with pytest.raises(ValueError, match=f"`{name}"):
                observed(called, tmp_path, capsys, {name: case.given})
            return
        before = base(called, tmp_path, capsys, case.beside)
        assert observed(called, tmp_path, capsys, {**case.beside, name: case.given}) != before


@pytest.mark.parametrize("called", [GRPO, GSPO])
def test_an_argument_without_a_critic_does_nothing(called, tmp_path, capsys):
    """And is taken without a word, so that a script for PPO runs."""
    assert observed(called, tmp_path, capsys, {"gae_lambda": 0.5}) == base(called, tmp_path, capsys, {})
