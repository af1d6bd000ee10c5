"""Numbers that are not finite: arguments are refused, actions do not leave for the environment, passes are undone."""

import copy
import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from on_policy import ACTION_SPACES, DICT, Walk, walks
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_flow import GRPO, PPO, AsyncPPO, MaskablePPO, MaskableRecurrentPPO, RecurrentPPO
from sb3_flow.collect import CollectorError

SMALL: dict[str, Any] = {"n_steps": 16, "batch_size": 16, "n_epochs": 2, "seed": 3, "device": "cpu"}
SMALL |= {"policy_kwargs": {"net_arch": [8]}}
BACKENDS = ("native", "torch")
KINDS = ("PPO native", "PPO torch", "GRPO native", "GRPO torch", "MaskablePPO", "RecurrentPPO", "MaskableRecurrentPPO")


def build(kind: str, env: Any = None, **kwargs: Any) -> Any:
    """:return: a model of this class and backend"""
    name, *backend = kind.split()
    policy = "MlpLstmPolicy" if name.endswith("RecurrentPPO") else "MlpPolicy"
    env = env or walks(2, ACTION_SPACES["discrete" if name.startswith("Maskable") else "box"])
    kwargs = SMALL | kwargs | ({"backend": backend[0]} if backend else {}) | ({"group_by": "none"} if name == "GRPO" else {})
    algorithms = PPO, GRPO, MaskablePPO, RecurrentPPO, MaskableRecurrentPPO
    return {one.__name__: one for one in algorithms}[name](policy, env, **kwargs)


def state_of(model: Any) -> dict[str, Any]:
    return copy.deepcopy({"weights": model.policy.state_dict(), "optimizer": model.policy.optimizer.state_dict()})


def assert_same(state: Any, other: Any) -> None:
    """To the last bit."""
    if isinstance(state, dict):
        assert state.keys() == other.keys()
        for key, value in state.items():
            assert_same(value, other[key])
    elif isinstance(state, th.Tensor):
        assert th.equal(state, other)
    else:
        assert state == other


NUMBERS = ("learning_rate", "clip_range", "clip_range_vf", "clip_range_high", "ent_coef", "vf_coef", "kl_coef")


@pytest.mark.parametrize("given", [math.nan, math.inf])
@pytest.mark.parametrize("name", NUMBERS)
def test_coefficients_must_be_finite(name, given):
    with pytest.raises(ValueError, match=f"`{name}` must be a finite number, but {given} was given"):
        build("PPO native", reference_policy="initial", **{name: given})


@pytest.mark.parametrize("kind", ["GRPO native", "MaskablePPO", "RecurrentPPO"])
def test_all_classes_refuse_them(kind):
    with pytest.raises(ValueError, match="`ent_coef` must be a finite number, but nan was given"):
        build(kind, ent_coef=math.nan)
    with pytest.raises(ValueError, match="`ent_coef` must be a finite number, but 'auto' was given"):
        build(kind, ent_coef="auto")


@pytest.mark.parametrize("name", ["gamma", "gae_lambda", "max_grad_norm", "target_kl", "dual_clip", "rho_bar", "c_bar"])
def test_other_arguments_must_be_numbers(name):
    with pytest.raises(ValueError, match=f"`{name}`.*nan was given|{name}=nan.* given"):
        build("PPO native", **{name: math.nan})


def test_no_clipping_of_gradients_is_allowed():
    build("PPO native", max_grad_norm=math.inf).learn(1)


def test_a_loaded_model_is_looked_at_again(tmp_path):
    build("PPO native").save(tmp_path / "model")
    with pytest.raises(ValueError, match="`ent_coef` must be a finite number"):
        PPO.load(tmp_path / "model", env=walks(2, ACTION_SPACES["box"]), ent_coef=math.nan)


@pytest.mark.parametrize("name", ["learning_rate", "clip_range", "clip_range_vf", "clip_range_high"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_schedule_is_looked_at_when_it_is_evaluated(backend, name):
    model = build(f"PPO {backend}", **{name: lambda remaining: 1e-3 if remaining > 0.4 else math.nan})
    with pytest.raises(ValueError, match=f"`{name}` must be a finite number, but nan was given by its schedule at .* 0.0"):
        model.learn(64)
    assert model._n_updates == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["advantages", "returns", "observations"])
def test_a_pass_that_breaks_is_undone(kind, where):
    model = build(kind).learn(64)
    if where == "returns" and not model.has_critic:
        where = "old_log_probs"
    before, updates = state_of(model), model._n_updates
    buffer = model.rollout_buffer
    getattr(buffer, where.replace("old_", ""))[5 if buffer.generator_ready else (5, 0)] = np.nan
    with pytest.raises(FloatingPointError, match=rf"Pass {updates + 1} over a rollout broke\. The loss of minibatch . of"):
        model.train()
    assert_same(state_of(model), before)
    assert model._n_updates == updates
    model.learn(64)  # nothing is broken
    assert all(parameter.isfinite().all() for parameter in model.policy.parameters())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "GRPO" not in kind])
def test_passes_before_the_one_that_breaks_stay(kind):
    """The first step goes far, with a loss that is finite; from there the squares of the second pass are too large."""
    kwargs = {"batch_size": 32, "learning_rate": 1e25}
    one, more = build(kind, n_epochs=1, **kwargs).learn(1), build(kind, n_epochs=3, **kwargs)
    with pytest.raises(FloatingPointError, match=r"Pass 2 over a rollout broke\. The loss of minibatch 1 of 1 is (inf|nan)"):
        more.learn(1)
    assert_same(state_of(more), state_of(one))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_not_finite_after_a_finite_loss(kind):
    """Networks saturate at an infinite observation, their gradients do not."""
    model = build(kind, batch_size=32, n_epochs=1).learn(1)
    before = state_of(model)
    observations = model.rollout_buffer.observations
    observations[5 if model.rollout_buffer.generator_ready else (5, 0)] = np.inf, 0, 0
    with pytest.raises(FloatingPointError, match=r"Pass 2 .* broke\. The weights are not finite after it.*: observations\."):
        model.train()
    assert_same(state_of(model), before)


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_ends_a_pass_undoes_it(kind):
    """Not only numbers: torch refuses a step that does not fit float32."""
    fresh = build(kind)
    with pytest.raises((FloatingPointError, RuntimeError)):
        (model := build(kind, batch_size=32, learning_rate=1e39)).learn(1)
    assert_same(model.policy.state_dict(), fresh.policy.state_dict())


class Poisoned(gym.Wrapper):
    """One observation is not finite. Keeps the actions that arrive."""

    def __init__(self, env: gym.Env, value: float = math.nan):
        super().__init__(env)
        self.value, self.arrived = value, []

    def step(self, action: Any) -> Any:
        self.arrived.append(action)
        observation, *rest = self.env.step(action)
        if len(self.arrived) == 10:
            part = observation["a"] if isinstance(observation, dict) else observation
            part[1] = self.value
        return observation, *rest


def poisoned(action_space: spaces.Space, observation_space: spaces.Space | None = None, **kwargs: Any) -> DummyVecEnv:
    # of walks that do not end, so that the observation is not that of an end
    return DummyVecEnv([lambda: Poisoned(Walk(action_space, observation_space, mean_length=10**9), **kwargs)])


@pytest.mark.parametrize("kind", ["PPO native", "PPO torch", "RecurrentPPO", "MaskablePPO"])
@pytest.mark.parametrize("actions", ACTION_SPACES)
def test_no_action_leaves_for_the_environment_after_a_broken_observation(kind, actions):
    if kind == "MaskablePPO" and "discrete" not in actions:
        return
    env = poisoned(ACTION_SPACES[actions])
    model = build(kind, env)
    before = state_of(model)
    with pytest.raises(FloatingPointError, match=r"no environment was stepped\. Not finite before that: observations"):
        model.learn(64)
    arrived = env.envs[0].arrived
    assert len(arrived) == 10 and np.isfinite(np.asarray(arrived, dtype=float)).all()
    assert_same(state_of(model), before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_observations_that_are_dictionaries(backend):
    env = poisoned(ACTION_SPACES["box"], DICT)
    with pytest.raises(FloatingPointError, match="Not finite before that: observations"):
        PPO("MultiInputPolicy", env, **SMALL, backend=backend).learn(64)
    assert len(env.envs[0].arrived) == 10


@pytest.mark.parametrize("backend", BACKENDS)
def test_broken_weights_do_not_act(backend):
    env = poisoned(ACTION_SPACES["box"])
    model = build(f"PPO {backend}", env)
    with th.no_grad():
        model.policy.action_net.weight[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="Not finite before that: weights"):
        model.learn(64)
    assert env.envs[0].arrived == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_mistakes_of_an_environment_stay_what_they_are(backend):
    model = build(f"PPO {backend}")

    def forward(*_: Any, **__: Any) -> Any:
        raise ValueError("of the user's own")

    model._act = forward
    with pytest.raises(ValueError, match="of the user's own"):
        model.learn(64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_collector_does_not_step_either(backend):
    model = AsyncPPO("MlpPolicy", poisoned(ACTION_SPACES["box"]), **SMALL, mode="sync", backend=backend)
    with pytest.raises(CollectorError, match=r"no environment was stepped\. Not finite before that: observations") as error:
        model.learn(64)
    assert isinstance(error.value.__cause__, FloatingPointError)


def test_a_pass_of_asyncppo_is_undone():
    model = AsyncPPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), **SMALL, mode="sync", learning_rate=1e39)
    before = model.policy.state_dict()
    before = {name: weight.clone() for name, weight in before.items()}
    with pytest.raises(FloatingPointError, match="Pass 1 over a rollout broke"):
        model.learn(64)
    assert_same(dict(model.policy.state_dict()), before)
    assert model._collectors is None
