"""Trajectories with the names of the package imitation, as objects and as rows of its files, become datasets."""

import json
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from sb3_flow import RQL, OfflineDataset

SPACE = spaces.Box(-2, 2, (1,))


@dataclass(frozen=True)
class Trajectory:
    """The fields of imitation's class of this name."""

    obs: Any
    acts: np.ndarray
    infos: Any
    terminal: bool


@dataclass(frozen=True)
class TrajectoryWithRew(Trajectory):
    rews: np.ndarray


@dataclass(frozen=True)
class DictObs:
    """Dict observations of imitation, a class without the methods of a mapping."""

    _d: dict[str, np.ndarray]

    def unwrap(self) -> dict[str, np.ndarray]:
        return dict(self._d)


def trajectory(length: int, terminal: bool = True, truncated: bool | None = None, seed: int = 0) -> TrajectoryWithRew:
    rng = np.random.default_rng(seed)
    infos = None if truncated is None else np.array([{}] * (length - 1) + [{"TimeLimit.truncated": truncated}])
    actions = rng.uniform(-2, 2, (length, 1)).astype(np.float32)
    return TrajectoryWithRew(rng.normal(size=(length + 1, 3)), actions, infos, terminal, rng.normal(size=length))


def made(*trajectories: Any, **arguments: Any) -> OfflineDataset:
    return OfflineDataset.from_trajectories(list(trajectories), action_space=SPACE, **arguments)


def test_nothing_is_lost() -> None:
    given = [trajectory(4, seed=1), trajectory(1, seed=2), trajectory(7, terminal=False, seed=3)]
    dataset = made(*given)
    assert dataset.trajectories.tolist() == [[0, 3], [4, 4], [5, 11]]
    assert np.flatnonzero(dataset.terminated).tolist() == [3, 4]
    for (first, last), final, one in zip(dataset.trajectories, dataset.final_observations, given, strict=True):
        rows = slice(first, last + 1)
        np.testing.assert_array_equal(np.vstack([dataset.observations[rows], final]), one.obs.astype(np.float32))
        np.testing.assert_array_equal(dataset.actions[rows], one.acts)
        np.testing.assert_array_equal(dataset.rewards[rows], one.rews.astype(np.float32))
    RQL("MlpPolicy", None, offline_dataset=dataset, n_critics=2, policy_kwargs={"net_arch": [8]}).learn_offline(dataset, 2)


@pytest.mark.parametrize(
    ("truncated", "time_limit", "terminated"),
    [(None, None, True), (False, None, True), (True, None, False), (None, 5, False), (None, 6, True), (False, 5, True)],
)
def test_a_time_limit_does_not_stop_bootstrapping(truncated: bool | None, time_limit: int | None, terminated: bool) -> None:
    assert made(trajectory(5, truncated=truncated), time_limit=time_limit).terminated.tolist() == [False] * 4 + [terminated]


def test_rows_of_files() -> None:
    """They are mappings, with arrays as lists and infos as JSON."""

    def row(one: TrajectoryWithRew) -> dict[str, Any]:
        infos = [json.dumps(info) for info in one.infos]
        lists = {name: getattr(one, name).tolist() for name in ("obs", "acts", "rews")}
        return lists | {"infos": infos, "terminal": True}

    given = [trajectory(4, truncated=True, seed=1), trajectory(4, truncated=False, seed=2)]
    of_rows, of_objects = made(*map(row, given)), made(*given)
    for name in ("observations", "actions", "rewards", "terminated", "trajectory_ends", "final_observations"):
        np.testing.assert_array_equal(getattr(of_rows, name), getattr(of_objects, name))
    assert np.flatnonzero(of_rows.terminated).tolist() == [7]


def test_dict_observations() -> None:
    one = trajectory(4)
    as_dict = TrajectoryWithRew(DictObs({"a": one.obs, "b": one.obs[:, :1]}), one.acts, None, True, one.rews)
    dataset = made(as_dict)
    assert isinstance(dataset.observations, dict) and isinstance(dataset.final_observations, dict)
    np.testing.assert_array_equal(dataset.observations["a"], one.obs[:-1].astype(np.float32))
    np.testing.assert_array_equal(dataset.final_observations["b"], one.obs[-1:, :1].astype(np.float32))
    with pytest.raises(ValueError, match=r"trajectory 1: obs has the keys \[''\], \['a', 'b'\] expected"):
        made(as_dict, one)


def test_data_without_rewards_are_imitated() -> None:
    one = trajectory(40)
    bare = Trajectory(one.obs, one.acts, None, True)
    with pytest.raises(ValueError, match=r"trajectory 1 has no rews: give `rewards=0\.0` for data that are imitated alone"):
        made(one, bare)
    dataset = made(bare, rewards=0.0)
    assert not dataset.rewards.any()
    model = RQL("MlpPolicy", None, offline_dataset=dataset, objective="bc", policy_kwargs={"net_arch": [8]})
    assert model.learn_offline(dataset, 2).offline_updates == 2
    np.testing.assert_array_equal(made(one, rewards=0.0).rewards, one.rews.astype(np.float32))


def test_trajectories_that_a_time_limit_may_have_cut_are_named() -> None:
    cut = [trajectory(5, seed=1), trajectory(3, seed=2), trajectory(5, seed=3)]
    with pytest.warns(UserWarning, match=r"2 terminal trajectories have 5 steps.* give `time_limit=5`"):
        assert made(*cut).terminated.sum() == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made(*cut, time_limit=5).terminated.sum() == 1
        assert made(*cut, time_limit=6).terminated.sum() == 3
        made(*cut[:2])
        made(*(trajectory(5, truncated=False, seed=seed) for seed in range(3)))
        made(*(trajectory(5, terminal=False, seed=seed) for seed in range(3)))


def test_what_the_infos_say_comes_before_the_time_limit() -> None:
    given = [trajectory(5, truncated=False), trajectory(5, truncated=True), trajectory(5), trajectory(4)]
    assert np.flatnonzero(made(*given, time_limit=5).terminated).tolist() == [4, 18]
    for terminal in (np.True_, np.array(True)):
        assert made(vars(given[3]) | {"terminal": terminal}).terminated.sum() == 1


def test_other_things_are_refused() -> None:
    one = trajectory(4)
    transitions = {"obs": one.obs[:-1], "acts": one.acts, "next_obs": one.obs[1:], "dones": np.zeros(4, bool)}
    wrong: list[tuple[Any, type[Exception], str]] = [
        (transitions, ValueError, "transitions without their order are given"),
        (vars(one), ValueError, "a single trajectory was given"),
        (one, ValueError, "a single trajectory was given"),
        ("folder", TypeError, "must be a list of trajectories, but a str was given"),
        ([], ValueError, "holds no steps"),
        ({"train": [one]}, TypeError, "must be a list of trajectories, but a dict was given"),
        ([vars(one) | {"infos": ["{}"] * 3 + ["{"]}], ValueError, "trajectory 0: the last info is no JSON"),
        (
            [np.zeros(3)],
            ValueError,
            r"trajectory 0, a ndarray, must have obs, acts and terminal, but lacks \['obs', 'acts', 'te",
        ),
        ([vars(one) | {"obs": one.obs[1:]}], ValueError, "trajectory 0: obs has 4 rows for 4 acts, 5 expected"),
        ([one, vars(one) | {"rews": one.rews[1:]}], ValueError, "trajectory 1: rews has 3 rows for 4 acts, 4 expected"),
        (
            [one, one, vars(one) | {"obs": one.obs[:, 1:]}],
            ValueError,
            r"trajectory 2: obs has rows of shape \(2,\), \(3,\) expected, as before",
        ),
        (
            [one, vars(one) | {"acts": one.acts[:, 0]}],
            ValueError,
            r"trajectory 1: acts has rows of shape \(\), \(1,\) expected",
        ),
        ([one, vars(one) | {"rews": one.rews[:, None]}], ValueError, "trajectory 1: rews has rows of shape"),
        ([one, vars(one) | {"acts": 3.0}], ValueError, "trajectory 1: acts must be an array"),
        ([one, vars(one) | {"infos": {"TimeLimit.truncated": True}}], ValueError, "trajectory 1: infos must be a list"),
        ([one, vars(one) | {"infos": [{}] * 3}], ValueError, "trajectory 1: infos has 3 entries for 4 acts, 4 expected"),
        (
            [vars(one) | {"infos": [{}] * 3 + [{"TimeLimit.truncated": "no"}]}],
            ValueError,
            "trajectory 0: TimeLimit.truncated .* got 'no'",
        ),
    ]
    for given, error, match in wrong:
        with pytest.raises(error, match=match):
            OfflineDataset.from_trajectories(given, action_space=SPACE)
    for terminal in ("False", float("nan"), np.zeros(4, bool), 1, [True]):
        with pytest.raises(ValueError, match="trajectory 1: terminal must be True or False, got"):
            made(one, vars(one) | {"terminal": terminal})
    with pytest.raises(ValueError, match="trajectory 1 has 4 steps, but `time_limit` is 3"):
        made(trajectory(3), one, time_limit=3)
    with pytest.raises(ValueError, match="`time_limit` must be at least 1, but 0 was given"):
        made(one, time_limit=0)
    with pytest.raises(ValueError, match="`rewards` must be a finite number, but nan was given"):
        made(one, rewards=float("nan"))
    with pytest.raises(ValueError, match="flow policies need continuous"):
        OfflineDataset.from_trajectories([vars(one) | {"acts": np.zeros(4, np.int64)}])


def test_a_folder_of_imitation_is_recognised(tmp_path: Any) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(ValueError, match=r"perhaps OfflineDataset\.from_trajectories\(datasets\.load_from_disk\('"):
        OfflineDataset.load(str(tmp_path))
