"""OfflineDataset: construction, validation, saving, statistics. The file formats are in test_dataset_sources.py."""

import json
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

import sb3_flow.data.columns
from sb3_flow.data import OfflineDataset
from sb3_flow.data.returns import LABELLED, RUN_ON
from sb3_flow.data.storage import space_from_json, space_to_json

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)


def make_arrays(lengths: list[int], terminal: list[bool] | None = None, seed: int = 0) -> dict[str, np.ndarray]:
    """Transitions whose observations tell trajectory and step, so that any mistake of a row shows."""
    rng = np.random.default_rng(seed)
    rows, following, ends, terminated = [], [], [], []
    for number, length in enumerate(lengths):
        states = np.stack([np.full(length + 1, number), np.arange(length + 1)], axis=1).astype(np.float32)
        rows.append(states[:-1])
        following.append(states[1:])
        ends.append(np.arange(length) == length - 1)
        terminated.append(ends[-1] & (terminal is not None and terminal[number]))
    n = sum(lengths)
    return {
        "observations": np.concatenate(rows),
        "actions": rng.uniform(-1, 1, (n, 2)).astype(np.float32),
        "rewards": rng.standard_normal(n).astype(np.float32),
        "terminated": np.concatenate(terminated),
        "trajectory_ends": np.concatenate(ends),
        "next_observations": np.concatenate(following),
    }


def assert_same(dataset: OfflineDataset, other: OfflineDataset) -> None:
    for name in ("observations", "actions", "rewards", "terminated", "trajectory_ends", "final_observations"):
        left, right = getattr(dataset, name), getattr(other, name)
        assert isinstance(left, dict) == isinstance(right, dict)
        for key in left if isinstance(left, dict) else [...]:
            assert left[key].dtype == right[key].dtype, name
            np.testing.assert_array_equal(left[key], right[key], err_msg=name)
    assert dataset.observation_space == other.observation_space
    assert dataset.action_space == other.action_space


layouts = st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=8)


@given(layouts)
@settings(max_examples=50, deadline=None)
def test_trajectories_partition_the_rows(layout: list[tuple[int, bool]]) -> None:
    arrays = make_arrays([length for length, _ in layout], [terminal for _, terminal in layout])
    dataset = OfflineDataset.from_arrays(**arrays)
    assert len(dataset) == len(arrays["rewards"])
    assert dataset.n_trajectories == len(layout) == len(dataset.trajectories) == len(dataset.final_observations)
    covered = np.concatenate([np.arange(first, last + 1) for first, last in dataset.trajectories])
    np.testing.assert_array_equal(covered, np.arange(len(dataset)))
    np.testing.assert_array_equal(dataset.next_observations, arrays["next_observations"])
    np.testing.assert_array_equal(dataset.terminated, arrays["terminated"])
    np.testing.assert_array_equal(dataset.final_observations, arrays["next_observations"][arrays["trajectory_ends"]])


@given(layouts)
@settings(max_examples=50, deadline=None)
def test_without_next_observations_truncated_rows_are_left_out(layout: list[tuple[int, bool]]) -> None:
    arrays = make_arrays([length for length, _ in layout], [terminal for _, terminal in layout])
    expected_next = arrays.pop("next_observations")
    keep = arrays["terminated"] | ~arrays["trajectory_ends"]
    if not keep.any():
        with pytest.raises(ValueError, match="no transition is left"):
            OfflineDataset.from_arrays(**arrays)
        return
    dataset = OfflineDataset.from_arrays(**arrays)
    np.testing.assert_array_equal(dataset.observations, arrays["observations"][keep])
    np.testing.assert_array_equal(dataset.rewards, arrays["rewards"][keep])
    np.testing.assert_array_equal(dataset.terminated, arrays["terminated"][keep])
    known = ~dataset.terminated  # every successor that bootstrapping needs is the true one
    np.testing.assert_array_equal(dataset.next_observations[known], expected_next[keep][known])
    assert dataset.n_trajectories == sum(terminal or length > 1 for length, terminal in layout)
    of_trajectory = [len(np.unique(dataset.observations[first : last + 1, 0])) for first, last in dataset.trajectories]
    assert of_trajectory == [1] * dataset.n_trajectories
    ended = dataset.terminated[dataset.trajectory_ends]
    own = dataset.observations[dataset.trajectory_ends]
    np.testing.assert_array_equal(dataset.final_observations[ended], own[ended])


def test_a_trajectory_runs_on_after_a_terminated_row() -> None:
    arrays = make_arrays([5])
    arrays["terminated"][2] = True
    dataset = OfflineDataset.from_arrays(**arrays)
    assert dataset.trajectories.tolist() == [[0, 4]]
    assert dataset.terminated.tolist() == [False, False, True, False, False]
    np.testing.assert_array_equal(dataset.next_observations, arrays["next_observations"])


def test_the_last_row_always_ends_a_trajectory() -> None:
    arrays = make_arrays([4])
    arrays["trajectory_ends"][:] = False
    assert OfflineDataset.from_arrays(**arrays).trajectories.tolist() == [[0, 3]]
    assert not arrays["trajectory_ends"].any()  # the caller's array is left alone


def test_right_arrays_are_neither_copied_nor_writeable() -> None:
    arrays = make_arrays([3, 2])
    dataset = OfflineDataset.from_arrays(**arrays)
    for name in ("observations", "actions", "rewards"):
        assert np.shares_memory(getattr(dataset, name), arrays[name])
        assert arrays[name].flags.writeable
    for name in ("observations", "actions", "rewards", "terminated", "trajectory_ends", "final_observations", "trajectories"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(dataset, name)[0] = 0


def test_types_are_converted() -> None:
    arrays = make_arrays([3])
    lists = {name: array.astype(np.float64).tolist() for name, array in arrays.items()}
    lists["rewards"] = [[reward] for reward in lists["rewards"]]
    dataset = OfflineDataset.from_arrays(**lists)
    assert_same(dataset, OfflineDataset.from_arrays(**arrays))
    assert dataset.observation_space == spaces.Box(-np.inf, np.inf, (2,), np.float32)
    assert dataset.action_space == BOX
    whole = {**arrays, "actions": [[0, 1], [1, 0], [-1, 1]]}
    assert OfflineDataset.from_arrays(**whole, action_space=BOX).actions.dtype == np.float32


def dict_arrays() -> dict[str, Any]:
    arrays: dict[str, Any] = make_arrays([3, 4], [True, False])
    rng = np.random.default_rng(1)
    frames = rng.integers(0, 256, (9, 3, 8, 8), dtype=np.uint8)  # 2 trajectories, one frame more each
    first = [0, 1, 2, 4, 5, 6, 7]
    for name, rows in (("observations", first), ("next_observations", [row + 1 for row in first])):
        arrays[name] = {"vector": arrays[name], "frame": frames[rows]}
    return arrays


def test_dict_observations() -> None:
    arrays = dict_arrays()
    dataset = OfflineDataset.from_arrays(**arrays)
    assert dataset.observation_space == spaces.Dict(
        {"vector": spaces.Box(-np.inf, np.inf, (2,), np.float32), "frame": spaces.Box(0, 255, (3, 8, 8), np.uint8)}
    )
    assert isinstance(dataset.next_observations, dict)
    for key, array in arrays["next_observations"].items():
        assert dataset.observations[key].dtype == array.dtype
        np.testing.assert_array_equal(dataset.next_observations[key], array)
    dataset.check_spaces(dataset.observation_space, dataset.action_space)


@pytest.mark.parametrize("block_bytes", [1, 40, 1 << 24])
def test_result_does_not_depend_on_blocks(block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = OfflineDataset.from_arrays(**dict_arrays())
    monkeypatch.setattr(sb3_flow.data.columns, "BLOCK_BYTES", block_bytes)
    arrays = dict_arrays()
    arrays["observations"]["vector"] = arrays["observations"]["vector"].astype(np.float64)
    assert_same(OfflineDataset.from_arrays(**arrays), expected)
    assert expected.summary() == OfflineDataset.from_arrays(**arrays).summary()
    arrays["trajectory_ends"][2] = False
    with pytest.raises(ValueError, match=r"next_observations/\w+\[2\] differs from observations\[3\]"):
        OfflineDataset.from_arrays(**arrays)


# ------------------------------------------------------------------------------------------------------------- bad input


def change(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda arrays: arrays.__setitem__(name, value(arrays[name]) if callable(value) else value)


def put(name: str, index: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda arrays: arrays[name].__setitem__(index, value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change("rewards", lambda a: a[:-1]), "rewards has 6 rows but observations has 7"),
        (change("terminated", lambda a: a[:-1]), "terminated has 6 rows but observations has 7"),
        (change("trajectory_ends", lambda a: a[:-1]), "trajectory_ends has 6 rows"),
        (change("next_observations", lambda a: a[:-1]), "next_observations has 6 rows"),
        (
            change("next_observations", lambda a: a[:, :1]),
            r"next_observations must have the observations' shape .*\(7, 2\), got \(7, 1\)",
        ),
        (change("next_observations", lambda a: {"x": a}), r"next_observations has the keys \['x'\], observations has \[''\]"),
        (change("observations", {}), "observations is an empty dict"),
        (change("observations", 3.0), "observations must be an array with one row per transition, got float"),
        (change("observations", [[1.0], [1.0, 2.0]]), "observations cannot be made an array"),
        (change("observations", lambda a: a.astype(object)), "observations must hold real numbers, got dtype object"),
        (change("observations", lambda a: a.astype(complex)), "observations must hold real numbers, got dtype complex128"),
        (change("observations", lambda a: a.astype(str)), "observations must hold real numbers, got dtype <U"),
        (put("observations", (3, 1), np.nan), "observations must be finite, 1 values .* first in row 3"),
        (put("actions", (4, 0), np.inf), "actions must be finite, 1 values .* first in row 4"),
        (put("rewards", slice(1, 3), -np.inf), "rewards must be finite, 2 values .* first in row 1"),
        (put("next_observations", (6, 0), np.nan), "final_observations must be finite, 1 values .* row 1"),
        (change("rewards", lambda a: a.astype(np.float64) * 1e300), "rewards must be finite, 7 values .* float32"),
        (change("rewards", lambda a: a.astype(str)), "rewards must hold real numbers"),
        (change("rewards", lambda a: np.stack([a, a], 1)), r"rewards must have shape \(N,\) or \(N, 1\), got \(7, 2\)"),
        (change("terminated", lambda a: a + 2), "terminated must hold bool or 0/1, got 2 in row 0"),
        (change("trajectory_ends", lambda a: a * 0.5), "trajectory_ends must hold bool or 0/1, got 0.5 in row 2"),
        (change("terminated", lambda a: a.astype(str)), "terminated must hold bool or 0/1, got dtype <U"),
        (change("actions", lambda a: a[:, 0]), r"actions must have shape \(N, \*action_shape\), got \(7,\); .* \(7, 1\)"),
        (change("actions", lambda a: a * 0 + 3), r"action_space is needed.*row 0 is \[3. 3.\].*action_space="),
        (change("actions", lambda a: (a > 0).astype(np.int64)), "continuous .* DQN or PPO .* QR-DQN of sb3-contrib"),
        (put("trajectory_ends", 2, False), r"next_observations\[2\] differs from observations\[3\].*probably missing"),
    ],
)
def test_bad_arrays(edit: Callable[[dict[str, Any]], None], message: str) -> None:
    arrays: dict[str, Any] = make_arrays([3, 4], [True, False])
    arrays["terminated"] = arrays["terminated"].astype(int)
    edit(arrays)
    with pytest.raises(ValueError, match=message):
        OfflineDataset.from_arrays(**arrays)


def test_bad_shapes_and_empty_data() -> None:
    arrays = make_arrays([3])
    flat = {**arrays, "observations": arrays["observations"][:, 1], "next_observations": arrays["next_observations"][:, 1]}
    with pytest.raises(ValueError, match=r"observations must have shape \(N, ...\) .* got \(3,\); .* use shape \(3, 1\)"):
        OfflineDataset.from_arrays(**flat)
    with pytest.raises(ValueError, match="the dataset is empty: observations has 0 rows"):
        OfflineDataset.from_arrays(**{name: array[:0] for name, array in arrays.items()})
    dataset = OfflineDataset.from_arrays(**arrays)
    with pytest.raises(ValueError, match="whose last row ends a trajectory"):
        OfflineDataset(
            dataset.observations,
            dataset.actions,
            dataset.rewards,
            dataset.terminated,
            np.zeros(3, bool),
            dataset.final_observations,
            dataset.observation_space,
            dataset.action_space,
        )
    with pytest.raises(ValueError, match="one row for each of the 1 trajectories"):
        OfflineDataset(
            dataset.observations,
            dataset.actions,
            dataset.rewards,
            dataset.terminated,
            dataset.trajectory_ends,
            dataset.observations,
            dataset.observation_space,
            dataset.action_space,
        )


UNSUITABLE_ACTIONS = [
    (spaces.Discrete(3), "continuous actions .*got Discrete.* DQN or PPO .* QR-DQN"),
    (spaces.MultiDiscrete([3, 2]), "continuous actions .*got MultiDiscrete"),
    (spaces.MultiBinary(2), "continuous actions .*got MultiBinary"),
    (spaces.Box(0, 3, (2,), np.int64), "continuous actions .*got Box.*int64"),
    (spaces.Box(-np.inf, np.inf, (2,)), "action_space must have finite bounds"),
]


@pytest.mark.parametrize(("space", "message"), UNSUITABLE_ACTIONS)
def test_unsuitable_action_space(space: spaces.Space, message: str) -> None:
    arrays = make_arrays([3])
    with pytest.raises(ValueError, match=message):
        OfflineDataset.from_arrays(**arrays, action_space=space)
    with pytest.raises(ValueError, match=message):
        dataset = OfflineDataset.from_arrays(**arrays)
        dataset.check_spaces(dataset.observation_space, space)


def test_given_spaces_must_fit() -> None:
    arrays = make_arrays([3])
    with pytest.raises(TypeError, match="action_space must be a Gymnasium space, got int"):
        OfflineDataset.from_arrays(**arrays, action_space=2)
    with pytest.raises(ValueError, match=r"actions have shape \(3, 2\), action_space wants \(1,\)"):
        OfflineDataset.from_arrays(**arrays, action_space=spaces.Box(-1, 1, (1,)))
    with pytest.raises(ValueError, match=r"observations have shape \(2,\) per row, observation_space wants \(3,\)"):
        OfflineDataset.from_arrays(**arrays, observation_space=spaces.Box(-1, 1, (3,)))
    with pytest.raises(ValueError, match="dtype float32, observation_space wants uint8"):
        OfflineDataset.from_arrays(**arrays, observation_space=spaces.Box(0, 255, (2,), np.uint8))
    with pytest.raises(ValueError, match=r"observations are one array, observation_space wants \['a'\]"):
        OfflineDataset.from_arrays(**arrays, observation_space=spaces.Dict({"a": spaces.Box(-1, 1, (2,))}))


def test_integers_become_floats_where_the_space_says_so() -> None:
    arrays = make_arrays([3])
    whole = {**arrays, **{name: arrays[name].astype(np.int64) for name in ("observations", "next_observations")}}
    assert OfflineDataset.from_arrays(**whole).observations.dtype == np.int64
    dataset = OfflineDataset.from_arrays(**whole, observation_space=spaces.Box(-9, 9, (2,)))
    assert_same(dataset, OfflineDataset.from_arrays(**arrays, observation_space=spaces.Box(-9, 9, (2,))))


def test_actions_are_clipped_within_tolerance_only() -> None:
    space = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))
    arrays = make_arrays([3])
    arrays["actions"] = np.array([[2.0002, 5.0], [-2.0003, 10.0009], [0.0, -0.0005]], np.float32)
    given_actions = arrays["actions"].copy()
    dataset = OfflineDataset.from_arrays(**arrays, action_space=space)
    np.testing.assert_array_equal(dataset.actions, [[2.0, 5.0], [-2.0, 10.0], [0.0, 0.0]])
    np.testing.assert_array_equal(arrays["actions"], given_actions)
    arrays["actions"][1] = [2.5, 12.0]
    with pytest.raises(
        ValueError, match=r"low \[-2.  0.\], high \[ 2. 10.\]\): 2 values .* worst is 12 in row 1, component 1"
    ):
        OfflineDataset.from_arrays(**arrays, action_space=space)


def test_check_spaces() -> None:
    dataset = OfflineDataset.from_arrays(**make_arrays([3]))
    dataset.check_spaces(spaces.Box(-5, 5, (2,), np.float64), spaces.Box(-1, 1, (2,), np.float64))
    with pytest.raises(ValueError, match=r"model's actions have shape \(3,\), the actions of arrays have \(2,\)"):
        dataset.check_spaces(dataset.observation_space, spaces.Box(-1, 1, (3,)))
    with pytest.raises(ValueError, match=r"model's action space has low \[-2. -2.\], the space of arrays has \[-1. -1.\]"):
        dataset.check_spaces(dataset.observation_space, spaces.Box(-2, 2, (2,)))
    with pytest.raises(ValueError, match=r"observations have shape \(2,\) per row, the model .* wants \(4,\)"):
        dataset.check_spaces(spaces.Box(-1, 1, (4,)), dataset.action_space)
    images = OfflineDataset.from_arrays(**dict_arrays())
    with pytest.raises(ValueError, match=r"observations are \['frame', 'vector'\], the model .* wants one array"):
        images.check_spaces(dataset.observation_space, dataset.action_space)
    other = spaces.Dict({"vector": spaces.Box(-1, 1, (2,)), "frame": spaces.Box(0, 1, (3, 8, 8))})
    with pytest.raises(ValueError, match=r"observations\['frame'\] have dtype uint8, the model .* wants float32"):
        images.check_spaces(other, dataset.action_space)
    last = spaces.Dict({"vector": spaces.Box(-1, 1, (2,)), "frame": spaces.Box(0, 255, (8, 8, 3), np.uint8)})
    with pytest.raises(ValueError, match=r"have shape \(3, 8, 8\) per row, .* wants \(8, 8, 3\); SB3 puts the channels"):
        images.check_spaces(last, dataset.action_space)


# --------------------------------------------------------------------------------------------------------- replay buffer


class Counter(gym.Env):
    """Observation (environment, episode, step) as counted; ends by a terminal or a time limit as scripted."""

    action_space = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))
    flat_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def __init__(self, number: int, layout: list[tuple[int, bool]], as_dict: bool):
        self.number, self.layout, self.episode, self.time, self.as_dict = number, layout, -1, 0, as_dict
        self.observation_space = spaces.Dict({"a": self.flat_space, "b": spaces.Discrete(100)}) if as_dict else self.flat_space

    def _obs(self) -> Any:
        flat = np.array([self.number, self.episode, self.time], np.float32)
        return {"a": flat, "b": self.time} if self.as_dict else flat

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.episode, self.time = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        length, terminal = self.layout[self.episode % len(self.layout)]
        done = self.time == length
        return self._obs(), float(self.time), done and terminal, done and not terminal, {}


def fill_buffer(
    layouts_of: list[list[tuple[int, bool]]], size: int, steps: int, as_dict: bool = False, **kwargs: Any
) -> tuple[ReplayBuffer, list[list[dict[str, Any]]]]:
    """Fill a buffer as SB3 does; also return what happened, by environment."""
    venv = DummyVecEnv([lambda i=i, layout=layout: Counter(i, layout, as_dict) for i, layout in enumerate(layouts_of)])
    kind = DictReplayBuffer if as_dict else ReplayBuffer
    n_envs = venv.num_envs
    buffer = kind(size * n_envs, venv.observation_space, venv.action_space, device="cpu", n_envs=n_envs, **kwargs)
    log: list[list[dict[str, Any]]] = [[] for _ in range(n_envs)]
    rng = np.random.default_rng(0)
    low, high = venv.action_space.low, venv.action_space.high
    obs: Any = venv.reset()
    for _ in range(steps):
        obs = {key: value.copy() for key, value in obs.items()} if as_dict else obs.copy()
        scaled = rng.uniform(-1, 1, (n_envs, 2)).astype(np.float32)
        actions = low + 0.5 * (scaled + 1) * (high - low)
        new_obs, rewards, dones, infos = venv.step(actions)
        following: Any = {key: value.copy() for key, value in new_obs.items()} if as_dict else new_obs.copy()
        for i in np.flatnonzero(dones):
            for key in following if as_dict else [...]:
                last = infos[i]["terminal_observation"]
                following[key][i] = last[key] if as_dict else last
        buffer.add(obs, following, scaled, rewards, dones, infos)
        flat_obs, flat_next = (obs["a"], following["a"]) if as_dict else (obs, following)
        for i in range(n_envs):
            timeout = infos[i].get("TimeLimit.truncated", False)
            row = {"obs": flat_obs[i].copy(), "next": flat_next[i].copy(), "action": actions[i], "reward": rewards[i]}
            log[i].append({**row, "done": dones[i], "terminated": dones[i] and not timeout})
        obs = new_obs
    return buffer, log


@given(
    st.lists(layouts, min_size=3, max_size=3), st.sampled_from([1, 3]), st.integers(2, 12), st.integers(1, 30), st.booleans()
)
@settings(max_examples=60, deadline=None)
def test_replay_buffer(layouts_of: list[list[tuple[int, bool]]], n_envs: int, size: int, steps: int, as_dict: bool) -> None:
    buffer, log = fill_buffer(layouts_of[:n_envs], size, steps, as_dict)
    dataset = OfflineDataset.from_replay_buffer(buffer)
    rows = [row for column in log for row in column[-size:]]  # what a full ring still holds
    flat = dataset.observations["a"] if as_dict else dataset.observations
    following = dataset.next_observations["a"] if as_dict else dataset.next_observations
    np.testing.assert_array_equal(flat, [row["obs"] for row in rows])
    np.testing.assert_array_equal(following, [row["next"] for row in rows])
    np.testing.assert_allclose(dataset.actions, [row["action"] for row in rows], atol=1e-5)
    np.testing.assert_array_equal(dataset.rewards, [row["reward"] for row in rows])
    np.testing.assert_array_equal(dataset.terminated, [row["terminated"] for row in rows])
    per_env = len(rows) // n_envs
    ends = [row["done"] or i % per_env == per_env - 1 for i, row in enumerate(rows)]
    np.testing.assert_array_equal(dataset.trajectory_ends, ends)
    if as_dict:
        assert dataset.observations["b"].shape == (len(rows),)
    dataset.check_spaces(buffer.observation_space, buffer.action_space)


def test_replay_buffer_that_shares_next_observations() -> None:
    layout = [(4, True), (3, True)]
    for steps in (5, 8, 13):
        buffer, log = fill_buffer([layout], 8, steps, optimize_memory_usage=True, handle_timeout_termination=False)
        dataset = OfflineDataset.from_replay_buffer(buffer)
        rows = log[0][-7:] if steps >= 8 else log[0]  # a full one has lost the observation of its oldest row
        np.testing.assert_array_equal(dataset.observations, [row["obs"] for row in rows])
        np.testing.assert_array_equal(dataset.terminated, [row["done"] for row in rows])
        alive = ~dataset.terminated
        np.testing.assert_array_equal(dataset.next_observations[alive], np.array([row["next"] for row in rows])[alive])
        assert dataset.trajectory_ends.tolist() == [row["done"] for row in rows[:-1]] + [True]


def test_replay_buffer_with_a_gap() -> None:
    """Rows that were added out of order are not taken for neighbours."""
    buffer = ReplayBuffer(10, spaces.Box(-9, 9, (1,)), BOX, device="cpu")
    for obs, following in ((0, 1), (1, 2), (5, 6), (6, 7)):
        buffer.add(np.array([[obs]]), np.array([[following]]), np.zeros((1, 2)), np.zeros(1), np.zeros(1), [{}])
    dataset = OfflineDataset.from_replay_buffer(buffer)
    assert dataset.trajectories.tolist() == [[0, 1], [2, 3]]
    assert dataset.next_observations.ravel().tolist() == [1, 2, 6, 7]
    assert not dataset.terminated.any()
    buffer.observations[:] = 9  # the dataset is a copy
    assert dataset.observations.ravel().tolist() == [0, 1, 5, 6]


def test_unsuitable_replay_buffers() -> None:
    box = spaces.Box(-1, 1, (1,))
    with pytest.raises(TypeError, match="a ReplayBuffer of Stable-Baselines3 is needed, got dict"):
        OfflineDataset.from_replay_buffer({})
    with pytest.raises(ValueError, match="continuous actions"):
        OfflineDataset.from_replay_buffer(ReplayBuffer(5, box, spaces.Discrete(3), device="cpu"))
    with pytest.raises(ValueError, match="the replay buffer is empty"):
        OfflineDataset.from_replay_buffer(ReplayBuffer(5, box, BOX, device="cpu"))


# ------------------------------------------------------------------------------------------------------ saving, mmap_dir


@pytest.mark.parametrize("make", [lambda: make_arrays([3, 2, 4], [False, True, True]), dict_arrays])
def test_save_and_open(make: Callable[[], dict[str, Any]], tmp_path) -> None:
    dataset = OfflineDataset.from_arrays(**make())
    folder = tmp_path / "new" / "data"
    dataset.save(folder)
    opened = OfflineDataset.load(f"npz:{folder}")
    assert_same(opened, dataset)
    assert isinstance(opened.rewards, np.memmap)
    assert not opened.rewards.flags.writeable
    assert "memory-mapped" in opened.summary()
    assert [path.name for path in folder.parent.iterdir()] == ["data"]
    with pytest.raises(FileExistsError, match="exists already"):
        opened.save(folder)
    opened.save(tmp_path / "copy")
    assert_same(OfflineDataset.load(f"npz:{tmp_path / 'copy'}"), dataset)


def test_damaged_folders(tmp_path) -> None:
    dataset = OfflineDataset.from_arrays(**make_arrays([3]))
    dataset.save(tmp_path / "data")
    file = tmp_path / "data" / json.loads((tmp_path / "data" / "dataset.json").read_text())["arrays"]["actions"]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"is not a complete \.npy file"):
        OfflineDataset.load(f"npz:{tmp_path / 'data'}")
    (tmp_path / "data" / "dataset.json").write_text("{")
    with pytest.raises(ValueError, match=r"is not a folder written by OfflineDataset.save"):
        OfflineDataset.load(f"npz:{tmp_path / 'data'}")


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-np.inf, np.inf, (3,)),
        spaces.Box(np.array([-0.1, -2.0], np.float32), np.array([1 / 3, np.inf], np.float32)),
        spaces.Box(0, 255, (4, 4, 3), np.uint8),
        spaces.Box(-1, 1, (), np.float64),
        spaces.Discrete(5, start=-2),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary((2, 2)),
        spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Box(-1, 1, (2,))}),
    ],
)
def test_spaces_as_json(space: spaces.Space) -> None:
    text = json.dumps(space_to_json(space), allow_nan=False)
    assert space_from_json(json.loads(text)) == space


def test_unknown_space_as_json() -> None:
    with pytest.raises(ValueError, match="a space of type Text cannot be saved"):
        space_to_json(spaces.Text(3))


# ------------------------------------------------------------------------------------------------ statistics, VecNormalize


def test_summary() -> None:
    arrays = make_arrays([2, 4], [True, False])
    arrays["terminated"][3] = True
    arrays["actions"][:] = 0.0
    arrays["actions"][0] = [1.0, -1.0]
    arrays["rewards"][:] = [1, 2, 0, 0, -1, 0]
    text = OfflineDataset.from_arrays(**arrays, source="here").summary()
    for line in (
        "OfflineDataset here",
        "rows            6 in 2 trajectories",
        "lengths         min 2, mean 3.0, max 4",
        "returns         min -1, mean 1, max 3",
        f"mean return     1.00, 95 % interval [-2.92, 4.92], 2 trajectories; {RUN_ON}",
        "terminated      2 rows (33.33%), in 2 trajectories (100.0%)",
        "saturation      16.7% of action components at the bounds",
        "observations    (2,) float32",
        "actions         (2,) float32, bounds [-1, 1]",
    ):
        assert line in text.splitlines()


def test_returns_of_trajectories() -> None:
    lengths = [3, 1, 5, 2, 4]
    arrays = make_arrays(lengths, [True] * 5)
    arrays["rewards"][:] = rewards = np.random.default_rng(0).normal(size=sum(lengths)).astype(np.float32)
    dataset = OfflineDataset.from_arrays(**arrays)
    expected = np.array([one.astype(np.float64).sum() for one in np.split(rewards, np.cumsum(lengths)[:-1])])
    assert dataset.returns == pytest.approx(expected, abs=1e-12) and dataset.returns.dtype == np.float64
    error = 1.96 * expected.std(ddof=1) / 5**0.5
    mean = expected.mean()
    assert dataset.behaviour_return[:4] == pytest.approx((mean, mean - error, mean + error, 5))
    assert dataset.behaviour_return.caveat == ""
    with pytest.raises(ValueError, match="read-only"):
        dataset.returns[0] = 0.0


def test_return_of_one_trajectory_has_no_interval() -> None:
    arrays = make_arrays([3], [True])
    arrays["rewards"][:] = [1, 2, 3]
    assert str(OfflineDataset.from_arrays(**arrays).behaviour_return) == "6.00, one trajectory"


@pytest.mark.parametrize("source", ["ogbench:pointmaze-medium-navigate-singletask-v0", "npz:saved"])
def test_walks_that_were_relabelled_are_no_episodes(source: str) -> None:
    arrays = make_arrays([4, 4])
    arrays["terminated"][:] = [False, True, False, False] * 2
    dataset = OfflineDataset.from_arrays(**arrays, source=source)
    expected = {"ogbench": LABELLED, "npz": RUN_ON}[source.partition(":")[0]]
    assert dataset.behaviour_return.caveat == expected
    assert f"2 trajectories; {expected}\n" in dataset.summary()


def test_sparse_rewards() -> None:
    arrays = make_arrays([4])
    arrays["rewards"][:] = [0, -3, 0.5, 0]
    dataset = OfflineDataset.from_arrays(**arrays)
    sparse = dataset.sparse_rewards()
    assert sparse.rewards.tolist() == [0, -1, -1, 0]
    assert sparse.rewards.dtype == np.float32
    assert np.shares_memory(sparse.observations, dataset.observations)
    assert dataset.rewards[1] == -3
    assert "sparse" in sparse.source


class Replay(gym.Env):
    """Replays the rows of a dataset: what VecNormalize would have seen."""

    action_space = BOX

    def __init__(self, dataset: OfflineDataset):
        self.dataset, self.row = dataset, 0
        self.observation_space = dataset.observation_space

    def _obs(self) -> Any:
        row = min(self.row, len(self.dataset) - 1)
        if isinstance(self.dataset.observations, dict):
            return {key: array[row] for key, array in self.dataset.observations.items()}
        return self.dataset.observations[row]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._obs(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward, end = float(self.dataset.rewards[self.row]), bool(self.dataset.trajectory_ends[self.row])
        self.row += 1
        return self._obs(), reward, False, end, {}


@pytest.mark.parametrize("make", [lambda: make_arrays([3, 20, 4], seed=3), dict_arrays])
def test_fit_vec_normalize(make: Callable[[], dict[str, Any]]) -> None:
    dataset = OfflineDataset.from_arrays(**make())
    keys = ["vector"] if isinstance(dataset.observations, dict) else None
    fitted, running = (VecNormalize(DummyVecEnv([lambda: Replay(dataset)]), gamma=0.9, norm_obs_keys=keys) for _ in range(2))
    dataset.fit_vec_normalize(fitted)
    running.reset()
    for _ in range(len(dataset)):
        running.step([np.zeros(2, np.float32)])
    rms = fitted.obs_rms["vector"] if keys else fitted.obs_rms
    rows = np.asarray(dataset.observations["vector"] if keys else dataset.observations, np.float64)
    assert rms.count == len(dataset) and fitted.ret_rms.count == len(dataset)
    np.testing.assert_allclose(rms.mean, rows.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(rms.var, rows.var(axis=0), rtol=1e-12)
    # the running statistics start with a count of 1e-4 (mean 0, variance 1)
    np.testing.assert_allclose(fitted.ret_rms.mean, running.ret_rms.mean, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(fitted.ret_rms.var, running.ret_rms.var, rtol=1e-3)
    assert fitted.normalize_reward(np.ones(1)).shape == (1,)


def test_fit_vec_normalize_equals_its_own_updates_on_the_same_rows() -> None:
    dataset = OfflineDataset.from_arrays(**make_arrays([5, 9]))
    fitted, fed = (VecNormalize(make_vec_env("Pendulum-v1")) for _ in range(2))
    for wrapper in (fitted, fed):
        wrapper.obs_rms = type(wrapper.obs_rms)(shape=(2,))
    dataset.fit_vec_normalize(fitted)
    for row in dataset.observations:
        fed.obs_rms.update(row[None].astype(np.float64))
    np.testing.assert_allclose(fitted.obs_rms.mean, fed.obs_rms.mean, rtol=1e-4)
    np.testing.assert_allclose(fitted.obs_rms.var, fed.obs_rms.var, rtol=1e-4)


def test_fit_vec_normalize_only_what_is_normalised() -> None:
    dataset = OfflineDataset.from_arrays(**make_arrays([5]))
    wrapper = VecNormalize(DummyVecEnv([lambda: Replay(dataset)]), norm_obs=False, norm_reward=False)
    before = wrapper.ret_rms
    dataset.fit_vec_normalize(wrapper)
    assert wrapper.ret_rms is before and not hasattr(wrapper, "obs_rms")


def test_fit_vec_normalize_refuses_other_observations() -> None:
    dataset = OfflineDataset.from_arrays(**make_arrays([5]))
    with pytest.raises(ValueError, match=r"VecNormalize expects observations .*\(3,\), arrays has .*\(2,\)"):
        dataset.fit_vec_normalize(VecNormalize(make_vec_env("Pendulum-v1")))
