"""PPO and its relatives on two ranks are one process with the environments of both, up to float32's order of sums."""

import json
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
import torch as th
from on_policy_ranks_program import CASES, MISTAKES, N_WALKS, STEPS, build, run
from ranks_program import run_on_two, weights
from stable_baselines3.common.running_mean_std import RunningMeanStd
from test_ranks import distance

from sb3_flow import PPO
from sb3_flow.on_policy.whole_batch import WholeBatch, divided, drawn_episodes
from sb3_flow.zoo.torchrun import check_trainable

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """:return: the folder, and what each of two ranks has found"""
    folder = tmp_path_factory.mktemp("ranks")
    run_on_two("on_policy_ranks_program.py", folder)
    return folder, [pickle.loads((folder / f"found{rank}.pkl").read_bytes()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def told(two):
    return json.loads((two[0] / "told.json").read_text())


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Weights after training in one process, of the cases asked for."""
    folder, found = tmp_path_factory.mktemp("one"), {}

    def trained(case):
        if case not in found:
            found[case] = run(case, folder, together=2)
        return folder, found[case]

    return trained


def same(some, others):
    return all(th.equal(some[name], others[name]) for name in some)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one_process_with_the_environments_of_both(two, one, case):
    folder, (first, second) = two
    assert same(first[case], second[case])
    alone, expected = one(case)
    assert distance(first[case], expected) < TOLERANCE
    assert distance(weights(build(case)), expected) > 100 * TOLERANCE  # training did move the weights
    logs = [(place / case / "progress.json").read_text().splitlines() for place in (alone, folder / "two")]
    assert len(logs[0]) == len(logs[1]) > 1
    for lines in zip(*logs, strict=True):
        # the last line is of the last update; the first rank has stopped by then, and the other not yet
        counted = ("train/",) if lines[0] == logs[0][-1] else ("train/", "rollout/", "time/total")
        if build(case).whole_episodes:
            counted = counted[:2]  # in one process all environments step until the last has ended
        values = [{name: value for name, value in json.loads(line).items() if name.startswith(counted)} for line in lines]
        assert len(values[0]) > 3 and values[0] == pytest.approx(values[1], rel=1e-3, abs=TOLERANCE)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_seen(two, one, name):
    """
    Gradients, normalisation, ``target_kl``, weights of rows and minibatches of episodes that each rank has for itself: they
    are noticed at a distance of .04 to .12, in weights that come within 2e-5 of those of one process otherwise.
    """
    assert distance(two[1][0][f"mistake-{name}"], one(MISTAKES[name][0])[1]) > 100 * TOLERANCE


def test_target_kl_ends_passes_of_all_ranks(two):
    """The case would not tell a mistake if no pass was ended, or all were ended by their first minibatch."""
    last = json.loads((two[0] / "two" / "kl" / "progress.json").read_text().splitlines()[-1])
    assert 3 <= last["train/n_updates"] < 3 * CASES["kl"][2]["n_epochs"]


def test_environments_differ_as_those_of_one_process_do(two):
    """Seeds count on from rank to rank."""
    seen = np.concatenate([found["normalised"]["seeds"] for found in two[1]])
    env = build("ppo", together=2).env
    np.testing.assert_array_equal(seen, env.reset())
    assert len(np.unique(seen[:, 0])) == 4


def test_statistics_of_all_ranks_add_up(two):
    found = [other["normalised"] for other in two[1]]
    assert same(found[0]["weights"], found[1]["weights"])
    for place, name in enumerate(("obs", "ret")):
        batches = [batch for other in found for batch in other["rows"][place]]
        expected = RunningMeanStd(shape=batches[0].shape[1:])
        for batch in batches:
            expected.update(batch)
        for other in found:
            mean, var, count, kind = other["statistics"][name]
            assert count == pytest.approx(expected.count, rel=1e-12) and kind == "RunningMeanStd"
            np.testing.assert_allclose(mean, expected.mean, rtol=1e-12)
            np.testing.assert_allclose(var, expected.var, rtol=1e-12)
        assert found[0]["statistics"][name][2] == found[1]["statistics"][name][2]


def test_the_callback_of_the_first_rank_stops_all(two):
    found = [other["normalised"] for other in two[1]]
    last = 2 * STEPS + 3  # of the first rank; the second has finished its rollout
    assert [other["timesteps"][0] for other in found] == [2 * (last + 3 * STEPS)] * 2
    assert found[0]["timesteps"][1] == [4 * (step + 1) for step in range(last)]
    assert found[1]["timesteps"][1] == []
    assert found[0]["bar"] == 4 * last


def test_episodes_of_all_ranks_are_counted(two):
    first, second = (other["normalised"]["episodes"] for other in two[1])
    assert first == second and len(first[0]) == len(first[1]) > 10
    assert {len(set(first[0]) - {episode}) for episode in first[0]} == {len(set(first[0])) - 1}
    assert any(first[1]) and not all(first[1])


def test_files_written_during_a_rollout_hold_classes_of_sb3_alone(two):
    saved = (two[0] / "in_between.pkl").read_bytes()
    assert b"RunningMeanStd" in saved and b"sb3_flow" not in saved
    assert pickle.loads(saved).obs_rms.count > 10
    assert PPO.load(two[0] / "in_between.zip").num_timesteps == 20


def test_a_saved_model_goes_on(two):
    first, second = (found["resumed"] for found in two[1])
    assert same(first["before"], second["before"]) and same(first["after"], second["after"])
    assert distance(first["before"], first["after"]) > 1e-3
    # time steps, passes, observations with three resets, and the backend, which one process chooses anew
    assert first["counts"] == second["counts"] == (3 * STEPS * 4, 9, pytest.approx(3 * STEPS * 4 + 2 * 4 + 1e-4), None)


def test_tensors_with_different_numbers_of_rows(two):
    first, second = (found["tensors"] for found in two[1])
    assert first["rows"] != second["rows"]
    assert same(first["weights"], second["weights"]) and first["episodes"] == second["episodes"] > 10
    for some, others in zip(first["statistics"], second["statistics"], strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(some, others, strict=True))
    steps = 3 * 12 * N_WALKS * 2
    assert first["timesteps"] == second["timesteps"] == steps
    observations, returns = (count for _, _, count in first["statistics"])
    assert observations == pytest.approx(steps + 2 * N_WALKS + 1e-4)  # with the reset
    assert steps * 0.5 < returns < steps - 20  # without the steps that only reset


def test_a_pass_that_breaks_on_a_rank_is_put_back_on_all(two):
    for told, put_back in (found["broken"] for found in two[1]):
        assert "Pass 4 over a rollout broke. The loss of minibatch" in told and put_back


def test_what_differs_is_refused(told):
    assert "multiple of the 2 ranks, but 5 was given" in told["shares"]
    assert told["steps"].endswith("`total_timesteps` is 16 on rank 0, 17 on rank 1.")
    assert told["arguments"].endswith("`n_steps` is 16 on rank 0, 20 on rank 1.")
    assert "but `clip_range` is [0.2, 0.2, 0.2] on rank 0" in told["schedules"]


def test_what_cannot_train_on_ranks_is_refused(told):
    for name in ("native", "met_later"):
        assert told[name].startswith('`backend` is "native", but the compiled loops do not cover this model: 2 ranks train')
    assert "2 ranks train, but AsyncPPO learns in one process: take more collectors" in told["async"]
    assert 'RecurrentPPO with `advantage="group"` trains in one process' in told["sequences"]


def test_a_killed_rank_ends_the_others(told):
    assert told["ended"].startswith("Rank 0 (of 2, counted from 0) cannot reach the others: ")


def test_one_process_is_left_alone():
    advantages = th.tensor([1.0, 2.0, 4.0])
    whole = WholeBatch(advantages)
    mean = advantages.mean()
    assert whole.part(mean) is mean and whole.largest(advantages) == 4.0
    assert th.equal(whole.normalised(advantages), (advantages - mean) / (advantages.std() + 1e-8))
    assert whole.normalised(advantages[:1]) == 1.0
    assert [part.tolist() for part in divided(np.arange(5), 2)] == [[0, 1], [2, 3], [4]]
    assert sorted(number for drawn in drawn_episodes([3, 1, 2, 2], 3) for number in drawn) == [0, 1, 2, 3]


def test_ranks_with_fewer_rows_have_as_many_minibatches(monkeypatch):
    """Rows are divided into as many minibatches as the rows of all make, of which some ranks have less, or nothing."""
    monkeypatch.setattr("sb3_flow.on_policy.whole_batch.of_all_ranks", lambda _: [2, 9])
    shares = [list(divided(np.arange(n), 4)) for n in (2, 9)]
    assert [[len(part) for part in share] for share in shares] == [[1, 1, 0], [3, 3, 3]]
    assert [len(list(divided(np.arange(n), None))) for n in (2, 9)] == [1, 1]
    monkeypatch.setattr("sb3_flow.on_policy.whole_batch.of_all_ranks", lambda _: [0, 0])
    assert list(divided(np.arange(0), 4)) == []


def test_torchrun(tmp_path):
    """The zoo trains on two ranks, and the first alone prints, evaluates and leaves files."""
    small = ["n_envs:2", "n_steps:16", "batch_size:32", "normalize:True", "n_timesteps:192", "n_epochs:2"]
    zoo = ["-m", "sb3_flow.zoo", "train", "--algo", "flow_ppo", "--env", "CartPole-v1", "--save-freq", "64", "--device", "cpu"]
    zoo += ["--eval-freq", "128", "--eval-episodes", "1", "--n-eval-envs", "1", "--verbose", "1", "-P"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *zoo]
    ended = subprocess.run([*command, "-params", *small], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    told = "Training on 2 ranks, each of which steps 2 environments and takes 16 of a minibatch's 32 rows"
    assert ended.stdout.count(told) == ended.stdout.count("Saving to ") == 1
    assert ended.stdout.count("Using the torch backend, which is slower: 2 ranks train it together") == 1
    assert re.search(r"total_timesteps +\| 192 ", ended.stdout) and "192/192" in ended.stdout
    folder = tmp_path / "logs" / "flow_ppo" / "CartPole-v1_1"
    steps = {int(path.stem.split("_")[2]) for path in folder.glob("rl_model_*.zip")}
    assert steps == {64, 128, 192}
    assert np.load(folder / "evaluations.npz")["timesteps"].tolist() == [128]
    assert [path.name for path in (tmp_path / "logs" / "flow_ppo").iterdir()] == ["CartPole-v1_1"]
    model = PPO.load(folder / "CartPole-v1.zip")
    assert model.num_timesteps == 192
    counts = pickle.loads((folder / "CartPole-v1" / "vecnormalize.pkl").read_bytes()).obs_rms.count
    assert counts == pytest.approx(192 + 4 + 1e-4)


def test_the_zoo_takes_ppo(monkeypatch):
    monkeypatch.setattr("sb3_flow.zoo.torchrun.n_ranks", lambda: 2)
    check_trainable(PPO, False, 100_000)
