"""``compare_acting``: the modes of a policy side by side."""

import numpy as np
import pytest
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from tasks import PointEnv, collect

from sb3_flow import DSRL, FMQ, FQL, QAM, RLPD, RQL, FlowMapPolicy
from sb3_flow.offline_to_online import compare_acting

SMALL = {"policy_kwargs": {"net_arch": [16, 16], "n_critics": 2}, "n_candidates": 4, "seed": 0, "device": "cpu"}
MODES = {"sample", "zero", "best_of_n", "qgbs"}


@pytest.mark.parametrize("algorithm", [RQL, FMQ, FQL, RLPD, DSRL, QAM])
@pytest.mark.parametrize("deterministic", [True, False])
def test_every_mode_is_evaluated_and_the_model_stays(algorithm, deterministic, capsys):
    model = algorithm("MlpPolicy", PointEnv(), **SMALL)
    mode = model.policy.acting_mode
    found = compare_acting(model, PointEnv(), 4, deterministic=deterministic)
    # actors of one step have no flow to search along, and a steered flow is not searched
    modes = MODES - {"qgbs"} if algorithm in (FQL, DSRL, RLPD) else MODES | {"guided"} if algorithm is RQL else MODES
    assert set(found) == modes and model.policy.acting_mode == model.acting_mode == mode
    means = [result.mean_return.value for result in found.values()]
    assert means == sorted(means, reverse=True)
    for result in found.values():
        assert result.returns.shape == (4,) and result.mean_return.low <= result.mean_return.value <= result.mean_return.high
        assert result.milliseconds > 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : len(modes) + 1]] == list(found)
    assert lines[len(modes) + 1] == f"Best of 4 episodes each: {next(iter(found))}."
    compare_acting(model, PointEnv(), 2, verbose=0)
    assert not capsys.readouterr().out


def test_rows_are_evaluate_policys():
    model, env = RQL("MlpPolicy", PointEnv(), **SMALL), make_vec_env(PointEnv, seed=0)
    found = compare_acting(model, env, 3, seed=5, verbose=0)
    for mode in MODES:
        model.set_acting_mode(mode)
        env.seed(5)
        returns, _ = evaluate_policy(model, env, 3, deterministic=True, return_episode_rewards=True)
        np.testing.assert_array_equal(found[mode].returns, returns)


def test_statistics_do_not_change():
    env = VecNormalize(DummyVecEnv([PointEnv]))
    model = FMQ("MlpPolicy", env, **SMALL).learn_offline(collect(PointEnv(), episodes=3), 2)
    own, other = VecNormalize(DummyVecEnv([PointEnv])), VecNormalize(DummyVecEnv([PointEnv]), norm_reward=True)
    before = env.obs_rms.mean.copy(), env.obs_rms.count
    results = [compare_acting(model, one, 3, verbose=0) for one in (env, own, other, PointEnv())]
    np.testing.assert_array_equal(env.obs_rms.mean, before[0])
    assert env.obs_rms.count == before[1] and env.training and env.norm_reward and other.norm_reward
    for result in results[1:]:
        for mode in MODES:  # whatever the environment is wrapped in: rewards as they are, observations as in training
            np.testing.assert_allclose(result[mode].returns, results[0][mode].returns, rtol=1e-5)


def test_a_policy_alone_and_too_few_episodes():
    space = PointEnv().observation_space, PointEnv().action_space
    policy = FlowMapPolicy(*space, lambda _: 1e-3, n_critics=0, net_arch=[8])
    assert set(compare_acting(policy, PointEnv(), 2, verbose=0)) == {"sample", "zero"}
    with pytest.raises(ValueError, match="`n_episodes` must be at least 2, but 1"):
        compare_acting(policy, PointEnv(), 1)
