"""GRPO and GSPO: groups, credit, whole episodes, seeds."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from on_policy import ACTION_SPACES, DICT, IMAGE, Walk, assert_same_weights, learned
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize

from sb3_flow import GRPO, GSPO, PPO, GroupedStart
from sb3_flow.on_policy.grouping import Groups

SMALL = {"n_steps": 40, "batch_size": 24, "n_epochs": 2, "group_size": 3, "seed": 3, "device": "cpu"}


def grouped(n_envs: int = 6, actions: str = "discrete", space: Any = None, **kwargs: Any) -> Any:
    return make_vec_env(lambda: Walk(ACTION_SPACES[actions], space), n_envs=n_envs, wrapper_class=GroupedStart, **kwargs)


# --- rollouts of whole episodes


def test_rollouts_are_first_episodes() -> None:
    model = GRPO("MlpPolicy", grouped(), **{**SMALL, "n_epochs": 0})
    model.learn(1)
    buffer = model.rollout_buffer
    ends = buffer.terminated | buffer.truncated
    assert buffer.buffer_size == len(buffer.raw_rewards) < 40
    for env in range(6):
        length = int(ends[:, env].argmax()) + 1
        np.testing.assert_array_equal(buffer.alive[:, env], np.arange(buffer.buffer_size) < length)
    # the last one to finish ends the rollout
    assert buffer.alive[-1].any() and model.num_timesteps == 6 * buffer.buffer_size
    # episodes of dead environments are not in the statistics
    assert len(model.ep_info_buffer) == 6
    assert sorted(info["l"] for info in model.ep_info_buffer) == sorted(buffer.alive.sum(axis=0))


def test_steps_after_the_first_end_are_not_learned_from() -> None:
    model = GRPO("MlpPolicy", grouped(), **{**SMALL, "n_epochs": 0})
    model.learn(1)
    buffer = model.rollout_buffer
    advantages = buffer.advantages.copy()
    assert (advantages[~buffer.alive] == 0).all()
    valid = buffer.swap_and_flatten(buffer.alive).flatten()
    buffer.prepare()
    buffer.values = np.arange(len(valid), dtype=np.float32)[:, None]
    rows = np.concatenate([one.data.old_values.numpy().astype(int) for one in buffer.minibatches(10)])
    assert sorted(rows) == list(np.flatnonzero(valid))


def test_episodes_longer_than_n_steps_are_cut_off() -> None:
    env = make_vec_env(lambda: Walk(ACTION_SPACES["box"], mean_length=10**6), n_envs=4, wrapper_class=GroupedStart)
    model = GRPO("MlpPolicy", env, n_steps=7, group_size=2, batch_size=8, device="cpu").learn(50)
    assert model.rollout_buffer.alive.all() and model.rollout_buffer.buffer_size == 7
    assert model.num_timesteps == 56
    # at the start of each rollout an episode starts: the walk pays the number of the step
    np.testing.assert_array_equal(model.rollout_buffer.raw_rewards[:, 0], np.arange(1, 8))


# --- groups


@pytest.mark.parametrize("vec_env_cls", [None, SubprocVecEnv], ids=["dummy", "subproc"])
def test_members_share_the_start_and_not_the_noise(vec_env_cls: Any) -> None:
    model = GRPO("MlpPolicy", grouped(4, vec_env_cls=vec_env_cls), **{**SMALL, "n_epochs": 0, "group_size": 2})
    starts = []
    for _ in range(2):
        model.learn(1, reset_num_timesteps=False)
        observations = model.rollout_buffer.observations
        groups = observations.reshape(-1, 2, 2, 3)
        assert (groups[0, :, :1] == groups[0]).all() and (groups[0, 0] != groups[0, 1]).all()
        assert (groups[1, :, 0] != groups[1, :, 1]).all()
        starts.append(groups[0])
    assert (starts[0] != starts[1]).all()
    model.env.close()


def test_shared_noise() -> None:
    model = GRPO("MlpPolicy", grouped(), **{**SMALL, "n_epochs": 0}, shared_noise=True).learn(1)
    groups = model.rollout_buffer.observations.reshape(-1, 2, 3, 3)
    assert (groups[:, :, :1] == groups)[: int(model.rollout_buffer.alive.sum(0).min())].all()


def test_a_resumed_run_has_the_same_seeds_to_come(tmp_path: Path) -> None:
    def starts(model: GRPO) -> np.ndarray:
        model.learn(1, reset_num_timesteps=False)
        return model.rollout_buffer.observations[0]

    model = GRPO("MlpPolicy", grouped(), **{**SMALL, "n_epochs": 0})
    starts(model)
    model.save(tmp_path / "model")
    loaded = GRPO.load(tmp_path / "model", env=grouped())
    np.testing.assert_array_equal(starts(model), starts(loaded))
    np.testing.assert_array_equal(starts(model), starts(loaded))
    again = GRPO("MlpPolicy", grouped(), **{**SMALL, "n_epochs": 0, "seed": 4})
    assert (starts(again) != starts(model)).any()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"group_size": 1}, "`group_size` must be at least 2"),
        ({"group_size": 4}, "`group_size` must divide the number of environments, but 4 does not divide 6"),
        ({"group_by": "seed"}, "`group_by` must be one of 'start', 'none'"),
        ({"credit": "step"}, "`credit` must be one of 'return_to_go'"),
        ({"baseline": "max"}, "`baseline` must be one of 'mean'"),
        ({"scale": "std"}, "`scale` must be one of 'none'"),
        ({"ddof": 2}, "`ddof` must be one of 0, 1"),
        ({"aggregation": "token"}, "`aggregation` must be one of 'step'"),
        ({"aggregation": "episode", "policy_loss": "gspo"}, "mean over episodes by itself"),
        ({"credit": "process", "baseline": "critic"}, "which a critic does not foresee"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPO("MlpPolicy", grouped(), **{**SMALL, **kwargs})


def test_bad_arguments_of_load(tmp_path: Path) -> None:
    GRPO("MlpPolicy", grouped(), **SMALL).save(tmp_path / "model")
    for name in ("group_by", "credit", "baseline", "scale", "aggregation"):
        with pytest.raises(ValueError, match=f"`{name}` must be one of"):
            GRPO.load(tmp_path / "model", env=grouped(), **{name: "other"})


def test_environments_that_cannot_form_groups() -> None:
    plain = make_vec_env(lambda: Walk(ACTION_SPACES["box"]), n_envs=6)
    with pytest.raises(ValueError, match="wrapper_class=GroupedStart"):
        GRPO("MlpPolicy", plain, **SMALL)
    with pytest.raises(ValueError, match="`group_size` must divide"):
        GRPO("MlpPolicy", "CartPole-v1", **SMALL)
    with pytest.raises(ValueError, match="at least 2 environments"):
        GRPO("MlpPolicy", "CartPole-v1", **SMALL, group_by="none")
    GRPO("MlpPolicy", plain, **SMALL, group_by="none").learn(10)


# --- credit


def rollout(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """:return: rewards and alive, 12 steps of 6 environments, the third of which is alone alive at the end"""
    generator = np.random.default_rng(seed)
    lengths = np.array([5, 7, 12, 9, 3, 9])
    alive = np.arange(12)[:, None] < lengths
    return generator.standard_normal((12, 6)).astype(np.float32), alive


def to_go(rewards: np.ndarray, alive: np.ndarray, gamma: float) -> np.ndarray:
    returns = np.zeros(rewards.shape)
    after = np.zeros(rewards.shape[1])
    for step in reversed(range(len(rewards))):
        after = np.where(alive[step], rewards[step] + gamma * after, 0)
        returns[step] = after
    return returns


def test_return_to_go_against_the_others_alive() -> None:
    rewards, alive = rollout()
    settings = Groups(size=3, scale="none", baseline="loo")
    advantages, returns, statistics, counts = settings.advantages(rewards, alive, np.zeros_like(rewards), 0.9)
    expected = to_go(rewards, alive, 0.9)
    np.testing.assert_allclose(returns, expected, rtol=1e-5, atol=1e-6)
    for step in range(12):
        for env in range(6):
            group = [i for i in range(3 * (env // 3), 3 * (env // 3) + 3) if alive[step, i]]
            everyone = [i for i in range(6) if alive[step, i]]
            peers = group if len(group) > 1 else everyone
            others = [i for i in peers if i != env]
            wanted = expected[step, env] - expected[step, others].mean() if alive[step, env] and others else 0.0
            assert advantages[step, env] == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert counts.all() and statistics["rollout/zero_variance_share"] == 0
    assert statistics["rollout/alive_share"] == pytest.approx(alive.mean())


def test_outcome_is_one_number_for_an_episode() -> None:
    rewards, alive = rollout()
    advantages, _, statistics, _ = Groups(size=3, credit="outcome", baseline="mean", scale="group").advantages(
        rewards, alive, np.zeros_like(rewards), 0.9
    )
    totals = np.where(alive, rewards, 0).sum(axis=0).reshape(2, 3)
    wanted = ((totals - totals.mean(1, keepdims=True)) / totals.std(1, keepdims=True)).reshape(6)
    np.testing.assert_allclose(advantages, np.where(alive, wanted, 0), rtol=1e-4, atol=1e-5)
    assert statistics["rollout/group_return_spread"] == pytest.approx(totals.std(1).mean(), rel=1e-5)


def test_pooled_compares_with_everyone() -> None:
    rewards, alive = rollout()
    pooled, *_ = Groups(size=3, credit="pooled", scale="none").advantages(rewards, alive, np.zeros_like(rewards), 0.9)
    everyone, *_ = Groups(size=None, scale="none").advantages(rewards, alive, np.zeros_like(rewards), 0.9)
    np.testing.assert_array_equal(pooled, everyone)


def test_process_sums_normalised_step_rewards() -> None:
    rewards, alive = rollout()
    advantages, *_ = Groups(size=3, credit="process", baseline="mean", scale="group").advantages(
        rewards, alive, np.zeros_like(rewards), 0.9
    )
    for group in (slice(0, 3), slice(3, 6)):
        inside = rewards[:, group][alive[:, group]]
        normalised = np.where(alive[:, group], (rewards[:, group] - inside.mean()) / inside.std(), 0)
        wanted = np.where(alive[:, group], normalised[::-1].cumsum(axis=0)[::-1], 0)
        np.testing.assert_allclose(advantages[:, group], wanted, rtol=1e-4, atol=1e-4)


def test_critic_compares_what_was_not_foreseen() -> None:
    rewards, alive = rollout()
    foreseen = to_go(rewards, alive, 0.9).astype(np.float32)
    settings = Groups(size=3, baseline="critic", scale="none")
    advantages, returns, *_ = settings.advantages(rewards, alive, foreseen, 0.9)
    np.testing.assert_allclose(advantages, 0, atol=1e-5)
    np.testing.assert_allclose(returns, foreseen, rtol=1e-5, atol=1e-6)


def test_episodes_or_steps_weigh_the_same() -> None:
    rewards, alive = rollout()
    values = np.zeros_like(rewards)
    found = {
        name: Groups(size=3, credit="outcome", baseline="min", aggregation=name).advantages(rewards, alive, values, 0.9)[0]
        for name in ("step", "episode", "constant")
    }
    lengths = alive.sum(axis=0)
    # the mean over steps of what enters the loss
    mean = {name: advantages.sum() / alive.sum() for name, advantages in found.items()}
    per_episode = found["step"][0]
    assert mean["step"] == pytest.approx((per_episode * lengths).sum() / lengths.sum(), rel=1e-4)
    assert mean["episode"] == pytest.approx(per_episode.mean(), rel=1e-3, abs=1e-6)
    assert mean["constant"] == pytest.approx((per_episode * lengths).sum() / 6 / 12, rel=1e-4)


@pytest.mark.parametrize("aggregation", ["episode", "constant"])
def test_weights_of_episodes_where_groups_are_skipped(aggregation: str) -> None:
    """The mean over the rows that are learned from is the mean over their episodes, whatever is skipped."""
    rewards, alive = rollout()
    rewards[:, 3:], alive[:, 3:] = 0.0, np.arange(12)[:, None] < 2  # short, and all the same
    settings = {"size": 3, "credit": "outcome", "scale": "none", "baseline": "min"}  # "loo" has a mean of 0
    zeros = np.zeros_like(rewards)
    per_step, *_ = Groups(**settings).advantages(rewards, alive, zeros, 0.9)
    advantages, _, _, counts = Groups(**settings, aggregation=aggregation).advantages(rewards, alive, zeros, 0.9)
    assert not counts[:, 3:].any()
    lengths = alive[:, :3].sum(axis=0) if aggregation == "episode" else 12
    expected = (per_step[:, :3].sum(axis=0) / lengths).mean()
    assert advantages[alive & counts].mean() == pytest.approx(expected, rel=1e-3, abs=1e-6)


def test_the_constant_of_the_aggregation_is_n_steps() -> None:
    """Not the length of the longest episode, which varies from rollout to rollout."""
    model = GRPO(
        "MlpPolicy",
        grouped(),
        **{**SMALL, "n_epochs": 0},
        credit="outcome",
        scale="none",
        baseline="min",
        aggregation="constant",
    )
    model.learn(1)
    buffer = model.rollout_buffer
    assert buffer.buffer_size < 40 and buffer.rows is not None
    plain = Groups(size=3, credit="outcome", scale="none", baseline="min")
    per_step, *_ = plain.advantages(buffer.raw_rewards, buffer.alive, np.zeros_like(buffer.raw_rewards), 0.99)
    assert buffer.advantages[buffer.alive].mean() == pytest.approx(per_step.sum() / 6 / 40, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("credit", ["return_to_go", "outcome", "pooled", "process"])
@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_groups_without_a_spread_are_counted_and_skipped(credit: str, scale: str) -> None:
    rewards = np.ones((4, 6), np.float32)
    if credit != "pooled":
        rewards[:, 3:] += np.random.default_rng(0).random((4, 3), dtype=np.float32)
    alive = np.ones((4, 6), bool)
    advantages, _, statistics, counts = Groups(size=3, credit=credit, scale=scale).advantages(
        rewards, alive, np.zeros_like(rewards), 1.0
    )
    assert (advantages[:, :3] == 0).all() and not counts[:, :3].any()
    assert statistics["rollout/zero_variance_share"] == (1.0 if credit == "pooled" else 0.5)
    assert counts[:, 3:].all() == (credit != "pooled")


@pytest.mark.parametrize("algorithm", [GRPO, GSPO])
def test_nothing_is_learned_where_all_are_equal(algorithm: Any) -> None:
    env = make_vec_env("CartPole-v1", n_envs=4, wrapper_class=GroupedStart)  # pays 1 a step
    model = algorithm("MlpPolicy", env, n_steps=5, group_size=2, batch_size=8, device="cpu")
    before = {key: weight.clone() for key, weight in model.policy.state_dict().items()}
    _, logged = learned(model, 40)
    assert_same_weights(model.policy.state_dict(), before)
    assert logged[-1]["rollout/zero_variance_share"] == 1.0


# --- the classes


@pytest.mark.parametrize("algorithm", [GRPO, GSPO])
@pytest.mark.parametrize(
    ("policy", "actions", "space"),
    [
        ("MlpPolicy", "box", None),
        ("MlpPolicy", "multi_discrete", None),
        ("MlpPolicy", "multi_binary", None),
        ("MultiInputPolicy", "discrete", DICT),
        ("CnnPolicy", "discrete", IMAGE),
    ],
)
@pytest.mark.parametrize("baseline", ["loo", "critic"])
def test_spaces(algorithm: Any, policy: str, actions: str, space: Any, baseline: str, tmp_path: Path) -> None:
    env = grouped(actions=actions, space=space)
    model = algorithm(policy, env, **SMALL, baseline=baseline)
    weights, logged = learned(model, 200)
    assert all(th.isfinite(weight).all() for weight in weights.values())
    assert ("train/value_loss" in logged[-1]) == (baseline == "critic")
    model.save(tmp_path / "model")
    loaded = algorithm.load(tmp_path / "model", env=grouped(actions=actions, space=space))
    assert_same_weights(loaded.policy.state_dict(), weights)
    observation = env.reset()
    np.testing.assert_array_equal(
        model.predict(observation, deterministic=True)[0], loaded.predict(observation, deterministic=True)[0]
    )
    loaded.learn(100)


def test_no_value_function_is_built() -> None:
    model = GRPO("MlpPolicy", grouped(), **SMALL)
    names = [name for name, _ in model.policy.named_parameters()]
    assert names and not any("value" in name for name in names)
    assert sum(len(group["params"]) for group in model.policy.optimizer.param_groups) == len(names)
    whole = PPO("MlpPolicy", grouped(), device="cpu")
    actor = {name: weight.shape for name, weight in whole.policy.named_parameters() if "value" not in name}
    assert {name: weight.shape for name, weight in model.policy.named_parameters()} == actor


@pytest.mark.parametrize("algorithm", [GRPO, GSPO])
def test_gsde_normalisation_evaluation_and_seed(algorithm: Any) -> None:
    runs = []
    for _ in range(2):
        env = VecNormalize(grouped(actions="box"), gamma=0.9)
        model = algorithm("MlpPolicy", env, use_sde=True, sde_sample_freq=3, **SMALL)
        runs.append(learned(model, 200)[0])
        evaluate_policy(model, env, n_eval_episodes=3)
    assert_same_weights(*runs)


def test_schedules_end_at_zero() -> None:
    """The last rollout of whole episodes goes beyond the number of time steps; below 0 a learning rate would unlearn."""
    model = GRPO(
        "MlpPolicy", grouped(), **{**SMALL, "learning_rate": lambda left: 1e-3 * left, "clip_range": lambda left: left}
    )
    learned(model, 10)
    assert model.num_timesteps > 10
    last = model.logger.name_to_value
    assert last["train/learning_rate"] == 0.0 and last["train/clip_range"] == 0.0


def test_gspo_clips_by_the_length_of_episodes() -> None:
    model = GSPO("MlpPolicy", grouped(), **SMALL)
    learned(model, 100)
    length = model.rollout_buffer.mean_episode_length()
    last = model.logger.name_to_value  # of the last update, which SB3 does not dump
    assert last["train/clip_range"] == pytest.approx(0.2 / length**0.5)
    assert last["train/clip_range_high"] == pytest.approx(0.28 / length**0.5)
    assert "train/sequence_ratio_max" in last
    model = GSPO("MlpPolicy", grouped(), **SMALL, clip_range=3e-4, clip_range_high=4e-4, length_scaled_clip=False)
    assert learned(model, 100)[1][-1]["train/clip_range"] == pytest.approx(3e-4)


def test_a_perfect_critic_leaves_nothing_to_compare() -> None:
    rewards, alive = rollout()
    foreseen = to_go(rewards, alive, 0.9).astype(np.float32)
    advantages, *_ = Groups(size=3, credit="outcome", baseline="critic", scale="none").advantages(
        rewards, alive, foreseen, 0.9
    )
    np.testing.assert_allclose(advantages, 0, atol=1e-5)


def test_a_teacher_with_a_critic_is_a_reference() -> None:
    teacher = PPO("MlpPolicy", grouped(), n_steps=32, batch_size=32, device="cpu", seed=9)
    model = GRPO("MlpPolicy", grouped(), **SMALL, kl_coef=0.1, reference_policy=teacher)
    for name, weight in model.reference.state_dict().items():
        assert th.equal(weight, teacher.policy.state_dict()[name])
    model.learn(50)
    with pytest.raises(ValueError, match='`baseline` is "critic", but ActorPolicy has no value function'):
        GRPO(type(model.policy), grouped(), **SMALL, baseline="critic")


def test_a_loaded_model_keeps_its_reference(tmp_path: Path) -> None:
    GRPO("MlpPolicy", grouped(), **SMALL, kl_coef=0.1, reference_policy="initial").save(tmp_path / "model")
    with pytest.raises(ValueError, match="saved with a reference of its own"):
        GRPO.load(tmp_path / "model", reference_policy=str(tmp_path / "model"))
