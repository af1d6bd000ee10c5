"""MaskableRecurrentPPO: RecurrentPPO to the last bit without masks, a transcription with masks, and a task that needs both."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from on_policy import ACTION_SPACES, DICT, Walk, assert_same_weights, learned, walks
from recurrent_reference import distance, evaluated, one_rollout, transcribed
from sb3_contrib.common.wrappers import ActionMasker
from stable_baselines3.common.vec_env import DummyVecEnv
from test_ppo import CHOICES, name

from sb3_flow import MaskableRecurrentPPO, RecurrentPPO
from sb3_flow.on_policy.masked_sequences import MaskableRecurrentDictRolloutBuffer, MaskableRecurrentRolloutBuffer
from sb3_flow.ppo.masked_policies import masked_logits

SMALL: dict[str, Any] = {"n_steps": 32, "batch_size": 24, "n_epochs": 3, "seed": 3, "device": "cpu", "learning_rate": 3e-3}
SMALL |= {"policy_kwargs": {"lstm_hidden_size": 8}}
DISCRETE = {key: space for key, space in ACTION_SPACES.items() if key != "box"}
NETWORKS = ("MlpLstmPolicy", "MlpGruPolicy")


def n_choices(space: spaces.Space) -> int:
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    return 2 * space.n if isinstance(space, spaces.MultiBinary) else int(sum(space.nvec))


def all_valid(actions: spaces.Space, observations: spaces.Space | None = None) -> DummyVecEnv:
    return DummyVecEnv([lambda: ActionMasker(Walk(actions, observations), lambda env: np.ones(n_choices(actions), bool))] * 3)


# --- RecurrentPPO to the last bit


@pytest.mark.parametrize("use_masking", [True, False])
@pytest.mark.parametrize("actions", DISCRETE)
@pytest.mark.parametrize("policy", [*NETWORKS, "MultiInputLstmPolicy"])
def test_without_masks_it_is_recurrent_ppo_to_the_last_bit(policy: str, actions: str, use_masking: bool) -> None:
    space = DISCRETE[actions], DICT if policy == "MultiInputLstmPolicy" else None
    theirs, logged = learned(RecurrentPPO(policy, walks(3, *space), **SMALL), 200)
    model = MaskableRecurrentPPO(policy, all_valid(*space) if use_masking else walks(3, *space), **SMALL)
    model.learn = partial(model.learn, use_masking=use_masking)  # type: ignore[method-assign]
    ours, also = learned(model, 200)
    assert_same_weights(ours, theirs)
    assert also == logged


@pytest.mark.parametrize("choice", CHOICES, ids=name)
def test_choices_without_masks_are_those_of_recurrent_ppo(choice: dict[str, Any]) -> None:
    found = [
        learned(algorithm("MlpLstmPolicy", env, **{**SMALL, **choice}), 200)[0]
        for algorithm, env in ((RecurrentPPO, walks(3, DISCRETE["discrete"])),
                               (MaskableRecurrentPPO, all_valid(DISCRETE["discrete"])))
    ]  # fmt: skip
    assert_same_weights(*found)


# --- masks, step by step


def masks_told(model: Any) -> np.ndarray:
    steps = model.n_steps
    return np.stack([env.told[:steps] for env in model.env.envs], axis=1)


@pytest.mark.parametrize("actions", DISCRETE)
@pytest.mark.parametrize("policy", NETWORKS)
def test_acting_and_learning_with_masks_are_the_transcription(policy: str, actions: str) -> None:
    model = one_rollout(MaskableRecurrentPPO, policy, DISCRETE[actions])
    expected, buffer = transcribed(model, masks_told(model)), model.rollout_buffer
    assert distance(tuple(map(th.as_tensor, (buffer.values, buffer.log_probs))), expected[:2]) < 1e-5
    assert distance(evaluated(model), expected) < 1e-5


def unmasked(model: Any) -> None:
    model._masks = lambda data: {}


def shifted(model: Any, axis: int) -> None:
    model.rollout_buffer.action_masks = np.roll(model.rollout_buffer.action_masks, 1, axis)


def padded_at_the_end(model: Any) -> None:
    """The padding is between the sequences, not after the last."""
    buffer = model.rollout_buffer
    samples = buffer._get_samples

    def wrong(rows: np.ndarray, *given: Any) -> Any:
        found = samples(rows, *given)
        masks = th.ones_like(found.action_masks)
        masks[: len(rows)] = th.as_tensor(buffer.action_masks[rows])
        return found._replace(action_masks=masks)

    buffer._get_samples = wrong


WRONG = {"no masks": unmasked, "padding": padded_at_the_end}
WRONG |= {"one step late": partial(shifted, axis=0), "of another environment": partial(shifted, axis=1)}


@pytest.mark.parametrize("actions", DISCRETE)
@pytest.mark.parametrize("wrong", WRONG)
def test_the_comparison_notices_wrong_masks(wrong: str, actions: str) -> None:
    model = one_rollout(MaskableRecurrentPPO, "MlpLstmPolicy", DISCRETE[actions])
    expected = transcribed(model, masks_told(model))
    WRONG[wrong](model)
    assert distance(evaluated(model), expected) > 0.1


@pytest.mark.parametrize("actions", DISCRETE)
def test_no_invalid_action_is_taken(actions: str) -> None:
    model = one_rollout(MaskableRecurrentPPO, "MlpGruPolicy", DISCRETE[actions])
    assert model.rollout_buffer.log_probs.min() > -1e6
    told, rng = masks_told(model), np.random.default_rng(0)
    for masks in told:
        taken, _ = model.predict(rng.standard_normal((3, 3)), deterministic=False, action_masks=masks)
        for action, mask in zip(taken, masks, strict=True):
            if actions == "multi_binary":
                assert mask.reshape(-1, 2)[np.arange(3), action.astype(int)].all()
            else:
                sizes = [3] if actions == "discrete" else [2, 3]
                ends = np.cumsum(sizes)
                assert all(mask[end - size + one] for one, size, end in zip(np.ravel(action), sizes, ends, strict=True))


@pytest.mark.parametrize("valid", ["one", "none"])
@pytest.mark.parametrize("actions", DISCRETE)
def test_one_valid_action_or_none(actions: str, valid: str) -> None:
    """What is left to no choice has no gradient; where nothing is valid, all is, as in sb3-contrib."""
    space = DISCRETE[actions]
    sizes = [2, 3] if actions == "multi_discrete" else [2] * 3 if actions == "multi_binary" else [3]
    mask = np.concatenate([np.arange(size) == 1 for size in sizes]) & (valid == "one")
    env = DummyVecEnv([lambda: ActionMasker(Walk(space), lambda _: mask)] * 2)
    model = MaskableRecurrentPPO("MlpLstmPolicy", env, kl_coef=0.1, reference_policy="initial", ent_coef=0.01, **SMALL)
    before = model.policy.action_net.weight.clone()
    model.learn(64)
    assert all(weight.isfinite().all() for weight in model.policy.parameters())
    taken = model.rollout_buffer.actions
    assert th.equal(before, model.policy.action_net.weight)
    assert (taken == 1).all() == (valid == "one") and (taken.std() > 0) == (valid == "none")
    if valid == "one":
        assert np.abs(model.rollout_buffer.log_probs).max() < 1e-6


def test_logits_of_binary_actions() -> None:
    masks = th.tensor([[1, 1], [1, 0], [0, 1], [0, 0]]).bool()
    found = masked_logits(th.full((4, 1), 0.3), masks, binary=True)
    assert found.sigmoid().flatten().tolist() == pytest.approx([0.574, 0.0, 1.0, 0.5], abs=1e-3)


@pytest.mark.parametrize("space", [None, DICT])
def test_sb3s_way_to_read_the_buffer(space: Any) -> None:
    """A callback may call ``get``, which gives the minibatches of the update."""
    buffers = []
    for _ in range(2):
        policy = "MlpLstmPolicy" if space is None else "MultiInputLstmPolicy"
        model = MaskableRecurrentPPO(policy, walks(3, DISCRETE["discrete"], space), **{**SMALL, "n_epochs": 0}).learn(96)
        buffers.append(model.rollout_buffer)
    np.random.seed(0)
    ours = [minibatch.data for minibatch in buffers[0].minibatches(40)]
    plain = MaskableRecurrentRolloutBuffer if space is None else MaskableRecurrentDictRolloutBuffer
    assert isinstance(buffers[1], plain)
    np.random.seed(0)
    for one, other in zip(ours, buffers[1].get(40), strict=True):
        assert th.equal(one.action_masks, other.action_masks) and th.equal(one.returns, other.returns)
        assert len(one.action_masks) == len(one.returns)
