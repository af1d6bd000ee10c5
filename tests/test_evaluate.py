"""Scores over seeds, and evaluations that say how the policy acted."""

import itertools
import sys

import numpy as np
import pytest
from stable_baselines3.common.callbacks import CallbackList, EvalCallback, EveryNTimesteps
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
from tasks import PointEnv, collect

from sb3_flow import DSRL, FMQ, FQL, QAM, RLPD, RQL
from sb3_flow.common.statistics import Estimate, bootstrap_interval, interquartile_mean, success_interval
from sb3_flow.envs import SuccessInfo
from sb3_flow.offline_to_online.evaluation_notes import find_evaluations

SMALL = {"policy_kwargs": {"net_arch": [16]}, "batch_size": 8, "learning_starts": 0, "n_candidates": 2, "seed": 0}

# With rliable 1.2.0, after np.random.seed(0):
# aggregate = lambda x: np.array([metrics.aggregate_iqm(x), metrics.aggregate_mean(x)])
# library.get_interval_estimates({"x": SCORES}, aggregate, reps=50_000)
SCORES = np.sin(np.arange(1.0, 25.0)).reshape(6, 4) + np.arange(6.0)[:, None] / 3
RLIABLE = {
    interquartile_mean: Estimate(0.82931377, 0.45252183, 1.210633),
    np.mean: Estimate(0.83642614, 0.5006292, 1.1662414),
}


@pytest.fixture(scope="module")
def dataset():
    return collect(PointEnv())


def success_env():
    return SuccessInfo(PointEnv())


@pytest.mark.parametrize("statistic", RLIABLE)
def test_as_rliable(statistic):
    ours, theirs = bootstrap_interval(SCORES, statistic, resamples=20_000), RLIABLE[statistic]
    assert ours.value == pytest.approx(theirs.value, abs=1e-8)
    # two seeds of rliable differ by 0.005 themselves
    assert ours[1:] == pytest.approx(theirs[1:], abs=0.01)


@pytest.mark.parametrize(("n_runs", "expected"), [(3, 0.43155506512883823), (6, 0.9280897537491842)])
def test_interquartile_mean_as_rliable(n_runs, expected):
    assert interquartile_mean(SCORES[:n_runs, :1]) == pytest.approx(expected, abs=1e-14)  # metrics.aggregate_iqm


def test_interquartile_mean_along_an_axis():
    per_task = interquartile_mean(SCORES, axis=0)
    assert per_task == pytest.approx([interquartile_mean(task) for task in SCORES.T])
    assert interquartile_mean(np.array([0.0, 1.0, 2.0, 1000.0])) == 1.5


def test_interval_is_that_of_all_resamples():
    scores = np.array([[0.0, 10.0], [1.0, 30.0], [5.0, 20.0]])
    # stratified: each task's three runs on their own, 27 * 27 equally likely outcomes
    means = [np.mean(one) for one in itertools.product(*[scores[:, 0]] * 3, *[scores[:, 1]] * 3)]
    expected = np.quantile(means, [0.05, 0.95])
    estimate = bootstrap_interval(scores, np.mean, level=0.9, resamples=50_000)
    assert estimate.value == pytest.approx(11.0)
    assert estimate[1:] == pytest.approx(expected, abs=0.1)


def test_tasks_are_not_resampled():
    # all runs agree on each task, so nothing is uncertain, however different the tasks are
    assert bootstrap_interval(np.tile([0.0, 100.0], (5, 1)), np.mean) == (50.0, 50.0, 50.0)


# scipy.stats.binomtest(successes, n).proportion_ci(level, method="wilson")
@pytest.mark.parametrize(
    ("successes", "n_episodes", "level", "low", "high"),
    [
        (31, 50, 0.95, 0.4815044693099298, 0.7413721068980641),
        (0, 50, 0.95, 0.0, 0.07134759913335872),
        (7, 7, 0.9, 0.7212373045474579, 1.0),
    ],
)
def test_success_interval_is_scipy_s(successes, n_episodes, level, low, high):
    assert success_interval(successes / n_episodes, n_episodes, level) == pytest.approx((successes / n_episodes, low, high))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.2, 50), "`share` must be from 0 to 1, but 1.2"),
        ((float("nan"), 50), "`share` must be from 0 to 1, but nan"),
        ((0.5, 0), "`n_episodes` must be at least 1"),
        ((0.5, 50, 95), "`level` must be between 0 and 1, but 95"),
    ],
)
def test_success_interval_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        success_interval(*arguments)


def test_intervals_repeat():
    assert bootstrap_interval(SCORES, resamples=1500) == bootstrap_interval(SCORES, resamples=1500)
    assert bootstrap_interval(SCORES, resamples=1500, seed=1) != bootstrap_interval(SCORES, resamples=1500)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scores": [1.0]}, "`scores` must have shape .* 2 runs or more, not \\(1,\\)"),
        ({"scores": np.ones((2, 2, 2))}, "`scores` must have shape"),
        ({"scores": [1.0, np.nan]}, "`scores` must be finite"),
        ({"scores": [1.0, 2.0], "level": 95}, "`level` must be between 0 and 1, but 95"),
        ({"scores": [1.0, 2.0], "resamples": 0}, "`resamples` must be at least 1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_interval(**arguments)


# ----------------------------------------------------------------- EvalCallback


MODES = {
    RQL: ("sample", "best_of_n"),
    FMQ: ("best_of_n", "sample"),
    FQL: ("sample", "zero"),
    RLPD: ("zero", "sample"),
    DSRL: ("best_of_n", "zero"),
    QAM: ("sample", "zero"),
}


@pytest.mark.parametrize(("algorithm", "modes"), MODES.items())
def test_both_phases_are_told_apart(algorithm, modes, dataset, tmp_path, capsys):
    """SB3's own callback, as the zoo uses it: one object for the whole of ``learn``."""
    env = make_vec_env(success_env)
    evaluation = EvalCallback(
        make_vec_env(success_env), n_eval_episodes=2, eval_freq=5, log_path=str(tmp_path), best_model_save_path=str(tmp_path)
    )
    model = algorithm("MlpPolicy", env, offline_dataset=dataset, offline_steps=10, **SMALL)
    model.learn(5, callback=evaluation)
    model.set_acting_mode(modes[1])
    model.learn(5, callback=evaluation, reset_num_timesteps=False)
    with np.load(tmp_path / "evaluations.npz") as log:
        assert log["timesteps"].tolist() == [5, 10, 5, 10]
        assert log["offline"].tolist() == [True, True, False, False]
        assert log["modes"].tolist() == [modes[0]] * 3 + [modes[1]]
        assert log["deterministic"].tolist() == [True] * 4
        assert log["behaviour_return"][:2] == pytest.approx(np.array([dataset.behaviour_return[:3]] * 2))
        assert np.isnan(log["behaviour_return"][2:]).all() and log["behaviour_caveat"].tolist() == [""] * 4
        assert log["results"].shape == log["successes"].shape == log["ep_lengths"].shape == (4, 2)
    assert capsys.readouterr().out.count(f"Evaluation mode: {modes[0]}, deterministic=True") == 3
    assert not list(tmp_path.glob(".*")), "no temporary file stays"
    best = algorithm.load(tmp_path / "best_model.zip")
    assert best.policy.acting_mode in modes


def test_evaluations_that_others_trigger(dataset, tmp_path):
    paper = EvalCallback(
        make_vec_env(success_env), n_eval_episodes=1, eval_freq=1, deterministic=False, log_path=str(tmp_path), verbose=0
    )
    callback = CallbackList([EveryNTimesteps(4, paper)])
    assert find_evaluations([callback]) == [paper]
    model = RQL("MlpPolicy", make_vec_env(success_env), acting_mode="sample", **SMALL)
    model.learn_offline(dataset, 8, callback=callback)
    with np.load(tmp_path / "evaluations.npz") as log:
        assert log["timesteps"].tolist() == [4, 8]
        assert log["modes"].tolist() == ["sample", "sample"]
        assert log["deterministic"].tolist() == [False, False]


def test_without_a_file_the_mode_is_printed(dataset, capsys):
    model = RQL("MlpPolicy", make_vec_env(success_env), verbose=1, **SMALL)
    model.learn_offline(dataset, 4, eval_env=success_env(), eval_freq=2, n_eval_episodes=1)
    printed = capsys.readouterr().out
    assert printed.count("Evaluation mode: sample, deterministic=True") == 2
    assert printed.count("Success rate:") == 2


@pytest.mark.parametrize("progress_bar", [False, True])
def test_offline_evaluations_are_printed_with_gradient_steps_and_what_the_data_score(progress_bar, dataset, capsys):
    evaluation = EvalCallback(make_vec_env(success_env), n_eval_episodes=1, eval_freq=2)
    model = RQL("MlpPolicy", make_vec_env(success_env), verbose=1, **SMALL)
    stdout = sys.stdout
    model.learn_offline(dataset, 4, evaluation, log_interval=2, progress_bar=progress_bar)
    assert sys.stdout is stdout
    printed = capsys.readouterr().out
    assert [f"Eval gradient_steps={step}, episode_reward=" in printed for step in (2, 4)] == [True, True]
    assert "timesteps" not in printed and "gradient_steps " in printed
    returns = dataset.returns
    error = 1.96 * returns.std(ddof=1) / len(returns) ** 0.5
    text = f"{returns.mean():.2f}, 95 % interval [{returns.mean() - error:.2f}, {returns.mean() + error:.2f}]"
    assert printed.count(f"Dataset's own mean return: {text}, 20 trajectories\n") == 2
    model.learn(4, evaluation, log_interval=1)
    printed = capsys.readouterr().out
    assert "Eval num_timesteps=" in printed and "Dataset's" not in printed and "gradient_steps" not in printed


def test_labels_end_with_the_phase(dataset):
    """Also if it fails."""
    model = RQL("MlpPolicy", make_vec_env(success_env), **SMALL)

    def fail(*_):
        raise KeyError

    stdout = sys.stdout
    with pytest.raises(KeyError):
        model.learn_offline(dataset, 4, fail)
    assert sys.stdout is stdout and "record" not in vars(model.logger)


def test_evaluation_of_the_offline_phase(dataset, tmp_path):
    """A plain environment is enough: it is normalised as the training environment is."""
    env = VecNormalize(make_vec_env(success_env), clip_obs=3.0)
    model = RQL("MlpPolicy", env, **SMALL)
    evaluated = success_env()
    model.learn_offline(dataset, 4, eval_env=evaluated, eval_freq=2, n_eval_episodes=3, eval_log_path=str(tmp_path))
    with np.load(tmp_path / "evaluations.npz") as log:
        assert log["results"].shape == (2, 3)
        assert log["offline"].all()
        assert (log["results"] < 0).all(), "returns are the environment's own, not normalised ones"
    assert (tmp_path / "best_model.zip").exists()
    count = env.obs_rms.count
    assert count == pytest.approx(len(dataset), abs=1), "evaluation does not enter the statistics"


def test_what_the_policy_sees_in_evaluation_is_normalised(dataset):
    env = VecNormalize(make_vec_env(success_env))
    model = RQL("MlpPolicy", env, **SMALL)
    model.set_offline_dataset(dataset)
    env.obs_rms.mean[:] = 100.0  # everything is far below it then
    seen = []
    predict = model.policy.predict
    model.policy.predict = lambda observation, *a, **k: seen.append(observation) or predict(observation, *a, **k)
    model.learn_offline(dataset, 1, eval_env=success_env(), eval_freq=1, n_eval_episodes=1)
    assert seen
    assert max(observation.max() for observation in seen) == -env.clip_obs
