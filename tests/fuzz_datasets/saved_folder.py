"""The folder of a saved dataset."""

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from sb3_flow.data import OfflineDataset
from tests.fuzz_datasets.files import (
    Field,
    File,
    Kind,
    pick,
    plain,
    under,
)
from tests.fuzz_datasets.plain_kinds import WIDE, make_npz


def make_folder(rng: np.random.Generator) -> File:
    """What ``save`` wrote."""
    source = make_npz(rng)
    names = {name: array for name, array in source.arrays.items() if "observations" not in name}
    both = {name: under(source.arrays, name) for name in ("observations", "next_observations")}
    given = {name: found.get("", found) for name, found in both.items() if found}
    dataset = OfflineDataset.from_arrays(**names, **given, **source.options)
    with tempfile.TemporaryDirectory() as place:
        dataset.save(Path(place) / "data")
        index = json.loads((Path(place) / "data/dataset.json").read_text())
        arrays = {name: np.load(Path(place) / "data" / file) for name, file in index["arrays"].items()}
    return File(arrays, {}, {"index": index, "space": dataset.observation_space, "wide": dataset.action_space == WIDE})


def folder_fields(file: File) -> dict[str, Field]:
    """All arrays, in the types that were written."""
    roles = {"actions": "actions", "rewards": "rewards", "terminated": "flags", "trajectory_ends": "flags"}
    members = {spaces.Discrete: 90, spaces.MultiDiscrete: 90, spaces.MultiBinary: 2}.get(type(file.about["space"]))
    fields = {}
    for name, array in file.arrays.items():
        if array.dtype.kind in "iu":
            continue  # whole numbers are stored as such, so a mistake would not stay in their type
        role = roles.get(name.split("/")[0], "observations")
        fields[name] = Field(role, stored=True, members=members if role == "observations" else None)
    return fields


def write_folder(file: File, folder: Path) -> str:
    """An .npy file for each array that the index names."""
    index = file.about["index"]
    for name, array in file.arrays.items():
        where = file.about["index"]["arrays"].get(name) if isinstance(index.get("arrays"), dict) else None
        if array is not None and isinstance(where, str) and ".." not in where:
            np.save(folder / where, array)
    (folder / "dataset.json").write_text(json.dumps(index))
    return f"npz:{folder}"


def folder_meaning(file: File) -> dict[str, np.ndarray]:
    """What is stored."""
    bounds = (-2, 2) if file.about["wide"] else (-1, 1)
    meant = {name: plain(array) for name, array in file.arrays.items() if array is not None}
    return meant | {"actions": np.clip(meant["actions"], *bounds)}


def edit_index(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong: an entry is missing, or is something else."""
    index = copy.deepcopy(file.about["index"])
    path = pick(rng, _paths(index))
    *outer, last = path
    inner: Any = index
    for key in outer:
        inner = inner[key]
    old = inner[last]
    if path[0] in ("source", "origin") or last in ("start",):
        return None
    if rng.random() < 0.4:
        del inner[last]
    else:
        inner[last] = pick(rng, [value for value in (None, [], {}, "../x", "nothing", -7, True, [[1]]) if value != old])
    file.about["index"] = index
    file.notes.append(f"{path} of the index: {old!r}")
    return False


def _paths(index: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All keys of nested dicts, and of lists of dicts."""
    found = []
    for key, value in index.items() if isinstance(index, dict) else enumerate(index):
        found.append((*path, key))
        if isinstance(value, dict):
            found += _paths(value, (*path, key))
    return found


def hidden_end(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong: fewer ends than final observations, or none in the last row."""
    ends = file.arrays["trajectory_ends"].copy()
    ends[pick(rng, np.flatnonzero(ends))] = False
    file.arrays["trajectory_ends"] = ends
    return False


def a_byte_that_is_no_bool(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong: NumPy itself does not notice."""
    flags = file.arrays["terminated"].copy()
    flags.view(np.uint8)[0] = 3
    file.arrays["terminated"] = flags
    return False


def members_in_place(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong: whole numbers outside their space."""
    if not isinstance(file.about["space"], (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        return None
    name = pick(rng, ("observations", "final_observations"))
    changed = file.arrays[name].copy()
    changed[0] = pick(rng, (-1, 90, 100000))
    file.arrays[name] = changed
    return False


def given_space(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong: a space that the data do not belong to."""
    narrow = spaces.Box(-0.1, 0.1, (2,), np.float32)
    file.arrays["actions"] = np.full_like(file.arrays["actions"], 0.5)
    file.options["action_space"] = pick(rng, (narrow, "Box", spaces.Discrete(3), spaces.Box(-1, 1, (3,))))
    return False


KINDS = {
    "folder": Kind(
        make_folder,
        folder_fields,
        write_folder,
        folder_meaning,
        (edit_index, edit_index, hidden_end, a_byte_that_is_no_bool, members_in_place, given_space),
    )
}
