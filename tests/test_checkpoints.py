"""Files of every algorithm are the previous ones or the new ones, whole, wherever writing is interrupted."""

import errno
import io
import os
import stat
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from on_policy import ACTION_SPACES, walks
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.vec_env import VecNormalize
from tasks import PointEnv, collect
from torch.distributions import Distribution

from sb3_flow import DSRL, FMQ, FQL, GRPO, GSPO, PPO, QAM, RLPD, RQL, AsyncPPO, MaskablePPO, MaskableRecurrentPPO, RecurrentPPO
from sb3_flow.common.checkpoints import CheckpointCallback, latest_checkpoint, write_atomically

SMALL: dict[str, Any] = {"n_steps": 8, "batch_size": 8, "n_epochs": 1, "device": "cpu", "policy_kwargs": {"net_arch": [8]}}
OFFLINE: dict[str, Any] = {"batch_size": 8, "device": "cpu", "policy_kwargs": {"net_arch": [8]}}
MODELS: dict[str, Callable[[], BaseAlgorithm]] = {
    "PPO": lambda: PPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), **SMALL),
    "GRPO": lambda: GRPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), group_by="none", **SMALL),
    "GSPO": lambda: GSPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), group_by="none", **SMALL),
    "AsyncPPO": lambda: AsyncPPO("MlpPolicy", walks(2, ACTION_SPACES["box"]), **SMALL),
    "MaskablePPO": lambda: MaskablePPO("MlpPolicy", walks(2, ACTION_SPACES["discrete"]), **SMALL),
    "RecurrentPPO": lambda: RecurrentPPO("MlpLstmPolicy", walks(2, ACTION_SPACES["box"]), **SMALL),
    "MaskableRecurrentPPO": lambda: MaskableRecurrentPPO("MlpGruPolicy", walks(2, ACTION_SPACES["discrete"]), **SMALL),
    "RQL": lambda: RQL("MlpPolicy", PointEnv(), **OFFLINE),
    "FMQ": lambda: FMQ("MlpPolicy", PointEnv(), **OFFLINE),
    "FQL": lambda: FQL("MlpPolicy", PointEnv(), **OFFLINE),
    "RLPD": lambda: RLPD("MlpPolicy", PointEnv(), **OFFLINE),
    "DSRL": lambda: DSRL("MlpPolicy", PointEnv(), **OFFLINE),
    "QAM": lambda: QAM("MlpPolicy", PointEnv(), flow_steps=3, edit_scale=0.5, **OFFLINE),
}


class FullDisk(io.BufferedWriter):
    """A file on a disk that is full after some bytes."""

    room = 3000

    def write(self, data: Any) -> int:
        self.room -= memoryview(data).nbytes
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, SB3's files do not fit."""
    monkeypatch.setattr(Path, "open", lambda path, mode, *_: FullDisk(io.FileIO(path, mode)))


def no_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, the new file does not come into its place, as if the process were killed before."""

    def failing(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "replace", failing)


@pytest.mark.parametrize("name", MODELS)
def test_a_save_that_fails_leaves_the_previous_file(name, tmp_path, monkeypatch):
    model = MODELS[name]()
    path = tmp_path / "model.zip"
    model.save(path)
    before = path.read_bytes()
    model.num_timesteps = 77
    for fail in (full_disk, no_rename):
        with monkeypatch.context() as patch:
            fail(patch)
            with pytest.raises(OSError):
                model.save(path)
            with pytest.raises(OSError):
                model.save(tmp_path / "another")
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["model.zip"]  # nothing half-written is left either
    model.save(path)
    assert type(model).load(path).num_timesteps == 77


@pytest.mark.parametrize("name", MODELS)
def test_a_policy_inside_torch_compile_is_saved_as_before(name, tmp_path, monkeypatch):
    monkeypatch.setattr(Distribution, "_validate_args", Distribution._validate_args)  # torch.compile switches the checks off
    model = MODELS[name]()
    model.save(tmp_path / "plain")
    model.policy = th.compile(model.policy)
    model.save(tmp_path / "wrapped")
    (plain, tensors, _), (data, wrapped, _) = (load_from_zip_file(tmp_path / kind) for kind in ("plain", "wrapped"))
    assert data.keys() == plain.keys() and wrapped.keys() == tensors.keys()
    actions, observations = [], model.observation_space.sample()
    for either in (model, type(model).load(tmp_path / "wrapped")):
        either.set_random_seed(3)
        actions.append(either.predict(observations)[0])
    np.testing.assert_array_equal(*actions)


@pytest.mark.parametrize("name", ["PPO", "RQL"])
def test_saves_reach_the_disk_before_they_take_the_place_of_the_previous_file(name, tmp_path, monkeypatch):
    order, sync, replace = [], os.fsync, os.replace
    path = tmp_path / "model.zip"

    def note_sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            assert os.path.samestat(os.fstat(descriptor), os.stat(tmp_path))
            order.append("folder")
        else:
            assert os.fstat(descriptor).st_size > 1000
            order.append("file")
        sync(descriptor)

    def note_replace(source: Path, target: Path) -> None:
        assert zipfile.ZipFile(source).testzip() is None
        order.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    MODELS[name]().save(path)
    assert order == ["file", "replace", "folder"]


def test_paths_are_those_of_sb3(tmp_path, monkeypatch):
    model = MODELS["PPO"]()
    monkeypatch.chdir(tmp_path)
    model.save("plain")
    model.save(Path("with.suffix"))
    with pytest.warns(UserWarning, match="does not exist. Will create it"):
        model.save("new/folders/model")
    Path("folder.zip").mkdir()
    with pytest.warns(UserWarning, match="is a folder. Will save instead to"):
        model.save("folder")
    found = sorted(str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*") if one.is_file())
    assert found == ["folder.zip_2", "new/folders/model.zip", "plain.zip", "with.suffix"]
    for name in found:
        PPO.load(name)
    stream = io.BytesIO()
    model.save(stream)
    stream.seek(0)
    PPO.load(stream)
    # through a link, to the file that it names; permissions stay
    Path("link.zip").symlink_to("plain.zip")
    os.chmod("plain.zip", 0o640)
    model.num_timesteps = 5
    model.save("link")
    assert Path("link.zip").is_symlink() and PPO.load("plain").num_timesteps == 5
    assert stat.S_IMODE(os.stat("plain.zip").st_mode) == 0o640
    umask = os.umask(0o027)
    try:
        model.save("private")
    finally:
        os.umask(umask)
    assert stat.S_IMODE(os.stat("private.zip").st_mode) == 0o640


def test_two_writers_of_one_file_take_turns(tmp_path):
    """Each file is one writer's: they do not meet in the file that is not in its place yet."""
    path = tmp_path / "file.bin"
    seen, barrier = [], threading.Barrier(2)

    def writer(mark: bytes) -> None:
        def write(target: Path) -> None:
            with open(target, "wb") as file:
                for _ in range(3):
                    file.write(mark * 1000)
                    file.flush()
                    time.sleep(0.001)

        barrier.wait()
        for _ in range(10):
            write_atomically(path, "bin", write)
            seen.append(path.read_bytes())

    writers = [threading.Thread(target=writer, args=(mark,)) for mark in (b"a", b"b")]
    for one in writers:
        one.start()
    for one in writers:
        one.join()
    assert len(seen) == 20 and set(seen) == {b"a" * 3000, b"b" * 3000}
    assert os.listdir(tmp_path) == ["file.bin"]


def test_what_a_killed_writer_left_is_written_over(tmp_path):
    (tmp_path / ".file.bin.tmp").write_bytes(b"half of a file that was longer")
    write_atomically(tmp_path / "file", "bin", lambda path: path.write_bytes(b"new"))
    assert (tmp_path / "file.bin").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file.bin"]


def test_checkpoints_with_buffer_and_statistics_are_whole(tmp_path, monkeypatch):
    env = VecNormalize(walks(1, ACTION_SPACES["box"]))
    model = RQL("MlpPolicy", env, learning_starts=4, **OFFLINE)
    callback = CheckpointCallback(10, str(tmp_path), save_replay_buffer=True, save_vecnormalize=True)
    model.learn(10, callback)
    names = [
        f"rl_model_{kind}10_steps.{suffix}"
        for kind, suffix in (("", "zip"), ("replay_buffer_", "pkl"), ("vecnormalize_", "pkl"))
    ]
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    before = {name: (tmp_path / name).read_bytes() for name in names}
    # written anew under the same names, and interrupted in the middle of the statistics
    monkeypatch.setattr(model, "num_timesteps", 10)

    def half(path: str) -> None:
        Path(path).write_bytes(before[names[2]][:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(env, "save", half)
    callback.n_calls, callback.num_timesteps = 10, 10
    with pytest.raises(OSError, match="No space"):
        callback._on_step()
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    assert (tmp_path / names[2]).read_bytes() == before[names[2]]
    assert (tmp_path / names[0]).read_bytes() == before[names[0]]  # the model comes last
    monkeypatch.undo()
    assert VecNormalize.load(str(tmp_path / names[2]), walks(1, ACTION_SPACES["box"])).obs_rms.count == env.obs_rms.count
    assert latest_checkpoint(tmp_path) == tmp_path / names[0]


def test_checkpoints_of_on_policy_algorithms(tmp_path):
    model = PPO("MlpPolicy", VecNormalize(walks(2, ACTION_SPACES["box"])), **SMALL)
    model.learn(16, CheckpointCallback(8, str(tmp_path), save_replay_buffer=True, save_vecnormalize=True, verbose=2))
    assert sorted(os.listdir(tmp_path)) == ["rl_model_16_steps.zip", "rl_model_vecnormalize_16_steps.pkl"]


def test_a_replay_buffer_that_does_not_fit_leaves_the_previous_file(tmp_path, monkeypatch):
    model = RQL("MlpPolicy", PointEnv(), **OFFLINE)
    model.set_offline_dataset(collect(PointEnv()))
    model.save_replay_buffer(tmp_path / "buffer")
    before = (tmp_path / "buffer.pkl").read_bytes()
    full_disk(monkeypatch)
    with pytest.raises(OSError, match="No space"):
        model.save_replay_buffer(tmp_path / "buffer")
    monkeypatch.undo()
    assert (tmp_path / "buffer.pkl").read_bytes() == before and os.listdir(tmp_path) == ["buffer.pkl"]
