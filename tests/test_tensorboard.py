"""What ends up in TensorBoard's event files: keys, and where on the x-axis; and that SB3's table can show all keys."""

import io

import numpy as np
import pytest
from on_policy import ACTION_SPACES, Recorder, walks
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.logger import HumanOutputFormat
from tasks import PointEnv, collect
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sb3_flow import DSRL, FMQ, FQL, GRPO, GSPO, PPO, QAM, RLPD, RQL, AsyncPPO, MaskablePPO, MaskableRecurrentPPO, RecurrentPPO
from sb3_flow.envs import SuccessInfo

SMALL = {"policy_kwargs": {"net_arch": [8]}, "batch_size": 8, "learning_starts": 0, "n_candidates": 2, "seed": 0}
ON_POLICY = {"n_steps": 8, "batch_size": 8, "policy_kwargs": {"net_arch": [8]}, "seed": 0}

EVALUATION = {"eval/mean_reward", "eval/mean_ep_length", "eval/success_rate"}
ROLLOUT = {"rollout/ep_rew_mean", "rollout/ep_len_mean"}
COMMON = {"time/fps", "train/learning_rate", "train/online_phase", "train/actor_loss", "train/critic_loss"}
RQL_KEYS = {f"train/{name}" for name in ("flow_loss", "value_mean", "value_std", "target_mean")}
FMQ_KEYS = {f"train/{name}" for name in ("q_mean", "target_mean", "gradient_norm")}
IMITATION = {"train/diagonal_loss", "train/distillation_loss"}
GUIDANCE = {f"train/{name}" for name in ("guidance_loss", "guidance_norm", "guidance_radius", "drift", "guided_q")}
BEHAVIOUR = {f"offline/behaviour_return{end}" for end in ("", "_low", "_high")}
FQL_KEYS = {f"train/{name}" for name in ("flow_loss", "distillation_loss", "actor_q", "q_mean", "target_mean")}
RLPD_KEYS = {f"train/{name}" for name in ("ent_coef", "ent_coef_loss", "entropy", "q_mean", "target_mean")}
DSRL_KEYS = {
    f"train/{name}" for name in ("flow_loss", "latent_loss", "ent_coef", "ent_coef_loss", "entropy", "q_mean", "target_mean")
}
QAM_KEYS = {f"train/{name}" for name in ("flow_loss", "adjoint_loss", "adjoint_size", "q_mean", "target_mean")}
OFFLINE = {
    RQL: COMMON | RQL_KEYS | EVALUATION | BEHAVIOUR,
    FMQ: COMMON | FMQ_KEYS | IMITATION | EVALUATION | BEHAVIOUR,
    FQL: COMMON | FQL_KEYS | EVALUATION | BEHAVIOUR,
    RLPD: COMMON | RLPD_KEYS | EVALUATION | BEHAVIOUR,
    DSRL: COMMON | DSRL_KEYS | EVALUATION | BEHAVIOUR,
    QAM: COMMON | QAM_KEYS | EVALUATION | BEHAVIOUR,
}
ONLINE = {
    RQL: COMMON | RQL_KEYS | EVALUATION | ROLLOUT | {"rollout/success_rate"},
    FMQ: COMMON | FMQ_KEYS | GUIDANCE | EVALUATION | ROLLOUT | {"rollout/success_rate"},
    FQL: COMMON | FQL_KEYS | EVALUATION | ROLLOUT | {"rollout/success_rate"},
    RLPD: COMMON | RLPD_KEYS | EVALUATION | ROLLOUT | {"rollout/success_rate"},
    DSRL: COMMON | DSRL_KEYS | EVALUATION | ROLLOUT | {"rollout/success_rate"},
    QAM: COMMON | QAM_KEYS | EVALUATION | ROLLOUT | {"rollout/success_rate"},
}


def success_env():
    return SuccessInfo(PointEnv(length=5))


@pytest.fixture(scope="module")
def dataset():
    return collect(PointEnv(length=5))


def scalars(folder):
    """:return: steps and values by tag, read back from the event files of a run"""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    # as they were written: files of one second are named by a counter, and 10 is read before 9
    tags = {tag: sorted(accumulator.Scalars(tag), key=lambda event: event.wall_time) for tag in accumulator.Tags()["scalars"]}
    return {tag: ([event.step for event in events], [event.value for event in events]) for tag, events in tags.items()}


@pytest.mark.parametrize("algorithm", [RQL, FMQ, FQL, RLPD, DSRL, QAM])
def test_both_phases(algorithm, dataset, tmp_path):
    """A run for each: gradient steps are on the x-axis of the offline one, environment steps on that of the online one."""
    evaluation = EvalCallback(make_vec_env(success_env), n_eval_episodes=1, eval_freq=4, verbose=0)
    model = algorithm("MlpPolicy", make_vec_env(success_env, n_envs=2), tensorboard_log=str(tmp_path), verbose=1, **SMALL)
    model.learn_offline(dataset, 8, evaluation, log_interval=4)
    model.learn_offline(dataset, 6, evaluation, log_interval=4)
    model.learn(20, evaluation, log_interval=1)
    model.learn(20, evaluation, log_interval=1, reset_num_timesteps=False)
    name = algorithm.__name__
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [f"{name}_1", f"{name}_offline_1"]
    offline, online = scalars(tmp_path / f"{name}_offline_1"), scalars(tmp_path / f"{name}_1")
    assert set(offline) == OFFLINE[algorithm]
    assert set(online) == ONLINE[algorithm]
    assert offline["train/critic_loss"][0] == [4, 8, 12, 14], "continued, and complete at the end"
    assert offline["eval/success_rate"][0] == [4, 8, 12]
    assert offline["train/online_phase"][1] == [0.0] * 4
    behaviour = dataset.behaviour_return
    for end, expected in (("", behaviour.value), ("_low", behaviour.low), ("_high", behaviour.high)):
        steps, values = offline[f"offline/behaviour_return{end}"]
        assert set(steps) == {4, 8, 12, 14} and values == pytest.approx([expected] * len(values))
    # an episode is at most 5 steps of 2 environments; SB3 logs when one ends
    assert online["eval/mean_reward"][0] == [4, 12, 20, 28, 36], "call 16 is the second one online; 2 steps a call"
    assert set(online["train/online_phase"][1]) == {1.0}
    for tag, (steps, values) in {**offline, **online}.items():
        assert steps == sorted(steps), f"{tag} goes forward"
        assert np.isfinite(values).all(), tag
    assert max(online["train/critic_loss"][0]) <= 40


@pytest.mark.parametrize("log_interval", [None, 3])
def test_offline_metrics_do_not_leak_into_the_online_phase(log_interval, dataset):
    model = RQL("MlpPolicy", make_vec_env(success_env), **SMALL)
    recorder = Recorder()
    model.set_logger(recorder)
    update = model.update
    model.update = lambda batch, generator: {
        **update(batch, generator),
        "value_mean": batch.actions.sum() * 0 + model.is_offline,
    }
    model.learn_offline(dataset, 4, log_interval=log_interval)
    model.learn(10, log_interval=1)
    phases = [dump["train/online_phase"] for dump in recorder.dumps]
    assert phases[: 0 if log_interval is None else 2] == [0] * (0 if log_interval is None else 2)
    assert phases[-1] == 1
    assert [dump["train/value_mean"] for dump in recorder.dumps] == [1 - phase for phase in phases]


def test_both_phases_in_one_call(dataset, tmp_path):
    """As the zoo does it; the run's name is kept."""
    model = RQL(
        *("MlpPolicy", make_vec_env(success_env)),
        offline_dataset=dataset,
        offline_steps=3,
        tensorboard_log=str(tmp_path),
        **SMALL,
    )
    model.learn(10, tb_log_name="mine", log_interval=1)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["mine_1", "mine_offline_1"]
    assert scalars(tmp_path / "mine_offline_1")["train/actor_loss"][0] == [3]
    assert scalars(tmp_path / "mine_1")["train/actor_loss"][0][-1] <= 10


BOX, DISCRETE = ACTION_SPACES["box"], ACTION_SPACES["discrete"]
PPO_KEYS = {
    f"train/{name}"
    for name in (
        *("approx_kl", "clip_fraction", "clip_range", "entropy_loss", "explained_variance", "learning_rate", "loss"),
        *("policy_gradient_loss", "value_loss", "ratio_mean", "ratio_max"),
    )
} | {"time/fps"}
SEQUENCES = {"train/sequence_ratio_mean", "train/sequence_ratio_max"}
NO_CRITIC = {"train/explained_variance", "train/value_loss"}
GROUPS = {f"rollout/{name}" for name in ("alive_peers", "alive_share", "group_return_spread", "zero_variance_share")}
CORRECTED = {"train/rho_clipped_share"}
ASYNC = {f"async/{name}" for name in ("lag_mean", "lag_max", "wait_collector", "wait_learner", "dropped")}
ALONE = {"group_by": "none", "backend": "torch"}
VTRACE = {"advantage": "vtrace", "clip_range_high": 0.3, "clip_range_vf": 0.2}
DECOUPLED = {"policy_loss": "decoupled", "kl_coef": 0.1, "reference_policy": "initial"}
LSTM = {"policy_kwargs": {"net_arch": [8], "lstm_hidden_size": 8}}

# class, action space, arguments, keys: all that one run logs
VARIANTS = {
    "PPO": (PPO, BOX, {}, PPO_KEYS | {"train/std"}),
    "PPO V-trace": (
        *(PPO, BOX, VTRACE),
        PPO_KEYS | CORRECTED | {"train/std", "train/clip_range_high", "train/clip_range_vf"},
    ),
    "PPO decoupled": (PPO, DISCRETE, DECOUPLED, PPO_KEYS | {"train/kl_reference"}),
    "PPO GSPO loss": (PPO, DISCRETE, {"policy_loss": "gspo_token"}, PPO_KEYS | SEQUENCES),
    "MaskablePPO": (MaskablePPO, DISCRETE, {}, PPO_KEYS),
    "RecurrentPPO": (RecurrentPPO, DISCRETE, LSTM, PPO_KEYS | SEQUENCES),
    "MaskableRecurrentPPO": (MaskableRecurrentPPO, DISCRETE, LSTM, PPO_KEYS | SEQUENCES),
    "GRPO": (GRPO, DISCRETE, ALONE, (PPO_KEYS | GROUPS) - NO_CRITIC),
    "GSPO": (GSPO, DISCRETE, ALONE, (PPO_KEYS | GROUPS | SEQUENCES | {"train/clip_range_high"}) - NO_CRITIC),
    "AsyncPPO": (AsyncPPO, DISCRETE, {}, PPO_KEYS | CORRECTED | ASYNC),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_on_policy(name, tmp_path):
    algorithm, space, kwargs, expected = VARIANTS[name]
    policy = "MlpLstmPolicy" if issubclass(algorithm, RecurrentPPO) else "MlpPolicy"
    # the table is printed, too, and SB3 refuses one with keys that look the same
    model = algorithm(policy, walks(2, space), tensorboard_log=str(tmp_path), verbose=1, **{**ON_POLICY, **kwargs})
    model.learn(48)
    if algorithm is AsyncPPO:
        model.close()
    logged = scalars(tmp_path / f"{algorithm.__name__}_1")
    assert set(logged) - ROLLOUT == expected
    for tag, (steps, values) in logged.items():
        assert steps == sorted(set(steps)), f"{tag} goes forward"
        assert 0 < steps[-1] <= model.num_timesteps
        assert np.isfinite(values).all(), tag


def table(keys):
    HumanOutputFormat(io.StringIO()).write(dict.fromkeys(keys, 0.0), dict.fromkeys(keys))


def test_all_keys_of_all_algorithms_fit_into_one_table():
    """SB3 cuts keys to 36 characters."""
    hidden = {f"time/{name}" for name in ("iterations", "episodes", "time_elapsed", "total_timesteps", "gradient_steps")}
    hidden.add("train/n_updates")
    keys = hidden.union(*OFFLINE.values(), *ONLINE.values(), *(expected for *_, expected in VARIANTS.values()))
    assert len(keys) > 50
    table(keys)
    long = "train/" + 33 * "x"
    with pytest.raises(ValueError, match="already exists"):
        table({*keys, long + "y", long + "z"})
