"""PPO with chosen advantages and losses: what it shares with SB3's to the last bit, and what it adds."""

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import sb3_contrib
import stable_baselines3
import torch as th
from gymnasium import spaces
from on_policy import ACTION_SPACES, DICT, IMAGE, Walk, assert_same_weights, learned, walks
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from sb3_flow import PPO, MaskablePPO, RecurrentPPO
from sb3_flow.kernels import compute_gae, compute_vtrace
from sb3_flow.on_policy.reference import kl_divergence

# a small LSTM: sb3-contrib steps through sequences one by one
LSTM = {"policy_kwargs": {"lstm_hidden_size": 8}}
SMALL = {"n_steps": 32, "batch_size": 24, "n_epochs": 3, "seed": 3, "device": "cpu", "learning_rate": 3e-3}
CHOICES = [
    {"advantage": "vtrace"},
    {"advantage": "vtrace", "recompute_advantages": "minibatch", "rho_bar": 1.2, "c_bar": 1.1},
    {"advantage": "group"},
    {"recompute_advantages": "epoch"},
    {"policy_loss": "dual_clip", "clip_range_high": 0.28},
    {"policy_loss": "gspo"},
    {"policy_loss": "gspo_token", "advantage": "vtrace"},
    {"policy_loss": "decoupled"},
    {"kl_coef": 0.1, "reference_policy": "initial"},
]


def name(choice: dict[str, Any]) -> str:
    return "-".join(f"{value}" for value in choice.values())


def classes(kind: str) -> tuple[Any, Any]:
    """:return: our class and the original, with their policy"""
    ours, theirs, policy, kwargs = {
        "PPO": (PPO, stable_baselines3.PPO, "MlpPolicy", {"backend": "torch"}),
        "MaskablePPO": (MaskablePPO, sb3_contrib.MaskablePPO, "MlpPolicy", {}),
        "RecurrentPPO": (RecurrentPPO, sb3_contrib.RecurrentPPO, "MlpLstmPolicy", LSTM),
    }[kind]
    return partial(ours, policy, **kwargs), partial(theirs, policy, **{key: kwargs[key] for key in kwargs if key != "backend"})


TorchPPO = partial(PPO, backend="torch")


# --- SB3's to the last bit


@pytest.mark.parametrize("actions", ACTION_SPACES)
@pytest.mark.parametrize("kind", ["PPO", "MaskablePPO", "RecurrentPPO"])
def test_defaults_are_the_original_to_the_last_bit(kind: str, actions: str) -> None:
    if kind == "MaskablePPO" and actions in ("box", "multi_binary"):
        pytest.skip("the walk has no masks for these")
    if kind == "RecurrentPPO" and actions == "multi_binary":
        with pytest.raises(RuntimeError):  # sb3-contrib 2.9.2 cannot; ours can
            sb3_contrib.RecurrentPPO("MlpLstmPolicy", walks(3, ACTION_SPACES[actions]), **SMALL).learn(100)
        RecurrentPPO("MlpLstmPolicy", walks(3, ACTION_SPACES[actions]), **SMALL).learn(100)
        return
    ours, theirs = classes(kind)
    found = []
    for algorithm in (ours, theirs):
        model = algorithm(walks(3, ACTION_SPACES[actions]), **SMALL)
        found.append(learned(model, 300))
    assert_same_weights(found[0][0], found[1][0])
    for mine, original in zip(found[0][1], found[1][1], strict=True):
        assert original.keys() <= mine.keys()
        for key, value in original.items():
            assert mine[key] == pytest.approx(value, rel=1e-6, abs=1e-9, nan_ok=True), key


@pytest.mark.parametrize(
    "kwargs",
    [
        {"clip_range_vf": 0.1, "ent_coef": 0.01, "target_kl": 0.02},
        {"normalize_advantage": False, "gae_lambda": 1.0, "clip_range": lambda left: 0.1 + 0.1 * left},
        {"use_sde": True, "sde_sample_freq": 4},
        {"policy_kwargs": {"squash_output": True}, "use_sde": True},
        {"batch_size": 32, "policy_kwargs": {"net_arch": [16], "activation_fn": th.nn.ReLU}},
    ],
    ids=["clip_range_vf", "schedule", "sde", "squashed", "net_arch"],
)
def test_options_are_sb3s_to_the_last_bit(kwargs: dict[str, Any]) -> None:
    found = [learned(one("MlpPolicy", walks(2, ACTION_SPACES["box"]), **{**SMALL, **kwargs}), 200) for one in
             (TorchPPO, stable_baselines3.PPO)]  # fmt: skip
    assert_same_weights(found[0][0], found[1][0])


def test_time_limits_that_coincide_are_sb3s_to_the_last_bit() -> None:
    found = []
    for algorithm in (TorchPPO, stable_baselines3.PPO):
        env = VecNormalize(make_vec_env("Pendulum-v1", n_envs=4, seed=1))
        found.append(learned(algorithm("MlpPolicy", env, **{**SMALL, "n_steps": 128}), 2048))
    assert_same_weights(found[0][0], found[1][0])


@pytest.mark.parametrize(("policy", "space"), [("MultiInputPolicy", DICT), ("CnnPolicy", IMAGE)])
def test_observations_are_sb3s_to_the_last_bit(policy: str, space: spaces.Space) -> None:
    found = [learned(one(policy, walks(2, ACTION_SPACES["discrete"], space), **SMALL), 100) for one in
             (TorchPPO, stable_baselines3.PPO)]  # fmt: skip
    assert_same_weights(found[0][0], found[1][0])


def test_a_buffer_with_its_own_estimate_keeps_it() -> None:
    class Ones(RolloutBuffer):
        def compute_returns_and_advantage(self, last_values: th.Tensor, dones: np.ndarray) -> None:
            self.advantages[:] = 1.0
            self.returns = self.advantages + self.values

    model = PPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), rollout_buffer_class=Ones, **SMALL)
    model.learn(64)
    assert (model.rollout_buffer.advantages == 1.0).all()


def test_a_users_buffer_is_built_once() -> None:
    built = []

    class Own(RolloutBuffer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            built.append(self)

    model = PPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), rollout_buffer_class=Own, **SMALL)
    assert built == [model.rollout_buffer] and isinstance(model.rollout_buffer, Own)
    assert model.rollout_buffer_class is Own and type(model.rollout_buffer).__name__ == "EstimatedOwn"


@pytest.mark.parametrize("kind", ["PPO", "MaskablePPO", "RecurrentPPO"])
def test_buffers_can_be_pickled_and_copied(kind: str) -> None:
    ours, _ = classes(kind)
    buffer = ours(walks(2, ACTION_SPACES["discrete"]), **SMALL).learn(64).rollout_buffer
    for other in (pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer)):
        assert type(other) is type(buffer)
        np.testing.assert_array_equal(other.advantages, buffer.advantages)


# --- what is stored, and the estimates


def test_rewards_and_ends_are_stored_apart() -> None:
    model = PPO("MlpPolicy", walks(3, ACTION_SPACES["box"]), **{**SMALL, "n_epochs": 0})
    model.learn(96)
    buffer = model.rollout_buffer
    assert buffer.terminated.any() and buffer.truncated.any() and not (buffer.terminated & buffer.truncated).any()
    # the walk pays the number of the step
    ended = buffer.terminated | buffer.truncated
    for env in range(3):
        number = 0
        for step in range(32):
            number += 1
            assert buffer.raw_rewards[step, env] == number
            number = 0 if ended[step, env] else number
    np.testing.assert_array_equal(buffer.episode_starts.reshape(32, 3)[1:], ended[:-1])
    assert (buffer.final_values != 0).sum() == buffer.truncated.sum() == len(buffer.final_observations)
    np.testing.assert_allclose(buffer.rewards, buffer.raw_rewards + np.float32(0.99) * buffer.final_values, rtol=1e-6)
    for one in buffer.final_observations:
        value = model.policy.predict_values(th.as_tensor(one.observation[None]))
        assert float(value) == pytest.approx(buffer.final_values[one.step, one.env], rel=1e-5)


def test_values_of_time_limits_are_evaluated_in_one_batch() -> None:
    rows = []
    for advantage in ("gae", "vtrace"):
        env = make_vec_env("Pendulum-v1", n_envs=4, seed=1)
        model = TorchPPO("MlpPolicy", env, **{**SMALL, "n_steps": 200, "n_epochs": 0}, advantage=advantage)
        predict_values = model.policy.predict_values
        model.policy.predict_values = lambda obs, inner=predict_values: (rows.append(len(obs)), inner(obs))[1]
        model.learn(800)
        rows.append(0)
    # of the same bits as SB3's one by one; else all at once; then the last values
    assert rows == [1, 1, 1, 1, 4, 0, 4, 4, 0]


@pytest.mark.parametrize("kind", ["PPO", "MaskablePPO", "RecurrentPPO"])
def test_vtrace_without_recomputing_is_gae(kind: str) -> None:
    ours, _ = classes(kind)
    found = []
    for advantage in ("gae", "vtrace"):
        env = walks(3, ACTION_SPACES["discrete"])
        model = ours(env, **SMALL, advantage=advantage, recompute_advantages="never")
        model.learn(96)
        found.append((model.rollout_buffer.advantages, model.rollout_buffer.returns))
    for mine, other in zip(*found, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("advantage", ["gae", "vtrace"])
@pytest.mark.parametrize("kind", ["PPO", "MaskablePPO", "RecurrentPPO"])
def test_recomputed_advantages_are_those_of_the_present_networks(kind: str, advantage: str) -> None:
    """Every value, ratio, final value and last value that enters is the present network's."""
    ours, _ = classes(kind)
    env = walks(3, ACTION_SPACES["discrete"])
    model = ours(env, **{**SMALL, "learning_rate": 0.03}, advantage=advantage, rho_bar=1.5, c_bar=0.9)
    model.learn(96)
    buffer = model.rollout_buffer
    before = buffer.advantages.copy()
    model._estimate_again()
    by_time = lambda flat: np.asarray(flat).reshape(3, 32).T  # noqa: E731
    with th.no_grad():
        values, log_probs = [], []
        for minibatch in buffer.in_order(batch_size=7):
            value, log_prob, _ = model._evaluate(minibatch.data)
            keep = slice(None) if minibatch.mask is None else minibatch.mask
            values.append(value.flatten()[keep]), log_probs.append(log_prob[keep])
        values, log_probs = by_time(th.cat(values)), by_time(th.cat(log_probs))
        final = np.zeros((32, 3), np.float32)
        for one in buffer.final_observations:
            final[one.step, one.env] = float(model._values_of([one]))
        last = model._last_values().flatten().numpy()
    log_rhos = log_probs - by_time(buffer.log_probs)
    assert np.abs(log_rhos).max() > 0.05
    kwargs = dict(last_values=last, terminated=buffer.terminated, truncated=buffer.truncated, final_values=final)
    if advantage == "gae":
        advantages, returns = compute_gae(buffer.raw_rewards, values, **kwargs, gae_lambda=0.95)
    else:
        returns, advantages, _ = compute_vtrace(
            log_rhos, buffer.raw_rewards, values, **kwargs, gae_lambda=0.95, rho_bar=1.5, c_bar=0.9, gamma=0.99
        )
    np.testing.assert_allclose(by_time(buffer.advantages), advantages, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(by_time(buffer.returns), returns, rtol=1e-4, atol=1e-4)
    assert np.abs(before - buffer.advantages).max() > 0.05


# --- choices


@pytest.mark.parametrize("choice", CHOICES, ids=name)
@pytest.mark.parametrize("kind", ["PPO", "MaskablePPO", "RecurrentPPO"])
def test_every_choice_learns_saves_and_goes_on(kind: str, choice: dict[str, Any], tmp_path: Path) -> None:
    ours, _ = classes(kind)
    model = ours(walks(3, ACTION_SPACES["multi_discrete"]), **SMALL, **choice)
    weights, logged = learned(model, 200)
    assert all(th.isfinite(weight).all() for weight in weights.values())
    assert "train/ratio_max" in logged[-1]
    model.save(tmp_path / "model")
    loaded = ours.func.load(tmp_path / "model", env=walks(3, ACTION_SPACES["multi_discrete"]))
    assert_same_weights(loaded.policy.state_dict(), weights)
    for key, value in choice.items():
        assert getattr(loaded, key) == (value if not key.startswith("clip_range") else getattr(loaded, key))
    loaded.learn(100)


@pytest.mark.parametrize("choice", CHOICES, ids=name)
@pytest.mark.parametrize("actions", ACTION_SPACES)
def test_every_choice_runs_in_every_space(choice: dict[str, Any], actions: str) -> None:
    model = PPO("MultiInputPolicy", walks(2, ACTION_SPACES[actions], DICT), **SMALL, **choice)
    weights, _ = learned(model, 64)
    assert all(th.isfinite(weight).all() for weight in weights.values())


@pytest.mark.parametrize("choice", CHOICES, ids=name)
def test_every_choice_runs_with_gsde(choice: dict[str, Any]) -> None:
    model = PPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), use_sde=True, sde_sample_freq=4, **SMALL, **choice)
    weights, _ = learned(model, 64)
    assert all(th.isfinite(weight).all() for weight in weights.values())


@pytest.mark.parametrize("choice", CHOICES, ids=name)
def test_a_seed_decides_the_run(choice: dict[str, Any]) -> None:
    runs = [learned(PPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), **SMALL, **choice), 128)[0] for _ in range(2)]
    assert_same_weights(*runs)


@pytest.mark.parametrize("policy_loss", ["dual_clip", "decoupled"])
def test_losses_that_are_clip_on_fresh_data(policy_loss: str) -> None:
    """In the first epoch of fresh data nothing is older than the update, and no ratio is near 3."""
    found = []
    for one in ("clip", policy_loss):
        model = PPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), **{**SMALL, "learning_rate": 3e-4}, policy_loss=one)
        found.append(learned(model, 64)[0])
    for key, weight in found[0].items():
        th.testing.assert_close(found[1][key], weight, rtol=1e-4, atol=1e-5)


def test_episodes_stay_together_in_minibatches_of_sequence_losses() -> None:
    model = PPO("MlpPolicy", walks(3, ACTION_SPACES["box"]), **{**SMALL, "n_epochs": 0}, policy_loss="gspo")
    model.learn(96)
    buffer = model.rollout_buffer
    buffer.prepare()
    buffer.values = np.arange(96, dtype=np.float32)[:, None]  # marks the rows
    starts = buffer.episode_starts.copy().astype(bool)
    starts[0] = True
    number = np.cumsum(buffer.swap_and_flatten(starts))
    seen, n_segments = [], 0
    for minibatch in buffer.minibatches(20, by_episode=True):
        rows = minibatch.data.old_values.numpy().astype(int)
        for segment in range(minibatch.n_segments):
            mine = rows[minibatch.segments.numpy() == segment]
            assert (np.diff(mine) == 1).all() and len(set(number[mine])) == 1
            assert len(mine) == (number == number[mine[0]]).sum()
        seen.append(rows)
        n_segments += minibatch.n_segments
    assert sorted(np.concatenate(seen)) == list(range(96)) and n_segments == number[-1]
    assert all(len(rows) >= 20 for rows in seen[:-1])
    assert buffer.mean_episode_length() == pytest.approx(96 / n_segments)


# --- reference policy


@pytest.mark.parametrize("actions", ACTION_SPACES)
@pytest.mark.parametrize("use_sde", [False, True])
def test_kl_to_the_reference_is_that_of_the_samples(actions: str, use_sde: bool) -> None:
    if use_sde and actions != "box":
        pytest.skip("gSDE is for continuous actions")
    env = walks(1, ACTION_SPACES[actions])
    models = [PPO("MlpPolicy", env, **{**SMALL, "seed": seed}, use_sde=use_sde) for seed in (0, 1)]
    for model in models:
        model.learn(300)
    observation = th.randn(1, 3).repeat(40_000, 1)
    with th.no_grad():
        p, q = (model.policy.get_distribution(observation) for model in models)
        exact = kl_divergence(p, q)[0]
        if use_sde:
            samples = p.distribution.sample()
        else:
            samples = p.sample()
        log_ratio = p.log_prob(samples) - q.log_prob(samples)
    assert exact > 0
    error = log_ratio.std() / 200
    assert abs(log_ratio.mean() - exact) < 5 * error


def test_kl_coef_keeps_the_policy_close(tmp_path: Path) -> None:
    moved = {}
    for kl_coef in (0.0, 10.0):
        model = PPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), **SMALL, kl_coef=kl_coef, reference_policy="initial")
        logged = learned(model, 500)[1]
        moved[kl_coef] = th.cat([(a - b).flatten() for a, b in zip(
            model.policy.action_net.parameters(), model.reference.action_net.parameters(), strict=True)]).norm()  # fmt: skip
        assert ("train/kl_reference" in logged[-1]) == (kl_coef > 0)
    assert moved[10.0] < moved[0.0] / 2


def test_reference_by_path_and_by_model_is_saved_with_the_model(tmp_path: Path) -> None:
    env = walks(2, ACTION_SPACES["discrete"])
    teacher = PPO("MlpPolicy", env, **{**SMALL, "seed": 9})
    teacher.save(tmp_path / "teacher")
    for source in (tmp_path / "teacher", str(tmp_path / "teacher"), teacher, teacher.policy):
        model = PPO("MlpPolicy", env, **SMALL, kl_coef=0.1, reference_policy=source)
        assert_same_weights(model.reference.state_dict(), teacher.policy.state_dict())
        model.learn(64)
        model.save(tmp_path / "model")
        assert_same_weights(model.reference.state_dict(), teacher.policy.state_dict())
        loaded = PPO.load(tmp_path / "model", env=env)
        assert_same_weights(loaded.reference.state_dict(), teacher.policy.state_dict())
        loaded.learn(64)
    (tmp_path / "teacher.zip").unlink()
    assert_same_weights(PPO.load(tmp_path / "model").reference.state_dict(), teacher.policy.state_dict())


def test_initial_reference_is_the_policy_that_was_loaded(tmp_path: Path) -> None:
    """To fine-tune a model that was trained without a reference, of SB3 or of ours."""
    env = walks(2, ACTION_SPACES["discrete"])
    for teacher_class in (PPO, stable_baselines3.PPO):
        teacher = teacher_class("MlpPolicy", env, **{**SMALL, "seed": 9}).learn(64)
        teacher.save(tmp_path / "teacher")
        loaded = PPO.load(tmp_path / "teacher", env=env, kl_coef=0.1, reference_policy="initial")
        assert_same_weights(loaded.reference.state_dict(), teacher.policy.state_dict())
        model = PPO("MlpPolicy", env, **SMALL, kl_coef=0.1, reference_policy="initial")
        model.set_parameters(tmp_path / "teacher")
        assert_same_weights(model.reference.state_dict(), teacher.policy.state_dict())
        for one in (loaded, model):
            one.learn(64)
            assert_same_weights(one.reference.state_dict(), teacher.policy.state_dict())


def test_reference_by_path_survives_parameters_without_one(tmp_path: Path) -> None:
    env = walks(2, ACTION_SPACES["discrete"])
    teacher, other = (PPO("MlpPolicy", env, **{**SMALL, "seed": seed}) for seed in (8, 9))
    teacher.save(tmp_path / "teacher")
    model = PPO("MlpPolicy", env, **SMALL, kl_coef=0.1, reference_policy=str(tmp_path / "teacher"))
    model.set_parameters(other.get_parameters())
    assert_same_weights(model.policy.state_dict(), other.policy.state_dict())
    assert_same_weights(model.reference.state_dict(), teacher.policy.state_dict())


def test_references_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    env = walks(2, ACTION_SPACES["discrete"])
    other = PPO("MlpPolicy", env, policy_kwargs={"net_arch": [8]}, **SMALL)
    with pytest.raises(ValueError, match="`reference_policy` must have the networks"):
        PPO("MlpPolicy", env, **SMALL, kl_coef=0.1, reference_policy=other)
    with pytest.raises(ValueError, match="`reference_policy` must be"):
        PPO("MlpPolicy", env, **SMALL, kl_coef=0.1, reference_policy=3)
    with pytest.raises(FileNotFoundError):
        PPO("MlpPolicy", env, **SMALL, kl_coef=0.1, reference_policy=str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"advantage": "td"}, "`advantage` must be one of 'gae'"),
        ({"policy_loss": "trpo"}, "`policy_loss` must be one of 'clip'"),
        ({"recompute_advantages": "always"}, "`recompute_advantages` must be one of"),
        ({"rho_bar": 0.5, "c_bar": 1.0}, "`rho_bar` must be at least `c_bar`"),
        ({"dual_clip": 1.0}, "`dual_clip` must be above 1"),
        ({"advantage": "vtrace", "rho_bar": np.inf}, "`rho_bar` and `c_bar` must be positive and finite"),
        ({"advantage": "vtrace", "c_bar": 0.0}, "`rho_bar` and `c_bar` must be positive and finite"),
        ({"advantage": "group"}, "at least 2 environments"),
        ({"kl_coef": 0.1}, "`reference_policy` is None"),
        ({"kl_coef": -0.1}, "`kl_coef` must be at least 0"),
        ({"advantage": "group", "recompute_advantages": "epoch"}, "group advantages do not depend on"),
    ],
)
@pytest.mark.parametrize("kind", ["PPO", "MaskablePPO", "RecurrentPPO"])
def test_bad_arguments(kind: str, kwargs: dict[str, Any], message: str) -> None:
    ours, _ = classes(kind)
    with pytest.raises(ValueError, match=message):
        ours(walks(1, ACTION_SPACES["discrete"]), **kwargs)


def test_bad_arguments_of_load(tmp_path: Path) -> None:
    """``load`` passes its keywords by the constructor."""
    env = walks(2, ACTION_SPACES["box"])
    PPO("MlpPolicy", env, **SMALL).save(tmp_path / "model")
    assert PPO.load(tmp_path / "model", env=env, advantage="vtrace").rollout_buffer.estimator.kind == "vtrace"
    with pytest.raises(ValueError, match="`advantage` must be one of 'gae'"):
        PPO.load(tmp_path / "model", env=env, advantage="td")
    with pytest.raises(ValueError, match="`reference_policy` is None"):
        PPO.load(tmp_path / "model", env=env, kl_coef=0.1)


def test_stock_sb3_loads_our_model_and_back(tmp_path: Path) -> None:
    env = walks(2, ACTION_SPACES["box"])
    observation = np.ones((4, 3), np.float32)
    for source, target in ((PPO, stable_baselines3.PPO), (stable_baselines3.PPO, PPO)):
        model = source("MlpPolicy", env, **SMALL).learn(64)
        model.save(tmp_path / "model")
        loaded = target.load(tmp_path / "model", env=env)
        np.testing.assert_array_equal(
            model.predict(observation, deterministic=True)[0], loaded.predict(observation, deterministic=True)[0]
        )
        loaded.learn(64)


def test_one_row_that_counts_is_not_normalised() -> None:
    """Its deviation is not a number. Recurrent minibatches keep rows that do not count, as padding or dead steps."""
    algorithm = partial(RecurrentPPO, "MlpLstmPolicy", **LSTM)
    model = algorithm(walks(2, ACTION_SPACES["discrete"]), **{**SMALL, "n_epochs": 0}, advantage="group")
    model.learn(1)
    buffer = model.rollout_buffer
    buffer.rows = np.array([3])
    minibatch = next(iter(buffer.minibatches(None)))
    assert len(minibatch.mask) > 1 and minibatch.mask.sum() == 1
    assert th.isfinite(model.loss(minibatch, clip_range=0.2)[0])


def test_share_clipped_by_rho_bar_is_logged() -> None:
    """In the dump after the update, which happens once the next rollout has been collected."""
    model = PPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), **{**SMALL, "learning_rate": 0.03}, advantage="vtrace")
    logged = learned(model, 200)[1]
    assert all(0 < one["train/rho_clipped_share"] < 1 for one in logged[1:])


@pytest.mark.parametrize("policy_loss", ["clip", "gspo", "gspo_token", "decoupled"])
@pytest.mark.parametrize("clip_range_high", [None, 10.0])
def test_clip_fraction_is_of_the_ratio_that_is_clipped(policy_loss: str, clip_range_high: float | None) -> None:
    model = PPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), **{**SMALL, "n_epochs": 0}, policy_loss=policy_loss).learn(64)
    buffer = model.rollout_buffer
    shift = np.random.default_rng(0).normal(0, 0.5, buffer.log_probs.shape).astype(np.float32)
    buffer.log_probs = buffer.log_probs + shift
    model.rollout_buffer.prepare()
    buffer.proximal_log_probs = model._evaluate_rollout()[1]  # decoupled: nothing has moved since the update began
    minibatch = next(iter(buffer.minibatches(None, by_episode=policy_loss.startswith("gspo"))))
    found = model.loss(minibatch, 0.2, clip_range_high)[1]
    with th.no_grad():
        log_ratio = model._evaluate(minibatch.data)[1] - minibatch.data.old_log_prob
    if policy_loss == "decoupled":
        log_ratio = th.zeros_like(log_ratio)
    elif policy_loss != "clip":
        segments = [minibatch.segments == segment for segment in range(minibatch.n_segments)]
        log_ratio = th.stack([log_ratio[segment].mean() for segment in segments])
    ratio = log_ratio.exp()
    expected = ((ratio < 0.8) | (ratio > (1.2 if clip_range_high is None else 11.0))).float().mean()
    assert found["clip_fraction"] == pytest.approx(float(expected))


def test_sequences_that_do_not_count_are_no_segments() -> None:
    """What is stepped after a first end are sequences too. An empty one would count as a loss of 0 in the mean."""
    model = RecurrentPPO("MlpLstmPolicy", walks(6, ACTION_SPACES["discrete"]), **LSTM, **{**SMALL, "n_epochs": 0},
                         advantage="group", policy_loss="gspo").learn(1)  # fmt: skip
    for minibatch in model.rollout_buffer.minibatches(64):
        segments = minibatch.segments[minibatch.mask]
        assert segments.unique().tolist() == list(range(minibatch.n_segments))


def test_explained_variance_is_of_the_rows_that_count() -> None:
    model = PPO("MlpPolicy", walks(4, ACTION_SPACES["box"]), **{**SMALL, "n_epochs": 1}, advantage="group").learn(1)
    buffer = model.rollout_buffer
    assert buffer.rows is not None
    values, returns = buffer.values.flatten()[buffer.rows], buffer.returns.flatten()[buffer.rows]
    assert model.logger.name_to_value["train/explained_variance"] == pytest.approx(
        1 - np.var(returns - values) / np.var(returns)
    )


def test_env_stepped_once_for_each_time_step() -> None:
    """Whole episodes too: every step of the vectorised environment is counted."""
    count = 0

    class Counting(Walk):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
            nonlocal count
            count += 1
            return super().step(action)

    env = make_vec_env(lambda: Counting(ACTION_SPACES["box"]), n_envs=4)
    model = PPO("MlpPolicy", env, **SMALL, advantage="group").learn(300)
    assert count == model.num_timesteps >= 300
    assert isinstance(env.envs[0], gym.Wrapper)
