"""Datasets of Minari."""

import functools
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import ogbench  # noqa: F401
from gymnasium import spaces

from tests.fuzz_datasets.files import (
    BOX,
    Field,
    File,
    Kind,
    episodes,
    flat,
    pick,
    plain,
    under,
    write_hdf5,
)

FLOATS = spaces.Box(-np.inf, np.inf, (2,), np.float32)


@functools.cache
def metadata(as_dict: bool) -> dict[str, Any]:
    """What Minari writes beside the data."""
    import minari
    from minari.data_collector import EpisodeBuffer

    space = spaces.Dict({"x": FLOATS, "y": FLOATS}) if as_dict else FLOATS
    states: Any = np.zeros((2, 2), np.float32)
    step = {"rewards": np.zeros(1), "terminations": np.ones(1, bool), "truncations": np.zeros(1, bool)}
    states = {"x": states, "y": states} if as_dict else states
    buffer = EpisodeBuffer(id=0, observations=states, actions=np.zeros((1, 2), np.float32), infos=None, **step)
    before = os.environ.get("MINARI_DATASETS_PATH")
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["MINARI_DATASETS_PATH"] = place
        minari.create_dataset_from_buffers("test/set-v0", [buffer], observation_space=space, action_space=BOX)
        found = json.loads((Path(place) / "test/set-v0/data/metadata.json").read_text())
    os.environ.pop("MINARI_DATASETS_PATH")
    if before is not None:
        os.environ["MINARI_DATASETS_PATH"] = before
    return found


def make_minari(rng: np.random.Generator) -> File:
    """One array of observations or two; ends in the infos or not."""
    made, as_dict, masked = episodes(rng), bool(rng.integers(2)), rng.random() < 0.3
    arrays: dict[str, Any] = {}
    for number, part in enumerate(made):
        here = f"episode_{number}"
        if as_dict:
            arrays[f"{here}/observations/x"], arrays[f"{here}/observations/y"] = part["states"], part["states"][:, ::-1] / 2
        else:
            arrays[f"{here}/observations"] = part["states"]
        arrays |= {
            f"{here}/actions": part["actions"],
            f"{here}/rewards": part["rewards"],
            f"{here}/terminations": part["stop"],
        }
        arrays[f"{here}/truncations"] = part["last"] & ~part["stop"]
        if masked:
            more = int(rng.integers(2))
            arrays[f"{here}/infos/mask"] = np.concatenate([np.ones(more), 1.0 - part["stop"]])
    total = sum(len(part["rewards"]) for part in made)
    about = {**metadata(as_dict), "total_steps": total, "total_episodes": len(made)}
    return File(arrays, {}, {"metadata": about, "episodes": len(made)})


def minari_fields(file: File) -> dict[str, Field]:
    """Observations have one row more than steps; with a mask terminations are not read."""
    fields = {}
    for name in file.arrays:
        kind = name.split("/")[1]
        # a row is one that exists in every episode
        if kind == "observations":
            fields[name] = Field("observations")
        elif kind in ("actions", "rewards"):
            fields[name] = Field(kind, column=kind == "rewards")
        elif kind == "infos" or (kind == "terminations" and name.replace("terminations", "infos/mask") not in file.arrays):
            # a mask has a row for each step, perhaps one more
            fields[name] = Field("flags", column=True, row=-1, optional=kind == "infos", alone=kind == "infos")
    return fields


def write_minari(file: File, folder: Path) -> str:
    """As Minari does."""
    data = folder / "test/set-v0/data"
    data.mkdir(parents=True)
    write_hdf5(data / "main_data.hdf5", file.arrays)
    (data / "metadata.json").write_text(json.dumps(file.about["metadata"]))
    os.environ["MINARI_DATASETS_PATH"] = str(folder)
    return "minari:test/set-v0"


def minari_meaning(file: File) -> dict[str, np.ndarray]:
    """Episode after episode."""
    parts: dict[str, list[np.ndarray]] = {}
    for number in range(file.about["episodes"]):
        here, arrays = f"episode_{number}", file.arrays
        actions, mask = np.clip(plain(arrays[f"{here}/actions"]), -1, 1), arrays.get(f"{here}/infos/mask")
        stop = flat(arrays[f"{here}/terminations"]) != 0 if mask is None else flat(mask)[-len(actions) :] == 0
        found = {"actions": actions, "rewards": flat(arrays[f"{here}/rewards"]), "terminated": stop}
        found["trajectory_ends"] = np.arange(len(actions)) == len(actions) - 1
        for key, states in under(arrays, f"{here}/observations").items():
            suffix = f"/{key}" if key else ""
            found |= {f"observations{suffix}": plain(states)[:-1], f"final_observations{suffix}": plain(states)[-1:]}
        for name, array in found.items():
            parts.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def other_metadata(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong: what says how much there is and of which kind."""
    about = file.about["metadata"]
    name = pick(rng, ("total_steps", "total_episodes", "observation_space", "action_space", "data_format", "minari_version"))
    wrong: list[Any] = [None, "", "many", [], {}, -3]
    if name.startswith("total"):
        wrong += [about[name] + 1, 0]
    elif name.endswith("space"):
        wrong += ['{"type": "Discrete", "n": 3, "start": 0}', '{"type": "Box"}']
    if rng.random() < 0.2:
        del about[name]
    else:
        about[name] = pick(rng, wrong)
    file.notes.append(f"metadata: {name} is {about.get(name)!r}")
    return False


def fewer_steps(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong: the metadata say fewer steps than there are."""
    file.about["metadata"]["total_steps"] -= 1
    return False


def no_episode(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong: an episode is missing, or an array is a group."""
    name = pick(rng, [name for name in minari_fields(file) if not name.endswith("mask")])
    if rng.random() < 0.5:
        here = name.split("/")[0]
        file.arrays = {key: array for key, array in file.arrays.items() if key.split("/")[0] != here}
    else:
        file.arrays[f"{name}/values"] = file.arrays.pop(name)
    return False


KINDS = {"minari": Kind(make_minari, minari_fields, write_minari, minari_meaning, (other_metadata, fewer_steps, no_episode))}
