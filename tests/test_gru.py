"""Policies with a GRU in place of the LSTM: torch's cells step by step, states, files and memory."""

from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from on_policy import ACTION_SPACES, DICT, IMAGE, assert_same_weights, walks
from recurrent_reference import distance, evaluated, one_rollout, transcribed

from sb3_flow import MaskableRecurrentPPO, RecurrentPPO
from sb3_flow.ppo.gru_policies import Gru, GruPolicy

SMALL: dict[str, Any] = {"n_steps": 32, "batch_size": 24, "n_epochs": 2, "seed": 3, "device": "cpu"}
SIZE = {"lstm_hidden_size": 8}
KINDS: dict[str, dict[str, Any]] = {
    "two": {},
    "shared": {"shared_lstm": True, "enable_critic_lstm": False},
    "no memory of the critic": {"enable_critic_lstm": False},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpGruPolicy"])
def test_acting_and_learning_are_torchs_cells_step_by_step(policy: str, kind: str) -> None:
    model = one_rollout(RecurrentPPO, policy, ACTION_SPACES["multi_discrete"], **KINDS[kind])
    assert isinstance(model.policy.lstm_actor, th.nn.LSTM if "Lstm" in policy else Gru)
    expected = transcribed(model)
    acted = model.rollout_buffer.values, model.rollout_buffer.log_probs
    assert distance(tuple(map(th.as_tensor, acted)), expected[:2]) < 1e-5
    assert model.rollout_buffer.episode_starts[1:].sum() > 5  # states were reset within the rollout
    assert distance(evaluated(model), expected) < 1e-5


def forgetting(features: Any, states: Any, episode_starts: Any, lstm: Any, process: Any) -> Any:
    return process(features, states, th.ones_like(episode_starts), lstm)


def never_reset(features: Any, states: Any, episode_starts: Any, lstm: Any, process: Any) -> Any:
    return process(features, states, th.zeros_like(episode_starts), lstm)


def first_layer_only(features: Any, states: Any, episode_starts: Any, lstm: Any, process: Any) -> Any:
    hidden, cell = states
    return process(features, (hidden[:1].expand_as(hidden).contiguous(), cell), episode_starts, lstm)


@pytest.mark.parametrize("wrong", [forgetting, never_reset, first_layer_only])
def test_the_comparison_notices_wrong_states(wrong: Any) -> None:
    model = one_rollout(RecurrentPPO, "MlpGruPolicy", ACTION_SPACES["discrete"])
    expected, process = transcribed(model), model.policy._process_sequence
    model.policy._process_sequence = lambda *given: wrong(*given, process=process)
    assert distance(evaluated(model), expected) > 0.01


def test_the_comparison_notices_a_wrong_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset and update gates in the wrong order."""
    model = one_rollout(RecurrentPPO, "MlpGruPolicy", ACTION_SPACES["discrete"])
    expected = transcribed(model)
    with th.no_grad():
        for name, weight in model.policy.lstm_actor.named_parameters():
            reset, update, new = weight.chunk(3)
            weight.copy_(th.cat([update, reset, new])) if name.startswith("weight") else None
    assert distance(evaluated(model), expected) > 0.01


@pytest.mark.parametrize("algorithm", [RecurrentPPO, MaskableRecurrentPPO])
@pytest.mark.parametrize(("policy", "space"), [("MlpGruPolicy", None), ("CnnGruPolicy", IMAGE), ("MultiInputGruPolicy", DICT)])
def test_states_and_buffers_hold_no_cells(algorithm: Any, policy: str, space: spaces.Space | None) -> None:
    env = walks(2, ACTION_SPACES["discrete"], space)
    model = algorithm(policy, env, **SMALL, policy_kwargs=SIZE).learn(64)
    buffer = model.rollout_buffer
    assert buffer.cell_states_pi.nbytes == buffer.cell_states_vf.nbytes == 0
    assert buffer.hidden_states_pi.nbytes == 4 * 32 * 2 * 8
    assert [state.shape for state in model._last_lstm_states.pi] == [(1, 2, 8), (1, 2, 0)]
    state = None
    for shape in ((1, 2, 0), (1, 2, 0)):
        _, state = model.predict(env.reset(), state, np.zeros(2, bool))
        assert state[0].shape == (1, 2, 8) and state[1].shape == shape


def test_the_state_goes_on_and_is_reset() -> None:
    model = RecurrentPPO("MlpGruPolicy", walks(2, ACTION_SPACES["box"]), **SMALL, policy_kwargs=SIZE)
    seen = np.random.default_rng(0).standard_normal((3, 2, 3)).astype(np.float32)
    _, first = model.predict(seen[0], None, np.ones(2, bool))
    _, second = model.predict(seen[1], first, np.array([False, True]))
    _, alone = model.predict(seen[1], None, np.ones(2, bool))
    np.testing.assert_array_equal(second[0][:, 1], alone[0][:, 1])
    assert np.abs(second[0][:, 0] - alone[0][:, 0]).max() > 0.01


@pytest.mark.parametrize("algorithm", [RecurrentPPO, MaskableRecurrentPPO])
def test_files(algorithm: Any, tmp_path: Any) -> None:
    env = walks(2, ACTION_SPACES["discrete"])
    kwargs = {**SIZE, "n_lstm_layers": 2, "shared_lstm": True, "enable_critic_lstm": False}
    model = algorithm("MlpGruPolicy", env, **SMALL, policy_kwargs=kwargs).learn(64)
    model.save(tmp_path / "model")
    loaded = algorithm.load(tmp_path / "model", env=env)
    assert_same_weights(loaded.policy.state_dict(), model.policy.state_dict())
    assert isinstance(loaded.policy.lstm_actor, Gru) and loaded.learn(64, reset_num_timesteps=False).num_timesteps == 128
    model.policy.save(tmp_path / "policy")
    policy = type(model.policy).load(tmp_path / "policy")
    observation = env.reset()
    np.testing.assert_array_equal(*(one.predict(observation, deterministic=True)[0] for one in (policy, model)))
    assert policy.shared_lstm and policy.lstm_hidden_state_shape == (2, 1, 8)


def test_the_optimizer_has_the_weights_of_the_gru() -> None:
    policy = GruPolicy(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), lambda _: 0.5, lstm_hidden_size=4)
    optimised = {id(weight) for group in policy.optimizer.param_groups for weight in group["params"]}
    assert optimised == set(map(id, policy.parameters())) and policy.optimizer.param_groups[0]["lr"] == 0.5


def test_a_wrong_name_is_answered_with_the_names() -> None:
    with pytest.raises(
        ValueError, match=r"`policy` must be one of 'MlpLstmPolicy', .*'MlpGruPolicy', .*'MlpGRUPolicy' was given"
    ):
        RecurrentPPO("MlpGRUPolicy", "CartPole-v1")
