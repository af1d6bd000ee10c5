"""Files that are either complete or not there, and finding the last complete one."""

import io
import os
import re
import zipfile
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
    temporary = final.with_name(f".{final.name}.tmp")
    try:
        write(temporary)
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)


def latest_checkpoint(folder: str | Path, name_prefix: str = "rl_model") -> Path | None:
    """
    The checkpoint with the most steps in a folder written by SB3's ``CheckpointCallback``. Files that cannot be read as
    a whole are passed over.

    :param folder: ``save_path`` of the callback
    :param name_prefix: ``name_prefix`` of the callback
    :return: its path, ``None`` if there is none
    """
    pattern = re.compile(rf"{re.escape(name_prefix)}_(\d+)_steps\.zip")
    found = [(int(match[1]), path) for path in Path(folder).glob("*.zip") if (match := pattern.fullmatch(path.name))]
    for _, path in sorted(found, reverse=True):
        if _is_whole(path):
            return path
    return None


def _is_whole(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError):
        return False
