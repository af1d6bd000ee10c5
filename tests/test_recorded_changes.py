"""What a recording takes for granted may change: the next update is what it would be without recordings."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch as th

from sb3_flow import PPO, AsyncPPO
from sb3_flow.execution import UpdateRunner, update_runner
from sb3_flow.on_policy import policy_gradient, recorded_steps
from sb3_flow.on_policy.reference import make_reference
from tests import test_recorded_steps as of_ppo
from tests.tape import Tape
from tests.tasks import PointEnv, collect
from tests.test_dataset_shards import rotating, write_files
from tests.test_update_runner import RATE, assert_same, build, pair, recorded
from tests.torch_cartpole import TorchCartPole

pytestmark = pytest.mark.filterwarnings("ignore:.*trajectories of arrays are shorter")


@pytest.fixture(scope="module")
def data():
    return collect(PointEnv(), episodes=8)


def freeze_a_layer(model):
    next(model.actor.parameters()).requires_grad_(False)


def assign_weights(model):
    target = model.critic_target
    target.load_state_dict({name: 2 * each for name, each in target.state_dict().items()}, assign=True)


def move_weights(model):
    weight = next(model.critic_target.parameters())
    weight.data = weight.data * 0.5


def exchange_a_network(model):
    model.policy.anchor = model.anchor = copy.deepcopy(model.anchor)
    with th.no_grad():
        next(model.anchor.parameters()).add_(1.0)


def set_a_number_of_numpy(model):
    model.alpha = np.float32(7.0)


def set_target_entropy(model):
    model.entropy_coefficient.target_entropy = 5.0


CHANGES = {
    "requires_grad": ("RQL", freeze_a_layer),
    "weights assigned": ("RQL", assign_weights),
    "weights moved": ("RQL", move_weights),
    "a number of NumPy's": ("RQL", set_a_number_of_numpy),
    "a network's number": ("DSRL", set_target_entropy),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_update_is_recorded_again(change, data):
    variant, make = CHANGES[change]
    eager, graph, tape = pair(variant, data)
    for model in (eager, graph):
        if variant == "RQL":
            model.alpha = np.float32(2.0)
        model.learn_offline(data, 6, log_interval=None)
        make(model)
        model.learn_offline(data, 6, log_interval=None)
    assert_same(eager, graph)
    assert tape.log.count("record") == 2 and graph._runner.why_eager is None


def test_a_frozen_network_is_exchanged_in_the_online_phase(data):
    eager, graph, tape = pair("FMQ, mf", data, PointEnv, offline_steps=4, learning_starts=6)
    for model in (eager, graph):
        model.learn(20)
        exchange_a_network(model)
        model.learn(20, reset_num_timesteps=False)
    assert_same(eager, graph)
    assert tape.log[-1] == "replay" and graph._runner.why_eager is None


def test_a_rate_that_a_scheduler_of_torch_writes_is_overwritten(data):
    """These schedulers write into a rate that is a tensor, and SB3 sets the rate before the next update."""
    eager, graph, _ = pair("RQL", data)
    for model in (eager, graph):
        model.learn_offline(data, 6, log_interval=None)
        scheduler = th.optim.lr_scheduler.ConstantLR(model.actor.optimizer, factor=0.5)
        assert float(model.actor.optimizer.param_groups[0]["lr"]) == RATE / 2
        assert model.get_parameters()["actor.optimizer"]["param_groups"][0]["lr"] == RATE / 2
        model.learn_offline(data, 3, log_interval=None)
        del scheduler
    assert_same(eager, graph)


@pytest.mark.parametrize("hook", ["module", "parameter"])
def test_hooks_are_not_left_out(hook, data):
    model = build("RQL", data)
    recorded(model)
    model.learn_offline(data, 5, log_interval=None)
    called = []
    if hook == "module":
        model.critic.features_extractor.register_forward_hook(lambda *arguments: called.append(1))
    else:
        next(model.actor.parameters()).register_hook(lambda gradient: called.append(1))
    model.learn_offline(data, 3, log_interval=None)
    assert len(called) >= 3 and "a network or a parameter has hooks" in model._runner.why_eager


def test_autocast_is_executed_as_it_is(data):
    model = build("RQL", data)
    recorded(model)
    with th.autocast("cpu", dtype=th.bfloat16):
        model.learn_offline(data, 2, log_interval=None)
    assert "autocast is on" in model._runner.why_eager


def test_copies_record_for_themselves(data):
    """And their files do not depend on how the original was executed, which changed the options of its optimizers."""
    eager, graph, _ = pair("RQL", data)
    for model in (eager, graph):
        model.learn_offline(data, 6, log_interval=None)
    for how in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        copied = how(graph)
        for optimizer, original in zip(copied.optimizers, graph.optimizers, strict=True):
            assert type(optimizer.param_groups[0]["lr"]) is float and isinstance(original.param_groups[0]["lr"], th.Tensor)
        assert (
            copied.get_parameters()["actor.optimizer"]["param_groups"]
            == (eager.get_parameters()["actor.optimizer"]["param_groups"])
        )
        copied.learn_offline(data, 6, log_interval=None)
        again = copy.deepcopy(eager)
        again.learn_offline(data, 6, log_interval=None)
        assert_same(again, copied)


def test_files_that_take_turns_are_recorded_without_end(tmp_path, monkeypatch):
    """Each turn is recorded anew, and no recording of another turn is kept."""
    monkeypatch.setattr(update_runner, "MOST_KINDS", 2)
    write_files(tmp_path, n_files=4)
    models = [build("RQL", rotating(tmp_path, files_per_turn=1, steps_per_file=5), horizon_length=1) for _ in range(2)]
    assert models[0].offline_dataset.rotation is not None
    eager, graph = models
    tape, n_turns = recorded(graph), 5
    for model in models:
        model.learn_offline(model.offline_dataset, 5 * n_turns, log_interval=None)
    assert graph._runner.why_eager is None and len(graph._runner._recordings) == 1
    assert tape.log.count("record") == n_turns
    assert_same(eager, graph)


def exchange_reference(model):
    with th.no_grad():
        for parameter in model.policy.parameters():
            parameter.mul_(0.5)
    model.reference = make_reference("initial", model.policy)


def exchange_activation(model):
    model.policy.mlp_extractor.policy_net[1] = th.nn.ReLU()


def exchange_ranges(model):
    model.clip_range_vf, model.clip_range_high = None, lambda progress: 0.0625


@pytest.mark.parametrize("change", [exchange_reference, exchange_activation, exchange_ranges])
def test_steps_of_ppo_are_recorded_again(change):
    given = {"clip_range": 0.25, "clip_range_vf": 0.0625, "kl_coef": 0.5, "reference_policy": "initial"}
    tape = Tape()
    eager, graph = (of_ppo.learned(PPO, "CartPole-v1", [64, 64], each, change, **given) for each in (None, tape))
    unchanged = of_ppo.learned(PPO, "CartPole-v1", [64, 64], **given)
    assert not th.equal(eager.policy.action_net.weight, unchanged.policy.action_net.weight)
    of_ppo.assert_same(eager, graph)
    assert tape.log.count("record") == 2 and graph.recorded_steps.runner.why_eager is None


def test_ranks_exchange_the_gradients_of_every_minibatch(monkeypatch):
    model = of_ppo.build(PPO, "CartPole-v1", clip_range=0.25, n_epochs=1)
    model.recorded_steps.runner = UpdateRunner("graph", model.device, recorder=Tape())
    exchanged, backward = [], policy_gradient.backward
    monkeypatch.setattr(policy_gradient, "backward", lambda *given: exchanged.append(1) or backward(*given))
    monkeypatch.setattr(recorded_steps, "n_ranks", lambda: 2)
    model.learn(64)
    assert len(exchanged) == 64 // 8 and model.recorded_steps.runner.why_eager == "several ranks exchange gradients"


def test_counters_are_no_settings():
    """Of rollouts from processes, and from environments whose observations are tensors, each of them elsewhere."""
    small = {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "seed": 0, "device": "cpu", "backend": "torch"}
    small["policy_kwargs"] = {"optimizer_kwargs": {"fused": True}}
    for model in (
        AsyncPPO("MlpPolicy", "CartPole-v1", mode="sync", **small),
        PPO("MlpPolicy", TorchCartPole(2, "cpu"), **small),
    ):
        tape = Tape()
        model.recorded_steps.runner = UpdateRunner("graph", model.device, recorder=tape)
        model.learn(8 * model.n_envs * model.n_steps)
        assert tape.log.count("record") == 1 and tape.log.count("warm up") == update_runner.WARM_UPS


@pytest.mark.parametrize("kind", ["RQL", "PPO"])
def test_a_model_that_is_gone_leaves_its_memory(kind, data):
    """A GPU that has no memory left does not wait for Python's collection of garbage."""
    tape = Tape()
    if kind == "RQL":
        model = build("RQL", data)
        model._runner = UpdateRunner("graph", model.device, recorder=tape)
        model.learn_offline(data, 6, log_interval=None)
        parts = [model, model.policy, model.replay_buffer, model._runner]
    else:
        model = of_ppo.learned(PPO, "CartPole-v1", [64], tape, clip_range=0.25)
        parts = [model, model.policy, model.rollout_buffer, model.recorded_steps.runner]
    assert "replay" in tape.log
    seen = [weakref.ref(part) for part in parts]
    gc.collect()
    gc.disable()
    try:
        del model, parts
        assert [part() for part in seen] == [None] * len(seen)
    finally:
        gc.enable()
