"""Models of our PPO and of SB3's open each other's files, take each other's parameters, and predict the same actions."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sb3_contrib
import stable_baselines3
import torch as th
from on_policy import ACTION_SPACES, assert_same_weights, walks
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecNormalize

from sb3_flow import PPO, MaskablePPO, RecurrentPPO

SMALL: dict[str, Any] = {"n_steps": 32, "batch_size": 32, "n_epochs": 2, "device": "cpu"}
OBSERVATIONS = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)


def assert_same_model(one: Any, other: Any) -> None:
    """The same weights, actions and state of the optimizer."""
    assert_same_weights(one.policy.state_dict(), other.policy.state_dict())
    actions = [model.predict(OBSERVATIONS, deterministic=True)[0] for model in (one, other)]
    np.testing.assert_array_equal(*actions)
    mine, theirs = (model.policy.optimizer.state_dict()["state"] for model in (one, other))
    assert len(mine) > 0
    for number, state in theirs.items():
        assert mine[number]["step"] == state["step"] > 0
        for name in ("exp_avg", "exp_avg_sq"):
            assert th.equal(mine[number][name], state[name])


def adam(model: Any) -> list[th.Tensor]:
    """:return: copies of the optimizer's tensors"""
    states = model.policy.optimizer.state_dict()["state"].values()
    return [tensor.clone() for state in states for tensor in state.values()]


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("actions", ["box", "discrete"])
def test_files_open_in_either_class(actions: str, backend: str, tmp_path: Path) -> None:
    env = VecNormalize(walks(2, ACTION_SPACES[actions]))
    ours = PPO("MlpPolicy", env, backend=backend, advantage="vtrace", clip_range_high=0.3, seed=0, **SMALL).learn(64)
    ours.save(tmp_path / "ours")
    env.save(tmp_path / "statistics.pkl")
    stock = stable_baselines3.PPO.load(tmp_path / "ours", env=VecNormalize.load(tmp_path / "statistics.pkl", env.venv))
    assert_same_model(stock, ours)
    before = adam(ours)
    stock.learn(64, reset_num_timesteps=False)
    assert stock.num_timesteps == 128
    assert all(map(th.equal, adam(ours), before))

    # what SB3's class carried along unused is in force again
    stock.save(tmp_path / "stock")
    back = PPO.load(tmp_path / "stock", env=env)
    assert_same_model(back, stock)
    assert (back.advantage, back.backend, back.clip_range_high(1)) == ("vtrace", backend, 0.3)
    back.learn(64)

    # and a file that has never been ours
    first = stable_baselines3.PPO("MlpPolicy", env, seed=1, **SMALL).learn(64)
    first.save(tmp_path / "first")
    loaded = PPO.load(tmp_path / "first", env=env, backend=backend)
    assert_same_model(loaded, first)
    assert (loaded.native is not None) == (backend == "native") and loaded.advantage == "gae"
    loaded.learn(64)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_parameters_are_handed_over_and_not_shared(backend: str) -> None:
    env = walks(2, ACTION_SPACES["box"])
    ours = PPO("MlpPolicy", env, backend=backend, seed=0, **SMALL).learn(64)
    stock = stable_baselines3.PPO("MlpPolicy", env, seed=1, **SMALL)
    stock.set_parameters(ours.get_parameters())
    assert_same_model(stock, ours)
    before = adam(ours)
    stock.learn(64)
    assert all(map(th.equal, adam(ours), before)) and not all(map(th.equal, adam(stock), before))

    ours.set_parameters(stock.get_parameters())
    assert_same_model(ours, stock)
    before = adam(stock)
    ours.learn(64)
    assert all(map(th.equal, adam(stock), before)) and not all(map(th.equal, adam(ours), before))


def test_files_are_as_large_as_sb3s(tmp_path: Path) -> None:
    env = walks(2, ACTION_SPACES["box"])
    sizes = []
    for algorithm, kwargs in ((PPO, {"backend": "native"}), (stable_baselines3.PPO, {})):
        model = algorithm("MlpPolicy", env, policy_kwargs={"net_arch": [256, 256]}, **SMALL, **kwargs).learn(64)
        model.save(tmp_path / "model.zip")
        model.policy.save(tmp_path / "policy.pth")
        sizes.append([(tmp_path / name).stat().st_size for name in ("model.zip", "policy.pth")])
    for ours, stock in zip(*sizes, strict=True):
        assert ours < 1.05 * stock


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_policy_alone(backend: str, tmp_path: Path) -> None:
    ours = PPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), backend=backend, **SMALL).learn(64)
    ours.policy.save(tmp_path / "policy.pth")
    policy = ActorCriticPolicy.load(tmp_path / "policy.pth")
    predicted = [one.predict(OBSERVATIONS, deterministic=True)[0] for one in (policy, ours)]
    np.testing.assert_array_equal(*predicted)


def test_a_reference_policy_is_left_out_by_hand() -> None:
    env = walks(2, ACTION_SPACES["box"])
    ours = PPO("MlpPolicy", env, kl_coef=0.1, reference_policy="initial", **SMALL).learn(64)
    parameters = ours.get_parameters()
    del parameters["reference"]
    stock = stable_baselines3.PPO("MlpPolicy", env, **SMALL)
    stock.set_parameters(parameters)
    assert_same_model(stock, ours)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("MaskablePPO", sb3_contrib.MaskablePPO), ("RecurrentPPO", sb3_contrib.RecurrentPPO)],
)
def test_sb3_contribs_classes(ours: str, theirs: Any, tmp_path: Path) -> None:
    algorithm: Any = {"MaskablePPO": MaskablePPO, "RecurrentPPO": RecurrentPPO}[ours]
    env = walks(2, ACTION_SPACES["discrete"])
    policy = "MlpLstmPolicy" if ours == "RecurrentPPO" else "MlpPolicy"
    model = algorithm(policy, env, **SMALL).learn(64)
    model.save(tmp_path / "ours")
    stock = theirs.load(tmp_path / "ours", env=env)
    assert_same_model(stock, model)
    stock.learn(64)
    stock.save(tmp_path / "stock")
    assert_same_model(algorithm.load(tmp_path / "stock", env=env), stock)


def test_where_only_sb3_is_installed(tmp_path: Path) -> None:
    """Opening our files needs none of our modules."""
    env = walks(2, ACTION_SPACES["box"])
    ours = PPO("MlpPolicy", env, backend="native", clip_range_high=0.3, **SMALL).learn(64)
    ours.save(tmp_path / "ours")
    np.save(tmp_path / "actions.npy", ours.predict(OBSERVATIONS, deterministic=True)[0])
    np.save(tmp_path / "observations.npy", OBSERVATIONS)
    script = f"""
import sys
sys.modules["sb3_flow"] = None  # import fails
import numpy as np
from stable_baselines3 import PPO
found = PPO.load(r"{tmp_path / "ours"}", device="cpu").predict(np.load(r"{tmp_path / "observations.npy"}"), deterministic=True)
assert np.array_equal(found[0], np.load(r"{tmp_path / "actions.npy"}"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
