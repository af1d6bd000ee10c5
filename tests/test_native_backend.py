"""The native backend beside the torch backend: the same update of the same rollout, and everything around it."""

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stable_baselines3
import torch as th
from gymnasium import spaces
from on_policy import ACTION_SPACES, DICT, IMAGE, Recorder, assert_same_weights, learned, walks
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import FlattenExtractor
from stable_baselines3.common.vec_env import VecNormalize

from sb3_flow import GRPO, GSPO, PPO, GroupedStart
from sb3_flow.on_policy.backend_choice import DISTRIBUTIONS
from sb3_flow.on_policy.native_learner import KINDS

SMALL = {"n_steps": 32, "batch_size": 24, "n_epochs": 3, "seed": 3, "device": "cpu", "learning_rate": 1e-3}
CHOICES = {
    "default": {},
    "options": {"clip_range_vf": 0.1, "ent_coef": 0.01, "normalize_advantage": False, "clip_range_high": 0.3},
    "net_arch": {"policy_kwargs": {"net_arch": {"pi": [16], "vf": []}, "activation_fn": th.nn.ReLU}},
    "vtrace": {"advantage": "vtrace", "rho_bar": 1.2, "c_bar": 1.1},
    "group": {"advantage": "group"},
    "dual_clip": {"policy_loss": "dual_clip"},
    "gspo": {"policy_loss": "gspo"},
    "gspo_token": {"policy_loss": "gspo_token"},
    "decoupled": {"policy_loss": "decoupled", "rho_bar": 1.5},
    "kl": {"kl_coef": 0.3, "reference_policy": "initial"},
    "target_kl": {"target_kl": 0.01},
    "adam": {"policy_kwargs": {"optimizer_kwargs": {"betas": (0.8, 0.95), "eps": 1e-4}}},
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("actions", ACTION_SPACES)
def test_both_backends_make_the_same_update(actions: str, choice: str) -> None:
    models = {}
    for backend in ("torch", "native"):
        models[backend] = PPO("MlpPolicy", walks(3, ACTION_SPACES[actions]), backend=backend, **SMALL, **CHOICES[choice])
    ours, native = models["torch"], models["native"]
    assert native.native is not None and ours.native is None
    train, recorders = PPO.train, {}
    ours.train = lambda: None  # collects only
    ours.learn(96)
    # so that ratios differ from 1 from the start
    ours.rollout_buffer.log_probs += np.random.default_rng(0).normal(0, 0.1, ours.rollout_buffer.log_probs.shape).astype("f")
    native.policy.load_state_dict(ours.policy.state_dict())
    native._setup_learn(96)
    native.rollout_buffer, native._last_obs = copy.deepcopy(ours.rollout_buffer), ours._last_obs
    before = copy.deepcopy(ours.policy.state_dict())
    for backend, model in models.items():
        recorders[backend] = Recorder()
        model.set_logger(recorders[backend])
        np.random.seed(0)
        train(model)
    moved = max(float((ours.policy.state_dict()[key] - before[key]).abs().max()) for key in before)
    assert moved > 1e-3
    for key, weight in ours.policy.state_dict().items():
        th.testing.assert_close(native.policy.state_dict()[key], weight, rtol=1e-3, atol=2e-5, msg=key)
    logged, wanted = (recorders[backend].name_to_value for backend in ("native", "torch"))
    assert logged.keys() == wanted.keys()
    for key, value in wanted.items():
        assert logged[key] == pytest.approx(value, rel=1e-3, abs=1e-4, nan_ok=True), key
    theirs, mine = (model.policy.optimizer.state_dict()["state"] for model in (ours, native))
    for number, state in theirs.items():
        assert mine[number]["step"] == state["step"]
        th.testing.assert_close(mine[number]["exp_avg"], state["exp_avg"], rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("algorithm", [GRPO, GSPO])
def test_group_methods_learn_natively(algorithm: Any, tmp_path: Path) -> None:
    env = make_vec_env("CartPole-v1", n_envs=4, wrapper_class=GroupedStart)
    model = algorithm("MlpPolicy", env, n_steps=50, group_size=2, batch_size=16, seed=0, device="cpu", backend="native")
    weights, logged = learned(model, 1000)
    assert all(th.isfinite(weight).all() for weight in weights.values())
    assert "train/value_loss" not in logged[-1]
    model.save(tmp_path / "model")
    assert_same_weights(algorithm.load(tmp_path / "model").policy.state_dict(), weights)


def test_acting_agrees_with_torch() -> None:
    for actions, space in ACTION_SPACES.items():
        model = PPO("MlpPolicy", walks(3, space), backend="native", **SMALL)
        model.learn(96)
        buffer = model.rollout_buffer
        model.learn(96)  # the buffer is of the policy before the update: evaluate at collection instead
        observations = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)
        acted, values, log_probs = model.native.act(observations, np.random.default_rng(1))
        with th.no_grad():
            wanted = model.policy.evaluate_actions(th.as_tensor(observations), acted.float() if actions == "box" else acted)
        th.testing.assert_close(values, wanted[0], rtol=1e-4, atol=1e-5)
        th.testing.assert_close(log_probs, wanted[1], rtol=1e-4, atol=1e-5)
        forward = model.policy(th.as_tensor(observations))
        assert [part.shape for part in forward] == [acted.shape, values.shape, log_probs.shape]
        assert acted.dtype == forward[0].dtype
        assert buffer.full


@pytest.mark.parametrize("first", ["native", "torch"])
def test_a_saved_model_goes_on_with_the_other_backend(first: str, tmp_path: Path) -> None:
    second = {"native": "torch", "torch": "native"}[first]
    env = VecNormalize(walks(2, ACTION_SPACES["box"]))
    model = PPO("MlpPolicy", env, backend=first, **SMALL).learn(128)
    model.save(tmp_path / "model")
    loaded = PPO.load(tmp_path / "model", env=env, backend=second)
    assert (loaded.native is None) == (second == "torch")
    assert_same_weights(loaded.policy.state_dict(), model.policy.state_dict())
    states = (one.policy.optimizer.state_dict()["state"].values() for one in (loaded, model))
    for mine, wanted in zip(*states, strict=True):
        assert mine["step"] == wanted["step"] > 0
        th.testing.assert_close(mine["exp_avg_sq"], wanted["exp_avg_sq"], rtol=0, atol=0)
    steps = float(wanted["step"])
    loaded.learn(64)
    assert float(next(iter(loaded.policy.optimizer.state.values()))["step"]) > steps
    stock = stable_baselines3.PPO.load(tmp_path / "model", env=env)
    stock.learn(64)


def test_a_resumed_run_acts_as_it_would_have(tmp_path: Path) -> None:
    model = PPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), backend="native", **SMALL).learn(64)
    model.save(tmp_path / "model")
    loaded = PPO.load(tmp_path / "model")
    observations = np.ones((5, 3), np.float32)
    drawn = [one.native.act(observations, one._actions_generator)[0] for one in (model, loaded)]
    th.testing.assert_close(*drawn, rtol=0, atol=0)


def test_a_seed_decides_the_run() -> None:
    runs = [learned(PPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), backend="native", **SMALL), 128)[0] for _ in range(2)]
    assert_same_weights(*runs)


def test_weights_written_by_others_are_learned_from() -> None:
    class Resets(BaseCallback):
        """Puts back the first weights, each time in another way."""

        def _on_training_start(self) -> None:
            self.first = copy.deepcopy(self.model.get_parameters())

        def _on_rollout_start(self) -> None:
            self.model.set_parameters(self.first)

        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            for name, parameter in self.model.policy.named_parameters():
                parameter.data = self.first["policy"][name].clone()  # another tensor, not a view any more

    found = []
    for backend in ("native", "torch"):
        model = PPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), backend=backend, **SMALL)
        start = copy.deepcopy(model.policy.state_dict())
        model.learn(64 * 3, callback=Resets())
        found.append(max(float((model.policy.state_dict()[key] - start[key]).abs().max()) for key in start))
    # three epochs of three steps of at most the learning rate from the first weights, not nine epochs
    assert 1e-4 < found[0] < 0.0095 and 1e-4 < found[1] < 0.0095


def test_gradients_and_a_copy_of_the_model() -> None:
    model = PPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), backend="native", **SMALL).learn(64)
    assert any(parameter.grad.abs().max() > 0 for parameter in model.policy.parameters())
    policy = copy.deepcopy(model.policy)
    before = copy.deepcopy(policy.state_dict())
    model.learn(64)
    assert_same_weights(policy.state_dict(), before)
    assert any(not th.equal(weight, before[key]) for key, weight in model.policy.state_dict().items())


class OwnExtractor(FlattenExtractor):
    """Of a user."""


class OwnLoss(PPO):
    def loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().loss(*args, **kwargs)


def test_every_distribution_that_is_covered_has_its_kind() -> None:
    assert set(KINDS) == set(DISTRIBUTIONS)


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"use_sde": True}, "the compiled loops do not draw actions from a StateDependentNoiseDistribution"),
        (
            {"policy": "CnnPolicy", "space": IMAGE},
            "NatureCNN encodes the Box observations, and the compiled loops take flat observations",
        ),
        (
            {"policy": "MultiInputPolicy", "space": spaces.Dict({**DICT.spaces, "image": IMAGE})},
            "CombinedExtractor encodes the Dict observations, and the compiled loops take flat observations",
        ),
        (
            {"policy_kwargs": {"features_extractor_class": OwnExtractor}},
            "OwnExtractor encodes the Box observations, and the compiled loops take flat observations",
        ),
        (
            {"policy_kwargs": {"activation_fn": th.nn.ELU}},
            "the networks are MlpExtractor with ELU, and the compiled loops cover an MlpExtractor with Tanh or ReLU",
        ),
        (
            {"policy_kwargs": {"optimizer_class": th.optim.SGD}},
            "the optimizer is SGD, and the compiled loops cover Adam with one group",
        ),
        (
            {"policy_kwargs": {"optimizer_kwargs": {"weight_decay": 0.1}}},
            r"the optimizer has options that the compiled loops do not cover \(weight_decay\)",
        ),
        ({"recompute_advantages": "minibatch"}, "advantages are estimated again after each gradient step"),
        ({"algorithm": OwnLoss}, "OwnLoss has a loss of its own"),
    ],
)
def test_what_is_not_covered_falls_back_and_says_so(kwargs: dict[str, Any], reason: str, capsys: Any) -> None:
    kwargs = dict(kwargs)
    policy, space, algorithm = kwargs.pop("policy", "MlpPolicy"), kwargs.pop("space", None), kwargs.pop("algorithm", PPO)
    env = walks(2, ACTION_SPACES["box"], space)
    with pytest.raises(ValueError, match=f'`backend` is "native", but .*{reason}'):
        algorithm(policy, env, backend="native", **SMALL, **kwargs)
    model = algorithm(policy, env, backend="auto", verbose=1, **SMALL, **kwargs)
    printed = capsys.readouterr().out
    assert model.native is None and re.search(rf"^Using the torch backend, which is slower: {reason}\.$", printed, re.M)
    model.learn(64)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("space", ["discrete", "multi_discrete", "multi_binary", "dict"])
def test_observations_that_are_encoded(space: str, shared: bool) -> None:
    policy = "MultiInputPolicy" if space == "dict" else "MlpPolicy"
    env = walks(2, ACTION_SPACES["discrete"], {**ACTION_SPACES, "dict": DICT}[space])
    model = PPO(policy, env, backend="native", policy_kwargs={"share_features_extractor": shared}, **SMALL)
    observations = model.env.reset()
    acted, values, _ = model.native.act(observations, np.random.default_rng(0))
    tensor, _ = model.policy.obs_to_tensor(observations)
    th.testing.assert_close(values, model.policy.predict_values(tensor).detach(), rtol=1e-5, atol=1e-6)
    assert len(acted) == 2
    model.learn(64)
