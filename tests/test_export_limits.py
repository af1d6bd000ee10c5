"""What `export` refuses, what it leaves as it was, and what its files do not contain."""

import copy
import pickle
import runpy
import sys
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3 as sb3
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecExtractDictObs, VecFrameStack, VecMonitor, VecNormalize
from test_export import FLOWS, decided, flow, metadata, run

from sb3_flow import PPO, RQL, FlowMapPolicy, MaskablePPO, RecurrentPPO, export
from tests.on_policy import walks
from tests.tasks import PointEnv, collect

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {"n_steps": 8, "batch_size": 8, "device": "cpu", "seed": 0}


@pytest.fixture(scope="module")
def data():
    return collect(PointEnv(), episodes=4)


class Named(gym.Env):
    """Dict observations with the given keys."""

    action_space = spaces.Box(-1, 1, (2,))

    def __init__(self, *keys):
        self.observation_space = spaces.Dict({key: spaces.Box(-1, 1, (2,)) for key in keys})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


# ------------------------------------------------------------------------------------------------- normalised observations


def normalized(times=1):
    env = DummyVecEnv([PointEnv])
    for _ in range(times):
        env = VecNormalize(env)
    return env


DICT = partial(DummyVecEnv, [partial(PointEnv, "dict")])


@pytest.mark.parametrize(
    ("policy", "env", "given", "message"),
    [
        ("MlpPolicy", partial(normalized, 2), None, "are normalised by 2 VecNormalize, but a program normalises once"),
        ("MlpPolicy", lambda: VecFrameStack(normalized(), 4), None, r"\(2,\)}, but the policy sees Box.*VecFrameStack"),
        ("MlpPolicy", lambda: VecExtractDictObs(VecNormalize(DICT()), "position"), None, "statistics of other observations"),
        ("MlpPolicy", partial(DummyVecEnv, [PointEnv]), lambda: VecNormalize(DICT()), "statistics of other observations"),
        ("MultiInputPolicy", DICT, normalized, r"{'observation': \(2,\)}, but the policy sees Dict"),
    ],
)
def test_statistics_of_other_observations(policy, env, given, message, tmp_path):
    model = PPO(policy, env(), **SMALL)
    with pytest.raises(ValueError, match=message):
        export(model, tmp_path / "policy.pt2", vec_normalize=given and given())
    assert not list(tmp_path.iterdir())
    export(model.policy, tmp_path / "policy.pt2")  # as the message says


def test_wrappers_that_leave_observations_alone(tmp_path):
    inner = VecNormalize(normalized(), norm_obs=False)  # of rewards
    model = PPO("MlpPolicy", VecMonitor(inner), **SMALL).learn(8)
    export(model, tmp_path / "policy.pt2")
    observation = np.array([[3.0, -1.0]], np.float32)
    (actions,) = run(tmp_path / "policy.pt2", {"observation": observation})
    expected = model.predict(inner.venv.normalize_obs(observation), deterministic=True)[0]
    np.testing.assert_allclose(actions, expected, atol=1e-5)
    assert metadata(tmp_path / "policy.pt2")["normalized"]


# ------------------------------------------------------------------------------------------------------------ what is inside


@pytest.mark.parametrize("variant", ["RQL", "RQL, best of n", "RLPD", "DSRL", "QAM"])
def test_a_file_holds_the_networks_that_act(variant, data, tmp_path):
    export(flow(variant, data), tmp_path / "policy.pt2")
    kept = {name.split(".")[1] for name in th.export.load(tmp_path / "policy.pt2").state_dict if name.startswith("policy.")}
    assert kept and "critic_target" not in kept
    assert ("critic" in kept) == (variant == "RQL, best of n")


def test_the_value_of_an_actor_is_left_out(tmp_path):
    export(PPO("MlpPolicy", PointEnv(), **SMALL), tmp_path / "policy.pt2")
    names = th.export.load(tmp_path / "policy.pt2").state_dict
    assert any("policy_net" in name for name in names) and not any("value" in name for name in names)


# --------------------------------------------------------------------------------------------------- the model stays as it was


def test_policies_can_be_copied_and_pickled_afterwards(tmp_path):
    for model in (
        PPO("MlpPolicy", PointEnv(), **SMALL),
        RecurrentPPO("MlpGruPolicy", PointEnv(), **SMALL),
        MaskablePPO("MlpPolicy", walks(1, spaces.MultiDiscrete([2, 3])), **SMALL),
    ):
        export(model, tmp_path / "policy.pt2")
        copy.deepcopy(model.policy)
        pickle.loads(pickle.dumps(model.policy))


@pytest.mark.parametrize("variant", FLOWS)
def test_no_random_numbers_are_drawn(variant, data, tmp_path):
    model, before = flow(variant, data), th.get_rng_state()
    export(model, tmp_path / "policy.pt2")
    assert th.equal(th.get_rng_state(), before)


def test_modes_of_modules(tmp_path):
    class WithNorm(FlattenExtractor):
        def __init__(self, space):
            super().__init__(space)
            self.norm = th.nn.BatchNorm1d(2)

    model = PPO("MlpPolicy", PointEnv(), policy_kwargs={"features_extractor_class": WithNorm}, **SMALL)
    model.policy.set_training_mode(True)
    model.policy.features_extractor.norm.eval()
    modes = [module.training for module in model.policy.modules()]
    assert True in modes and False in modes
    export(model, tmp_path / "policy.pt2")
    assert [module.training for module in model.policy.modules()] == modes


# ------------------------------------------------------------------------------------------------------------------- refusals


class Constant(ActorCriticPolicy):
    def _predict(self, observation, deterministic=False):
        return super()._predict(observation, deterministic) * 0 + 0.05


class Noisy(FlowMapPolicy):
    def predict(self, *args, **kwargs):
        actions, state = super().predict(*args, **kwargs)
        return actions + 0.1, state


class Halved(PPO):
    def predict(self, *args, **kwargs):
        actions, state = super().predict(*args, **kwargs)
        return actions / 2, state


def test_decisions_of_ones_own(data, tmp_path):
    noisy = Noisy(data.observation_space, data.action_space, lambda _: 1e-3, net_arch=[8], n_critics=0)
    for model, name in (
        (sb3.PPO(Constant, PointEnv(), **SMALL), "Constant has a `_predict` of its own"),
        (noisy, "Noisy has a `predict` of its own"),
        (Halved("MlpPolicy", PointEnv(), **SMALL), "Halved has a `predict` of its own"),
    ):
        with pytest.raises(ValueError, match=name):
            export(model, tmp_path / "policy.pt2")


def test_networks_of_ones_own(tmp_path):
    class Doubled(FlattenExtractor):
        def forward(self, observations):
            return super().forward(observations) * 2

    model = PPO("MlpPolicy", PointEnv(), policy_kwargs={"features_extractor_class": Doubled}, **SMALL)
    export(model, tmp_path / "policy.pt2")
    observation = np.array([[0.3, -0.7]], np.float32)
    (actions,) = run(tmp_path / "policy.pt2", {"observation": observation})
    np.testing.assert_allclose(actions, model.predict(observation, deterministic=True)[0], atol=1e-5)


def test_networks_that_torch_cannot_trace(tmp_path):
    class Looks(FlattenExtractor):
        def forward(self, observations):
            return super().forward(observations) * (2 if (observations > 0).any() else 1)

    model = PPO("MlpPolicy", PointEnv(), policy_kwargs={"features_extractor_class": Looks}, **SMALL)
    training = model.policy.training
    with pytest.raises(ValueError, match=r"torch cannot export ActorCriticPolicy \(GuardOnDataDependentSymNode: "):
        export(model, tmp_path / "policy.pt2")
    assert not list(tmp_path.iterdir()) and model.policy.training == training


def test_names_of_observations(data, tmp_path):
    model = PPO("MultiInputPolicy", Named("actions", "other"), **SMALL)
    message = r"has the keys \['actions'\], which are names of the program's own inputs and outputs"
    with pytest.raises(ValueError, match=message):
        export(model, tmp_path / "policy.onnx")
    export(model, tmp_path / "policy.pt2")
    noise = RQL("MultiInputPolicy", Named("noise", "other"), policy_kwargs={"net_arch": [8]}, buffer_size=10, device="cpu")
    with pytest.raises(ValueError, match=r"has the keys \['noise'\]"):
        export(noise, tmp_path / "policy.onnx")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vec_normalize": "stats.pkl"}, "`vec_normalize` must be a VecNormalize or None, but 'stats.pkl' was given"),
        ({"dynamic_batch": "False"}, "`dynamic_batch` must be True or False, but 'False' was given"),
        ({"path": None}, "`path` must be a str or Path, but None was given"),
    ],
)
def test_arguments_of_another_kind(given, message, tmp_path):
    with pytest.raises(TypeError, match=message):
        export(**{"model": PPO("MlpPolicy", PointEnv(), **SMALL), "path": tmp_path / "policy.pt2"} | given)


# ------------------------------------------------------------------------------------------------------------- a robot's side


def robot(path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["robot.py", str(path), "--hertz", "500", "--seconds", "0.02"])
    variables = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "robot.py"))
    assert "10 steps at 500 Hz" in capsys.readouterr().out
    return variables["action"]


def test_an_action_of_a_robot_has_the_shape_of_the_space(data, tmp_path, capsys, monkeypatch):
    path = tmp_path / "policy.onnx"
    single = RQL("MlpPolicy", None, offline_dataset=data, device="cpu", policy_kwargs={"net_arch": [8]})
    for model in (single, PPO("MlpPolicy", PointEnv(), **SMALL)):
        export(model, path)
        assert robot(path, capsys, monkeypatch).shape == (2,)
    assert decided(single.policy, np.zeros((1, 2), np.float32)).shape == (1, 1, 2)


def test_a_robot_refuses_memory(tmp_path, capsys, monkeypatch):
    export(RecurrentPPO("MlpGruPolicy", PointEnv(), **SMALL), tmp_path / "policy.onnx")
    with pytest.raises(SystemExit):
        robot(tmp_path / "policy.onnx", capsys, monkeypatch)
    assert "is a RecurrentPPO, which also needs hidden_state, episode_start" in capsys.readouterr().err


def test_a_robot_with_numbers_of_another_type(tmp_path, capsys, monkeypatch):
    class Doubles(Named):
        def __init__(self):
            self.observation_space = spaces.Box(-3, 3, (4,), np.float64)

    export(PPO("MlpPolicy", Doubles(), **SMALL), tmp_path / "policy.onnx")
    assert robot(tmp_path / "policy.onnx", capsys, monkeypatch).shape == (2,)
