"""Exported programs decide what `predict` decides, for any number of observations, and say what cannot be exported."""

import json
import sys
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib.common.envs import InvalidActionEnvDiscrete
from stable_baselines3 import SAC
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import SimpleMultiObsEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_flow import DSRL, FMQ, FQL, GRPO, PPO, QAM, RLPD, RQL, FlowMapPolicy, MaskablePPO, MaskableRecurrentPPO, RecurrentPPO
from sb3_flow.deployment import export
from tests.on_policy import walks
from tests.tasks import PointEnv, collect

ort = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore")
FLOWS = {
    "RQL": (RQL, {}),
    "RQL, zero": (RQL, {"acting_mode": "zero"}),
    "RQL, best of n": (RQL, {"acting_mode": "best_of_n", "n_candidates": 4}),
    "FMQ": (FMQ, {"n_candidates": 3}),
    "FMQ, sample": (FMQ, {"acting_mode": "sample", "n_sampling_steps": 2}),
    "FQL": (FQL, {"execution_horizon": 2}),
    "RLPD": (RLPD, {"acting_mode": "sample"}),
    "RLPD, zero": (RLPD, {}),
    "DSRL": (DSRL, {}),
    "QAM": (QAM, {"edit_scale": 0.1}),
}


class Numbered(gym.Env):
    """Discrete observations and several discrete actions."""

    observation_space = spaces.Discrete(5)
    action_space = spaces.MultiDiscrete([3, 2])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return int(self.np_random.integers(5)), 0.0, False, False, {}


ACTORS = {
    "PPO, continuous": (PPO, "MlpPolicy", PointEnv),
    "PPO, discrete": (PPO, "MlpPolicy", lambda: gym.make("CartPole-v1")),
    "PPO, numbers": (PPO, "MlpPolicy", Numbered),
    "PPO, images": (PPO, "CnnPolicy", partial(PointEnv, "image")),
    "PPO, Dict": (PPO, "MultiInputPolicy", SimpleMultiObsEnv),
    "PPO, gSDE": (PPO, "MlpPolicy", PointEnv),
    "GRPO": (GRPO, "MlpPolicy", PointEnv),
}


@pytest.fixture(scope="module")
def data():
    return collect(PointEnv(), episodes=4)


def flow(variant, data, **given):
    algorithm, options = FLOWS[variant]
    small = {"horizon_length": 3, "device": "cpu", "seed": 0, "policy_kwargs": {"net_arch": [8, 8]}}
    return algorithm("MlpPolicy", None, offline_dataset=data, **small, **options, **given)


def run(path, inputs):
    """:return: outputs of a program, in a list"""
    if path.suffix == ".onnx":
        return ort.InferenceSession(path).run(None, inputs)
    program = th.export.load(path)
    tensors = [th.as_tensor(value) for value in inputs.values()]
    names = list(inputs)
    if "observation" not in names:
        first = {name: tensor for name, tensor in zip(names, tensors, strict=True)}
        tensors = [first]
    with th.no_grad():
        result = program.module()(*tensors)
    return [part.numpy() for part in (result if isinstance(result, tuple) else (result,))]


def metadata(path):
    if path.suffix == ".onnx":
        return json.loads(ort.InferenceSession(path).get_modelmeta().custom_metadata_map["sb3_flow"])
    extra = {"sb3_flow": ""}
    th.export.load(path, extra_files=extra)
    return json.loads(extra["sb3_flow"])


def decided(policy, observation, noise=None):
    """:return: chunks of `predict` from this noise"""
    actor = policy.acting_actor
    if noise is not None:
        actor.noise = lambda *_, **__: lambda n: th.as_tensor(noise)
    try:
        return policy.plan(observation, partial(policy.predict_chunk, deterministic=False))
    finally:
        vars(actor).pop("noise", None)


IN_ONNX = ("RQL", "RQL, best of n", "FMQ", "QAM", "PPO, continuous", "PPO, images", "PPO, Dict")
"""Cases that show each kind of operator; to write a file takes seconds."""


def suffixes(cases):
    return [(case, suffix) for case in cases for suffix in ("onnx", "pt2") if suffix == "pt2" or case in IN_ONNX]


@pytest.mark.parametrize(("variant", "suffix"), suffixes(FLOWS))
def test_chunks(variant, suffix, data, tmp_path):
    model, rng = flow(variant, data), np.random.default_rng(0)
    path = tmp_path / f"policy.{suffix}"
    export(model, path)
    assert metadata(path)["actions_of_a_decision"] == (2 if variant == "FQL" else 3) and not metadata(path)["normalized"]
    for n in (1, 2, 64):
        inputs = {"observation": rng.normal(size=(n, 2)).astype(np.float32)}
        if model.acting_mode != "zero":
            n_noises = model.policy.n_candidates if model.acting_mode == "best_of_n" else 1
            inputs["noise"] = rng.normal(size=(n, n_noises, model.policy.noise_dim)).astype(np.float32)
        (actions,) = run(path, inputs)
        expected = decided(model.policy, inputs["observation"], inputs.get("noise"))
        assert actions.shape == (n, 2 if variant == "FQL" else 3, 2)
        np.testing.assert_allclose(actions, expected, atol=1e-5)
        if "noise" in inputs:
            others = run(path, {**inputs, "noise": -inputs["noise"]})[0]
            assert np.abs(others - actions).max() > 1e-3, "noise matters"


def test_keyed_noise_is_that_of_predict(data, tmp_path):
    model = flow("RQL", data)
    export(model, tmp_path / "policy.pt2", noise="keyed")
    observation = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    (actions,) = run(tmp_path / "policy.pt2", {"observation": observation})
    np.testing.assert_allclose(actions[:, 0], model.predict(observation, deterministic=True)[0], atol=1e-5)


@pytest.mark.parametrize(("case", "suffix"), suffixes(ACTORS))
def test_actions(case, suffix, tmp_path):
    algorithm, policy, env = ACTORS[case]
    own = {"use_sde": True} if "gSDE" in case else {"group_size": 2, "group_by": "none"} if algorithm is GRPO else {}
    env = make_vec_env(env, n_envs=2)
    model = algorithm(policy, env, n_steps=8, batch_size=8, device="cpu", seed=0, **own)
    path = tmp_path / f"policy.{suffix}"
    export(model, path)
    assert metadata(path)["actions_of_a_decision"] is None
    model.observation_space.seed(0)
    for n in (1, 7):
        if isinstance(model.observation_space, spaces.Dict):
            samples = [model.observation_space.sample() for _ in range(n)]
            observation = {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}
            inputs = observation
        else:
            observation = np.stack([np.asarray(model.observation_space.sample()) for _ in range(n)])
            if observation.dtype == np.float32:
                observation = np.clip(observation, -3, 3)
            inputs = {"observation": observation}
        (actions,) = run(path, inputs)
        np.testing.assert_allclose(actions, model.predict(observation, deterministic=True)[0], atol=1e-5)


def test_normalisation_is_inside(data, tmp_path):
    env = VecNormalize(DummyVecEnv([PointEnv]), clip_obs=2.0)
    model = PPO("MlpPolicy", env, n_steps=64, device="cpu", seed=0).learn(64)
    export(model, tmp_path / "policy.onnx")
    assert metadata(tmp_path / "policy.onnx")["normalized"]
    observation = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32) * 3
    (actions,) = run(tmp_path / "policy.onnx", {"observation": observation})
    np.testing.assert_allclose(actions, model.predict(env.normalize_obs(observation), deterministic=True)[0], atol=1e-5)
    assert np.abs(actions - model.predict(observation, deterministic=True)[0]).max() > 1e-3
    dictionary = VecNormalize(DummyVecEnv([partial(PointEnv, "dict")]), norm_obs_keys=["position"])
    model = PPO("MultiInputPolicy", dictionary, n_steps=64, device="cpu", seed=0).learn(64)
    export(model, tmp_path / "policy.onnx")
    inputs = {"clock": np.full((3, 1), 0.5, np.float32), "position": observation[:3]}
    (actions,) = run(tmp_path / "policy.onnx", inputs)
    np.testing.assert_allclose(actions, model.predict(dictionary.normalize_obs(inputs), deterministic=True)[0], atol=1e-5)


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_masks(suffix, tmp_path):
    env = InvalidActionEnvDiscrete(dim=8, n_invalid_actions=4)
    model = MaskablePPO("MlpPolicy", env, n_steps=8, batch_size=8, device="cpu", seed=0)
    path = tmp_path / f"policy.{suffix}"
    export(model, path)
    rng = np.random.default_rng(0)
    observation = np.stack([env.observation_space.sample() for _ in range(16)])
    masks = rng.random((16, 8)) < 0.5
    masks[:, 0] = True
    (actions,) = run(path, {"observation": observation, "action_masks": masks})
    np.testing.assert_array_equal(actions, model.predict(observation, deterministic=True, action_masks=masks)[0])
    assert masks[np.arange(16), actions].all()


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpGruPolicy"])
@pytest.mark.parametrize("masked", [None, spaces.Discrete(5), spaces.MultiBinary(3)], ids=["plain", "masks", "binary masks"])
def test_recurrent_states(masked, policy, suffix, tmp_path):
    algorithm, env = (RecurrentPPO, PointEnv()) if masked is None else (MaskableRecurrentPPO, walks(1, masked))
    small = {"lstm_hidden_size": 16, "n_lstm_layers": 3}
    model = algorithm(policy, env, n_steps=8, batch_size=8, device="cpu", seed=0, policy_kwargs=small)
    with th.no_grad():
        model.policy.action_net.weight.mul_(100)  # at first, all actions are nearly equally probable
    path = tmp_path / f"policy.{suffix}"
    export(model, path)
    rng, state, start = np.random.default_rng(0), None, np.ones(3, bool)
    names = ("hidden_state", "cell_state") if policy == "MlpLstmPolicy" else ("hidden_state",)
    states = [np.zeros((3, 3, 16), np.float32) for _ in names]
    assert [metadata(path)["inputs"][name] for name in (*names, "episode_start")] == [*([[3, 16]] * len(names)), []]
    for _ in range(4):
        observation = rng.normal(size=(3, *model.observation_space.shape)).astype(np.float32)
        inputs = dict(zip(names, states, strict=True)) | {"episode_start": start.astype(np.float32)}
        masks = {}
        if masked is not None:
            masks = {"action_masks": rng.random((3, model.policy.n_choices)) < 0.6}
        expected, state = model.predict(observation, state, start, deterministic=True, **masks)
        actions, *states = run(path, {"observation": observation, **inputs, **masks})
        np.testing.assert_allclose(actions, expected, atol=1e-5)
        for found, wanted in zip(states, state, strict=False):
            np.testing.assert_allclose(found, wanted, atol=1e-5)
        start = rng.random(3) < 0.5


def test_one_observation(data, tmp_path):
    model = flow("RQL, zero", data)
    export(model, tmp_path / "policy.onnx", dynamic_batch=False)
    assert ort.InferenceSession(tmp_path / "policy.onnx").get_inputs()[0].shape == [1, 2]
    found = metadata(tmp_path / "policy.onnx")
    assert found["model"] == "RQL" and found["acting_mode"] == "zero" and found["actions_of_a_decision"] == 3


def test_a_policy_alone_and_the_model_afterwards(data, tmp_path):
    policy = FlowMapPolicy(data.observation_space, data.action_space, lambda _: 1e-3, net_arch=[8], n_critics=0)
    policy.learn_behaviour(data, 2, batch_size=8)
    export(policy, tmp_path / "policy.pt2")
    noise = np.ones((4, 1, 2), np.float32)
    observation = np.zeros((4, 2), np.float32)
    (actions,) = run(tmp_path / "policy.pt2", {"observation": observation, "noise": noise})
    np.testing.assert_allclose(actions[:, 0], decided(policy, observation, noise)[:, 0], atol=1e-5)
    model = flow("RQL", data)
    before = model.predict(observation, deterministic=True)[0]
    model.policy.set_training_mode(True)
    export(model, tmp_path / "policy.pt2")
    assert model.policy.training and model.device.type == "cpu"
    np.testing.assert_array_equal(model.predict(observation, deterministic=True)[0], before)


@pytest.mark.parametrize(
    ("given", "file", "message"),
    [
        ({"acting_mode": "guided"}, "policy.onnx", '`acting_mode="guided"` searches by gradients of the critic'),
        ({"acting_mode": "qgbs"}, "policy.pt2", '`acting_mode="qgbs"` searches by gradients of the critic'),
        ({"noise": "keyed"}, "policy.onnx", "ONNX has no operators for"),
        ({"noise": "fresh"}, "policy.onnx", "`noise` must be one of 'input', 'keyed', but 'fresh' was given"),
        ({}, "policy.zip", "`path` must end in .onnx or .pt2, but "),
    ],
)
def test_refusals(given, file, message, data, tmp_path):
    noise = given.pop("noise", "input")
    model = flow("RQL", data)
    if given:
        model.set_acting_mode(**{"mode": given["acting_mode"]})
    (tmp_path / file).write_text("kept")
    with pytest.raises(ValueError, match=message):
        export(model, tmp_path / file, noise=noise)
    assert (tmp_path / file).read_text() == "kept"
    with pytest.raises(ValueError, match='`noise="keyed"` is for policies that act from noise'):
        export(PPO("MlpPolicy", PointEnv(), n_steps=8, device="cpu"), tmp_path / "ppo.pt2", noise="keyed")


def test_other_models(tmp_path):
    with pytest.raises(TypeError, match=r"`model` must be an algorithm of this package, .*, but SACPolicy was given"):
        export(SAC("MlpPolicy", PointEnv(), device="cpu"), tmp_path / "policy.pt2")


def test_without_the_extra(data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"Export to ONNX needs the package onnxscript: pip install 'sb3-flow\[onnx\]'"):
        export(flow("RQL, zero", data), tmp_path / "policy.onnx")
    assert not Path(tmp_path / "policy.onnx").exists()
