"""Files say which version saved them, and a file from a newer version than the installed one is named in a warning."""

import pickle
import warnings

import gymnasium as gym
import pytest
from stable_baselines3.common.save_util import load_from_zip_file

import sb3_flow
from sb3_flow import DSRL, PPO, RQL, FlowMapPolicy
from sb3_flow.common import checkpoints, saved_by
from sb3_flow.data import replay
from sb3_flow.offline_to_online import generative_policy

SMALL = {"policy_kwargs": {"net_arch": [8]}, "n_critics": 2}
NEWER = "was saved by sb3_flow 99.1.0, but .* is installed.*pip install --upgrade 'sb3-flow>=99.1.0'"


@pytest.fixture
def of_the_future(monkeypatch):
    """Let files be saved as if by a version to come."""
    for module in (checkpoints, generative_policy, replay):
        monkeypatch.setattr(module, "__version__", "99.1.0")


def make(algorithm):
    return algorithm("MlpPolicy", "Pendulum-v1", device="cpu", **({} if algorithm is PPO else SMALL))


@pytest.mark.parametrize("algorithm", [PPO, RQL])
def test_models_tell_their_version(algorithm, tmp_path):
    make(algorithm).save(tmp_path / "model")
    data, *_ = load_from_zip_file(tmp_path / "model")
    assert data["sb3_flow_version"] == sb3_flow.__version__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert algorithm.load(tmp_path / "model").sb3_flow_version == sb3_flow.__version__


@pytest.mark.parametrize("algorithm", [PPO, RQL])
def test_models_of_a_newer_version(algorithm, tmp_path, of_the_future, monkeypatch):
    make(algorithm).save(tmp_path / "model")
    with pytest.warns(UserWarning, match=NEWER):
        model = algorithm.load(tmp_path / "model")
    with open(tmp_path / "model.zip", "rb") as file, pytest.warns(UserWarning, match=NEWER):
        algorithm.load(file)
    monkeypatch.undo()  # the installed version saves the model again
    model.save(tmp_path / "again")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        algorithm.load(tmp_path / "again")


def test_the_warning_comes_before_an_error(tmp_path, of_the_future):
    model = make(RQL)
    model.policy_kwargs["wings"] = 2  # an argument to come
    model.save(tmp_path / "model")
    with pytest.warns(UserWarning, match=NEWER), pytest.raises(TypeError, match="wings"):
        RQL.load(tmp_path / "model")


def test_policies_and_decoders_of_a_newer_version(tmp_path, of_the_future):
    env = gym.make("Pendulum-v1")
    spaces = env.observation_space, env.action_space
    policy = FlowMapPolicy(*spaces, lambda _: 1e-3, net_arch=[8])
    policy.save(tmp_path / "policy.pth")
    with pytest.warns(UserWarning, match=f"policy.pth {NEWER}"):
        FlowMapPolicy.load(tmp_path / "policy.pth")
    with pytest.warns(UserWarning, match=f"policy.pth {NEWER}"):
        DSRL("MlpPolicy", env, decoder=str(tmp_path / "policy.pth"), **SMALL)
    make(RQL).save(tmp_path / "model")
    with pytest.warns(UserWarning, match=f"model.zip {NEWER}"):
        DSRL("MlpPolicy", env, decoder=str(tmp_path / "model"), **SMALL)


def test_replay_buffers_of_a_newer_version(tmp_path, of_the_future):
    model = make(RQL).learn(3)
    model.save_replay_buffer(tmp_path / "buffer")
    with pytest.warns(UserWarning, match=f"The replay buffer {NEWER}"):
        model.load_replay_buffer(tmp_path / "buffer")
    assert "sb3_flow_version" not in vars(model.replay_buffer) and model.replay_buffer.size() == 3


def test_replay_buffers_without_a_version_load():
    buffer = make(RQL).learn(3).replay_buffer
    state = buffer.__getstate__()
    assert state.pop("sb3_flow_version") == sb3_flow.__version__
    older = type(buffer).__new__(type(buffer))
    older.__setstate__(state)
    assert older.size() == pickle.loads(pickle.dumps(buffer)).size() == 3


@pytest.mark.parametrize(("saved", "installed", "newer"), [("0.10.0", "0.9.1", True), ("0.9.1", "0.10.0", False)])
def test_versions_are_compared_by_their_numbers(saved, installed, newer, monkeypatch):
    monkeypatch.setattr(saved_by, "__version__", installed)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        saved_by.warn_of_newer(saved, "model.zip")
    assert len(found) == newer
