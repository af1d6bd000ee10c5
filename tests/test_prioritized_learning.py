"""Algorithms that learn from prioritised windows: exactly as recorded, resumed and copied, and faster along a chain."""

import copy

import numpy as np
import pytest
import torch as th

from sb3_flow import RQL
from sb3_flow.data import ChunkSamples, PrioritizedReplayBuffer
from tests.benchmarks.prioritized_replay import updates_of_chain
from tests.flow_variants import VARIANTS
from tests.tasks import PointEnv, collect
from tests.test_dataset_shards import rotating, write_files
from tests.test_update_runner import assert_same, build, pair, recorded

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*trajectories of arrays are shorter"),
    pytest.mark.filterwarnings("ignore:This model was trained on a dataset"),
]
PRIORITIZED = {"replay_buffer_class": PrioritizedReplayBuffer, "replay_buffer_kwargs": {"alpha": 0.7}}
TELLING = [variant for variant in VARIANTS if variant != "RQL, bc"]


@pytest.fixture(scope="module")
def data():
    return collect(PointEnv(), episodes=8)


def assert_same_priorities(one, other):
    mine, theirs = (model.replay_buffer._state_of_priorities() for model in (one, other))
    assert mine["greatest"] == theirs["greatest"] and np.array_equal(mine["online"], theirs["online"])
    assert np.array_equal(mine["offline"][1], theirs["offline"][1])


@pytest.mark.parametrize("variant", TELLING)
def test_recorded_updates_are_the_updates(variant, data):
    """Offline the draw and the new priorities are recorded, too; online the windows are given to the recording."""
    given = {"offline_steps": 10, "learning_starts": 6, "offline_fraction": 0.5}
    eager, graph, tape = pair(variant, data, PointEnv, **given, **PRIORITIZED)
    for model in (eager, graph):
        model.learn(25)
    assert_same(eager, graph)
    assert_same_priorities(eager, graph)
    assert graph._runner.why_eager is None and tape.log.count("record") == (3 if variant == "RLPD" else 2)
    buffer = eager.replay_buffer
    assert len(set(buffer._online.priorities.tolist())) > 5 and len(set(buffer._offline.priorities.tolist())) > 5


def exchange_alpha(model):
    model.replay_buffer.alpha = 0.3


def exchange_data(model):
    model.set_offline_dataset(collect(PointEnv(), episodes=6, seed=5))


def exchange_buffer(model):
    model.replay_buffer = copy.deepcopy(model.replay_buffer)
    model.set_offline_dataset(model.offline_dataset)


@pytest.mark.parametrize("change", [exchange_alpha, exchange_data, exchange_buffer])
def test_a_change_is_recorded_anew(change, data):
    eager, graph, tape = pair("RQL", data, PointEnv, offline_steps=6, learning_starts=6, **PRIORITIZED)
    for model in (eager, graph):
        model.learn(16)
        change(model)
        model.learn(10, reset_num_timesteps=False)
        change(model)
        model.learn_offline(model.replay_buffer.offline_dataset, 6, log_interval=None)
    assert_same(eager, graph)
    assert_same_priorities(eager, graph)
    assert graph._runner.why_eager is None and tape.log[-1] == "replay"


def test_a_source_that_comes_later_is_recorded_anew(data):
    """The first updates of the online phase find windows of the dataset alone: the first online window takes six steps."""
    eager, graph, tape = pair("FQL", data, PointEnv, horizon_length=6, learning_starts=0, **PRIORITIZED)
    for model in (eager, graph):
        model.set_offline_dataset(data)
        model.learn(16)
    assert_same_priorities(eager, graph)
    assert_same(eager, graph)
    assert tape.log.count("record") == 2 and len(set(eager.replay_buffer._online.priorities.tolist())) > 3


def test_files_that_take_turns_begin_anew(tmp_path):
    write_files(tmp_path, n_files=4)
    given = {"horizon_length": 1, **PRIORITIZED}
    eager, graph = (build("RQL", rotating(tmp_path, files_per_turn=1, steps_per_file=6), **given) for _ in range(2))
    recorded(graph)
    for model in (eager, graph):
        model.learn_offline(model.offline_dataset, 18, log_interval=None)
        priorities = model.replay_buffer._offline.priorities
        model.replay_buffer.follow_rotation(24)
        fresh = model.replay_buffer._offline.priorities
        assert len(set(priorities.tolist())) > 1 and set(fresh.tolist()) == {float(model.replay_buffer._greatest)}
    assert_same(eager, graph)


@pytest.mark.parametrize("variant", ["RQL", "RLPD"])
def test_a_model_goes_on_with_its_buffer(variant, data, tmp_path):
    """To the last bit with the buffer's file, in the offline phase; without that file the priorities begin anew."""
    model = build(variant, data, PointEnv(), **PRIORITIZED).learn_offline(data, 12, log_interval=None)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "buffer")
    copied = copy.deepcopy(model)
    loaded, without = (type(model).load(tmp_path / "model", device="cpu") for _ in range(2))
    loaded.load_replay_buffer(tmp_path / "buffer")
    for each in (model, copied, loaded, without):
        each.learn_offline(data, 5, log_interval=None)
    for each in (copied, loaded):
        assert_same(model, each)
        assert_same_priorities(model, each)
    with pytest.raises(AssertionError):
        assert_same_priorities(model, without)


def test_files_of_the_other_class_are_refused(data, tmp_path):
    plain, prioritized = build("RQL", data), build("RQL", data, **PRIORITIZED)
    for name, model in {"plain": plain, "prioritized": prioritized}.items():
        model.save_replay_buffer(tmp_path / name)
    with pytest.raises(ValueError, match=r"is a PrioritizedReplayBuffer, but the model has .*=TrajectoryReplayBuffer"):
        plain.load_replay_buffer(tmp_path / "prioritized")
    with pytest.raises(ValueError, match=r"is a TrajectoryReplayBuffer, but the model has .*=PrioritizedReplayBuffer"):
        prioritized.load_replay_buffer(tmp_path / "plain")
    assert isinstance(prioritized.replay_buffer, PrioritizedReplayBuffer)
    sharper = build("RQL", data, **{**PRIORITIZED, "replay_buffer_kwargs": {"alpha": 0.9, "beta": 0.1}})
    sharper.load_replay_buffer(tmp_path / "prioritized")
    assert (sharper.replay_buffer.alpha, sharper.replay_buffer.beta) == (0.9, 0.1)
    prioritized.learn_offline(data, 1, log_interval=None)


def test_a_model_whose_buffer_was_deleted_loads_one(data, tmp_path):
    """With what the model decides, as if its buffer were there; SB3's tests delete it."""
    model = build("RLPD", data, **PRIORITIZED).learn_offline(data, 5, log_interval=None)
    model.save_replay_buffer(tmp_path / "buffer")
    other = build("RLPD", data, **{**PRIORITIZED, "replay_buffer_kwargs": {"alpha": 0.9}}, offline_fraction=0.25)
    for delete in (lambda: delattr(other, "replay_buffer"), lambda: setattr(other, "replay_buffer", None)):
        delete()
        other.load_replay_buffer(tmp_path / "buffer")
        assert isinstance(other.replay_buffer, PrioritizedReplayBuffer)
        assert (other.replay_buffer.alpha, other.replay_buffer.offline_fraction) == (0.9, 0.25)
        other.learn_offline(data, 2, log_interval=None)
    build("RQL", data, **PRIORITIZED).save_replay_buffer(tmp_path / "rql")
    del other.replay_buffer
    with pytest.raises(ValueError, match="has `window_rule=rql`, but the model has `window_rule=q_chunking`"):
        other.load_replay_buffer(tmp_path / "rql")


@pytest.mark.parametrize("variant", TELLING)
def test_weights_are_in_the_value_s_loss_alone(variant, data):
    """Weights of one and no weights are the same to the last bit; other weights change the critic's loss, not the policy's."""
    model = build(variant, data, **PRIORITIZED)
    model.learn_offline(data, 1, log_interval=None)
    batch = model.replay_buffer.sample(8)
    weights = th.linspace(0.2, 1.0, 8).unsqueeze(1)
    batches = [ChunkSamples(*batch[:7]), batch._replace(weights=th.ones(8, 1)), batch._replace(weights=weights)]
    found = []
    for each in batches:
        copied = copy.deepcopy(model)
        found.append((copied.update(each, th.Generator().manual_seed(0)), copied.policy.state_dict()))
    (plain, after_plain), (ones, after_ones), (weighted, _) = found
    assert all(th.equal(plain[name], ones[name]) for name in plain)
    assert all(th.equal(after_plain[name], after_ones[name]) for name in after_plain)
    assert weighted["critic_loss"] < plain["critic_loss"]
    assert all(th.equal(weighted[name], plain[name]) for name in plain if name not in ("critic_loss", "gradient_norm"))


def test_errors_are_means_over_the_critics(data):
    """By hand: |y - V_k| of two members, new priorities where the window is whole."""
    model = build("RQL", data, **{**PRIORITIZED, "replay_buffer_kwargs": {"alpha": 1.0}})
    model.set_offline_dataset(data)
    batch = model.replay_buffer.sample(4)._replace(valid=th.tensor([[1.0], [1.0], [0.0], [1.0]]))
    values, target = th.tensor([[1.0, 2, 3, 4], [3.0, 2, 0, 8]]), th.tensor([[0.0], [2], [9], [5]])
    weights = model.row_weights(batch._replace(numbers=th.arange(4), weights=th.full((4, 1), 0.5)), values, target)
    assert weights[:, 0].tolist() == [0.5, 0.5, 0.0, 0.5]
    assert model.replay_buffer._offline.priorities[:5].tolist() == pytest.approx([2.0, 0.0, 1.0, 2.0, 1.0], abs=2e-6)


def test_an_update_that_tells_no_errors_is_refused(data, monkeypatch):
    monkeypatch.setattr(RQL, "row_weights", lambda self, batch, values, target: batch.valid)
    with pytest.raises(ValueError, match="an update of RQL told none: leave `replay_buffer_class` at its default, or call"):
        build("RQL", data, **PRIORITIZED).learn_offline(data, 3)


def test_behaviour_cloning_is_refused(data):
    with pytest.raises(
        ValueError, match=r'`replay_buffer_class=PrioritizedReplayBuffer` draws by .* `objective="bc"` trains none'
    ):
        build("RQL, bc", data, **PRIORITIZED)


def test_beta_follows_each_phase(data):
    kwargs = {"beta": 0.2, "final_beta": 0.8}
    model = build("RQL", data, PointEnv(), **{**PRIORITIZED, "replay_buffer_kwargs": kwargs, "learning_starts": 4})
    found = []
    anneal = model.replay_buffer.anneal

    def noted(progress_remaining):
        anneal(progress_remaining)
        found.append(float(model.replay_buffer._beta))

    model.replay_buffer.anneal = noted
    model.learn_offline(data, 4, log_interval=None)
    assert found == pytest.approx([0.2, 0.35, 0.5, 0.65])
    found.clear()
    model.learn(20)
    assert found[0] < 0.4 and found[-1] == pytest.approx(0.8)


@pytest.mark.parametrize("seed", range(3))
def test_a_chain_is_learnt_sooner(seed):
    """Reward at the end of a chain among many windows without reward: uniform draws, and priorities never told, are late."""
    assert updates_of_chain("prioritised", seed, 550) < 550
    assert updates_of_chain("uniform", seed, 550) == updates_of_chain("never told", seed, 550) == 550
