"""What OfflineDataset refuses and what it must take: wrong values and shapes of every source, names of arrays, locations."""

import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pytest
from gymnasium import spaces
from test_dataset import assert_same, change, dict_arrays, fill_buffer, make_arrays
from test_dataset_sources import POINTMAZE, d4rl_arrays, h5_file, minari_episodes, write_ogbench

from sb3_flow.data import OfflineDataset
from sb3_flow.data.robomimic import KEYS
from sb3_flow.data.storage import space_from_json, space_to_json

Edit = Callable[[dict[str, Any]], None]
BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)


def masked(array: np.ndarray) -> np.ma.MaskedArray:
    return np.ma.MaskedArray(array, mask=np.arange(array.size).reshape(array.shape) == 1)


# ---------------------------------------------------------------------------------------------------------------- arrays


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change("observations", None), "observations must be an array with one row per transition, got NoneType"),
        (change("observations", masked), "observations is a masked array with 1 masked values"),
        (change("rewards", masked), "rewards is a masked array"),
        (change("terminated", masked), "terminated is a masked array"),
        (change("actions", lambda a: [masked(row) for row in a]), "actions is a masked array"),
        (change("observations", lambda a: a[:, :0]), r"observations have shape \(0,\) per row: a row holds no value"),
        (change("actions", lambda a: a[:, :0]), r"actions have shape \(0,\) per row: a row holds no value"),
        (change("observations", lambda a: {0: a}), "keys of observations must be text that is not empty, got 0"),
        (change("observations", lambda a: {"": a}), "keys of observations must be text that is not empty, got ''"),
        (change("observations", lambda a: {"a": {"b": a}}), "observations/a must be an array with one row per transition"),
    ],
)
def test_wrong_arrays(edit: Edit, message: str) -> None:
    arrays: dict[str, Any] = make_arrays([3, 4], [True, False])
    del arrays["next_observations"]
    edit(arrays)
    with pytest.raises(ValueError, match=message), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        OfflineDataset.from_arrays(**arrays)


def test_a_mask_without_masked_values_is_taken() -> None:
    arrays = make_arrays([3, 4], [True, False])
    guised = {name: np.ma.MaskedArray(array) for name, array in arrays.items()}
    assert_same(OfflineDataset.from_arrays(**guised), OfflineDataset.from_arrays(**arrays))


def test_foreign_byte_order_is_taken() -> None:
    arrays = make_arrays([3, 4])
    arrays["observations"], arrays["next_observations"] = arrays["observations"].astype(int), None
    swapped = {name: None if array is None else array.astype(array.dtype.newbyteorder(">")) for name, array in arrays.items()}
    with pytest.warns(UserWarning, match="left out"):
        dataset = OfflineDataset.from_arrays(**swapped)
        assert_same(dataset, OfflineDataset.from_arrays(**arrays))
    assert dataset.observations.dtype.isnative


@pytest.mark.parametrize(
    ("space", "rows", "message"),
    [
        (spaces.Discrete(5), [0, 4, 5], r"must be one of 0, ..., 4 .*Discrete\(5\).*got 5 in row 2"),
        (spaces.Discrete(5), [0, -1, 4], "got -1 in row 1"),
        (spaces.Discrete(5), [0.5, 1.0, 2.0], "got 0.5 in row 0"),
        (spaces.Discrete(5, start=2), [2, 6, 1], "must be one of 2, ..., 6 .* got 1 in row 2"),
        (spaces.MultiBinary(2), [[0, 1], [1, 7], [0, 0]], r"must be 0 or 1 .*MultiBinary\(2\).* got \[1 7\] in row 1"),
        (spaces.MultiBinary(2), [[0, 1], [1, 0], [0, 0.5]], r"got \[0.\s+0.5\] in row 2"),
        (
            spaces.MultiDiscrete([2, 3]),
            [[1, 2], [2, 0], [0, 0]],
            r"must be one of 0, ..., 1 and 0, ..., 2 .* got \[2 0\] in row 1",
        ),
    ],
)
@pytest.mark.parametrize("key", ["", "x"])
def test_observations_outside_their_discrete_space(space: spaces.Space, rows: list[Any], message: str, key: str) -> None:
    arrays: dict[str, Any] = make_arrays([3], [True])
    arrays["next_observations"] = None
    arrays["observations"] = {key: np.array(rows)} if key else np.array(rows)
    with pytest.raises(ValueError, match=message):
        OfflineDataset.from_arrays(**arrays, observation_space=spaces.Dict({key: space}) if key else space)


def test_final_observations_belong_to_the_space() -> None:
    arrays: dict[str, Any] = make_arrays([3])
    arrays["observations"], arrays["next_observations"] = np.array([0, 1, 2]), np.array([1, 2, 9])
    with pytest.raises(ValueError, match=r"final_observations must be one of 0, ..., 4 .* got 9 in row 0"):
        OfflineDataset.from_arrays(**arrays, observation_space=spaces.Discrete(5))
    arrays["next_observations"][2] = 4
    dataset = OfflineDataset.from_arrays(**arrays, observation_space=spaces.Discrete(5))
    with pytest.raises(ValueError, match=r"must be one of 0, \.\.\., 1"):
        dataset.check_spaces(spaces.Discrete(2), dataset.action_space)


@pytest.mark.parametrize(
    ("low", "high"),
    [(-1e300, 1e300), (-3e38, 3e38), (1.0, 1.0 + 1e-12), (np.nan, 1.0)],
)
def test_action_bounds_must_be_finite_as_float32(low: float, high: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        space = spaces.Box(-1.0, 1.0, (2,), np.float64)
        space.low, space.high = np.full(2, low), np.full(2, high)
        with pytest.raises(ValueError, match=r"action_space must have finite bounds with low < high .*float32"):
            OfflineDataset.from_arrays(**make_arrays([3]), action_space=space)


@pytest.mark.parametrize(
    "space", [spaces.Tuple([BOX]), spaces.Text(3), spaces.Dict({"a": spaces.Dict({"b": BOX})}), spaces.Dict({})]
)
def test_unsuitable_observation_spaces(space: spaces.Space) -> None:
    arrays: dict[str, Any] = make_arrays([3])
    if isinstance(space, spaces.Dict):
        for name in ("observations", "next_observations"):
            arrays[name] = {"a": arrays[name]}
    with pytest.raises(
        ValueError, match="must be a Box, Discrete, MultiDiscrete or MultiBinary space or a flat Dict of these"
    ):
        OfflineDataset.from_arrays(**arrays, observation_space=space)


def test_whole_numbers_are_actions_where_the_space_says_so(tmp_path: Path) -> None:
    arrays = make_arrays([3, 4], [True, False])
    arrays["actions"] = np.arange(14).reshape(7, 2) % 3 - 1
    space = spaces.Box(-1, 1, (2,), np.float32)
    expected = OfflineDataset.from_arrays(**arrays, action_space=space)
    np.testing.assert_array_equal(expected.actions, arrays["actions"])
    np.savez(tmp_path / "data.npz", **arrays)
    assert_same(OfflineDataset.load(f"npz:{tmp_path / 'data.npz'}", action_space=space), expected)
    arrays["terminals"], arrays["timeouts"] = arrays.pop("terminated"), arrays.pop("trajectory_ends")
    path = h5_file(tmp_path / "data.hdf5", arrays)
    assert_same(OfflineDataset.load(f"d4rl:{path}", action_space=space), expected)
    with pytest.raises(ValueError, match="actions have dtype int64: flow policies need continuous"):
        OfflineDataset.load(f"npz:{tmp_path / 'data.npz'}")


def test_a_file_of_whole_observations_is_floats_where_the_space_says_so(tmp_path: Path) -> None:
    arrays = make_arrays([3, 4])
    whole = {**arrays, **{name: arrays[name].astype(np.int64) for name in ("observations", "next_observations")}}
    np.savez(tmp_path / "data.npz", **whole)
    space = spaces.Box(-9, 9, (2,), np.float32)
    dataset = OfflineDataset.load(f"npz:{tmp_path / 'data.npz'}", observation_space=space)
    assert_same(dataset, OfflineDataset.from_arrays(**arrays, observation_space=space))


# ---------------------------------------------------------------------------------------------- ends under other names


RULES = [
    (("terminals", "timeouts"), "terminated=terminals, trajectory_ends=terminals | timeouts"),
    (("terminated", "truncated"), "terminated=terminated, trajectory_ends=terminated | truncated"),
    (("dones", "timeouts"), "terminated=dones & ~timeouts, trajectory_ends=dones"),
    (("dones", "truncated"), "terminated=dones & ~truncated, trajectory_ends=dones"),
    (("terminated", "dones"), "terminated=terminated, trajectory_ends=dones"),
    (("dones",), r"`dones` alone .* time limits.* terminated=dones & ~timeouts, trajectory_ends=dones"),
    (("terminals",), r"terminated=terminals, trajectory_ends=terminals | timeouts, where"),
    (("timeouts",), r"terminated and trajectory_ends.*`timeouts` alone"),
]


@pytest.mark.parametrize(("names", "rule"), RULES)
def test_other_names_are_translated(names: tuple[str, ...], rule: str, tmp_path: Path) -> None:
    arrays: dict[str, Any] = make_arrays([3, 4], [True, False])
    ends = arrays.pop("trajectory_ends")
    del arrays["terminated"]
    arrays.update({name: ends for name in names})
    rule = rule.replace("|", r"\|")
    with pytest.raises(ValueError, match=rule):
        OfflineDataset.from_arrays(**arrays)
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(ValueError, match=rule):
        OfflineDataset.load(f"npz:{tmp_path / 'data.npz'}")


def test_missing_and_unknown_names() -> None:
    arrays = make_arrays([3])
    with pytest.raises(ValueError, match=r"`timeouts` .* beside `terminated` and `trajectory_ends`"):
        OfflineDataset.from_arrays(**arrays, timeouts=arrays["trajectory_ends"])
    with pytest.raises(TypeError, match="unexpected keyword argument 'goals'"):
        OfflineDataset.from_arrays(**arrays, goals=1)
    del arrays["trajectory_ends"]
    with pytest.raises(ValueError, match="`trajectory_ends` is missing"):
        OfflineDataset.from_arrays(**arrays)


def test_rows_that_are_left_out_are_told() -> None:
    arrays = make_arrays([3, 1, 4], [True, False, False])
    del arrays["next_observations"]
    with pytest.warns(UserWarning, match=r"2 of 8 rows are left out: .* `next_observations`.* 1 trajectories? .* single"):
        assert len(OfflineDataset.from_arrays(**arrays)) == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OfflineDataset.from_arrays(**make_arrays([3, 1, 4], [True, False, False]))


@pytest.mark.parametrize("kind", ["arrays", "npz", "d4rl"])
def test_a_warning_if_no_trajectory_ends(kind: str, tmp_path: Path) -> None:
    arrays = make_arrays([5])
    arrays["trajectory_ends"][:] = False
    with pytest.warns(UserWarning, match="no row ends a trajectory: all 5 rows are taken for one trajectory"):
        if kind == "arrays":
            OfflineDataset.from_arrays(**arrays)
        elif kind == "npz":
            np.savez(tmp_path / "data.npz", **arrays)
            OfflineDataset.load(f"npz:{tmp_path / 'data.npz'}")
        else:
            arrays["timeouts"], arrays["terminals"] = arrays.pop("trajectory_ends"), arrays.pop("terminated")
            OfflineDataset.load(f"d4rl:{h5_file(tmp_path / 'data.hdf5', arrays, next_observations=None)}")


# ------------------------------------------------------------------------------------------------------------- locations


def test_a_folder_that_was_saved_is_known(tmp_path: Path) -> None:
    dataset = OfflineDataset.from_arrays(**make_arrays([3]))
    dataset.save(tmp_path / "data")
    for location in (tmp_path / "data", tmp_path / "data" / "dataset.json"):
        assert_same(OfflineDataset.load(str(location)), dataset)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("plain.npz", "'npz:{path}'"),
        ("raw.npz", "'ogbench:<single-task name>@{path}'"),
        ("d4rl.hdf5", "'d4rl:{path}'"),
        ("demonstrations.hdf5", "'robomimic:{path}'"),
        ("buffer.pkl", "'sb3:{path}'"),
        ("folder", "is no folder that OfflineDataset.save wrote"),
    ],
)
def test_the_prefix_of_a_file_is_suggested(name: str, suggestion: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    elif name.endswith("npz"):
        np.savez(path, **{"qpos" if name == "raw.npz" else "actions": np.zeros(3)})
    elif name.endswith("hdf5"):
        h5_file(path, {"data/demo_0/actions" if name.startswith("demo") else "actions": np.zeros(3)})
    else:
        path.write_bytes(b"x")
    with pytest.raises(ValueError, match="must start with one of ogbench:, ") as caught:
        OfflineDataset.load(str(path))
    assert suggestion.format(path=path) in str(caught.value)


@pytest.mark.parametrize(
    ("location", "suggestion"),
    [
        (POINTMAZE, f"'ogbench:{POINTMAZE}'"),
        ("D4RL/door/human-v2", "'minari:D4RL/door/human-v2'"),
        ("Minari:D4RL/door/human-v2", "'minari:D4RL/door/human-v2'"),
        ("npy:data.npz", "'npz:data.npz'"),
        ("nothing.npz", "there is no file nothing.npz"),
    ],
)
def test_the_prefix_of_a_name_is_suggested(location: str, suggestion: str) -> None:
    with pytest.raises(ValueError, match="must start with one of ogbench:, ") as caught:
        OfflineDataset.load(location)
    assert suggestion in str(caught.value)


@pytest.mark.parametrize("name", ["observation_space", "action_space"])
def test_a_space_must_be_one(name: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **make_arrays([3]))
    OfflineDataset.from_arrays(**make_arrays([3])).save(tmp_path / "data")
    for where in ("data.npz", "data"):
        with pytest.raises(TypeError, match=f"{name} must be a Gymnasium space, got str"):
            OfflineDataset.load(f"npz:{tmp_path / where}", **{name: "Box"})


# ------------------------------------------------------------------------------------------------------- saved folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    OfflineDataset.from_arrays(**make_arrays([3, 4], [True, False])).save(tmp_path / "data")
    return tmp_path / "data"


def rewrite(folder: Path, name: str, value: Any) -> None:
    """Exchange an array of a folder: a function of the old one."""
    file = folder / json.loads((folder / "dataset.json").read_text())["arrays"][name]
    np.save(file, value(np.load(file)))


def at(index: Any, value: Any) -> Callable[[np.ndarray], np.ndarray]:
    def edit(array: np.ndarray) -> np.ndarray:
        array[index] = value
        return array

    return edit


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("observations", at((3, 1), np.nan), "observations must be finite, 1 values .* first in row 3"),
        ("rewards", at(2, np.inf), "rewards must be finite"),
        ("final_observations", at((1, 0), np.nan), "final_observations must be finite"),
        ("actions", at((4, 0), 50.0), "actions must lie in the action space .* worst is 50 in row 4"),
        ("observations", lambda a: a.astype(np.float64), "observations must be stored as float32 or integers, got float64"),
        ("actions", lambda a: a.astype(np.float64), "actions must be stored as float32, got float64"),
        ("rewards", lambda a: a.astype(np.float64), "rewards must be stored as float32, got float64"),
        ("terminated", lambda a: a.astype(np.float32), "terminated must be stored as bool, got float32"),
        ("trajectory_ends", lambda a: a.astype(int), "trajectory_ends must be stored as bool, got int64"),
        (
            "terminated",
            lambda a: (a * np.uint8(2)).view(bool),
            "terminated must be stored as bool, got bytes other than 0 and 1",
        ),
        ("observations", lambda a: a[:, :1], r"final_observations .*\(2,\) per row, observations have .*\(1,\)"),
        ("actions", lambda a: a[:, :1], r"actions have shape \(7, 1\), action_space wants \(2,\)"),
        ("rewards", lambda a: a[:, None], r"rewards must have shape \(7,\), got \(7, 1\)"),
        ("rewards", lambda a: a[:1], "rewards has 1 rows but observations has 7"),
        ("observations", lambda a: a[0, 0], "observations must be an array with rows, got a single value"),
        ("actions", lambda a: a[:-1], "actions has 6 rows but observations has 7"),
        ("final_observations", lambda a: a[:1], "final_observations has 1 rows, but 2 rows end a trajectory"),
        ("trajectory_ends", at(6, False), "the last row of trajectory_ends must be True"),
    ],
)
def test_folders_are_checked(folder: Path, name: str, value: Any, message: str) -> None:
    rewrite(folder, name, value)
    with pytest.raises(ValueError, match=message):
        OfflineDataset.load(f"npz:{folder}")


def without(*keys: str) -> Edit:
    def edit(index: dict[str, Any]) -> None:
        for key in keys[:-1]:
            index = index[key]
        del index[keys[-1]]

    return edit


def entry(*keys: str, value: Any) -> Edit:
    def edit(index: dict[str, Any]) -> None:
        for key in keys[:-1]:
            index = index[key]
        index[keys[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without("arrays"), "lacks 'arrays'"),
        (without("version"), "lacks 'version'"),
        (without("action_space"), "lacks 'action_space'"),
        (without("arrays", "rewards"), r"names no file for \['rewards'\]"),
        (entry("arrays", value=[]), "'arrays' must be an object"),
        (entry("arrays", "rewards", value="../9.npy"), "rewards: '../9.npy' is no file of the folder"),
        (entry("arrays", "rewards", value="9.npy"), "rewards: '9.npy' is no file of the folder"),
        (entry("arrays", "goals", value="0-observations.npy"), r"names unknown arrays \['goals'\]"),
        (entry("observation_space", "type", value="Graph"), "observation_space .*unknown type 'Graph'"),
        (entry("observation_space", "low", value=["0", "0", "0"]), "observation_space .*3 values of low for shape"),
        (entry("action_space", "low", value=["nan"]), "action_space is no space that was saved: .*nan"),
        (entry("action_space", value={"type": "Discrete", "n": 2, "start": 0}), "need continuous actions"),
        (entry("version", value=99), "has dataset format 99"),
    ],
)
def test_a_folders_index_is_checked(folder: Path, edit: Edit, message: str) -> None:
    index = json.loads((folder / "dataset.json").read_text())
    edit(index)
    (folder / "dataset.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        OfflineDataset.load(f"npz:{folder}")


def test_given_spaces_of_a_folder(folder: Path, tmp_path: Path) -> None:
    wide = spaces.Box(-3, 3, (2,), np.float32)
    assert OfflineDataset.load(f"npz:{folder}", action_space=wide).action_space == wide
    assert OfflineDataset.load(f"npz:{folder}", observation_space=wide).observation_space == wide
    with pytest.raises(ValueError, match="actions must lie in the action space"):
        OfflineDataset.load(f"npz:{folder}", action_space=spaces.Box(-0.1, 0.1, (2,)))
    with pytest.raises(ValueError, match=r"`mmap_dir` .* is opened memory-mapped where it is"):
        OfflineDataset.load(f"npz:{folder}", mmap_dir=tmp_path / "other")


def test_the_start_of_a_multi_discrete_space_is_saved() -> None:
    space = spaces.MultiDiscrete([2, 3], start=[1, -1])
    assert space_from_json(json.loads(json.dumps(space_to_json(space)))) == space


# ------------------------------------------------------------------------------------------------------------- robomimic


def demonstrations(path: Path, edit: Callable[[h5py.File], None] = lambda file: None) -> str:
    """A file as RoboMimic's with demonstrations of five and three rows."""
    with h5py.File(path, "w") as file:
        for name, length in (("demo_0", 5), ("demo_1", 3)):
            for group, shift in (("obs", 0), ("next_obs", 1)):
                for key in KEYS:
                    file[f"data/{name}/{group}/{key}"] = np.arange(length)[:, None] + np.full((length, 2), float(shift))
            file[f"data/{name}/actions"] = np.full((length, 7), 0.5)
            file[f"data/{name}/rewards"] = (np.arange(length) == length - 1).astype(float)
        edit(file)
    return f"robomimic:{path}"


def dataset_of(name: str, value: Any) -> Callable[[h5py.File], None]:
    """Exchange an array of an HDF5 file: a function of the old one, or None to leave it out."""

    def edit(file: h5py.File) -> None:
        old = file[name][()] if isinstance(file.get(name), h5py.Dataset) else None
        if name in file:
            del file[name]
        if value is not None:
            file[name] = value(old)

    return edit


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("demo_1/rewards", at(1, np.nan), "data/demo_1/rewards must hold bool or 0/1, got nan in row 1"),
        ("demo_1/rewards", at(1, 0.3), "data/demo_1/rewards must hold bool or 0/1, got 0.3 in row 1"),
        ("demo_0/rewards", lambda a: a[:1], "data/demo_0/rewards has 1 rows, but data/demo_0/actions has 5"),
        ("demo_0/obs/object", lambda a: a[:1], "data/demo_0/obs/object has 1 rows, but data/demo_0/actions has 5"),
        ("demo_0/next_obs/object", lambda a: a[:1], "data/demo_0/next_obs/object has 1 rows, but data/demo_0/actions has 5"),
        ("demo_1/obs/object", lambda a: a[:, :1], r"data/demo_1/obs/object has shape \(3, 1\), but data/demo_0/obs/object"),
        ("demo_1/obs/object", lambda a: a[:, 0], r"data/demo_1/obs/object has shape \(3,\)"),
        ("demo_1/actions", lambda a: a[:, :1], r"data/demo_1/actions has shape \(3, 1\), but data/demo_0/actions"),
        ("demo_1/actions", lambda a: a[:0], "data/demo_1/actions has no row"),
        ("demo_0/actions", lambda a: np.float32(1), r"data/demo_0/actions has shape \(\)"),
        ("demo_1/actions", None, "lacks data/demo_1/actions"),
        ("demo_1/actions", lambda a: a.astype("S3"), "data/demo_1/actions must hold real numbers"),
        ("demo_1/obs", None, r"lacks \['obs/robot0_eef_pos'.*first without: data/demo_1"),
        ("mask", lambda a: np.zeros(3), "data/mask is no demonstration"),
    ],
)
def test_demonstrations_are_checked(name: str, value: Any, message: str, tmp_path: Path) -> None:
    location = demonstrations(tmp_path / "low_dim.hdf5", dataset_of(f"data/{name}", value))
    with pytest.raises(ValueError, match=message):
        OfflineDataset.load(location)
    assert len(OfflineDataset.load(demonstrations(tmp_path / "right.hdf5"))) == 8


# ---------------------------------------------------------------------------------------------------------------- minari


@pytest.fixture
def make_minari(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    import minari

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))

    def make(**kwargs: Any) -> Path:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            minari.create_dataset_from_buffers(
                "test/set-v0",
                minari_episodes(**kwargs),
                observation_space=spaces.Box(-np.inf, np.inf, (2,), np.float32),
                action_space=BOX,
            )
        return tmp_path / "minari/test/set-v0/data/main_data.hdf5"

    return make


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("terminations", lambda a: a[:1], r"episode 1: terminations has 1 rows for 4 steps"),
        ("terminations", lambda a: a.astype(float) + 2, "episode 1: terminations must hold bool or 0/1, got 2.0 in row 0"),
        ("terminations", lambda a: np.full(4, np.nan), "episode 1: terminations must hold bool or 0/1, got nan"),
        ("rewards", lambda a: np.zeros((4, 2)), r"episode 1: rewards must have shape \(N,\) or \(N, 1\), got \(4, 2\)"),
        ("rewards", lambda a: a[:1], "episode 1 .* rewards|episode 1: rewards has 1 rows"),
        ("actions", lambda a: a[:1], "episode 1: actions has 1 rows for 4 steps"),
        ("actions", lambda a: a[:, :1], r"episode 1: actions has shape \(4, 1\), \(4, 2\) expected"),
        ("observations", lambda a: a[:, :1], r"episode 1: observations has shape \(4, 1\), \(4, 2\) expected"),
        ("observations", lambda a: a[:-1], "episode 1: observations has 4 rows for 4 steps, 1 more expected"),
        ("observations", lambda a: a.astype("S3"), "episode 1: observations must hold real numbers"),
        ("infos/mask", lambda a: np.full(4, np.nan), "episode 1: mask must hold bool or 0/1, got nan"),
        ("infos/mask", lambda a: np.ones(1), "episode 1: mask has 1 rows for 4 steps"),
        ("infos/mask", lambda a: np.ones(6), "episode 1: mask has 6 rows for 4 steps"),
        ("rewards", None, "Minari"),
    ],
)
def test_minari_episodes_are_checked(name: str, value: Any, message: str, make_minari: Any) -> None:
    path = make_minari(mask_before=0 if "mask" in name else None)
    with h5py.File(path, "a") as file:
        dataset_of(f"episode_1/{name}", value)(file)
    with pytest.raises(ValueError, match=message):
        OfflineDataset.load("minari:test/set-v0")


def test_damaged_minari_metadata(make_minari: Any) -> None:
    path = make_minari()
    (path.parent / "metadata.json").write_text('{"total_episodes": "many"}')
    with pytest.raises(ValueError, match="is not a complete Minari"):
        OfflineDataset.load("minari:test/set-v0")


# --------------------------------------------------------------------------------------------------------------- ogbench


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("qpos", at((3, 0), np.nan), "qpos must be finite, got nan in row 3"),
        ("qpos", lambda a: a[:, :1], r"qpos has shape .*\(1,\) per row, .* has 2"),
        ("qpos", lambda a: a[:, 0], r"qpos has shape .*\(\) per row"),
        ("qpos", lambda a: a.astype("S3"), "qpos must hold real numbers"),
        ("qpos", at(3, [10.0, 0.0]), r"position \[10. +0.\] in row 3 .* wall.* of another maze"),
        ("qpos", at(3, [1e9, 0.0]), "of another maze"),
        ("terminals", at(3, 0.0), "no"),
    ],
)
def test_ogbench_files_are_checked(name: str, value: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "raw.npz"
    write_ogbench(path, "pointmaze-medium-singletask-task1-v0")
    arrays = dict(np.load(path))
    if name == "terminals":
        arrays[name] = arrays[name].astype(float) + np.nan
        message = "terminals must hold bool or 0/1, got nan"
    else:
        arrays[name] = value(arrays[name])
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=message):
        OfflineDataset.load(f"ogbench:{POINTMAZE}@{path}")


def test_a_file_of_another_maze(tmp_path: Path) -> None:
    path = tmp_path / "raw.npz"
    write_ogbench(path, "pointmaze-medium-singletask-task1-v0")
    with np.load(path) as file:
        arrays = dict(file)
    env = gym.make("pointmaze-medium-v0").unwrapped
    free = np.array([env.ij_to_xy(cell) for cell in np.argwhere(env.maze_map == 0)], np.float32)
    arrays["qpos"] = free[np.arange(len(arrays["qpos"])) % len(free)]
    np.savez(path, **arrays)
    assert len(OfflineDataset.load(f"ogbench:{POINTMAZE}@{path}")) == 13
    for other in ("large", "giant", "teleport"):
        with pytest.raises(ValueError, match=f"in a wall of pointmaze-{other}.* of another maze"):
            OfflineDataset.load(f"ogbench:{POINTMAZE.replace('medium', other)}@{path}")


def test_ogbench_button_states(tmp_path: Path) -> None:
    path = tmp_path / "raw.npz"
    write_ogbench(path, "puzzle-3x3-singletask-v0")
    with np.load(path) as file:
        arrays = dict(file)
    states = arrays["button_states"]
    for wrong, message in (
        (states + 1, "button_states must be 0 or 1, got"),
        (states[:, :1], r"button_states has shape .*\(1,\) per"),
    ):
        np.savez(path, **{**arrays, "button_states": wrong})
        with pytest.raises(ValueError, match=message):
            OfflineDataset.load(f"ogbench:puzzle-3x3-play-singletask-v0@{path}")


# ------------------------------------------------------------------------------------------------------------------- sb3


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change("actions", lambda a: np.repeat(a, 2, axis=2)), r"actions have shape \(9, 2, 4\), .*\(9, 2, 2\) expected"),
        (change("observations", lambda a: a[:, :, :1]), r"observations have shape \(9, 2, 1\)"),
        (change("rewards", lambda a: a[:, :1]), r"rewards have shape \(9, 1\)"),
        (change("dones", lambda a: a + 2), "dones must hold bool or 0/1"),
        (change("dones", lambda a: a * np.nan), "dones must hold bool or 0/1"),
        (change("timeouts", lambda a: a + 0.5), "timeouts must hold bool or 0/1"),
        (change("pos", 99), "pos"),
        (change("pos", -1), "pos"),
        (lambda state: state.pop("rewards"), "the replay buffer lacks 'rewards'"),
        (lambda state: state.pop("n_envs"), "the replay buffer lacks 'n_envs'"),
        (change("observation_space", None), "observation_space"),
    ],
)
def test_replay_buffers_are_checked(edit: Edit, message: str, tmp_path: Path) -> None:
    buffer, _ = fill_buffer([[(3, True), (4, False)]] * 2, 9, 7)
    edit(vars(buffer))
    with pytest.raises(ValueError, match=message):
        OfflineDataset.from_replay_buffer(buffer)
    (tmp_path / "buffer.pkl").write_bytes(pickle.dumps(buffer))
    with pytest.raises(ValueError, match=message):
        OfflineDataset.load(f"sb3:{tmp_path / 'buffer.pkl'}")


# --------------------------------------------------------------------------------------------------------- files as such


def test_one_array_and_a_dict_of_the_same_name(tmp_path: Path) -> None:
    arrays = make_arrays([3])
    np.savez(tmp_path / "data.npz", **arrays, **{"observations/camera": arrays["observations"]})
    with pytest.raises(ValueError, match="observations is given as one array and as observations/camera"):
        OfflineDataset.load(f"npz:{tmp_path / 'data.npz'}")


def test_an_array_header_that_lies(tmp_path: Path) -> None:
    arrays = make_arrays([3])
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)
    path.write_bytes(path.read_bytes().replace(b"(3, 2), }", b"(9, 2), }"))
    with pytest.raises(ValueError, match=r"is not a complete \.npz file"):
        OfflineDataset.load(f"npz:{path}")


def test_d4rl_terminals_of_a_wrong_kind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="terminals must hold bool or 0/1, got dtype"):
        OfflineDataset.load(f"d4rl:{h5_file(tmp_path / 'a.hdf5', d4rl_arrays(), terminals=np.array([b'no'] * 9))}")
    with pytest.raises(ValueError, match="lacks the arrays"):
        OfflineDataset.load(f"d4rl:{h5_file(tmp_path / 'b.hdf5', d4rl_arrays(), terminals=None)}")


def test_dict_observations_stay_right(tmp_path: Path) -> None:
    dataset = OfflineDataset.from_arrays(**dict_arrays())
    dataset.save(tmp_path / "data")
    assert_same(OfflineDataset.load(f"npz:{tmp_path / 'data'}"), dataset)
