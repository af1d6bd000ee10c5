"""
Files that are either complete or not there, and the search for the last complete checkpoint.

:class:`CheckpointCallback` calls SB3's protected ``_checkpoint_path`` and overrides ``_on_step`` (checked with
stable-baselines3 2.9.2, named in ``tests/test_sb3_private_api.py``).
"""

import contextlib
import io
import json
import os
import re
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from stable_baselines3.common import callbacks
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.type_aliases import GymEnv

from sb3_flow.common.older_files import finding_moved_modules
from sb3_flow.common.saved_by import SAVED_VERSION, check_saved_by
from sb3_flow.version import __version__

try:
    import fcntl
except ImportError:  # pragma: no cover
    fcntl = None  # type: ignore[assignment]


def write_atomically(path: str | Path | io.BufferedIOBase, suffix: str | None, write: Callable[[Any], None]) -> None:
    """
    Write a file so that the previous file or the new file is there, whole, also after an error, a full disk, a killed process
    or a power cut. The new file is written beside its place, and moved into it when it has reached the disk.

    :param path: of the file; missing folders are made, as SB3 does; an open file is handed on as it is
    :param suffix: added if the path has none, as SB3 does; ``None`` adds nothing
    :param write: takes the path (or the open file) to write to
    """
    if not isinstance(path, str | os.PathLike):
        write(path)
        return
    final = Path(path)
    if suffix is not None and final.suffix == "":
        final = Path(f"{final}.{suffix}")
    final = final.resolve()  # through symbolic links, which would be replaced otherwise
    if final.is_dir():
        warnings.warn(f"Path '{final}' is a folder. Will save instead to {final}_2")
        final = final.with_name(f"{final.name}_2")
    missing = [folder for folder in final.parents if not folder.exists()]
    if missing:
        warnings.warn(f"Path '{final.parent}' does not exist. Will create it.")
        final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{final.name}.tmp")
    descriptor = _open_alone(temporary)
    try:
        with contextlib.suppress(OSError):
            shutil.copymode(final, temporary)
        write(temporary)
        os.fsync(descriptor)
        os.replace(temporary, final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    for folder in (final.parent, *(new.parent for new in missing)):
        _sync_folder(folder)


def _open_alone(path: Path) -> int:
    """Open a file, new or left by a killed process, that no other process writes to meanwhile; return its descriptor."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if fcntl is None:
            return descriptor
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # the process that had the lock before may have moved the file away
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Have the names in a folder reach the disk."""
    with contextlib.suppress(OSError):  # not everywhere can folders be opened
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class AtomicSaves(BaseAlgorithm):
    """An algorithm whose files are complete or not there."""

    def save(self, path: str | Path | io.BufferedIOBase, exclude: Any = None, include: Any = None) -> None:
        """
        Save all the attributes of the object and the model parameters in a zip-file. The previous file or the new file is
        there, whole, also if the process is killed or the disk is full.

        :param path: of the file
        :param exclude: names of parameters that are left out in addition to the default
        :param include: names of parameters that are saved although they might be excluded
        """
        setattr(self, SAVED_VERSION, __version__)  # SB3 saves all attributes, and opens files with attributes of others
        write_atomically(path, "zip", lambda target: super(AtomicSaves, self).save(target, exclude, include))

    @classmethod
    def load(cls, path: str | Path | io.BufferedIOBase, env: GymEnv | None = None, *arguments: Any, **options: Any) -> Self:
        """
        Load the model from a zip-file, see ``BaseAlgorithm.load``.

        :param path: of the file, or an open file
        :param env: the new environment to run the loaded model on
        :param arguments: further arguments of ``BaseAlgorithm.load``
        :param options: the same by name, and arguments of the constructor to change
        :raises ValueError: if another algorithm saved the file
        """
        check_saved_by(cls, path)
        with finding_moved_modules():
            return super().load(path, env, *arguments, **options)


class CheckpointCallback(callbacks.CheckpointCallback):
    """
    Saves checkpoints as SB3's callback does, with SB3's arguments. Every file, ``VecNormalize``'s included, is complete or not
    there. The model is written last: where there is a model, its replay buffer and its statistics are there.
    """

    def _on_step(self) -> bool:
        if self.n_calls % self.save_freq == 0:
            if self.save_replay_buffer and getattr(self.model, "replay_buffer", None) is not None:
                self._write("replay_buffer_", "pkl", self.model.save_replay_buffer)  # type: ignore[attr-defined]
            normalizer = self.model.get_vec_normalize_env()
            if self.save_vecnormalize and normalizer is not None:
                self._write("vecnormalize_", "pkl", lambda path: write_atomically(path, "pkl", normalizer.save))
            self._write("", "zip", self.model.save)
        return True

    def _write(self, kind: str, suffix: str, save: Callable[[str], None]) -> None:
        path = self._checkpoint_path(kind, suffix)
        save(path)
        if self.verbose >= 2:
            print(f"Saving checkpoint to {path}")


def latest_checkpoint(folder: str | Path, name_prefix: str = "rl_model") -> Path | None:
    """
    Find the checkpoint with the most training in a folder written by :class:`CheckpointCallback`. The number in a file's name
    does not tell: it counts gradient steps offline and starts anew, counting environment steps, online. Files that cannot
    be read as a whole are passed over.

    :param folder: ``save_path`` of the callback
    :param name_prefix: ``name_prefix`` of the callback
    :return: path of the checkpoint, ``None`` if there is no checkpoint
    """
    pattern = re.compile(rf"{re.escape(name_prefix)}_(\d+)_steps\.zip")
    found = [(_progress(path), path) for path in Path(folder).glob("*.zip") if pattern.fullmatch(path.name)]
    whole = [(progress, path) for progress, path in found if progress is not None]
    return max(whole)[1] if whole else None


def _progress(path: Path) -> tuple[int, int] | None:
    """Read offline gradient steps and online environment steps of a saved model, ``None`` if the file is not whole."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                return None
            data = json.loads(archive.read("data"))
    except (zipfile.BadZipFile, zlib.error, OSError, KeyError, ValueError):
        return None
    return data.get("offline_updates", 0), data["num_timesteps"]
