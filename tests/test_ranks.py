"""Two processes that train together are one: the same weights on both, and the same numbers up to float32's order of sums."""

import json
import re
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from ranks_program import BROKEN, CASES, build, run, run_on_two, weights
from stable_baselines3 import SAC

from sb3_flow import FQL, PPO, RQL, AsyncPPO, OfflineDataset
from sb3_flow.common import ranks
from sb3_flow.zoo.torchrun import check_trainable

TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """:return: the folder, and the weights that the ranks have at the end of each case"""
    folder = tmp_path_factory.mktemp("ranks")
    run_on_two("ranks_program.py", folder)
    return folder, [th.load(folder / f"weights{rank}.pt") for rank in (0, 1)]


@pytest.fixture(scope="module")
def told(two):
    return json.loads((two[0] / "told.json").read_text())


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Weights after training in one process, of the cases asked for."""
    folder, found = tmp_path_factory.mktemp("one"), {}

    def trained(case):
        if case not in found:
            found[case] = run(case, folder)
        return folder, found[case]

    return trained


def distance(some, others):
    assert some.keys() == others.keys()
    return max((some[name] - others[name]).abs().max().item() for name in some)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one(two, one, case):
    folder, (first, second) = two
    assert all(th.equal(first[case][name], second[case][name]) for name in first[case])
    alone, expected = one(case)
    assert distance(first[case], expected) < TOLERANCE
    assert distance(weights(build(case)), expected) > 100 * TOLERANCE  # training did move the weights
    if case != "fmq-online":  # logs nothing in its second part
        logs = [json.loads((place / case / "progress.json").read_text()) for place in (alone, folder / "two")]
        values = [{name: value for name, value in log.items() if name.startswith("train/")} for log in logs]
        assert len(values[0]) > 4 and values[0] == pytest.approx(values[1], rel=1e-4, abs=TOLERANCE)


@pytest.mark.parametrize("name", BROKEN)
def test_mistakes_are_seen(two, one, name):
    """Noise that is not the rank's own rows, and means over a rank's rows where the batch's are due."""
    assert distance(two[1][0][name], one(BROKEN[name][0])[1]) > 20 * TOLERANCE


def test_a_saved_model_goes_on_exactly(two):
    first, second = two[1]
    for weights_of_rank in (first["resumed"], second["resumed"]):
        assert all(th.equal(weights_of_rank[name], first["rql"][name]) for name in weights_of_rank)


def test_the_first_rank_stops_all(two, told):
    assert told["stopped"] == [3, 3]


def test_what_differs_is_refused(told):
    assert "multiple of the 2 ranks, but 5 was given" in told["shares"]
    assert told["steps"].endswith("`gradient_steps` is 1 on rank 0, 2 on rank 1.")
    assert told["arguments"].endswith("`alpha` is 1.0 on rank 0, 2.0 on rank 1.")
    assert told["buffer"].endswith(
        "`replay_buffer_class` is 'TrajectoryReplayBuffer' on rank 0, 'PrioritizedReplayBuffer' on rank 1."
    )
    assert "but `dataset` is (200, " in told["data"]


def test_the_online_phase_is_refused_before_the_offline_phase_begins(told):
    assert "The online phase runs in one process, but 2 ranks train" in told["online"]


def test_a_killed_rank_ends_the_others(told):
    assert told["ended"].startswith("Rank 0 (of 2, counted from 0) cannot reach the others: ")


def test_one_process_is_left_alone():
    tensor = th.ones(5, 1)
    assert ranks.own_rows(tensor) is tensor and ranks.mean_over_ranks(tensor) is tensor
    assert ranks.is_first() and ranks.check_shares(5) == 5


@pytest.mark.parametrize(
    ("algorithm", "optimizes", "n_timesteps", "sentence"),
    [
        (RQL, False, 5, "the online phase (5 environment steps) runs in one process: give torchrun `-params n_timesteps:0`"),
        (RQL, True, 0, "search hyperparameters without it"),
        (PPO, True, 5, "search hyperparameters without it"),
        (SAC, False, 5, "but not SAC: run it without torchrun"),
        (AsyncPPO, False, 5, "AsyncPPO learns in one process: run it without torchrun, with more collectors"),
    ],
)
def test_the_zoo_refuses(monkeypatch, algorithm, optimizes, n_timesteps, sentence):
    check_trainable(algorithm, optimizes, n_timesteps)  # in one process
    monkeypatch.setattr("sb3_flow.zoo.torchrun.n_ranks", lambda: 2)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        check_trainable(algorithm, optimizes, n_timesteps)


def test_torchrun(tmp_path, monkeypatch):
    """The zoo trains on two ranks, and the first alone prints and leaves files."""
    rng, n = np.random.default_rng(0), 40
    ends = np.arange(n) % 20 == 19
    arrays = rng.normal(size=(n, 3)), rng.uniform(-2, 2, (n, 1)), rng.normal(size=n), ends, ends
    OfflineDataset.from_arrays(*arrays, action_space=gym.spaces.Box(-2, 2, (1,))).save(tmp_path / "data")
    small = ["offline_steps:4", "n_timesteps:0", "offline_dataset:'npz:data'", "policy_kwargs:dict(net_arch=[8])"]
    zoo = ["-m", "sb3_flow.zoo", "train", "--algo", "fql", "--env", "Pendulum-v1", "--save-freq", "2", "--device", "cpu", "-P"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *zoo]
    ended = subprocess.run([*command, "-params", *small], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    monkeypatch.chdir(tmp_path)
    assert ended.stdout.count("Training on 2 ranks, each of which takes 128 of a batch's 256 rows") == 1
    assert ended.stdout.count("Saving to ") == 1
    models = {path.relative_to(tmp_path / "logs" / "fql").as_posix() for path in (tmp_path / "logs").rglob("*.zip")}
    assert models == {f"Pendulum-v1_1/{name}.zip" for name in ("Pendulum-v1", "rl_model_2_steps", "rl_model_4_steps")}
    model = FQL.load(tmp_path / "logs" / "fql" / "Pendulum-v1_1" / "Pendulum-v1.zip", env=gym.make("Pendulum-v1"))
    assert model.offline_updates == 4
    model.learn(20)  # the online phase goes on in one process
