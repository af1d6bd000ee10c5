"""Files of plain transitions, one a row: .npz and D4RL."""

from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from tests.fuzz_datasets.files import (
    BOX,
    Field,
    File,
    Kind,
    dataset_of,
    episodes,
    flat,
    following,
    joined,
    pick,
    plain,
    under,
    write_hdf5,
)

WIDE = spaces.Box(-2.0, 2.0, (2,), np.float32)
MEMBERS = {
    "discrete": spaces.Discrete(90),
    "multi discrete": spaces.MultiDiscrete([90, 3]),
    "multi binary": spaces.MultiBinary(2),
}


def bounds_of(file: File) -> tuple[float, float]:
    """The bounds that actions are clipped to."""
    return (-2.0, 2.0) if file.options.get("action_space") == WIDE else (-1.0, 1.0)


def add_spaces(file: File, rng: np.random.Generator) -> None:
    """Perhaps an action space and an observation space."""
    if rng.random() < 0.6:
        file.options["action_space"] = pick(rng, (BOX, WIDE))
    if rng.random() < 0.5:
        shapes = {key: array.shape[1:] for key, array in under(file.arrays, "observations").items()}
        given = {key: spaces.Box(-np.inf, np.inf, shape, np.float32) for key, shape in shapes.items()}
        file.options["observation_space"] = given[""] if "" in given else spaces.Dict(given)


def transition_fields(file: File, names: dict[str, str], **common: Any) -> dict[str, Field]:
    """:param names: roles by name; observations are found by themselves"""
    successors = bool(under(file.arrays, "next_observations"))
    space = file.options.get("observation_space")
    found = {}
    for name in file.arrays:
        first = name.split("/")[0]
        if first in ("observations", "next_observations"):
            members = {spaces.Discrete: 90, spaces.MultiDiscrete: 90, spaces.MultiBinary: 2}.get(type(space))
            fixed = successors or space is not None
            # a file may hold fewer arrays of observations, or no next observations
            optional = name == "next_observations" or ("/" in name and not fixed)
            found[name] = Field("observations", fixed=fixed, members=members, optional=optional, **common)
        elif name in names:
            found[name] = Field(names[name], column=True, **common)
    given = "action_space" in file.options
    found["actions"] = Field("actions", fixed=given, whole=given, tolerant=given, **common)
    return found


# ------------------------------------------------------------------------------------------------------------------- npz


def make_npz(rng: np.random.Generator) -> File:
    """One array of observations, several, or members of a discrete space; with next observations or without."""
    made = episodes(rng)
    stop = joined(made, "stop")
    if rng.random() < 0.2:
        stop[0] = True  # the trajectory runs on
    arrays = {"actions": joined(made, "actions"), "rewards": joined(made, "rewards"), "terminated": stop}
    arrays["trajectory_ends"] = joined(made, "last")
    kind = pick(rng, ("box", "box", "dict", *MEMBERS))
    file = File(arrays)
    for name, states in (("observations", joined(made, "states")), ("next_observations", following(made))):
        count = (states[:, 0] * 8).astype(np.int64)
        if kind == "dict":
            arrays[f"{name}/x"] = states
            arrays[f"{name}/frame"] = np.stack([count, count + 1], 1).astype(np.uint8).reshape(-1, 1, 2)
        else:
            multi = {
                "multi discrete": np.stack([count, count % 3], 1),
                "multi binary": np.stack([count % 2, count // 2 % 2], 1),
            }
            arrays[name] = {"box": states, "discrete": count}.get(kind, multi.get(kind))
    if rng.random() < 0.4:
        for name in [name for name in arrays if name.startswith("next")]:
            del arrays[name]
    add_spaces(file, rng)
    if kind in MEMBERS:
        file.options["observation_space"] = MEMBERS[kind]
    elif kind == "dict":
        file.options.pop("observation_space", None)
    return file


def npz_fields(file: File) -> dict[str, Field]:
    """All arrays; frames are images, whose type is theirs."""
    fields = transition_fields(file, {"rewards": "rewards", "terminated": "flags", "trajectory_ends": "flags"})
    for name in [name for name in fields if name.endswith("/frame")]:
        del fields[name]
    return fields


def write_npz(file: File, folder: Path) -> str:
    """Compressed or not."""
    save = np.savez_compressed if file.about.get("compressed") else np.savez
    save(folder / "data.npz", **{name: array for name, array in file.arrays.items() if array is not None})
    return f"npz:{folder / 'data.npz'}"


def npz_meaning(file: File) -> dict[str, np.ndarray]:
    """As documented."""
    arrays = file.arrays
    return dataset_of(
        under(arrays, "observations"),
        arrays["actions"],
        arrays["rewards"],
        arrays["terminated"],
        arrays["trajectory_ends"],
        under(arrays, "next_observations") or None,
        bounds_of(file),
    )


def drop_successors(file: File, rng: np.random.Generator) -> bool | None:
    """Right, as truncated rows are left out then."""
    names = [name for name in file.arrays if name.startswith("next")]
    for name in names:
        del file.arrays[name]
    return True if names else None


def drop_one_successor(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong where there are several."""
    if "next_observations/x" not in file.arrays:
        return None
    del file.arrays["next_observations/x"]
    return False


def hide_an_end(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong where next observations show it."""
    ends = flat(file.arrays["trajectory_ends"]) != 0
    rows = np.flatnonzero(ends[:-1])
    if (
        not len(rows)
        or not under(file.arrays, "next_observations")
        or isinstance(file.options.get("observation_space"), spaces.MultiBinary)
    ):
        return None
    ends[rows[0]] = False
    file.arrays["trajectory_ends"] = ends
    return False


def alter_a_successor(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong within a trajectory."""
    name = pick(rng, under(file.arrays, "next_observations") or [None])
    if name is None or isinstance(file.options.get("observation_space"), spaces.MultiBinary):
        return None
    whole = f"next_observations/{name}" if name else "next_observations"
    changed = file.arrays[whole].copy()
    changed[0] = 0
    file.arrays[whole] = changed
    return False


def other_names(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong: nobody may guess."""
    file.arrays["terminals"], file.arrays["timeouts"] = file.arrays.pop("terminated"), file.arrays.pop("trajectory_ends")
    return False


def one_and_several(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong: observations as one array and as several."""
    if "observations" not in file.arrays:
        return None
    file.arrays["observations/camera"] = file.arrays["observations"]
    return False


def more_arrays(file: File, rng: np.random.Generator) -> bool | None:
    """Right: arrays of other names are not read."""
    file.arrays["infos_goal"] = np.full(3, np.nan)
    file.arrays["note"] = np.array("text")
    return True


def other_space(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong: spaces that the data do not belong to, and what is no space."""
    name = pick(rng, ("observation_space", "action_space"))
    wrong = [
        spaces.Box(-1, 1, (3,)),
        "Box",
        spaces.Tuple([BOX]),
        spaces.Text(4),
        spaces.Dict({"other": BOX}),
        spaces.Discrete(2),
    ]
    wrong += [spaces.Box(-1, 1, (5, 2)), 3, spaces.Dict({"x": spaces.Dict({"y": BOX})})]
    if name == "action_space":
        wrong += [
            spaces.Box(-1e300, 1e300, (2,), np.float64),
            spaces.Box(-np.inf, np.inf, (2,)),
            spaces.Box(-0.01, 0.01, (2,)),
        ]
        file.arrays["actions"] = np.full_like(plain(file.arrays["actions"]), 0.5)
    elif isinstance(file.options.get("observation_space"), spaces.Discrete):
        wrong.remove(spaces.Discrete(2))
    file.options[name] = pick(rng, wrong)
    return False


# ------------------------------------------------------------------------------------------------------------------ d4rl


def make_d4rl(rng: np.random.Generator) -> File:
    """With timeouts, next observations, or both."""
    made = episodes(rng)
    stop, last = joined(made, "stop"), joined(made, "last")
    arrays = {"observations": joined(made, "states"), "actions": joined(made, "actions"), "rewards": joined(made, "rewards")}
    arrays["terminals"] = stop
    present = pick(rng, ("timeouts", "next", "both"))
    if present != "next":
        arrays["timeouts"] = last & ~stop
    if present != "timeouts":
        arrays["next_observations"] = following(made)
    file = File(arrays)
    add_spaces(file, rng)
    return file


def d4rl_fields(file: File) -> dict[str, Field]:
    """All arrays. Each of timeouts and next observations may be missing, not both."""
    fields = transition_fields(file, {"rewards": "rewards", "terminals": "flags", "timeouts": "flags"})
    for name, other in (("timeouts", "next_observations"), ("next_observations", "timeouts")):
        if name in fields:
            fields[name].optional = file.arrays.get(other) is not None
    return fields


def write_d4rl(file: File, folder: Path) -> str:
    """HDF5."""
    write_hdf5(folder / "data.hdf5", file.arrays)
    return f"d4rl:{folder / 'data.hdf5'}"


def d4rl_meaning(file: File) -> dict[str, np.ndarray]:
    """Trajectories end at terminals, timeouts, and where the next row is not the successor."""
    arrays = file.arrays
    stop = flat(arrays["terminals"]) != 0
    ends = stop.copy()
    if arrays.get("timeouts") is not None:
        ends |= flat(arrays["timeouts"]) != 0
    successors = arrays.get("next_observations")
    if successors is not None:
        differ = plain(successors)[:-1] != plain(arrays["observations"])[1:]
        ends[:-1] |= differ.reshape(len(differ), -1).any(axis=1)
    found = None if successors is None else {"": successors}
    return dataset_of({"": arrays["observations"]}, arrays["actions"], arrays["rewards"], stop, ends, found, bounds_of(file))


def another_end(file: File, rng: np.random.Generator) -> bool | None:
    """Right: the trajectory ends where the next row is not the successor."""
    if file.arrays.get("next_observations") is None:
        return None
    changed = file.arrays["next_observations"].copy()
    changed[1] = 0.5
    file.arrays["next_observations"] = changed
    return True


def group_instead(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong: a group where an array should be."""
    name = pick(rng, [name for name in d4rl_fields(file) if file.arrays[name] is not None])
    file.arrays[f"{name}/values"] = file.arrays.pop(name)
    return False


KINDS = {
    "npz": Kind(
        make_npz,
        npz_fields,
        write_npz,
        npz_meaning,
        (
            drop_successors,
            drop_one_successor,
            hide_an_end,
            alter_a_successor,
            other_names,
            one_and_several,
            more_arrays,
            other_space,
        ),
    ),
    "d4rl": Kind(make_d4rl, d4rl_fields, write_d4rl, d4rl_meaning, (another_end, group_instead, more_arrays, other_space)),
}
