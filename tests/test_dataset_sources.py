"""OfflineDataset.load: every source, what it takes for "done", damaged and missing files, conversion to mapped files."""

import pickle
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import minari
import numpy as np
import ogbench
import pytest
from gymnasium import spaces
from minari.data_collector import EpisodeBuffer
from stable_baselines3.common.buffers import ReplayBuffer
from test_dataset import assert_same, fill_buffer, make_arrays

import sb3_flow.data.columns
from sb3_flow.data import OfflineDataset

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:minari.*")

POINTMAZE = "pointmaze-medium-navigate-singletask-task1-v0"
LOCATIONS = ("ogbench", "minari", "d4rl", "sb3", "npz")


def write_ogbench(path: Path, env_name: str, lengths: tuple[int, ...] = (5, 1, 7), seed: int = 0) -> None:
    """A file in OGBench's layout: a row more than transitions for each episode, some rows at the goal of the task."""
    rng = np.random.default_rng(seed)
    env = gym.make(env_name).unwrapped
    env.reset()
    n = sum(lengths) + len(lengths)
    terminals = np.zeros(n, bool)
    terminals[np.cumsum(np.array(lengths) + 1) - 1] = True
    qpos = rng.standard_normal((n, env._model.nq if "maze" not in env_name else 2)).astype(np.float32)
    arrays: dict[str, np.ndarray] = {}
    if "maze" in env_name:
        qpos = qpos.clip(-2, 2)  # within the first cell
        qpos[1::3] = env.cur_goal_xy
    elif "cube" in env_name:
        qpos[1::3, 14:17] = env._data.mocap_pos[0]
    else:
        states = rng.integers(0, 2, (n, env._num_buttons))
        states[1::3] = env._target_button_states
        arrays["button_states"] = states
    shape = env.observation_space.shape
    arrays["observations"] = rng.standard_normal((n, *shape)).astype(np.float32)
    arrays["actions"] = rng.uniform(-1, 1, (n, *env.action_space.shape)).astype(np.float32)
    np.savez_compressed(path, terminals=terminals, qpos=qpos, qvel=qpos, **arrays)


def h5_file(path: Path, arrays: dict[str, Any], **changes: Any) -> Path:
    arrays = {**arrays, **changes}
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            if array is not None:
                file[name] = array
        file["metadata/algorithm"] = "none"
    return path


def d4rl_arrays() -> dict[str, np.ndarray]:
    arrays = make_arrays([3, 4, 2], [True, False, False])
    ends = arrays.pop("trajectory_ends")
    arrays["terminals"] = arrays.pop("terminated")
    arrays["timeouts"] = ends & ~arrays["terminals"]
    return arrays


def minari_episodes(mask_before: int | None = None, as_dict: bool = False) -> list[EpisodeBuffer]:
    arrays = make_arrays([3, 4], [True, False])
    episodes = []
    for first, last in ((0, 2), (3, 6)):
        rows = slice(first, last + 1)
        observations: Any = np.concatenate([arrays["observations"][rows], arrays["next_observations"][last : last + 1]])
        if as_dict:
            observations = {"x": observations, "y": observations[:, :1] * 2}
        terminations = arrays["terminated"][rows]
        truncations = np.zeros(last + 1 - first, bool)
        truncations[-1] = not terminations[-1]
        episodes.append(
            EpisodeBuffer(
                id=len(episodes),
                observations=observations,
                actions=arrays["actions"][rows],
                rewards=arrays["rewards"][rows],
                terminations=terminations,
                truncations=truncations,
                infos=None
                if mask_before is None
                else {"mask": np.array([1.0] * mask_before + [0.0] + [1.0] * (last - first))},
            )
        )
    return episodes


@pytest.fixture
def make_minari(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))

    def make(name: str = "test/set-v0", **kwargs: Any) -> minari.MinariDataset:
        box = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        space = spaces.Dict({"x": box, "y": spaces.Box(-np.inf, np.inf, (1,))}) if kwargs.get("as_dict") else box
        return minari.create_dataset_from_buffers(
            name,
            minari_episodes(**kwargs),
            observation_space=space,
            action_space=spaces.Box(-1, 1, (2,), np.float32),
            algorithm_name="none",
            author="none",
            author_email="none",
            code_permalink="none",
            description="none",
        )

    return make


@pytest.fixture
def location(request: pytest.FixtureRequest, tmp_path: Path, make_minari: Any) -> str:
    """A small dataset of the source that the test asks for."""
    if request.param == "ogbench":
        write_ogbench(tmp_path / "raw.npz", "pointmaze-medium-singletask-task1-v0")
        return f"ogbench:{POINTMAZE}@{tmp_path / 'raw.npz'}"
    if request.param == "minari":
        make_minari()
        return "minari:test/set-v0"
    if request.param == "d4rl":
        return f"d4rl:{h5_file(tmp_path / 'data.hdf5', d4rl_arrays())}"
    if request.param == "sb3":
        buffer, _ = fill_buffer([[(3, True), (4, False)]] * 2, 9, 12)
        (tmp_path / "buffer.pkl").write_bytes(pickle.dumps(buffer))
        return f"sb3:{tmp_path / 'buffer.pkl'}"
    np.savez(tmp_path / "data.npz", **make_arrays([3, 4], [True, False]))
    return f"npz:{tmp_path / 'data.npz'}"


# --------------------------------------------------------------------------------------------------------------- ogbench


@pytest.mark.parametrize(
    ("name", "lengths", "block_bytes"),
    [
        (POINTMAZE, (5, 1, 7), 1 << 24),
        ("pointmaze-medium-navigate-singletask-v0", (30,), 50),
        ("cube-single-play-singletask-task2-v0", (4, 6), 1 << 24),
        ("puzzle-3x3-play-singletask-v0", (4, 6), 800),
    ],
)
def test_ogbench_is_what_ogbench_loads(
    name: str, lengths: tuple[int, ...], block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sb3_flow.data.columns, "BLOCK_BYTES", block_bytes)
    path = tmp_path / "raw.npz"
    words = name.split("-")
    at = words.index("singletask")
    env_name = "-".join(words[: at - 1] + words[at:])
    write_ogbench(path, env_name, lengths)
    write_ogbench(tmp_path / "raw-val.npz", env_name, (2,), seed=1)
    env, expected, _ = ogbench.make_env_and_datasets(name, dataset_path=str(path))
    random_state = np.random.get_state()[1].copy()
    dataset = OfflineDataset.load(f"ogbench:{name}@{path}")
    np.testing.assert_array_equal(np.random.get_state()[1], random_state)
    np.testing.assert_array_equal(dataset.observations, expected["observations"])
    np.testing.assert_array_equal(dataset.actions, expected["actions"])
    np.testing.assert_array_equal(dataset.rewards, expected["rewards"])
    np.testing.assert_array_equal(dataset.next_observations, expected["next_observations"])
    np.testing.assert_array_equal(dataset.terminated, expected["masks"] == 0)
    np.testing.assert_array_equal(dataset.trajectory_ends, expected["terminals"] == 1)
    assert dataset.observations.dtype == expected["observations"].dtype == np.float32
    assert dataset.terminated.any() and not dataset.terminated.all()
    assert dataset.terminated[~dataset.trajectory_ends].any()  # the trajectory runs on
    assert dataset.observation_space == env.observation_space and dataset.action_space == env.action_space
    assert [last + 1 - first for first, last in dataset.trajectories] == list(lengths)
    dataset.check_spaces(env.observation_space, env.action_space)


def test_ogbench_episodes_without_transition(tmp_path: Path) -> None:
    write_ogbench(tmp_path / "raw.npz", "pointmaze-medium-singletask-task1-v0", (0, 3, 0, 0, 2))
    dataset = OfflineDataset.load(f"ogbench:{POINTMAZE}@{tmp_path / 'raw.npz'}")
    raw = np.load(tmp_path / "raw.npz")["observations"]
    assert dataset.trajectories.tolist() == [[0, 2], [3, 4]]
    np.testing.assert_array_equal(dataset.next_observations, raw[[2, 3, 4, 8, 9]])
    write_ogbench(tmp_path / "raw.npz", "pointmaze-medium-singletask-task1-v0", (0, 0))
    with pytest.raises(ValueError, match="holds no transition"):
        OfflineDataset.load(f"ogbench:{POINTMAZE}@{tmp_path / 'raw.npz'}")


def test_ogbench_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(
        FileNotFoundError, match=r"pointmaze-medium-navigate-v0.npz. Make the file with 'python -m sb3_flow.data.gen"
    ):
        OfflineDataset.load(f"ogbench:{POINTMAZE}")
    (tmp_path / ".ogbench" / "data").mkdir(parents=True)
    write_ogbench(tmp_path / ".ogbench/data/pointmaze-medium-navigate-v0.npz", "pointmaze-medium-singletask-task1-v0")
    assert len(OfflineDataset.load(f"ogbench:{POINTMAZE}")) == 13


def test_ogbench_errors(tmp_path: Path) -> None:
    path = tmp_path / "raw.npz"
    write_ogbench(path, "pointmaze-medium-singletask-task1-v0")
    for where in (path, "pointmaze-medium-navigate-v0", f"pointmaze-medium-navigate-v0@{path}"):
        with pytest.raises(ValueError, match="names no single task, and rewards are computed for single tasks"):
            OfflineDataset.load(f"ogbench:{where}")
    with pytest.raises(ValueError, match="OGBench has no environment pointmaze-tiny-singletask-v0"):
        OfflineDataset.load(f"ogbench:pointmaze-tiny-navigate-singletask-v0@{path}")
    with pytest.raises(
        ValueError, match=r"shape \(2,\), cube-single-singletask-v0 has \(28,\): the file is of another dataset"
    ):
        OfflineDataset.load(f"ogbench:cube-single-play-singletask-v0@{path}")
    with pytest.raises(ValueError, match=r"lacks the arrays \['button_states'\]; it has \['actions', 'observations', 'qpos'"):
        OfflineDataset.load(f"ogbench:puzzle-3x3-play-singletask-v0@{path}")


# ---------------------------------------------------------------------------------------------------------------- minari


def test_minari(make_minari: Any) -> None:
    made = make_minari()
    dataset = OfflineDataset.load("minari:test/set-v0")
    assert_same(dataset, OfflineDataset.from_minari(made))
    arrays = make_arrays([3, 4], [True, False])
    assert_same(dataset, OfflineDataset.from_arrays(**arrays, action_space=made.action_space))
    np.testing.assert_array_equal(dataset.next_observations, arrays["next_observations"])
    assert dataset.terminated.tolist() == [False, False, True, False, False, False, False]
    assert dataset.trajectories.tolist() == [[0, 2], [3, 6]]
    part = OfflineDataset.from_minari(made.filter_episodes(lambda episode: episode.id == 1))
    np.testing.assert_array_equal(part.observations, arrays["observations"][3:])


@pytest.mark.parametrize("mask_before", [0, 1])  # infos that DataCollector recorded start with that of reset()
def test_minari_mask_goes_before_terminations(mask_before: int, make_minari: Any) -> None:
    make_minari(mask_before=mask_before)
    dataset = OfflineDataset.load("minari:test/set-v0")
    assert dataset.terminated.tolist() == [True, False, False, True, False, False, False]
    assert dataset.trajectories.tolist() == [[0, 2], [3, 6]]


def test_minari_dict_observations(make_minari: Any) -> None:
    make_minari(as_dict=True)
    dataset = OfflineDataset.load("minari:test/set-v0")
    arrays = make_arrays([3, 4], [True, False])
    assert isinstance(dataset.next_observations, dict)
    np.testing.assert_array_equal(dataset.next_observations["x"], arrays["next_observations"])
    np.testing.assert_array_equal(dataset.observations["y"], arrays["observations"][:, :1] * 2)


def test_minari_names(make_minari: Any) -> None:
    """An id without version or namespace, or with a slip, is answered with the id that may be meant."""
    for name in ("test/set-v0", "test/set-v10", "test/set-v2"):
        made = make_minari(name)
    for where in ("test/set", "set-v10", "test/sets-v10"):
        with pytest.raises(FileNotFoundError, match="Perhaps 'minari:test/set-v10'"):
            OfflineDataset.load(f"minari:{where}")
    with pytest.raises(TypeError, match=r"must be a minari.MinariDataset, but a str was given; OfflineDataset.load\("):
        OfflineDataset.from_minari(made.id)


def test_minari_errors(make_minari: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Nothing is downloaded here; to get it: minari download test/none-v0"):
        OfflineDataset.load("minari:test/none-v0")
    made = make_minari()
    made._observation_space = spaces.Dict({"a": spaces.Dict({"b": spaces.Box(-1, 1, (1,))})})
    with pytest.raises(
        ValueError, match="observations must be an array or a flat dict of arrays, nested or tuple space given"
    ):
        OfflineDataset.from_minari(made)
    made._action_space = spaces.Discrete(2)
    made._observation_space = spaces.Box(-1, 1, (2,))
    with pytest.raises(ValueError, match="continuous actions"):
        OfflineDataset.from_minari(made)
    file = tmp_path / "minari/test/set-v0/data/main_data.hdf5"
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ValueError, match="is not a complete Minari file"):
        OfflineDataset.load("minari:test/set-v0")


# ------------------------------------------------------------------------------------------------------------------ d4rl


def test_d4rl(tmp_path: Path) -> None:
    arrays = d4rl_arrays()
    expected = OfflineDataset.from_arrays(**make_arrays([3, 4, 2], [True, False, False]))
    assert_same(OfflineDataset.load(f"d4rl:{h5_file(tmp_path / 'a.hdf5', arrays)}"), expected)
    # the trajectories can also be told from the next observations
    assert_same(OfflineDataset.load(f"d4rl:{h5_file(tmp_path / 'b.hdf5', arrays, timeouts=None)}"), expected)
    dataset = OfflineDataset.load(f"d4rl:{h5_file(tmp_path / 'c.hdf5', arrays, next_observations=None)}")
    assert dataset.trajectories.tolist() == [[0, 2], [3, 5], [6, 6]]  # truncated rows are left out
    np.testing.assert_array_equal(dataset.observations, arrays["observations"][[0, 1, 2, 3, 4, 5, 7]])
    np.testing.assert_array_equal(dataset.final_observations[1:], arrays["observations"][[6, 8]])
    assert dataset.terminated.tolist() == [False, False, True, False, False, False, False]


def test_d4rl_errors(tmp_path: Path) -> None:
    path = tmp_path / "data.hdf5"
    h5_file(path, d4rl_arrays(), timeouts=None, next_observations=None)
    with pytest.raises(ValueError, match="neither timeouts nor next_observations, so nothing says where its trajectories end"):
        OfflineDataset.load(f"d4rl:{path}")
    h5_file(path, d4rl_arrays(), rewards=None)
    with pytest.raises(ValueError, match=r"lacks the arrays \['rewards'\]"):
        OfflineDataset.load(f"d4rl:{path}")
    h5_file(path, d4rl_arrays(), timeouts=np.zeros(3))
    with pytest.raises(ValueError, match="timeouts has 3 rows but"):
        OfflineDataset.load(f"d4rl:{path}")
    h5_file(path, d4rl_arrays(), actions=np.zeros((9, 1), int))
    with pytest.raises(ValueError, match="actions have dtype int64: flow policies need continuous"):
        OfflineDataset.load(f"d4rl:{path}")
    h5_file(path, d4rl_arrays(), actions=np.full((9, 2), 1.5))
    with pytest.raises(ValueError, match="action_space is needed") as caught:
        OfflineDataset.load(f"d4rl:{path}")
    assert caught.value.__notes__ == [f"while loading 'd4rl:{path}'"]
    dataset = OfflineDataset.load(f"d4rl:{path}", action_space=spaces.Box(-2, 2, (2,)))
    assert dataset.action_space == spaces.Box(-2, 2, (2,)) and (dataset.actions == 1.5).all()


# ------------------------------------------------------------------------------------------------------------------- sb3


def test_sb3_file(tmp_path: Path) -> None:
    buffer, _ = fill_buffer([[(3, True), (4, False)]] * 2, 9, 12, as_dict=True)
    (tmp_path / "buffer.pkl").write_bytes(pickle.dumps(buffer))
    dataset = OfflineDataset.load(f"sb3:{tmp_path / 'buffer.pkl'}")
    assert_same(dataset, OfflineDataset.from_replay_buffer(buffer))
    assert dataset.n_trajectories == 6 and dataset.terminated.sum() == 2
    assert dataset.actions.max() > 1  # not scaled
    (tmp_path / "other.pkl").write_bytes(pickle.dumps([1]))
    with pytest.raises(TypeError, match="a ReplayBuffer of Stable-Baselines3 is needed, got list"):
        OfflineDataset.load(f"sb3:{tmp_path / 'other.pkl'}")
    (tmp_path / "text.pkl").write_text("no pickle")
    with pytest.raises(ValueError, match="is not a complete pickle file"):
        OfflineDataset.load(f"sb3:{tmp_path / 'text.pkl'}")


# ------------------------------------------------------------------------------------------------------------------- npz


@pytest.mark.parametrize("order", ["C", "F"])
def test_npz(order: Any, tmp_path: Path) -> None:
    arrays = make_arrays([3, 4, 1], [True, False, True])
    wide = {name: np.asarray(array, np.float64, order=order) for name, array in arrays.items()}
    np.savez_compressed(tmp_path / "data.npz", **wide, note=np.array("text"))
    dataset = OfflineDataset.load(f"npz:{tmp_path / 'data.npz'}")
    assert_same(dataset, OfflineDataset.from_arrays(**arrays))
    np.testing.assert_array_equal(dataset.next_observations, arrays["next_observations"])
    del arrays["next_observations"]
    np.savez(tmp_path / "short.npz", **arrays)
    assert_same(OfflineDataset.load(f"npz:{tmp_path / 'short.npz'}"), OfflineDataset.from_arrays(**arrays))


def test_npz_dict_observations(tmp_path: Path) -> None:
    arrays: dict[str, Any] = make_arrays([3, 4], [True, False])
    flat = {key: array for key, array in arrays.items() if "observations" not in key}
    for name in ("observations", "next_observations"):
        flat[f"{name}/a"], flat[f"{name}/b"] = arrays[name], (arrays[name] * 20).astype(np.uint8)
        arrays[name] = {"a": flat[f"{name}/a"], "b": flat[f"{name}/b"]}
    np.savez(tmp_path / "data.npz", **flat)
    assert_same(OfflineDataset.load(f"npz:{tmp_path / 'data.npz'}"), OfflineDataset.from_arrays(**arrays))


def test_npz_errors(tmp_path: Path) -> None:
    arrays: dict[str, Any] = make_arrays([3])
    del arrays["rewards"], arrays["terminated"]
    np.savez(tmp_path / "data.npz", **arrays, objects=np.array([{}]))
    with pytest.raises(ValueError, match=r"lacks the arrays \['rewards', 'terminated'\]; it has \['actions', 'next_obs"):
        OfflineDataset.load(f"npz:{tmp_path / 'data.npz'}")


# ----------------------------------------------------------------------------------------------- what all have in common


def test_unknown_prefix() -> None:
    for bad in ("hdf5:x", "data.npz", "", "Minari:x"):
        with pytest.raises(ValueError, match="must start with one of ogbench:, minari:, d4rl:, sb3:, npz:"):
            OfflineDataset.load(bad)
    with pytest.raises(TypeError, match="location must be a string 'prefix:where', got PosixPath"):
        OfflineDataset.load(Path("npz:x"))


@pytest.mark.parametrize("prefix", ["npz", "d4rl", "sb3", f"ogbench:{POINTMAZE}@"])
def test_missing_file(prefix: str, tmp_path: Path) -> None:
    where = f"{prefix}{'' if '@' in prefix else ':'}{tmp_path / 'none.npz'}"
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none\.npz"):
        OfflineDataset.load(where)


@pytest.mark.parametrize("location", ["ogbench", "d4rl", "sb3", "npz"], indirect=True)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.95])
def test_truncated_file(location: str, share: float) -> None:
    path = Path(location.partition(":")[2].rpartition("@")[2])
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ValueError, match=r"is not a complete \S+ file \(truncated or corrupt\)"):
        OfflineDataset.load(location)


@pytest.mark.parametrize("location", ["npz"], indirect=True)
def test_corrupt_npz_members(location: str) -> None:
    path = Path(location.removeprefix("npz:"))
    good = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        header = archive.getinfo("observations.npy").header_offset
    for at in (header + 80, header + 60 + 128 + 20):  # in the array's header, in its data
        path.write_bytes(good[:at] + bytes(byte ^ 0xFF for byte in good[at : at + 8]) + good[at + 8 :])
        with pytest.raises(ValueError, match=r"is not a complete .npz file \(truncated or corrupt\)"):
            OfflineDataset.load(location)


@pytest.mark.parametrize(
    ("location", "package"), [("ogbench", "ogbench"), ("minari", "minari"), ("d4rl", "h5py")], indirect=["location"]
)
def test_missing_extra(location: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    prefix = location.partition(":")[0]
    with pytest.raises(ImportError, match=rf"'{prefix}:...' needs the package {package}: pip install 'sb3-flow\[{prefix}\]'"):
        OfflineDataset.load(location)


def test_optional_packages_are_not_imported() -> None:
    code = "import sys, sb3_flow.data; print([name for name in ('h5py', 'minari', 'ogbench') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# -------------------------------------------------------------------------------------------------------------- mmap_dir


@pytest.mark.parametrize("location", LOCATIONS, indirect=True)
@pytest.mark.parametrize("block_bytes", [30, 1 << 24])
def test_mapped_equals_in_memory(location: str, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = OfflineDataset.load(location)
    monkeypatch.setattr(sb3_flow.data.columns, "BLOCK_BYTES", block_bytes)
    mapped = OfflineDataset.load(location, mmap_dir=tmp_path / "mapped")
    assert_same(mapped, expected)
    for name in ("observations", "actions", "rewards", "terminated", "trajectory_ends", "final_observations"):
        assert isinstance(getattr(mapped, name), np.memmap)
        assert not getattr(mapped, name).flags.writeable
    made = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "mapped").iterdir()}
    assert_same(OfflineDataset.load(location, mmap_dir=tmp_path / "mapped"), expected)
    assert made == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "mapped").iterdir()}  # opened, not made again
    assert_same(OfflineDataset.load(f"npz:{tmp_path / 'mapped'}"), expected)
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


@pytest.mark.parametrize("location", ["npz"], indirect=True)
def test_conversion_follows_its_source(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "mapped"
    OfflineDataset.load(location, mmap_dir=folder)
    np.savez(location.removeprefix("npz:"), **make_arrays([2, 2]))
    assert OfflineDataset.load(location, mmap_dir=folder).trajectories.tolist() == [[0, 1], [2, 3]]
    wide = spaces.Box(-3, 3, (2,), np.float32)
    assert OfflineDataset.load(location, mmap_dir=folder, action_space=wide).action_space == wide
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.npz", "mapped"]


@pytest.mark.parametrize("location", ["npz"], indirect=True)
def test_foreign_folders_are_left_alone(location: str, tmp_path: Path) -> None:
    OfflineDataset.from_arrays(**make_arrays([2])).save(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"mmap_dir .*saved holds another dataset, arrays"):
        OfflineDataset.load(location, mmap_dir=tmp_path / "saved")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    for bad in ("mine", "data.npz"):
        with pytest.raises(ValueError, match="exists and is not a dataset folder"):
            OfflineDataset.load(location, mmap_dir=tmp_path / bad)
    (tmp_path / "empty").mkdir()
    assert len(OfflineDataset.load(location, mmap_dir=tmp_path / "empty")) == 7


@pytest.mark.parametrize("location", ["npz"], indirect=True)
def test_a_failed_conversion_leaves_nothing(location: str, tmp_path: Path) -> None:
    path = Path(location.removeprefix("npz:"))
    arrays = make_arrays([3])
    arrays["rewards"][1] = np.nan
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match="rewards must be finite"):
        OfflineDataset.load(location, mmap_dir=tmp_path / "mapped")
    assert [entry.name for entry in tmp_path.iterdir()] == ["data.npz"]


@pytest.mark.parametrize("location", ["npz"], indirect=True)
def test_a_killed_conversion_is_not_taken_for_a_good_one(location: str, tmp_path: Path) -> None:
    code = f"""
        import os, sb3_flow.data.storage as storage
        from sb3_flow.data import OfflineDataset
        storage.json.dumps = lambda *args, **kwargs: os._exit(9)  # all arrays are written, the index is not
        OfflineDataset.load({location!r}, mmap_dir={str(tmp_path / "mapped")!r})
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)]).returncode == 9
    (left,) = (path for path in tmp_path.iterdir() if path.name.startswith(".mapped.partial-"))
    assert not (tmp_path / "mapped").exists()
    with pytest.raises(ValueError, match="is not a folder written by"):
        OfflineDataset.load(f"npz:{left}")
    assert_same(OfflineDataset.load(location, mmap_dir=tmp_path / "mapped"), OfflineDataset.load(location))


@pytest.mark.parametrize("location", ["npz"], indirect=True)
def test_too_little_disk(location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = sb3_flow.data.storage.shutil._ntuple_diskusage(100, 90, 10)
    monkeypatch.setattr(sb3_flow.data.storage.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"observations needs 0.0 GB in .* where 0.0 GB are free"):
        OfflineDataset.load(location, mmap_dir=tmp_path / "mapped")
    assert [entry.name for entry in tmp_path.iterdir()] == ["data.npz"]


def test_mapped_actions_are_clipped_in_the_file(tmp_path: Path) -> None:
    arrays = make_arrays([3])
    arrays["actions"][1, 0] = 2.0003
    np.savez(tmp_path / "data.npz", **arrays)
    space = spaces.Box(-2, 2, (2,), np.float32)
    mapped = OfflineDataset.load(f"npz:{tmp_path / 'data.npz'}", mmap_dir=tmp_path / "mapped", action_space=space)
    assert mapped.actions[1, 0] == 2.0


def test_pickles_of_other_buffers_without_timeouts(tmp_path: Path) -> None:
    buffer = ReplayBuffer(4, spaces.Box(-9, 9, (1,)), spaces.Box(-1, 1, (1,)), "cpu", handle_timeout_termination=False)
    for step in range(3):
        done = np.array([step == 1])
        infos = [{"TimeLimit.truncated": True}]
        buffer.add(np.array([[step]]), np.array([[step + 1]]), np.zeros((1, 1)), np.zeros(1), done, infos)
    (tmp_path / "buffer.pkl").write_bytes(pickle.dumps(buffer))
    dataset = OfflineDataset.load(f"sb3:{tmp_path / 'buffer.pkl'}")
    assert dataset.terminated.tolist() == [False, True, False]
