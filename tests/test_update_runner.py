"""Recorded updates are the updates: the same numbers to the last bit, on a recorder that is as strict as CUDA's graphs."""

from unittest import mock

import numpy as np
import pytest
import torch as th

from sb3_flow import RQL
from sb3_flow.data import residence
from sb3_flow.execution import UpdateRunner
from sb3_flow.execution.update_runner import MOST_KINDS, MOST_RECORDINGS, WARM_UPS
from sb3_flow.offline_to_online import random_streams
from tests.flow_variants import VARIANTS
from tests.tape import NotRecordable, OneDevice, Tape
from tests.tasks import PointEnv, collect

RATE = 2.0**-11
"""A rate that float32 holds exactly, as the tensor does that recorded steps read."""
every_variant = pytest.mark.parametrize("variant", VARIANTS)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*trajectories of arrays are shorter"),
    pytest.mark.filterwarnings("ignore:This model was trained on a dataset"),
]


@pytest.fixture(scope="module")
def data():
    return collect(PointEnv(), episodes=8)


def build(variant, data, env=None, **given):
    algorithm, options = VARIANTS[variant]
    settings = {"horizon_length": 2, "batch_size": 8, "seed": 3, "learning_rate": RATE, "device": "cpu", **options, **given}
    small = {"policy_kwargs": {"net_arch": [8, 8]}, "storage": "device", "backend": "torch"}
    return algorithm("MlpPolicy", env, offline_dataset=data, **{**small, **settings})


def recorded(model):
    tape = Tape()
    model._runner = UpdateRunner("graph", model.device, recorder=tape)
    return tape


def assert_same(one, other):
    for name, weights in one.policy.state_dict().items():
        assert th.equal(weights, other.policy.state_dict()[name]), name
    for mine, theirs in zip(one.optimizers, other.optimizers, strict=True):
        for parameters in zip(mine.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
            states = [optimizer.state[each] for optimizer, each in zip((mine, theirs), parameters, strict=True)]
            assert all(th.equal(states[0][key], states[1][key]) for key in states[0])
    for name, (_, state) in one.random_streams.get_state().items():
        assert th.equal(state, other.random_streams[name].get_state()), name


def pair(variant, data, env=None, **given):
    eager, graph = (build(variant, data, env and env(), **given) for _ in range(2))
    return eager, graph, recorded(graph)


@every_variant
def test_a_recorded_offline_phase_is_the_offline_phase(variant, data):
    def falling(progress):
        return RATE if progress > 0.5 else RATE / 4

    eager, graph, tape = pair(variant, data, learning_rate=falling)
    logged = []
    for model in (eager, graph):
        model.learn_offline(data, 16, log_interval=16)
        model._metrics.flush(mock.Mock(record=lambda name, value: logged.append((name, value))))
    assert_same(eager, graph)
    assert graph._runner.why_eager is None
    kinds = 2 if variant == "RLPD" else 1
    assert tape.log.count("warm up") == WARM_UPS * kinds and tape.log.count("record") == kinds
    assert tape.log.count("replay") == 16 - WARM_UPS * kinds
    if kinds == 1:
        assert tape.log == ["warm up"] * WARM_UPS + ["record"] + ["replay"] * (16 - WARM_UPS)


@pytest.mark.parametrize("variant", ["RQL", "FMQ, mf", "RLPD", "QAM, edits"])
def test_recorded_phases_one_after_the_other(variant, data):
    """Offline the draw of windows is recorded, too; online the windows are given to the recording."""
    given = {"offline_steps": 8, "learning_starts": 6}
    eager, graph, tape = pair(variant, data, PointEnv, **given)
    for model in (eager, graph):
        model.learn(30)
    assert_same(eager, graph)
    assert tape.log.count("record") == (3 if variant == "RLPD" else 2) and graph._runner.why_eager is None


def change_alpha(model):
    model.alpha = 7.0


def change_batch_size(model):
    model.batch_size = 5


def change_policy(model):
    model.policy.n_critics += 0
    model.set_parameters({name: value for name, value in build("RQL", model.offline_dataset, seed=9).get_parameters().items()})


def change_data(model):
    model.set_offline_dataset(collect(PointEnv(), episodes=6, seed=5))


def change_weight_decay(model):
    model.actor.optimizer.param_groups[0]["weight_decay"] = 0.25


def change_seed(model):
    model.set_random_seed(11)


def change_gamma(model):
    model.gamma = 0.5


def change_nothing(model):
    pass


@pytest.mark.parametrize(
    "change",
    [change_alpha, change_batch_size, change_policy, change_data, change_weight_decay, change_seed, change_gamma],
)
def test_what_a_recording_takes_for_granted_may_change(change, data):
    eager, graph, tape = pair("RQL", data)
    for model in (eager, graph):
        model.learn_offline(data, 6, log_interval=None)
        change(model)
        model.learn_offline(model.replay_buffer.offline_dataset, 6, log_interval=None)
    assert_same(eager, graph)
    assert tape.log.count("record") == 2, "recorded again"
    eager, graph, tape = pair("RQL", data)
    for model in (eager, graph):
        model.learn_offline(data, 6, log_interval=None)
        (change if model is eager else change_nothing)(model)
        model.learn_offline(model.replay_buffer.offline_dataset, 6, log_interval=None)
    with pytest.raises(AssertionError):
        assert_same(eager, graph)  # the change is one that matters


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(data, tmp_path):
    eager, graph, _ = pair("RQL", data, PointEnv)
    eager.learn_offline(data, 20, log_interval=None)
    graph.learn_offline(data, 9, log_interval=None)
    graph.save(tmp_path / "model.zip")
    rates = [group["lr"] for state in graph.get_parameters().values() for group in state.get("param_groups", ())]
    assert len(rates) == 2 and all(type(rate) is float for rate in rates), "files do not depend on the execution"
    for again in (False, True):
        loaded = RQL.load(tmp_path / "model.zip", env=PointEnv(), device="cpu")
        if again:
            recorded(loaded)
        loaded.learn_offline(data, 11, log_interval=None)
        assert_same(eager, loaded)
    copied = graph.__deepcopy__({})
    assert copied._runner is not graph._runner
    copied.learn_offline(data, 11, log_interval=None)
    assert_same(eager, copied)


class Looks(RQL):
    def update(self, batch, generator):
        metrics = super().update(batch, generator)
        return {**metrics, "seen": th.tensor(float(metrics["target_mean"]))}


def test_an_update_that_looks_at_its_data_goes_on_eagerly(data, capsys):
    with mock.patch.dict(VARIANTS, {"Looks": (Looks, {})}):
        eager, graph, tape = pair("Looks", data)
    for model in (eager, graph):
        model.learn_offline(data, 8, log_interval=None)
    assert_same(eager, graph)
    assert tape.log == ["warm up"] * WARM_UPS + ["record"]
    assert "an update cannot be recorded, NotRecordable: aten._local_scalar_dense.default waits for the device" in (
        capsys.readouterr().out
    )


def test_generators_of_a_failed_recording_are_made_anew(data):
    """CUDA leaves the generators of a failed recording unusable."""
    eager, graph, tape = pair("RQL", data)

    def fail(function, generators):
        for generator in generators:
            generator.manual_seed(0)
        raise RuntimeError("operation not permitted when stream is capturing")

    tape.record = fail
    for model in (eager, graph):
        model.learn_offline(data, 8, log_interval=None)
    assert_same(eager, graph)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"policy_kwargs": {"optimizer_class": th.optim.Adagrad, "net_arch": [4]}}, "steps of Adagrad cannot be recorded"),
        ({"execution": "eager"}, '`execution` is "eager"'),
        ({}, "the model is on cpu, and graphs are CUDA's"),
    ],
)
def test_why_updates_are_not_recorded(given, reason, data):
    model = build("RQL", data, **given)
    if "policy_kwargs" in given:
        recorded(model)
    model.learn_offline(data, 2, log_interval=None)
    assert reason in model._runner.why_eager


def test_hooks_of_an_optimizer_are_not_left_out(data):
    model = build("RQL", data)
    recorded(model)
    called = []
    model.actor.optimizer.register_step_pre_hook(lambda *arguments: called.append(1))
    model.learn_offline(data, 6, log_interval=None)
    assert len(called) == 6 and "hooks" in model._runner.why_eager


def test_graphs_need_a_gpu(data, tmp_path):
    with pytest.raises(ValueError, match='`execution="graph"` needs a CUDA device, but the model is on cpu'):
        build("RQL", data, execution="graph")
    with pytest.raises(ValueError, match="`execution` must be one of 'auto', 'eager', 'graph', but 'compiled' was given"):
        build("RQL", data, execution="compiled")
    model = build("RQL", data)
    model.execution = "graph"  # as if it had been trained on a GPU
    model.save(tmp_path / "model")
    assert RQL.load(tmp_path / "model", device="cpu")._runner.why_eager is not None


def test_recordings_are_not_kept_without_end():
    weight = th.nn.Parameter(th.zeros(3))
    optimizer, tape = th.optim.Adam([weight], fused=True), Tape()
    runner = UpdateRunner("graph", weight.device, recorder=tape)

    def step(x):
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()
        return weight.detach().clone()

    for size in range(MOST_RECORDINGS + 4):
        for _ in range(WARM_UPS + 1):
            runner(lambda x: step(x), (th.ones(3),), {"size": size}, [optimizer])
    assert len(runner._recordings) == MOST_RECORDINGS
    before = weight.detach().clone()
    result = runner(step, (th.ones(3),), {"size": MOST_RECORDINGS + 3}, [optimizer])
    assert th.equal(result, weight) and not th.equal(weight, before)
    for size in range(MOST_KINDS + 1):
        runner(step, (th.ones(3),), {"size": 0, "other": size}, [optimizer])
    assert "100 kinds of updates were made, since what they depend on changes all the time: other" in runner.why_eager


GENERATOR = th.Generator


class OnTheHost:
    """A generator for a device that has none."""

    def __new__(cls, device=None):
        return GENERATOR()


def without_data(variant, data):
    """A model on the device "meta", whose tensors have shapes and types and no numbers."""
    with mock.patch.object(random_streams.th, "Generator", OnTheHost):
        model = build(variant, data, device="meta", policy_kwargs={"net_arch": [8, 8], "optimizer_class": th.optim.SGD})
        model.set_offline_dataset(data)
    for network in model.networks.values():
        if "optimizer" in vars(network):
            network.optimizer.param_groups[0]["params"] = list(network.parameters())  # the optimizer has those of the CPU
            network.optimizer.step = lambda: None
    if variant.startswith("QAM"):
        model.max_grad_norm = None  # torch's clipping of gradients does not know this device; the recorder has seen it
    model.replay_buffer.offline_only = True
    assert model.replay_buffer.sampling_key() is not None
    return model


@every_variant
def test_an_update_looks_at_no_number_and_has_all_its_tensors_on_the_device(variant, data):
    """Shapes alone lead through an update and the draw of its windows, and no tensor comes from the host."""
    model = without_data(variant, data)
    with OneDevice():
        metrics = model.update(model._sample_windows(8), model.random_streams["update"])
    assert {metric.device.type for metric in metrics.values()} == {"meta"}
    assert all(metric.shape == () for metric in metrics.values())


@pytest.mark.parametrize(
    "mistake",
    [lambda x: x.sum().item(), lambda x: x + th.ones(()), lambda x: x[x > 0], lambda x: x.cpu(), lambda x: bool(x.sum() > 0)],
    ids=["item", "a number on the host", "a mask", "a copy to the host", "a branch"],
)
def test_mistakes_would_be_noticed(mistake, data):
    model = without_data("RQL", data)
    loss = model.policy_loss

    def with_mistake(value, velocity, batch, noise, time):
        mistake(noise)
        return loss(value, velocity, batch, noise, time)

    model.policy_loss = with_mistake
    with OneDevice(), pytest.raises((NotRecordable, NotImplementedError, RuntimeError)):
        model.update(model._sample_windows(8), model.random_streams["update"])


def test_steps_reside_on_the_device_where_they_fit(data, monkeypatch):
    """With ``storage="auto"``; the device has no memory to speak of, but the decision is the same."""
    free = {"bytes": 10**9}
    monkeypatch.setattr(residence, "free_memory", lambda device: free["bytes"] if device.type == "meta" else 0)
    monkeypatch.setattr(random_streams.th, "Generator", OnTheHost)

    def resident(**given):
        model = build("RQL", data, **{"storage": "auto", "device": "meta", "backend": "auto", "buffer_size": 10, **given})
        model.set_offline_dataset(data)
        return model.replay_buffer.is_resident

    assert resident() and not resident(storage="cpu") and not resident(device="cpu")
    steps = residence.n_bytes([data.observations, data.actions, data.rewards, data.terminated, data.final_observations])
    ring = 10 * (2 * 2 * 4 + 2 * 4 + 4 + 4)
    free["bytes"] = 2 * (steps + ring) - ring  # the ring is there already when the dataset comes
    assert resident()
    free["bytes"] -= 1
    assert not resident() and resident(storage="device")


def test_a_stream_goes_on_where_it_was_on_another_device():
    streams = random_streams.RandomStreams(0, {"windows": th.device("cpu"), "update": th.device("cpu")})
    drawn = th.rand(3, generator=streams["windows"])
    state = streams.get_state()
    expected = th.rand(3, generator=streams["windows"])
    moved = random_streams.RandomStreams(0, {"windows": th.device("cpu"), "update": th.device("cpu")})
    with mock.patch.object(random_streams.th, "Generator", lambda device: mock.Mock(device=device)):
        moved.move("windows", th.device("meta"))
        moved.set_state(state)
    moved.move("windows", th.device("cpu"))
    assert not th.equal(drawn, expected)
    assert th.equal(th.rand(3, generator=moved["windows"]), expected)
    assert np.all(moved["update"].get_state().numpy() == streams["update"].get_state().numpy())
