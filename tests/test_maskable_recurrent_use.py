"""How MaskableRecurrentPPO is used: the task that needs it, evaluation, files, and mistakes."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import sb3_contrib
import torch as th
from gymnasium import spaces
from on_policy import ACTION_SPACES, DICT, assert_same_weights, walks
from recall import Recall
from sb3_contrib.common.maskable.callbacks import MaskableEvalCallback
from sb3_contrib.common.maskable.evaluation import evaluate_policy
from stable_baselines3.common import evaluation
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from sb3_flow import MaskablePPO, MaskableRecurrentPPO, RecurrentPPO

SMALL: dict[str, Any] = {"n_steps": 16, "batch_size": 24, "n_epochs": 2, "seed": 3, "device": "cpu"}
SMALL |= {"policy_kwargs": {"lstm_hidden_size": 8}}
NETWORKS = ("MlpLstmPolicy", "MlpGruPolicy")


# --- the task that needs masks and memory


def recalling(policy: str, seed: int = 0) -> MaskableRecurrentPPO:
    small = {"n_steps": 24, "batch_size": 96, "n_epochs": 6, "learning_rate": 0.01, "gamma": 0.9, "ent_coef": 0.01}
    kwargs = {"lstm_hidden_size": 16, "net_arch": [16]}
    env = make_vec_env(Recall, 16, seed=seed)
    return MaskableRecurrentPPO(policy, env, **small, seed=seed, device="cpu", policy_kwargs=kwargs)


def success(model: Any, n_envs: int = 16, **given: Any) -> float:
    return float(evaluate_policy(model, make_vec_env(Recall, n_envs, seed=100), n_eval_episodes=200, warn=False, **given)[0])


@pytest.fixture(scope="module")
def trained() -> dict[str, MaskableRecurrentPPO]:
    return {policy: recalling(policy).learn(6144) for policy in NETWORKS}


@pytest.mark.parametrize("policy", NETWORKS)
def test_a_task_that_needs_masks_and_memory_is_learned(policy: str, trained: Any) -> None:
    """Of 8 seeds of either network, all score 1.0; without memory they score at most 0.40, and without masks 0.12."""
    assert success(trained[policy]) > 0.9


def test_it_is_not_learned_without_memory() -> None:
    model = recalling("MlpGruPolicy")
    process = model.policy._process_sequence
    model.policy._process_sequence = lambda seen, states, starts, lstm: process(seen, states, th.ones_like(starts), lstm)
    assert success(model.learn(6144)) < 0.6


def test_it_is_not_learned_without_masks() -> None:
    assert success(recalling("MlpGruPolicy").learn(6144, use_masking=False), use_masking=False) < 0.4


# --- evaluation


def by_hand(model: Any, env: VecEnv, episodes: int, carry: bool = True) -> list[float]:
    """:return: rewards of one environment's episodes, deterministic"""
    seen, state, start, found = env.reset(), None, np.ones(1, bool), []
    while len(found) < episodes:
        masks = np.stack(env.env_method("action_masks"))
        action, state = model.predict(seen, state if carry else None, start, deterministic=True, action_masks=masks)
        seen, reward, start, _ = env.step(action)
        if start[0]:
            found.append(float(reward[0]))
    return found


@pytest.mark.parametrize("policy", NETWORKS)
def test_sb3_contribs_evaluation_with_masks_keeps_the_memory(policy: str, trained: Any) -> None:
    """``evaluate_policy`` of sb3-contrib 2.9.2 gives no state in any call."""
    model = trained[policy]
    found, _ = evaluate_policy(model, make_vec_env(Recall, 1, seed=7), 40, warn=False, return_episode_rewards=True)
    assert found == by_hand(model, make_vec_env(Recall, 1, seed=7), 40)
    assert np.mean(found) > 0.9
    forgetful = RecurrentPPO.predict  # SB3's, which forgets
    env = make_vec_env(Recall, 1, seed=7)
    model.predict = lambda *given, action_masks=None, **named: forgetful(model, *given, **named)
    try:
        assert evaluate_policy(model, env, 40, warn=False)[0] < 0.6
    finally:
        del model.predict


def test_policies_keep_their_memory_in_that_evaluation(trained: Any) -> None:
    model = trained["MlpGruPolicy"]
    for one in (model.policy, model):
        found, _ = evaluate_policy(one, make_vec_env(Recall, 3, seed=7), 30, warn=False, return_episode_rewards=True)
        assert np.mean(found) > 0.9


def test_states_are_found_in_that_evaluation_alone(trained: Any) -> None:
    model = trained["MlpGruPolicy"]
    masks, begins, goes_on = np.ones((2, 30), bool), np.ones(2, bool), np.zeros(2, bool)
    cue, blank = np.eye(4, dtype=np.float32)[[0, 1]], np.eye(4, dtype=np.float32)[[3, 3]]

    def hidden(seen: np.ndarray, starts: np.ndarray) -> np.ndarray:
        return model.predict(seen, None, starts, True, masks)[1][0]

    fresh = hidden(blank, begins)
    state = model.predict(cue, None, begins, True, masks)[1]
    assert np.abs(model.predict(blank, state, goes_on, True, masks)[1][0] - fresh).max() > 0.01
    for _ in range(2):  # a call without a state has none, whatever was called before
        np.testing.assert_array_equal(hidden(blank, goes_on), fresh)
        hidden(cue, begins)
    found = []

    def other_calls(local: dict[str, Any], _: dict[str, Any]) -> None:
        found.append(hidden(blank, goes_on))

    evaluate_policy(model, make_vec_env(Recall, 2, seed=7), 4, callback=other_calls, warn=False)
    for one in (*found, hidden(blank, goes_on)):
        np.testing.assert_array_equal(one, fresh)
    assert len(found) > 4 and not any("state" in name for name in vars(model) if "lstm" not in name)


def test_callbacks_and_sb3s_evaluation(trained: Any, tmp_path: Any) -> None:
    model = recalling("MlpGruPolicy")
    test = make_vec_env(Recall, 4, seed=1)
    callback = MaskableEvalCallback(test, eval_freq=24, n_eval_episodes=8, warn=False, best_model_save_path=str(tmp_path))
    model.learn(768, callback=callback)
    assert callback.n_calls == 48 and 0 <= callback.best_mean_reward <= 1
    MaskableRecurrentPPO.load(tmp_path / "best_model")
    # SB3's own asks no masks: a tenth of the keys of the right kind fit
    assert evaluation.evaluate_policy(trained["MlpGruPolicy"], test, 100, warn=False)[0] < 0.4


# --- files


def test_files_and_going_on(tmp_path: Any) -> None:
    env = walks(2, ACTION_SPACES["discrete"])
    model = MaskableRecurrentPPO("MlpLstmPolicy", env, kl_coef=0.1, reference_policy="initial", **SMALL).learn(64)
    model.save(tmp_path / "model")
    loaded = MaskableRecurrentPPO.load(tmp_path / "model", env=env)
    assert_same_weights(loaded.policy.state_dict(), model.policy.state_dict())
    found = []
    for one in (model, loaded):
        one._last_lstm_states, one._last_obs = loaded._last_lstm_states, None  # a file holds no states
        one.set_random_seed(5)
        one.env.seed(5)
        found.append(one.learn(64, reset_num_timesteps=False).policy.state_dict())
    assert_same_weights(*found)
    assert loaded.num_timesteps == 128


def test_files_of_relatives(tmp_path: Any) -> None:
    env = walks(2, ACTION_SPACES["multi_binary"])
    plain = RecurrentPPO("MlpLstmPolicy", env, **SMALL).learn(32)
    plain.save(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"`MaskableRecurrentPPO\.load` was given a file that RecurrentPPO saved"):
        MaskableRecurrentPPO.load(tmp_path / "plain")
    model = MaskableRecurrentPPO("MlpLstmPolicy", env, **SMALL)
    model.set_parameters(tmp_path / "plain")
    seen = env.reset()
    np.testing.assert_array_equal(*(one.predict(seen, deterministic=True)[0] for one in (plain, model)))
    model.save(tmp_path / "masked")
    for algorithm in (RecurrentPPO, MaskablePPO):
        with pytest.raises(ValueError, match=f"`{algorithm.__name__}.load` was given a file that MaskableRecurrentPPO saved"):
            algorithm.load(tmp_path / "masked")
    RecurrentPPO("MlpLstmPolicy", env, **SMALL).set_parameters(tmp_path / "masked")
    RecurrentPPO("MlpGruPolicy", env, **SMALL).save(tmp_path / "gru")
    with pytest.raises(ValueError, match="a file that RecurrentPPO saved"):
        MaskableRecurrentPPO.load(tmp_path / "gru")


# --- other uses and mistakes


@pytest.mark.parametrize("batch_size", [7, 1, None])
@pytest.mark.parametrize("n_envs", [1, 4])
def test_any_number_of_environments_and_rows(n_envs: int, batch_size: int | None) -> None:
    env = walks(n_envs, ACTION_SPACES["multi_discrete"], DICT)
    given = {**SMALL, "batch_size": batch_size, "normalize_advantage": False}
    model = MaskableRecurrentPPO("MultiInputLstmPolicy", env, **given).learn(3 * 16 * n_envs)
    assert all(weight.isfinite().all() for weight in model.policy.parameters())


def test_normalised_observations() -> None:
    env = VecNormalize(make_vec_env(Recall, 4, seed=0))
    model = MaskableRecurrentPPO("MlpGruPolicy", env, **SMALL).learn(128)
    assert np.isfinite(model.rollout_buffer.observations).all() and env.obs_rms.count > 100
    evaluate_policy(model, env, 8, warn=False)


def test_environments_without_masks() -> None:
    model = MaskableRecurrentPPO("MlpLstmPolicy", "CartPole-v1", **SMALL)
    with pytest.raises(ValueError, match="Environment does not support action masking"):
        model.learn(16)
    assert model.learn(16, use_masking=False).num_timesteps == 16
    with pytest.raises(ValueError, match="Environment does not support action masking"):
        model.learn(16)  # the choice is of that call


def test_mistakes() -> None:
    env = walks(2, ACTION_SPACES["discrete"])
    with pytest.raises(ValueError, match=r"`policy` must be one of 'MlpLstmPolicy', .* but 'MlpPolicy' was given"):
        MaskableRecurrentPPO("MlpPolicy", env)
    for policy in (ActorCriticPolicy, sb3_contrib.ppo_recurrent.MlpLstmPolicy):
        with pytest.raises(ValueError, match=r"`policy` must be one of .* or a subclass of MaskableRecurrentPolicy, but"):
            MaskableRecurrentPPO(policy, env)
    with pytest.raises(AssertionError, match="The algorithm only supports"):
        MaskableRecurrentPPO("MlpLstmPolicy", "Pendulum-v1")
    model = MaskableRecurrentPPO("MlpLstmPolicy", env, **SMALL)
    for masks in (np.ones(3, bool), np.ones((2, 2), bool), np.ones((3, 2), bool), np.ones(6, bool)):
        with pytest.raises(ValueError, match=r"`action_masks` must have the shape \(2, 3\), but .* was given"):
            model.predict(env.reset(), action_masks=masks)
    assert model.policy._masks is None  # nothing is left of a call that failed
    assert model.predict(env.reset()[0], action_masks=[False, False, True])[0] == 2
    assert model.predict(env.reset()[:1], action_masks=[[False, False, True]])[0].tolist() == [2]
    assert model.predict(env.reset(), action_masks=[[[False], [False], [True]]] * 2)[0].tolist() == [2, 2]


class Wide(gym.Env):
    observation_space = spaces.MultiDiscrete([4, 3])
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return self.np_random.integers([4, 3]), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        return self.np_random.integers([4, 3]), 0.0, False, False, {}


def test_multi_discrete_observations() -> None:
    """sb3-contrib's LSTM refuses their size, a number of NumPy's."""
    with pytest.raises(TypeError, match="int64"):
        RecurrentPPO("MlpLstmPolicy", Wide(), **SMALL)
    RecurrentPPO("MlpGruPolicy", Wide(), **SMALL).learn(16)
    MaskableRecurrentPPO("MlpLstmPolicy", Wide(), **SMALL).learn(16, use_masking=False)
