"""The offline phase, its hand-over to SB3's online loop, and that nothing is lost on the way."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from copy import deepcopy

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import SAC
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CheckpointCallback,
    EvalCallback,
    EveryNTimesteps,
    StopTrainingOnMaxEpisodes,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from tasks import PointEnv, collect

from sb3_flow import FMQ, RQL, OfflineDataset, PrioritizedReplayBuffer
from sb3_flow.common.checkpoints import latest_checkpoint
from sb3_flow.data import TrajectoryReplayBuffer

SMALL = {"policy_kwargs": {"net_arch": [16, 16]}, "n_critics": 2, "flow_steps": 3, "batch_size": 16, "seed": 0}


@pytest.fixture(scope="module")
def dataset():
    return collect(PointEnv())


def state_of(model):
    """Everything that training changes, as one flat dict."""
    state = {f"policy.{name}": value for name, value in model.policy.state_dict().items()}
    for name in ("actor", "critic"):
        for index, entries in getattr(model, name).optimizer.state_dict()["state"].items():
            state.update({f"{name}.optimizer.{index}.{key}": value for key, value in entries.items()})
    state.update({f"stream.{name}": value for name, (_, value) in model.random_streams.get_state().items()})
    return {name: value.clone() if isinstance(value, th.Tensor) else th.tensor(value) for name, value in state.items()}


def assert_same_state(one, other):
    assert one.keys() == other.keys()
    different = [name for name in one if not th.equal(one[name], other[name])]
    assert not different


# ------------------------------------------------------------- save, load, resume


@pytest.mark.parametrize("horizon_length", [1, 4])
@pytest.mark.parametrize("seed", [0, None])
def test_offline_training_in_two_halves_equals_one_go(dataset, tmp_path, horizon_length, seed):
    kwargs = {**SMALL, "seed": seed, "horizon_length": horizon_length, "offline_dataset": dataset}
    th.manual_seed(3)  # unseeded models draw their own seed from torch
    whole = RQL("MlpPolicy", None, **kwargs).learn_offline(dataset, 40)
    th.manual_seed(3)
    half = RQL("MlpPolicy", None, **kwargs).learn_offline(dataset, 20)
    half.save(tmp_path / "half")
    del half
    th.manual_seed(99)
    resumed = RQL.load(tmp_path / "half").learn_offline(dataset, 20)
    assert_same_state(state_of(whole), state_of(resumed))
    assert resumed.offline_updates == whole.offline_updates == 40
    assert resumed._n_updates == whole._n_updates == 40


def test_loading_with_another_seed_reseeds(dataset, tmp_path):
    RQL("MlpPolicy", None, **SMALL, offline_dataset=dataset).learn_offline(dataset, 5).save(tmp_path / "model")
    as_saved, reseeded = RQL.load(tmp_path / "model"), RQL.load(tmp_path / "model", seed=1)
    fresh = RQL("MlpPolicy", None, **{**SMALL, "seed": 1}, offline_dataset=dataset)
    for name in ("windows", "update", "act"):
        assert th.equal(reseeded.random_streams[name].get_state(), fresh.random_streams[name].get_state())
    assert not th.equal(as_saved.random_streams["update"].get_state(), reseeded.random_streams["update"].get_state())


@pytest.mark.parametrize("n_envs", [1, 4])
def test_online_state_is_restored_field_by_field(dataset, tmp_path, n_envs):
    env = DummyVecEnv([PointEnv] * n_envs)
    model = RQL("MlpPolicy", env, **SMALL, horizon_length=3, buffer_size=200, learning_starts=10)
    model.learn_offline(dataset, 10)
    model.learn(130)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    loaded = RQL.load(tmp_path / "model", env=DummyVecEnv([PointEnv] * n_envs))
    loaded.set_offline_dataset(dataset)
    loaded.load_replay_buffer(tmp_path / "buffer")
    assert_same_state(state_of(model), state_of(loaded))
    for name in ("num_timesteps", "offline_updates", "_n_updates", "_episode_num", "horizon_length", "acting_mode"):
        assert getattr(model, name) == getattr(loaded, name), name
    ours, theirs = model.replay_buffer, loaded.replay_buffer
    for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts", "terminated"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    assert (ours.pos, ours.full, ours.trajectories.clock) == (theirs.pos, theirs.full, theirs.trajectories.clock)
    # the environment starts anew, so what was running is cut; apart from that the same windows come
    ours.cut_trajectories()
    for one, other in zip(ours.sample(64), theirs.sample(64), strict=True):
        assert th.equal(one, other)
    loaded.learn(20, reset_num_timesteps=False)
    assert loaded.num_timesteps == model.num_timesteps + 20


def test_the_same_environment_goes_on_after_a_load(tmp_path):
    env = DummyVecEnv([PointEnv])
    model = RQL("MlpPolicy", env, **SMALL, horizon_length=4, learning_starts=5).learn(43)
    model.save(tmp_path / "model")
    loaded = RQL.load(tmp_path / "model", env=env, force_reset=False)
    for one, other in zip(model._chunk_state, loaded._chunk_state, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(model._sample_action(0, None, 1)[0], loaded._sample_action(0, None, 1)[0])


RUN = """
    import sys
    from stable_baselines3.common.callbacks import CheckpointCallback
    sys.path.insert(0, {tests!r})
    from tasks import PointEnv, collect
    from sb3_flow import RQL
    dataset = collect(PointEnv())
    model = RQL("MlpPolicy", None, policy_kwargs=dict(net_arch=[16, 16]), n_critics=2, flow_steps=3, batch_size=16, seed=0,
                offline_dataset=dataset)
    model.learn_offline(dataset, 1_000_000, callback=CheckpointCallback(10, {folder!r}))
"""


def test_a_killed_run_continues_from_its_last_checkpoint(dataset, tmp_path):
    script = textwrap.dedent(RUN.format(tests=os.path.dirname(__file__), folder=str(tmp_path)))
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("*.zip"))) < 5:
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < deadline, "no checkpoints appeared"
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
    # whatever has a checkpoint's name is whole, wherever the kill struck
    for path in tmp_path.glob("*.zip"):
        assert RQL.load(path).offline_updates == int(path.stem.split("_")[2])
    latest = latest_checkpoint(tmp_path)
    resumed = RQL.load(latest)
    assert resumed.offline_updates >= 50
    done = resumed.offline_updates
    resumed.learn_offline(dataset, 7)
    whole = RQL("MlpPolicy", None, **SMALL, offline_dataset=dataset).learn_offline(dataset, done + 7)
    assert_same_state(state_of(whole), state_of(resumed))


def test_a_half_written_checkpoint_is_never_taken_for_a_good_one(dataset, tmp_path, monkeypatch):
    model = RQL("MlpPolicy", None, **SMALL, offline_dataset=dataset)
    model.save(tmp_path / "rl_model_10_steps")
    good = (tmp_path / "rl_model_10_steps.zip").read_bytes()
    # a writer without our care leaves a truncated file under the final name
    (tmp_path / "rl_model_20_steps.zip").write_bytes(good[: len(good) // 2])
    corrupt = bytearray(good)
    corrupt[len(good) // 3] ^= 0xFF
    (tmp_path / "rl_model_30_steps.zip").write_bytes(bytes(corrupt))
    (tmp_path / "other_99_steps.zip").write_bytes(good)
    assert latest_checkpoint(tmp_path).name == "rl_model_10_steps.zip"
    assert latest_checkpoint(tmp_path / "nowhere") is None
    # ours: interrupted in the middle of writing, the old file is still there and whole
    real_write = th.save

    def interrupted(*args, **kwargs):
        real_write(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(th, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.save(tmp_path / "rl_model_10_steps")
    monkeypatch.undo()
    assert (tmp_path / "rl_model_10_steps.zip").read_bytes() == good
    assert not list(tmp_path.glob(".*"))


def test_save_into_an_open_file(dataset, tmp_path):
    model = RQL("MlpPolicy", None, **SMALL, offline_dataset=dataset)
    with open(tmp_path / "file.zip", "wb") as file:
        model.save(file)
    with open(tmp_path / "file.zip", "rb") as file:
        assert_same_state(state_of(model), state_of(RQL.load(file)))


def test_failed_set_parameters_leaves_the_model_as_it_was(dataset):
    model = RQL("MlpPolicy", None, **SMALL, offline_dataset=dataset).learn_offline(dataset, 3)
    before = state_of(model)
    parameters = deepcopy(model.get_parameters())
    parameters["policy"] = {name: th.zeros_like(value) for name, value in parameters["policy"].items()}
    parameters["critic.optimizer"] = {"nonsense": 1}
    with pytest.raises((KeyError, ValueError)):
        model.set_parameters(parameters)
    assert_same_state(before, state_of(model))


@pytest.mark.parametrize("buffer", [None, PrioritizedReplayBuffer])
def test_a_buffer_saved_in_the_offline_phase_is_sampled_online(buffer, dataset, tmp_path):
    given = {**SMALL, "offline_dataset": dataset, "offline_fraction": 0.5, "replay_buffer_class": buffer}
    model = RQL("MlpPolicy", PointEnv(), **given)
    model.learn_offline(dataset, 4, CheckpointCallback(4, str(tmp_path), save_replay_buffer=True))
    loaded = RQL.load(tmp_path / "rl_model_4_steps", env=PointEnv(), offline_dataset=dataset)
    loaded.load_replay_buffer(tmp_path / "rl_model_replay_buffer_4_steps.pkl")
    for each in (model, loaded):
        each.learn(30)
        assert not each.replay_buffer.offline_only and len(each.replay_buffer._sources()) == 2
    assert_same_state(state_of(model), state_of(loaded))


def test_damaged_buffers_are_named(tmp_path):
    model = RQL("MlpPolicy", PointEnv(), **SMALL)
    buffer = model.replay_buffer
    model.save_replay_buffer(tmp_path / "whole")
    content = (tmp_path / "whole.pkl").read_bytes()
    for name, damaged in {"short.pkl": content[: len(content) // 2], "empty.pkl": b"", "junk.pkl": b"junk"}.items():
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{name} is not a complete pickle file"):
            model.load_replay_buffer(tmp_path / name)
        assert model.replay_buffer is buffer


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"replay_buffer_class": "HerReplayBuffer"}, TypeError, "`replay_buffer_class` must be a class .*'HerReplayBuffer'"),
        ({"replay_buffer_kwargs": {"n_envs": 2}}, ValueError, "`n_envs` is not for `replay_buffer_kwargs`"),
        (
            {"replay_buffer_class": PrioritizedReplayBuffer, "replay_buffer_kwargs": {"alhpa": 0.5}},
            TypeError,
            "PrioritizedReplayBuffer has no argument `alhpa`: did you mean `alpha`",
        ),
    ],
)
def test_arguments_of_buffers(given, error, message):
    with pytest.raises(error, match=message):
        RQL("MlpPolicy", PointEnv(), **SMALL, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"horizon_length": 1.5}, "`horizon_length` must be a whole number, but 1.5 was given"),
        ({"n_envs": 0}, "`n_envs` must be at least 1"),
        ({"gamma": 5.0}, "`gamma` must be in"),
        ({"buffer_size": -5}, "`buffer_size` must be at least 0"),
    ],
)
def test_arguments_of_a_buffer_alone(given, message):
    space = gym.spaces.Box(-1, 1, (1,))
    with pytest.raises(ValueError, match=message):
        TrajectoryReplayBuffer(
            **{"buffer_size": 10, "observation_space": space, "action_space": space, "device": "cpu"} | given
        )


def test_failed_buffer_load_keeps_the_old_buffer(tmp_path):
    model = RQL("MlpPolicy", DummyVecEnv([PointEnv]), **SMALL, horizon_length=2)
    buffer = model.replay_buffer
    RQL("MlpPolicy", DummyVecEnv([PointEnv] * 2), **SMALL).save_replay_buffer(tmp_path / "two")
    RQL("MlpPolicy", DummyVecEnv([PointEnv]), **SMALL).save_replay_buffer(tmp_path / "h1")
    RQL("MlpPolicy", "Pendulum-v1", **SMALL, horizon_length=2).save_replay_buffer(tmp_path / "pendulum")
    SAC("MlpPolicy", PointEnv(), buffer_size=10).save_replay_buffer(tmp_path / "sac")
    for name, message in (
        ("two", "`n_envs=2`, but the model has `n_envs=1`"),
        ("h1", "`horizon_length=1`, but"),
        ("pendulum", "`observation_space=.*but the model has"),
        ("sac", "`horizon_length=2` needs a TrajectoryReplayBuffer"),
    ):
        with pytest.raises(ValueError, match=message):
            model.load_replay_buffer(tmp_path / name)
        assert model.replay_buffer is buffer


def test_a_buffer_that_would_change_what_is_learnt_is_refused(dataset, tmp_path):
    """A stock buffer has no room for the dataset, and the windows of another algorithm bootstrap by another rule."""
    SAC("MlpPolicy", PointEnv(), buffer_size=10).save_replay_buffer(tmp_path / "sac")
    RQL("MlpPolicy", PointEnv(), **SMALL).save_replay_buffer(tmp_path / "rql")
    model = RQL("MlpPolicy", PointEnv(), **SMALL)
    model.load_replay_buffer(tmp_path / "sac")
    model = RQL("MlpPolicy", PointEnv(), **SMALL)
    model.set_offline_dataset(dataset)
    with pytest.raises(ValueError, match=r"a ReplayBuffer, which cannot hold the model's dataset.*from_replay_buffer"):
        model.load_replay_buffer(tmp_path / "sac")
    assert model.replay_buffer.n_offline > 0
    other = FMQ("MlpPolicy", PointEnv(), policy_kwargs={"net_arch": [8]})
    with pytest.raises(ValueError, match="has `window_rule=rql`, but the model has `window_rule=q_chunking`"):
        other.load_replay_buffer(tmp_path / "rql")


def test_the_latest_checkpoint_of_both_phases(dataset, tmp_path):
    """Both phases count from 0 and write to the same names; what was trained longest is the latest all the same."""
    model = RQL("MlpPolicy", PointEnv(), **SMALL)
    callback = CheckpointCallback(20, str(tmp_path))
    model.learn_offline(dataset, 60, callback)
    assert RQL.load(latest_checkpoint(tmp_path)).offline_updates == 60
    model.learn(30, callback)
    latest = RQL.load(latest_checkpoint(tmp_path))
    assert (latest.offline_updates, latest.num_timesteps) == (60, 20)


def test_a_seed_set_by_hand_is_resumed_as_well(dataset, tmp_path):
    models = [RQL("MlpPolicy", None, **SMALL, offline_dataset=dataset) for _ in range(2)]
    for model in models:
        model.set_random_seed(7)
        model.learn_offline(dataset, 5)
    models[0].save(tmp_path / "model")
    resumed = RQL.load(tmp_path / "model").learn_offline(dataset, 5)
    assert_same_state(state_of(models[1].learn_offline(dataset, 5)), state_of(resumed))


def test_a_deep_copy_trains_on_its_own(dataset):
    model = RQL("MlpPolicy", None, **SMALL, offline_dataset=dataset).learn_offline(dataset, 3)
    copied = deepcopy(model)
    before = state_of(model)
    copied.learn_offline(dataset, 3)
    assert_same_state(before, state_of(model))
    model.learn_offline(dataset, 3)
    assert_same_state(state_of(model), state_of(copied))


def test_going_on_online_without_the_dataset_is_said(dataset, tmp_path):
    RQL("MlpPolicy", PointEnv(), **SMALL).learn_offline(dataset, 2).save(tmp_path / "model")
    with pytest.warns(UserWarning, match="set_offline_dataset"):
        RQL.load(tmp_path / "model", env=PointEnv()).learn(5)


def test_streams_of_neighbouring_seeds_differ():
    states = [
        bytes(RQL("MlpPolicy", PointEnv(), **{**SMALL, "seed": seed}).random_streams[name].get_state().numpy())
        for seed in range(3)
        for name in ("windows", "update", "act", "explore")
    ]
    assert len(set(states)) == len(states)


@pytest.mark.parametrize("deterministic", [True, False])
def test_evaluation_does_not_disturb_training(deterministic):
    states = []
    for eval_freq in (0, 10):
        model = RQL("MlpPolicy", PointEnv(), **SMALL, learning_starts=5)
        env = DummyVecEnv([PointEnv])
        model.learn(40, EvalCallback(env, eval_freq=eval_freq, n_eval_episodes=1, deterministic=deterministic, warn=False))
        states.append({name: value for name, value in state_of(model).items() if name != "stream.act"})
    assert_same_state(*states)


# --------------------------------------------------------------- the offline phase


def test_without_an_environment(dataset, tmp_path):
    model = RQL("MlpPolicy", None, **SMALL, horizon_length=3, offline_dataset=dataset)
    assert model.observation_space == dataset.observation_space
    model.learn_offline(dataset, 5)
    assert model.env is None
    assert model.num_timesteps == 0
    assert model.offline_updates == 5
    evaluate_policy(model, DummyVecEnv([PointEnv]), n_eval_episodes=2, warn=False)
    with pytest.raises(AssertionError, match="You must set the environment"):
        model.learn(10)
    with pytest.raises(ValueError, match="spaces do not match"):
        model.set_env(PointEnv("dict"))
    model.set_env(PointEnv())
    model.learn(30)
    assert model.num_timesteps == 30
    with pytest.raises(ValueError, match="`env=None` needs `offline_dataset`"):
        RQL("MlpPolicy", None)


class Counter(BaseCallback):
    def __init__(self, stop_after=None):
        super().__init__()
        self.stop_after, self.started, self.ended, self.seen = stop_after, 0, 0, []

    def _on_training_start(self):
        self.started += 1

    def _on_training_end(self):
        self.ended += 1

    def _on_step(self):
        self.seen.append(self.num_timesteps)
        assert len(self.locals["dones"]) == len(self.locals["infos"])
        return self.stop_after is None or len(self.seen) < self.stop_after


def test_callbacks_count_gradient_steps(dataset):
    counter = Counter()
    model = RQL("MlpPolicy", PointEnv(), **SMALL).learn_offline(dataset, 7, callback=counter)
    model.learn_offline(dataset, 3, callback=counter)
    assert counter.seen == list(range(1, 11))
    assert (counter.started, counter.ended) == (2, 2)
    model.learn(4, callback=counter)
    assert counter.seen[10:] == [1, 2, 3, 4]


def test_callback_stops_the_phase_and_what_follows(dataset):
    counter = Counter(stop_after=6)
    model = RQL("MlpPolicy", PointEnv(), **SMALL, offline_dataset=dataset, offline_steps=50)
    model.learn(1000, callback=counter)
    assert model.offline_updates == 6
    assert model.num_timesteps == 0
    assert counter.ended == 1


def test_shipped_callbacks_work_offline(dataset, tmp_path):
    evaluation = EvalCallback(
        DummyVecEnv([PointEnv]),
        callback_on_new_best=StopTrainingOnRewardThreshold(reward_threshold=1e6),
        best_model_save_path=str(tmp_path / "best"),
        log_path=str(tmp_path),
        eval_freq=10,
        n_eval_episodes=2,
        warn=False,
        verbose=0,
    )
    callbacks = [
        CheckpointCallback(10, str(tmp_path), save_replay_buffer=True),
        evaluation,
        StopTrainingOnMaxEpisodes(1),
        EveryNTimesteps(5, Counter()),
    ]
    model = RQL("MlpPolicy", None, **SMALL, offline_dataset=dataset, tensorboard_log=str(tmp_path / "tb"))
    model.learn_offline(dataset, 20, callback=callbacks, log_interval=10, progress_bar=True)
    assert np.load(tmp_path / "evaluations.npz")["timesteps"].tolist() == [10, 20]
    assert (tmp_path / "best" / "best_model.zip").exists()
    for steps in (10, 20):
        checkpoint = RQL.load(tmp_path / f"rl_model_{steps}_steps.zip")
        assert checkpoint.offline_updates == steps
        assert checkpoint.num_timesteps == 0, "environment steps are not what the offline phase counts"
    assert list((tmp_path / "tb" / "RQL_offline_1").glob("events*"))


def test_logged_values(dataset, tmp_path):
    model = RQL("MlpPolicy", PointEnv(), **SMALL, tensorboard_log=str(tmp_path))
    model.set_logger(configure(str(tmp_path), ["csv"]))
    model.learn_offline(dataset, 20, log_interval=10)
    import pandas

    table = pandas.read_csv(tmp_path / "progress.csv")
    assert table["time/gradient_steps"].tolist() == [10, 20] and "time/total_timesteps" not in table
    assert (table["offline/behaviour_return"] == dataset.behaviour_return.value).all()
    assert table["train/n_updates"].tolist() == [10, 20]
    for name in ("actor_loss", "critic_loss", "flow_loss", "value_mean", "value_std", "target_mean", "learning_rate"):
        assert np.isfinite(table[f"train/{name}"]).all(), name


def test_metrics_are_means_over_the_log_interval(dataset):
    model = RQL("MlpPolicy", PointEnv(), **SMALL)
    values = iter([1.0, 2.0, 6.0])
    model.update = lambda batch, generator: {"critic_loss": th.tensor(next(values))}
    model.set_logger(configure(None, []))
    model.set_offline_dataset(dataset)
    model.train(3, 4)
    model._metrics.flush(model.logger)
    assert model.logger.name_to_value["train/critic_loss"] == pytest.approx(3.0)


def test_evaluation_during_the_phase(dataset, tmp_path):
    model = RQL("MlpPolicy", None, **SMALL, offline_dataset=dataset)
    model.set_logger(configure(str(tmp_path), ["csv"]))
    model.learn_offline(dataset, 10, eval_env=PointEnv(), eval_freq=5, n_eval_episodes=2, log_interval=None)
    import pandas

    table = pandas.read_csv(tmp_path / "progress.csv")
    assert table["time/gradient_steps"].tolist() == [5, 10]
    assert table["eval/mean_reward"].notna().all()


def test_offline_phase_from_the_constructor_runs_once(dataset, tmp_path):
    folder = tmp_path / "data"
    dataset.save(folder)
    kwargs = {**SMALL, "offline_dataset": f"npz:{folder}", "offline_steps": 12, "learning_starts": 0}
    model = RQL("MlpPolicy", PointEnv(), **kwargs).learn(20)
    assert model.offline_updates == 12
    assert model.num_timesteps == 20
    assert model._n_updates == 12 + 20
    model.save(tmp_path / "model")
    again = RQL.load(tmp_path / "model", env=PointEnv())
    again.learn(5)
    assert again.offline_updates == 12, "the phase is over"
    assert again.replay_buffer.n_offline == len(dataset), "its data still count"
    more = RQL.load(tmp_path / "model", env=PointEnv(), offline_steps=15)
    more.learn(5)
    assert more.offline_updates == 15


def test_learning_rate_schedule_spans_the_phase(dataset):
    rates = []

    class Rates(BaseCallback):
        def _on_step(self):
            rates.append(self.model.actor.optimizer.param_groups[0]["lr"])
            return True

    RQL("MlpPolicy", PointEnv(), **SMALL, learning_rate=lambda progress: 1e-3 * progress).learn_offline(dataset, 4, Rates())
    assert rates == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


# ---------------------------------------------------------------- the online phase


@pytest.mark.parametrize("n_envs", [1, 4])
@pytest.mark.parametrize("horizon_length", [1, 3])
def test_online_collection_stores_what_was_done(n_envs, horizon_length):
    model = RQL("MlpPolicy", DummyVecEnv([PointEnv] * n_envs), **SMALL, horizon_length=horizon_length, learning_starts=8)
    model.learn(200)
    buffer = model.replay_buffer
    rows = buffer.pos
    assert rows == 200 // n_envs
    done = buffer.dones[:rows].astype(bool)
    # x moves by a tenth of the unscaled action, unless the episode ended
    np.testing.assert_allclose(
        buffer.next_observations[:rows], buffer.observations[:rows] + 0.1 * 2 * buffer.actions[:rows], atol=1e-5
    )
    np.testing.assert_array_equal(buffer.observations[1:rows][~done[:-1]], buffer.next_observations[: rows - 1][~done[:-1]])


def test_chunks_are_executed_open_loop_and_dropped_at_an_episodes_end():
    model = RQL("MlpPolicy", DummyVecEnv([PointEnv]), **SMALL, horizon_length=7, learning_starts=0)
    plans = []
    real = model.policy.explore_chunk

    def recorded(observation):
        plans.append(model.num_timesteps)
        return real(observation)

    model.policy.explore_chunk = recorded
    model.learn(60)
    starts = [0, *np.flatnonzero(model.replay_buffer.dones[:60, 0]) + 1]
    expected = [t for first, last in zip(starts, [*starts[1:], 60], strict=True) for t in range(first, last, 7)]
    assert plans == [t for t in expected if t < 60]


def test_random_warm_up_only_without_an_offline_phase(dataset):
    for offline_steps, expected in ((0, False), (3, True)):
        model = RQL("MlpPolicy", DummyVecEnv([PointEnv]), **SMALL, learning_starts=10)
        model.learn_offline(dataset, offline_steps)
        asked = []
        model.policy.explore_chunk = lambda obs, asked=asked: asked.append(1) or th.zeros(1, 2)
        model.learn(5)
        assert bool(asked) == expected


def test_the_offline_phase_samples_the_dataset_alone(dataset):
    model = RQL("MlpPolicy", PointEnv(), **SMALL, offline_fraction=0.0, learning_starts=5).learn_offline(dataset, 1)
    model.learn(40)
    sampled = []
    update = model.update
    model.update = lambda batch, generator: sampled.append(batch.actions) or update(batch, generator)
    model.learn_offline(dataset, 2)
    model.learn(41)
    known = dataset.actions / 2
    offline = [(np.abs(batch.numpy()[:, None] - known).max(axis=2).min(axis=1) < 1e-4).mean() for batch in sampled]
    assert offline[:2] == [1.0, 1.0]
    assert offline[-1] < 0.2  # a coincidence may happen


@pytest.mark.parametrize("space", [spaces.Discrete(5), spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(3)])
def test_discrete_observations_offline_and_online(space):
    class Env(PointEnv):
        def __init__(self):
            super().__init__()
            self.observation_space = space

        def observe(self):
            return space.sample()

    env = Env()
    data = collect(env, episodes=4)
    model = RQL("MlpPolicy", env, **SMALL, offline_fraction=0.5, learning_starts=5).learn_offline(data, 2).learn(30)
    assert model._n_updates > 20


def test_normalised_rewards_keep_their_statistics(dataset):
    env = VecNormalize(DummyVecEnv([PointEnv]), norm_obs=False)
    model = RQL("MlpPolicy", env, **SMALL).learn_offline(dataset, 1)
    model.learn(30)
    variance = env.ret_rms.var.copy()
    model.set_offline_dataset(dataset)
    assert env.ret_rms.var == variance


def test_vec_normalize_takes_its_statistics_from_the_dataset(dataset):
    env = VecNormalize(DummyVecEnv([PointEnv]), norm_reward=False)
    model = RQL("MlpPolicy", env, **SMALL).learn_offline(dataset, 2)
    np.testing.assert_allclose(env.obs_rms.mean, dataset.observations.mean(axis=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(env.obs_rms.var, dataset.observations.var(axis=0), rtol=1e-3)
    model.learn(40)
    assert env.obs_rms.count == pytest.approx(len(dataset) + 41, abs=2)
    # raw rows are stored
    np.testing.assert_allclose(model.replay_buffer.observations[0, 0], env.get_original_obs()[0], atol=2.0)
    assert np.abs(model.replay_buffer.observations[:40]).max() <= 3.0
    # statistics that exist are left alone
    mean = env.obs_rms.mean.copy()
    model.learn_offline(dataset, 1)
    np.testing.assert_array_equal(env.obs_rms.mean, mean)


@pytest.mark.parametrize(("kind", "policy"), [("dict", "MultiInputPolicy"), ("image", "CnnPolicy")])
@pytest.mark.parametrize("n_envs", [1, 4])
def test_dict_and_image_observations(kind, policy, n_envs, tmp_path):
    env = DummyVecEnv([lambda: PointEnv(kind)] * n_envs)
    data = collect(PointEnv(kind), episodes=4)
    kwargs = {**SMALL, "horizon_length": 2, "buffer_size": 100, "learning_starts": 8}
    if kind == "image":
        kwargs["policy_kwargs"] = {"net_arch": [16], "features_extractor_kwargs": {"features_dim": 8}}
    model = RQL(policy, env, **kwargs).learn_offline(data, 3).learn(24)
    observation = env.reset()
    actions, _ = model.predict(observation, deterministic=True)
    assert actions.shape == (n_envs, 2)
    model.save(tmp_path / "model")
    np.testing.assert_allclose(RQL.load(tmp_path / "model").predict(observation, deterministic=True)[0], actions, rtol=1e-5)
    # the same data train a model that has no environment
    RQL(policy, None, **kwargs, offline_dataset=data).learn_offline(data, 2)


def test_multi_dimensional_actions():
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (30, 2, 3)).astype(np.float32)
    data = OfflineDataset.from_arrays(
        rng.normal(size=(30, 4)), actions, np.zeros(30), np.zeros(30, bool), np.arange(30) % 10 == 9
    )
    model = RQL("MlpPolicy", None, **SMALL, horizon_length=2, offline_dataset=data).learn_offline(data, 2)
    assert model.predict(np.zeros(4, dtype=np.float32))[0].shape == (2, 3)
    assert model.predict(np.zeros((5, 4), dtype=np.float32))[0].shape == (5, 2, 3)


# ------------------------------------------------------------------------ bad input


def arrays(n=10, **changes):
    base = {
        "observations": np.zeros((n, 2)),
        "actions": np.zeros((n, 2)),
        "rewards": np.zeros(n),
        "terminated": np.zeros(n, bool),
        "trajectory_ends": np.arange(n) == n - 1,
        "action_space": spaces.Box(-2, 2, (2,)),
    }
    return OfflineDataset.from_arrays(**{**base, **changes})


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (lambda: arrays(observations=np.zeros((10, 3))), ValueError, "observation"),
        (lambda: arrays(actions=np.zeros((10, 3)), action_space=spaces.Box(-2, 2, (3,))), ValueError, "action"),
        (lambda: arrays(action_space=spaces.Box(-1, 1, (2,))), ValueError, "action"),
        (lambda: arrays(observations=np.full((10, 2), np.nan)), ValueError, "observations"),
        (lambda: arrays(rewards=np.full(10, np.inf)), ValueError, "rewards"),
        (lambda: arrays(n=0), ValueError, "empty|at least|no "),
        (lambda: arrays(n=4), ValueError, "`horizon_length=5` is longer than every trajectory"),
        (lambda: "nonsense:file", ValueError, "ogbench.*npz|npz.*ogbench"),
        (lambda: np.zeros(3), TypeError, "`dataset` must be an OfflineDataset"),
    ],
)
def test_a_bad_dataset_is_refused_and_the_model_is_unchanged(dataset, bad, error, message):
    model = RQL("MlpPolicy", PointEnv(), **SMALL, horizon_length=5)
    model.learn_offline(dataset, 3)
    before, kept = state_of(model), model.replay_buffer.offline_dataset
    with pytest.raises(error, match=message):
        model.learn_offline(bad(), 3)
    assert_same_state(before, state_of(model))
    assert model.replay_buffer.offline_dataset is kept
    assert model.offline_updates == 3
    model.learn_offline(dataset, 1)


def test_discrete_actions_are_refused_with_an_alternative():
    with pytest.raises(AssertionError, match="DQN"):
        RQL("MlpPolicy", "CartPole-v1")
    with pytest.raises(ValueError, match="DQN"):
        arrays(actions=np.zeros(10, dtype=np.int64), action_space=spaces.Discrete(2))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"horizon_length": 0}, "`horizon_length` must be at least 1, but 0"),
        ({"flow_steps": 0}, "`flow_steps` must be at least 1, but 0"),
        ({"expectile": 1.0}, r"`expectile` must be in \(0, 1\), but 1.0"),
        ({"objective": "sac"}, "`objective` must be one of 'rql', 'bc', but 'sac'"),
        ({"acting_mode": "mean"}, "`acting_mode` must be one of .* but 'mean'"),
        ({"offline_steps": 5}, "`offline_steps=5` needs `offline_dataset`"),
        ({"offline_steps": -1}, "`offline_steps` must be at least 0, but -1"),
        ({"horizon_length": 2, "n_steps": 3}, "`horizon_length=2` needs RQL's own TrajectoryReplayBuffer"),
        ({"sampling": "row"}, "`sampling` must be one of"),
        ({"n_critics": 0}, "`n_critics` must be at least 1, but 0"),
        ({"batch_size": 0}, "`batch_size` must be at least 1, but 0"),
        ({"alpha": -1.0}, "`alpha` must be at least 0.0, but -1.0"),
        ({"rho": float("nan")}, "`rho` must be at least 0.0, but nan"),
        ({"ema_decay": 1.5}, r"`ema_decay` must be in \[0, 1\], but 1.5"),
        ({"tau": 2.0}, r"`tau` must be in \[0, 1\], but 2.0"),
        ({"replay_buffer_class": TrajectoryReplayBuffer, "n_steps": 3}, "`n_steps=3` does not go with"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        RQL("MlpPolicy", PointEnv(), **kwargs)


def test_offline_training_needs_our_buffer(dataset):
    model = RQL("MlpPolicy", PointEnv(), **SMALL, n_steps=3)
    with pytest.raises(ValueError, match="needs a TrajectoryReplayBuffer, but this model has a NStepReplayBuffer"):
        model.learn_offline(dataset, 1)
    with pytest.raises(ValueError, match="`gradient_steps` must be at least 0, but -1"):
        RQL("MlpPolicy", PointEnv(), **SMALL).learn_offline(dataset, -1)
