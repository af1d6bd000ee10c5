"""Recorded gradient steps of the PPO family are the steps: the same weights to the last bit, on a recorder for the CPU."""

import gymnasium as gym
import pytest
import torch as th
from sb3_contrib.common.envs import InvalidActionEnvDiscrete
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import SimpleMultiObsEnv

from sb3_flow import GRPO, GSPO, PPO, MaskablePPO, RecurrentPPO
from sb3_flow.common.nests import map_tensors
from sb3_flow.execution import UpdateRunner
from sb3_flow.execution.update_runner import WARM_UPS
from sb3_flow.on_policy.gradient_steps import in_place_activations, unchecked_distributions
from sb3_flow.on_policy.minibatches import Minibatch
from tests.tape import OneDevice, Tape
from tests.tasks import PointEnv

EXACT = 2.0**-9
"""A number that float32 holds exactly, as the tensors do that recorded steps read."""


def halved(progress):
    return EXACT * 64 if progress > 0.5 else EXACT * 32


def masked():
    return InvalidActionEnvDiscrete(dim=20, n_invalid_actions=10)


CASES = {
    "PPO": (PPO, "CartPole-v1", {"clip_range": 0.25}),
    "PPO, schedules": (PPO, "CartPole-v1", {"clip_range": halved, "clip_range_vf": halved, "clip_range_high": 0.25}),
    "PPO, continuous": (PPO, PointEnv, {"ent_coef": 0.01, "clip_range": 0.25}),
    "PPO, images": (PPO, lambda: PointEnv("image"), {"clip_range": 0.25, "batch_size": 16}),
    "PPO, Dict": (PPO, SimpleMultiObsEnv, {"clip_range": 0.25, "batch_size": 16}),
    "PPO, decoupled": (PPO, "CartPole-v1", {"policy_loss": "decoupled", "clip_range": 0.25}),
    "PPO, V-trace": (PPO, "CartPole-v1", {"advantage": "vtrace", "clip_range": 0.25}),
    "PPO, reference": (PPO, "CartPole-v1", {"kl_coef": 0.5, "reference_policy": "initial", "clip_range": 0.25}),
    "PPO, uneven": (PPO, "CartPole-v1", {"clip_range": 0.25, "batch_size": 24}),
    "GRPO": (GRPO, "CartPole-v1", {"clip_range": 0.25, "batch_size": 8, "n_steps": 64}),
}
NOT = {
    "target_kl": (PPO, {"target_kl": 10.0}, "`target_kl` is compared before each step"),
    "gSDE": (PPO, {"use_sde": True}, "gSDE draws its noise"),
    "MaskablePPO": (MaskablePPO, {}, "masked distributions bring numbers from the host"),
    "GSPO": (GSPO, {}, "minibatches of whole episodes and of sequences differ in size"),
    "RecurrentPPO": (RecurrentPPO, {}, "minibatches of whole episodes and of sequences differ in size"),
}


def build(algorithm, env, **given):
    env = make_vec_env(env, n_envs=4 if algorithm in (GRPO, GSPO) else 2, seed=0)
    policy = {GRPO: "MlpPolicy", RecurrentPPO: "MlpLstmPolicy"}.get(algorithm, "MlpPolicy")
    if isinstance(env.observation_space, gym.spaces.Dict):
        policy = "MultiInputPolicy"
    elif len(env.observation_space.shape or ()) == 3:
        policy = "CnnPolicy"
    options = {"n_steps": 32, "batch_size": 8, "n_epochs": 3, "learning_rate": EXACT, "seed": 0, "device": "cpu", **given}
    if algorithm in (PPO, GRPO, GSPO):
        options["backend"] = "torch"
    if algorithm in (GRPO, GSPO):
        options |= {"group_size": 4, "group_by": "none"}
    # fused steps are one operator; PPO's own flat steps on the CPU look at numbers
    return algorithm(policy, env, **{"policy_kwargs": {"optimizer_kwargs": {"fused": True}}, **options})


def learned(algorithm, env, steps, tape=None, change=lambda model: None, **given):
    """:return: a model that learned, ``steps`` at a time; with a tape, by recorded steps"""
    model = build(algorithm, env, **given)
    if tape is not None:
        model.recorded_steps.runner = UpdateRunner("graph", model.device, recorder=tape)
    for n in steps:
        model.learn(n, reset_num_timesteps=False)
        change(model)
    return model


def assert_same(one, other):
    for name, weights in one.policy.state_dict().items():
        assert th.equal(weights, other.policy.state_dict()[name]), name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size", "ignore:.*episodes were cut")
def test_recorded_steps_are_the_steps(case):
    algorithm, env, given = CASES[case]
    tape = Tape()
    eager, graph = (learned(algorithm, env, [192], each, **given) for each in (None, tape))
    logged = [
        {name: value for name, value in model.logger.name_to_value.items() if name.startswith("train/")}
        for model in (eager, graph)
    ]
    assert graph.recorded_steps.runner.why_eager is None
    assert_same(eager, graph)
    assert "train/loss" in logged[0]
    assert logged[0] == pytest.approx(logged[1], rel=1e-6, nan_ok=True), "metrics are of each minibatch, not of the last"
    sizes = len({leaf for kind in graph.recorded_steps.runner._recordings for leaf in kind[-1][1][:1]})
    assert tape.log.count("record") == sizes == (2 if case == "PPO, uneven" else sizes)
    assert tape.log.count("replay") > 3 * WARM_UPS, tape.log


@pytest.mark.parametrize("case", NOT)
def test_steps_that_are_not_recorded(case):
    algorithm, given, reason = NOT[case]
    env = {"gSDE": "Pendulum-v1", "MaskablePPO": masked}.get(case, "CartPole-v1")
    tape = Tape()
    eager, graph = (learned(algorithm, env, [128], each, **given) for each in (None, tape))
    assert_same(eager, graph)
    assert reason in graph.recorded_steps.runner.why_eager and tape.log == []


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:You have specified a mini-batch size", "ignore:.*episodes were cut")
def test_a_step_looks_at_no_number_and_has_all_its_tensors_on_the_device(case):
    """On the device "meta", whose tensors have shapes and no numbers: shapes alone lead through the loss and its gradients."""
    algorithm, env, given = CASES[case]
    model = learned(algorithm, env, [64], **given)
    minibatch = next(model.rollout_buffer.minibatches(model.batch_size))
    device = th.device("meta")
    data, proximal = map_tensors(lambda tensor: tensor.to(device), (minibatch.data, minibatch.proximal_log_prob))
    ranges = {
        name: None if value is None else th.full((), value, device=device) for name, value in model._clip_ranges().items()
    }
    for policy in filter(None, (model.policy, model.reference)):
        policy.to(device)
    with unchecked_distributions(), in_place_activations(model.policy), OneDevice():
        loss, metrics = model.loss(Minibatch(data=data, proximal_log_prob=proximal), **ranges)
        loss.backward()
    assert {metric.device.type for metric in metrics.values()} == {"meta"}


def test_a_coefficient_may_change(tmp_path):
    def change(model):
        model.ent_coef = 0.5

    tape = Tape()
    eager, graph, unchanged = (
        learned(PPO, "CartPole-v1", [64, 64], each, how, clip_range=0.25)
        for each, how in ((None, change), (tape, change), (None, lambda model: None))
    )
    assert not th.equal(unchanged.policy.action_net.weight, eager.policy.action_net.weight)
    assert_same(eager, graph)
    assert tape.log.count("record") == 2
    graph.save(tmp_path / "model")
    assert [type(group["lr"]) for group in graph.get_parameters()["policy.optimizer"]["param_groups"]] == [float]
    loaded = PPO.load(tmp_path / "model", env=make_vec_env("CartPole-v1", n_envs=2, seed=0), device="cpu")
    assert loaded.recorded_steps.runner.why_eager is not None
    assert_same(loaded, graph)


def test_graphs_need_a_gpu(tmp_path):
    for algorithm in (PPO, GRPO):
        with pytest.raises(ValueError, match='`execution="graph"` needs a CUDA device, but the model is on cpu'):
            build(algorithm, "CartPole-v1", execution="graph")
    with pytest.raises(ValueError, match="`execution` must be one of 'auto', 'eager', 'graph', but 'cuda' was given"):
        build(PPO, "CartPole-v1", execution="cuda")
