"""Files of generated episodes: each is whole or not there, and together they make one file in OGBench's layout."""

import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

ZIP_DATE = (1980, 1, 1, 0, 0, 0)


@contextmanager
def replacing(target: Path, folder: Path | None = None) -> Iterator[IO[bytes]]:
    """
    Write a file that appears under its name only when it is complete.

    :param target: the file
    :param folder: where the unfinished file lies, by default the folder of ``target``
    """
    unfinished = (folder or target.parent) / f".{target.name}.{os.getpid()}.tmp"
    try:
        with unfinished.open("wb") as file:
            yield file
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def is_whole(part: Path, length: int) -> bool:
    """
    Say whether a file is there and whole: reading every array checks the zip file's checksums.

    :param length: rows of each array in the file
    """
    try:
        with np.load(part) as arrays:
            return bool(arrays.files) and all(len(arrays[key]) == length for key in arrays.files)
    except (OSError, EOFError, ValueError, zipfile.BadZipFile):
        return False


def merge(parts: list[Path], target: Path) -> None:
    """
    Write a single npz file from parts of equal length, with a single array of a single part in memory at a time.

    :param parts: files, in order
    :param target: file to write
    """
    with np.load(parts[0]) as first:
        layout = {key: (first[key].dtype, first[key].shape) for key in first.files}
    with replacing(target, parts[0].parent) as file, zipfile.ZipFile(file, "w") as archive:
        for key, (dtype, (length, *tail)) in layout.items():
            member = zipfile.ZipInfo(f"{key}.npy", ZIP_DATE)  # a fixed date: the same data, the same bytes
            member.compress_type = zipfile.ZIP_DEFLATED
            header: dict[str, Any] = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
            header["shape"] = (len(parts) * length, *tail)
            with archive.open(member, "w", force_zip64=True) as stream:
                np.lib.format.write_array_header_1_0(stream, header)
                for part in parts:
                    with np.load(part) as arrays:
                        stream.write(np.ascontiguousarray(arrays[key]).tobytes())
