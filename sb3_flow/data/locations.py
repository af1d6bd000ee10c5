"""The locations that a user may give: ``prefix:where`` or the folder of a saved dataset, and suggestions for mistakes."""

import difflib
import re
import zipfile
from pathlib import Path

from sb3_flow.data import storage
from sb3_flow.data.files import hdf5_columns, npz_columns
from sb3_flow.data.shards import npz_files
from sb3_flow.data.sources import SOURCES


def resolve(location: str) -> tuple[str, str]:
    """
    Split a location into prefix and place.

    :param location: ``prefix:where``, or a folder that ``OfflineDataset.save`` wrote, or its index
    :raises ValueError: for anything else, with a suggestion
    """
    prefix, colon, where = location.partition(":")
    if colon and prefix in SOURCES:
        return prefix, where
    path = Path(location).expanduser()
    folder = path.parent if path.name == storage.INDEX else path
    if location and storage.read_index(folder) is not None:
        return "npz", str(folder)
    known = ", ".join(f"{name}:" for name in SOURCES)
    raise ValueError(f"'{location}' must start with one of {known}{_suggestion(location, path)}")


def _suggestion(location: str, path: Path) -> str:
    """Suggest a location, as the end of a sentence; empty if there is none."""
    prefix, colon, where = location.partition(":")
    if path.is_file():
        return f"; perhaps '{_of_file(path)}{location}'" if _of_file(path) else ""
    if location and path.is_dir():
        if files := npz_files(path):
            return f"; perhaps '{_of_file(files[0])}{location}'" if _of_file(files[0]) else ""
        if (path / "dataset_info.json").is_file():
            return f"; perhaps OfflineDataset.from_trajectories(datasets.load_from_disk({location!r}).with_format('numpy'))"
        return f"; {path} is no folder that OfflineDataset.save wrote"
    nearest = difflib.get_close_matches(prefix.lower(), SOURCES, 1) if colon else []
    if nearest:
        return f"; perhaps '{nearest[0]}:{where}'"
    if "singletask" in location:
        return f"; perhaps 'ogbench:{location}'"
    if re.fullmatch(r"([\w.-]+/)*[\w.-]+-v[0-9]+", location):
        return f"; perhaps 'minari:{location}'"
    return f"; there is no file {path}" if path.suffix in (".npz", ".hdf5", ".h5", ".pkl") and not colon else ""


def _of_file(path: Path) -> str:
    """Tell the prefix of a file by its suffix and arrays."""
    try:
        if zipfile.is_zipfile(path):
            return "ogbench:<single-task name>@" if "qpos" in npz_columns(path) else "npz:"
        if path.suffix in (".hdf5", ".h5"):
            return "d4rl:" if "actions" in hdf5_columns(path) else "robomimic:"
    except (ValueError, ImportError):
        return ""
    return "sb3:" if path.suffix in (".pkl", ".pickle") else ""
