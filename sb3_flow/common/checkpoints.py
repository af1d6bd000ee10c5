"""Files that are either complete or not there, and finding the last complete one."""

import io
import json
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_atomically(path: str | Path | io.BufferedIOBase, suffix: str, write: Callable[[Any], None]) -> None:
    """
    Write to a neighbouring temporary file and move it into place, so that a killed process leaves the old file or the
    new one, never half of one.

    :param path: where the file shall be; an open file is handed on as it is
    :param suffix: added if the path has none, as SB3 does
    :param write: called with the path (or open file) to write to
    """
    if not isinstance(path, str | os.PathLike):
        write(path)
        return
    final = Path(path)
    if final.suffix == "":
        final = final.with_name(f"{final.name}.{suffix}")
    final = final.resolve()  # through symbolic links, which would be replaced otherwise
    if final.is_dir():
        warnings.warn(f"Path '{final}' is a folder. Will save instead to {final}_2")
        final = final.with_name(f"{final.name}_2")
    temporary = final.with_name(f".{final.name}.tmp")
    try:
        write(temporary)
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)


def latest_checkpoint(folder: str | Path, name_prefix: str = "rl_model") -> Path | None:
    """
    The checkpoint with the most training in a folder written by SB3's ``CheckpointCallback``. The number in a file's name
    does not tell: it counts gradient steps offline and starts anew, counting environment steps, online. Files that cannot
    be read as a whole are passed over.

    :param folder: ``save_path`` of the callback
    :param name_prefix: ``name_prefix`` of the callback
    :return: its path, ``None`` if there is none
    """
    pattern = re.compile(rf"{re.escape(name_prefix)}_(\d+)_steps\.zip")
    found = [(_progress(path), path) for path in Path(folder).glob("*.zip") if pattern.fullmatch(path.name)]
    whole = [(progress, path) for progress, path in found if progress is not None]
    return max(whole)[1] if whole else None


def _progress(path: Path) -> tuple[int, int] | None:
    """:return: offline gradient steps and online environment steps of a saved model, ``None`` if the file is not whole"""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                return None
            data = json.loads(archive.read("data"))
    except (zipfile.BadZipFile, zlib.error, OSError, KeyError, ValueError):
        return None
    return data.get("offline_updates", 0), data["num_timesteps"]
