"""Folders of .npz files as one dataset: in memory, mapped, and files that take turns while a model trains."""

import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from tasks import PointEnv
from test_dataset import assert_same, make_arrays
from test_dataset_sources import POINTMAZE, write_ogbench

from sb3_flow import RQL, FlowMapPolicy
from sb3_flow.data import OfflineDataset, TrajectoryReplayBuffer
from sb3_flow.data.columns import Allocate, Parts
from sb3_flow.data.shards import Rotation
from sb3_flow.data.storage import write_folder

ROW_BYTES = 4 * 2 + 4 * 2 + 4 + 2
SMALL: dict[str, Any] = {
    "n_critics": 2,
    "flow_steps": 2,
    "batch_size": 4,
    "buffer_size": 50,
    "policy_kwargs": {"net_arch": [4]},
}
files_of_rows = st.lists(st.lists(st.tuples(st.integers(2, 5), st.booleans()), min_size=1, max_size=3), min_size=1, max_size=4)


def write_files(folder: Path, n_files: int = 5, **changes: Any) -> list[dict[str, np.ndarray]]:
    """Files of 2 trajectories and 7 rows each; observations tell the file."""
    folder.mkdir(exist_ok=True)
    written = []
    for number in range(n_files):
        arrays = make_arrays([3, 4], [True, False], seed=number)
        arrays["observations"][:, 0] = arrays["next_observations"][:, 0] = number
        np.savez(folder / f"set-{number:03}.npz", **arrays, **changes)
        written.append(arrays)
    np.savez(folder / "set-000-val.npz", other=np.zeros(3))
    return written


def joined(files: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([arrays[name] for arrays in files]) for name in files[0]}


def rotating(folder: Path, files_per_turn: int = 2, steps_per_file: int = 3, **options: Any) -> OfflineDataset:
    max_memory = 2 * files_per_turn * 7 * ROW_BYTES
    return OfflineDataset.load(f"npz:{folder}", max_memory=max_memory, steps_per_file=steps_per_file, **options)


def present(model: Any) -> list[int]:
    """:return: the files in the replay buffer"""
    return sorted(set(model.replay_buffer.offline_dataset.observations[:, 0].astype(int).tolist()))


# ---------------------------------------------------------------------------------------------------------------- all files


@given(files_of_rows, st.booleans(), st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_folder_is_its_files_one_after_another(
    tmp_path_factory: pytest.TempPathFactory, layout: list[list[tuple[int, bool]]], successors: bool, last_end: bool
) -> None:
    folder, files = tmp_path_factory.mktemp("files"), []
    for number, trajectories in enumerate(layout):
        arrays = make_arrays([length for length, _ in trajectories], [end for _, end in trajectories], number)
        arrays["trajectory_ends"][-1] = last_end  # a file ends a trajectory, whatever its last flag says
        if not successors:
            del arrays["next_observations"]
        np.savez(folder / f"{number}.npz", **arrays)
        files.append(arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = OfflineDataset.load(f"npz:{folder}")
        mapped = OfflineDataset.load(f"npz:{folder}", mmap_dir=folder / "mapped")
        for arrays in files:
            arrays["trajectory_ends"][-1] = True
        assert_same(found, OfflineDataset.from_arrays(**joined(files)))
    assert found.rotation is None
    assert_same(mapped, found)
    assert isinstance(mapped.observations, np.memmap)


def write_ogbench_files(folder: Path, task: str, lengths: list[tuple[int, ...]]) -> list[OfflineDataset]:
    """:return: the dataset of each file"""
    env_name = "-".join(part for part in task.split("-") if part not in ("navigate", "play", "sparse"))
    folder.mkdir()
    for number, of_file in enumerate(lengths):
        write_ogbench(folder / f"set-{number}.npz", env_name, of_file, number)
    return [OfflineDataset.load(f"ogbench:{task}@{path}") for path in sorted(folder.iterdir())]


def assert_joined(dataset: OfflineDataset, parts: list[OfflineDataset]) -> None:
    for name in ("observations", "actions", "rewards", "terminated", "trajectory_ends", "final_observations"):
        np.testing.assert_array_equal(getattr(dataset, name), np.concatenate([getattr(part, name) for part in parts]))
    assert dataset.terminated.any()
    assert (dataset.observation_space, dataset.action_space) == (parts[0].observation_space, parts[0].action_space)


def test_ogbench_labels_each_file(tmp_path: Path) -> None:
    parts = write_ogbench_files(tmp_path / "set-100m-v0", POINTMAZE, [(5, 1, 7), (8, 3), (6, 6)])
    location = f"ogbench:{POINTMAZE}@{tmp_path / 'set-100m-v0'}"
    found = OfflineDataset.load(location)
    assert_joined(found, parts)
    assert_same(OfflineDataset.load(location, mmap_dir=tmp_path / "mapped"), found)
    row_bytes = 4 * found.observations.shape[1] + 4 * found.actions.shape[1] + 6
    turns = OfflineDataset.load(location, max_memory=2 * 16 * row_bytes)  # with a row more than transitions in each episode
    assert turns.rotation is not None and str(turns.rotation) == "files 1 to 1 of 3"
    assert_same(turns, parts[0])
    assert_same(OfflineDataset.of_turn(turns.rotation.after(2000), "third"), parts[2])


def test_ogbench_labels_each_file_by_its_buttons(tmp_path: Path) -> None:
    task = "puzzle-3x3-play-sparse-singletask-v0"
    parts = write_ogbench_files(tmp_path / "files", task, [(5, 1), (3,)])
    assert_joined(OfflineDataset.load(f"ogbench:{task}@{tmp_path / 'files'}"), parts)


# -------------------------------------------------------------------------------------------------------------------- turns


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 9))
def test_every_file_has_its_share_of_gradient_steps(n_files: int, files_per_turn: int, steps_per_file: int) -> None:
    read: list[Path] = []
    files = [Path(str(number)) for number in range(n_files)]
    now = Rotation(files, [], files_per_turn, steps_per_file, read.extend)
    shares = dict.fromkeys(files, 0.0)
    for step in range(2 * n_files * steps_per_file):
        now = now.after(step) or now
        assert now.after(step) is None
        read.clear()
        now.read(now.files[now._present])
        assert 1 <= len(read) <= files_per_turn
        for path in read:
            shares[path] += 1 / len(read)
    assert list(shares.values()) == pytest.approx([2 * steps_per_file] * n_files)


def test_a_model_trains_on_the_files_in_turn(tmp_path: Path) -> None:
    files = write_files(tmp_path / "files")
    dataset = rotating(tmp_path / "files", action_space=PointEnv().action_space)
    assert_same(dataset, OfflineDataset.from_arrays(**joined(files[:2]), action_space=PointEnv().action_space))
    assert "files 1 to 2 of 5" in repr(dataset) and "files 1 to 2 of 5" in dataset.summary()
    model = RQL("MlpPolicy", PointEnv(), learning_starts=4, **SMALL)
    seen = []
    for _ in range(16):
        model.learn_offline(dataset, 1, log_interval=None)
        seen.append(present(model))
    assert seen == [[0, 1]] * 6 + [[2, 3]] * 6 + [[4]] * 3 + [[0, 1]]
    drawn = model.replay_buffer.sample(200).observations[:, 0].unique()
    assert drawn.tolist() == [0, 1]
    model.learn_offline(dataset, 6, log_interval=None)
    model.save(tmp_path / "model")
    model = RQL.load(tmp_path / "model", env=PointEnv(), offline_dataset=dataset)
    model.learn_offline(dataset, 1, log_interval=None)
    assert present(model) == [2, 3], "a loaded model goes on where it was"
    model.learn(10)
    assert present(model) == [4], "online gradient steps count as well"


def test_a_location_alone_trains(tmp_path: Path) -> None:
    write_files(tmp_path)
    model = RQL("MlpPolicy", None, offline_dataset=f"npz:{tmp_path}", **SMALL)
    model.learn_offline(f"npz:{tmp_path}", 2)
    assert present(model) == [0, 1, 2, 3, 4]


def test_behaviour_cloning_takes_turns(tmp_path: Path) -> None:
    write_files(tmp_path)
    dataset, read = rotating(tmp_path, steps_per_file=1), []
    policy = FlowMapPolicy(dataset.observation_space, dataset.action_space, lambda _: 1e-3, net_arch=[4])
    policy.learn_behaviour(
        dataset.changed_by(lambda part: read.append(part.observations[0, 0]) or part), gradient_steps=8, batch_size=2
    )
    assert read == [0, 2, 4, 0, 2]


def test_changes_reach_the_files_that_follow(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    dataset = rotating(tmp_path)
    for use in (lambda: dataset.replace(rewards=-dataset.rewards), lambda: dataset.save(tmp_path / "saved")):
        with pytest.raises(ValueError, match=r"would see files 1 to 2 of 5 of npz:.* alone, because the files take turns"):
            use()
    changed = dataset.sparse_rewards().changed_by(lambda part: part.replace(rewards=2 * part.rewards))
    assert set(changed.rewards.tolist()) == {-2.0} and changed.source.endswith("(sparse rewards)")
    later = OfflineDataset.of_turn(changed.rotation.after(6), changed.source)
    assert set(later.rewards.tolist()) == {-2.0} and later.observations[0, 0] == 2
    np.testing.assert_array_equal(later.actions, joined(files[2:4])["actions"])


def test_images_of_later_files_are_channels_first_too(tmp_path: Path) -> None:
    for number in range(3):
        arrays = make_arrays([5], [True])
        images = np.full((5, 36, 40, 3), number, np.uint8)
        np.savez(tmp_path / f"{number}.npz", **arrays | {"observations": images, "next_observations": images})
    dataset = OfflineDataset.load(f"npz:{tmp_path}", max_memory=2 * 5 * (36 * 40 * 3 + 14), steps_per_file=1)
    buffer = TrajectoryReplayBuffer(9, spaces.Box(0, 255, (3, 36, 40), np.uint8), dataset.action_space, "cpu")
    from sb3_flow.offline_to_online.spaces import channels_first

    buffer.set_offline(channels_first(dataset, buffer.observation_space))
    buffer.follow_rotation(2)
    observations = buffer.sample(3).observations
    assert observations.shape == (3, 3, 36, 40) and (observations == 2).all()


# ------------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict.fromkeys(["observations", "next_observations"], np.zeros((7, 3), np.float32)),
            r"observations has dtype float32 and shape \(3,\) .*set-003.npz, but .*",
        ),
        ({"actions": np.zeros((7, 2))}, r"actions has dtype float64 .*set-003.npz, but float32 .*set-000.npz: .* different"),
        ({"next_observations": None}, r"set-003.npz holds the arrays .*set-000.npz holds"),
        ({"rewards": None}, r"set-003.npz lacks the arrays \['rewards'\]"),
        ({"rewards": np.zeros(6, np.float32)}, r"set-003.npz: rewards has 6 rows"),
        ({"rewards": np.full(7, np.nan, np.float32)}, r"set-003.npz: rewards must be finite, 7 values .* first in row 0"),
        ({"actions": np.full((7, 2), 3, np.float32)}, r"set-003.npz: action_space is needed: actions are not all in"),
    ],
)
def test_files_that_do_not_fit_together(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    arrays = write_files(tmp_path / "files")[3] | change
    np.savez(tmp_path / "files" / "set-003.npz", **{name: array for name, array in arrays.items() if array is not None})
    for options in ({}, {"mmap_dir": tmp_path / "mapped"}):
        with pytest.raises(ValueError, match=message):
            OfflineDataset.load(f"npz:{tmp_path / 'files'}", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["files"]
    if not re.search("finite|action_space", message):
        with pytest.raises(ValueError, match=message):
            rotating(tmp_path / "files")


def test_wrong_values_in_a_later_turn(tmp_path: Path) -> None:
    arrays = write_files(tmp_path)[3]
    np.savez(tmp_path / "set-003.npz", **arrays | {"actions": 2 * np.ones((7, 2), np.float32)})
    dataset = rotating(tmp_path)
    with pytest.raises(ValueError, match=r"set-003.npz: actions must lie in the action space \(low \[-1. -1.\]"):
        OfflineDataset.of_turn(dataset.rotation.after(6), "later")


def test_files_that_change_while_a_model_trains(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    dataset = rotating(tmp_path)
    model = RQL("MlpPolicy", None, offline_dataset=dataset, **SMALL)
    last = tmp_path / "set-003.npz"
    content = last.read_bytes()
    np.savez(last, **files[3] | {"rewards": np.zeros(7)})
    with pytest.raises(ValueError, match=r"set-003.npz has changed since the dataset was opened"):
        model.learn_offline(dataset, 7, log_interval=None)
    last.unlink()
    with pytest.raises(FileNotFoundError, match=r"set-003.npz"):
        model.learn_offline(dataset, 1, log_interval=None)
    assert model._n_updates == 6
    last.write_bytes(content[:-30])
    with pytest.raises(ValueError, match=r"set-003.npz is not a complete .npz file"):
        OfflineDataset.load(f"npz:{tmp_path}")
    last.write_bytes(content)
    model.learn_offline(rotating(tmp_path), 1, log_interval=None)
    assert present(model) == [2, 3]


def test_missing_files_are_named(tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "set-001.npz").unlink()
    (tmp_path / "set-002.npz").unlink()
    with pytest.warns(UserWarning, match=f"files of the numbers 001, 002 are missing in {tmp_path}"):
        assert len(OfflineDataset.load(f"npz:{tmp_path}")) == 3 * 7
    (tmp_path / "set-001.npz").symlink_to(tmp_path / "nothing")
    (tmp_path / "set-002.npz").symlink_to(tmp_path / "set-003.npz")
    with pytest.raises(FileNotFoundError, match=r"set-001.npz"):
        OfflineDataset.load(f"npz:{tmp_path}")


def test_copies_and_pickles_go_on_taking_turns(tmp_path: Path) -> None:
    write_files(tmp_path)
    dataset = rotating(tmp_path)
    other = pickle.loads(pickle.dumps(dataset))
    assert_same(other, dataset)
    assert_same(OfflineDataset.of_turn(other.rotation.after(6), ""), OfflineDataset.of_turn(dataset.rotation.after(6), ""))


def test_folders_without_files_and_limits(tmp_path: Path) -> None:
    np.savez(tmp_path / "set-val.npz", observations=np.zeros(3))
    with pytest.raises(ValueError, match=r"is not a folder written by OfflineDataset.save .*, and holds no .npz file"):
        OfflineDataset.load(f"npz:{tmp_path}")
    with pytest.raises(ValueError, match=r"'ogbench:.*': the folder .* holds no .npz file"):
        OfflineDataset.load(f"ogbench:{POINTMAZE}@{tmp_path}")
    write_files(tmp_path)
    with pytest.raises(ValueError, match=rf"; perhaps 'npz:{tmp_path}'"):
        OfflineDataset.load(str(tmp_path))
    with pytest.raises(ValueError, match=r"`max_memory=300` is too little.*set-000.npz alone needs 154 bytes.*at least 308"):
        OfflineDataset.load(f"npz:{tmp_path}", max_memory=300)
    for name, value in (("max_memory", 0), ("max_memory", "2GB"), ("steps_per_file", 0), ("steps_per_file", 1.5)):
        with pytest.raises(ValueError, match=rf"`{name}` must be"):
            OfflineDataset.load(f"npz:{tmp_path}", **{name: value})


# ------------------------------------------------------------------------------------------------------------------- memory


def anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_mapped_rows_are_not_copied_into_memory(tmp_path: Path) -> None:
    n, length = 10**7, 1000

    def fill(allocate: Allocate) -> Parts:
        ends = allocate("trajectory_ends", (n,), bool)
        ends[length - 1 :: length] = True
        sizes = {"observations": (n, 3), "actions": (n, 2), "rewards": (n,), "final_observations": (n // length, 3)}
        zeros = {name: allocate(name, size, np.float32) for name, size in sizes.items()}  # sparse files
        boxes = {"observation_space": spaces.Box(-9, 9, (3,)), "action_space": spaces.Box(-2, 6, (2,))}
        return Parts(**zeros, **boxes, terminated=allocate("terminated", (n,), bool), trajectory_ends=ends)

    write_folder(tmp_path / "data", fill, "zeros", None)
    buffer = TrajectoryReplayBuffer(1, spaces.Box(-9, 9, (3,)), spaces.Box(-2, 6, (2,)), "cpu", horizon_length=3)
    before = anonymous_bytes()
    dataset = OfflineDataset.load(str(tmp_path / "data"))
    buffer.set_offline(dataset)
    batch = buffer.sample(256)
    assert anonymous_bytes() - before < 30e6, "actions alone have 80 MB, flags as numbers 40 MB"
    assert dataset.behaviour_return.value == 0 and anonymous_bytes() - before < 30e6
    assert (batch.actions == th.tensor(-0.5)).all()
    mappings = re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())
    flags = [mapping.split("VmFlags:")[1].split() for mapping in mappings if "-observations.npy" in mapping]
    assert flags and all("rr" in found for found in flags), "a row brings its whole neighbourhood into memory"
