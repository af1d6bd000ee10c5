"""Files of recorded episodes: OGBench and RoboMimic."""

import functools
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import ogbench  # noqa: F401

from sb3_flow.data.robomimic import KEYS
from tests.fuzz_datasets.files import (
    Field,
    File,
    Kind,
    eighths,
    episodes,
    flat,
    pick,
    plain,
    write_hdf5,
)

# --------------------------------------------------------------------------------------------------------------- ogbench
PUZZLE = "puzzle-3x3"
MAZES = ("pointmaze-medium", "pointmaze-large", "antmaze-medium")


@functools.cache
def environment(name: str) -> Any:
    """OGBench's environment of one task."""
    env = gym.make(f"{name}-singletask-v0").unwrapped
    env.reset()
    return env


def make_ogbench(rng: np.random.Generator) -> File:
    """Episodes with a row more than transitions; some states solve the task."""
    name = PUZZLE if rng.random() < 0.02 else pick(rng, MAZES)
    env = environment(name)
    lengths = [int(rng.integers(3, 6)), *rng.integers(0, 5, int(rng.integers(0, 3)))]
    n = sum(lengths) + len(lengths)
    ends = np.zeros(n, bool)
    ends[np.cumsum(np.array(lengths) + 1) - 1] = True
    observations = rng.standard_normal((n, *env.observation_space.shape)).astype(np.float32)
    arrays = {"observations": observations, "terminals": ends, "actions": eighths(rng, n, *env.action_space.shape)}
    arrays["qpos"] = rng.standard_normal((n, env.model.nq)).astype(np.float32)
    if name == PUZZLE:
        arrays["button_states"] = rng.integers(0, 2, (n, 9))
        arrays["button_states"][::3] = env._target_button_states
    else:
        cells = np.argwhere(env.maze_map == 0)
        arrays["qpos"][:, :2] = [env.ij_to_xy(cells[rng.integers(len(cells))]) for _ in range(n)]
        arrays["qpos"][::3, :2] = env.cur_goal_xy
    return File(arrays, {}, {"name": name})


def ogbench_fields(file: File) -> dict[str, Field]:
    """What is read; the shapes are the environment's."""
    fields = {"observations": Field("observations"), "terminals": Field("flags", column=True), "actions": Field("actions")}
    if file.about["name"] == PUZZLE:
        fields["button_states"] = Field("states", members=2)
    return fields | {"qpos": Field("states")}


def write_ogbench(file: File, folder: Path) -> str:
    """.npz"""
    np.savez(folder / "raw.npz", **{name: array for name, array in file.arrays.items() if array is not None})
    maze, size = file.about["name"].rsplit("-", 1)
    kind = "play" if maze == "puzzle" else "navigate"
    return f"ogbench:{maze}-{size}-{kind}-singletask-v0@{folder / 'raw.npz'}"


def ogbench_meaning(file: File) -> dict[str, np.ndarray]:
    """A row is solved where the position is near the goal, or all buttons are right."""
    env, arrays = environment(file.about["name"]), file.arrays
    extra = flat(arrays["terminals"]) != 0
    extra[-1] = True
    if file.about["name"] == PUZZLE:
        right = plain(arrays["button_states"]) == env._target_button_states
        rewards, solved = right.sum(axis=1) - 9.0, right.all(axis=1)
    else:
        solved = np.linalg.norm(plain(arrays["qpos"])[:, :2] - env.cur_goal_xy, axis=1) <= env._goal_tol
        rewards = solved - 1.0
    last = ~extra & np.append(extra[1:], False)
    keep = ~extra
    observations = plain(arrays["observations"])
    return {
        "observations": observations[keep],
        "final_observations": observations[np.flatnonzero(last) + 1],
        "actions": np.clip(plain(arrays["actions"]), -1, 1)[keep],
        "rewards": rewards[keep],
        "terminated": solved[keep],
        "trajectory_ends": last[keep],
    }


def into_a_wall(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong: no robot of this maze was there."""
    if file.about["name"] == PUZZLE:
        return None
    env = environment(file.about["name"])
    walls = np.argwhere(env.maze_map == 1)
    places = [env.ij_to_xy(walls[rng.integers(len(walls))]), (1000.0, 0.0), (0.0, -1e20), (-1e308, 0.0)]
    qpos = plain(file.arrays["qpos"])
    qpos[rng.integers(len(qpos)), :2] = pick(rng, places)
    file.arrays["qpos"] = qpos
    return False


def another_maze(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong where a position is in a wall of the other."""
    others = {"pointmaze-medium": "pointmaze-large", "pointmaze-large": "pointmaze-medium"}
    if file.about["name"] not in others:
        return None
    env, other = environment(file.about["name"]), environment(others[file.about["name"]])
    size = np.minimum(env.maze_map.shape, other.maze_map.shape)
    hidden = np.argwhere((env.maze_map == 0)[: size[0], : size[1]] & (other.maze_map == 1)[: size[0], : size[1]])
    file.arrays["qpos"] = plain(file.arrays["qpos"])
    file.arrays["qpos"][1, :2] = env.ij_to_xy(hidden[rng.integers(len(hidden))])
    file.about["name"] = others[file.about["name"]]
    return False


def no_transition(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong: every row ends an episode."""
    file.arrays["terminals"] = np.ones(len(file.arrays["terminals"]))
    return False


def no_end(file: File, rng: np.random.Generator) -> bool | None:
    """Right: the last row ends an episode anyhow."""
    file.arrays["terminals"] = np.zeros(len(file.arrays["terminals"]))
    return True


# ------------------------------------------------------------------------------------------------------------- robomimic


def make_robomimic(rng: np.random.Generator) -> File:
    """Demonstrations of some rows; the last ones are solved."""
    arrays: dict[str, Any] = {}
    numbers = rng.permutation(12)
    for number, part in zip(numbers, episodes(rng), strict=False):
        here = f"data/demo_{number}"
        for key in KEYS:
            scale = len(key) / 8
            arrays[f"{here}/obs/{key}"], arrays[f"{here}/next_obs/{key}"] = (
                part["states"][:-1] * scale,
                part["states"][1:] * scale,
            )
        arrays |= {f"{here}/actions": part["actions"], f"{here}/rewards": part["stop"].astype(np.float64)}
        arrays[f"{here}/dones"] = part["stop"].astype(np.int64)
    arrays["mask/train"] = np.array([b"demo_0"])
    return File(arrays)


def robomimic_fields(file: File) -> dict[str, Field]:
    """Of next observations the last row is used."""
    fields = {}
    several = len({name.split("/")[1] for name in file.arrays if name.startswith("data/")}) > 1
    for name in file.arrays:
        if "obs/" in name:
            # the width of one demonstration alone is as it is
            fields[name] = Field("observations", row=-1 if "next" in name else 0)
        elif name.endswith("actions"):
            fields[name] = Field("actions", fixed=True if several else False)
        elif name.endswith("rewards"):
            fields[name] = Field("flags", column=True)
    return fields


def write_robomimic(file: File, folder: Path) -> str:
    """HDF5."""
    write_hdf5(folder / "low_dim.hdf5", file.arrays)
    return f"robomimic:{folder / 'low_dim.hdf5'}"


def robomimic_meaning(file: File) -> dict[str, np.ndarray]:
    """Demonstrations by their numbers; rewards of -1 until a row is solved."""
    numbers = sorted({int(name.split("/")[1].split("_")[1]) for name in file.arrays if name.startswith("data/demo_")})
    parts: dict[str, list[np.ndarray]] = {}
    for number in numbers:
        here = f"data/demo_{number}"
        solved = flat(file.arrays[f"{here}/rewards"]) == 1
        found = {
            "actions": np.clip(plain(file.arrays[f"{here}/actions"]), -1, 1),
            "rewards": solved - 1.0,
            "terminated": solved,
        }
        found["trajectory_ends"] = np.arange(len(solved)) == len(solved) - 1
        for name, group, rows in (("observations", "obs", slice(None)), ("final_observations", "next_obs", slice(-1, None))):
            found[name] = np.concatenate([plain(file.arrays[f"{here}/{group}/{key}"])[rows] for key in KEYS], axis=1)
        for name, array in found.items():
            parts.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def other_groups(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong: something that is no demonstration beside the demonstrations, or nothing else."""
    way = int(rng.integers(4))
    if way == 0:
        file.arrays["data/notes"] = np.zeros(3)
    elif way == 1:
        file.arrays["data/demo_x/actions"] = np.zeros((3, 2))
    elif way == 2:
        file.arrays["data/demo_99/actions"] = np.zeros((3, 2))
    else:
        file.arrays = {"data": np.zeros(3)} if rng.integers(2) else {"mask/train": np.zeros(3)}
    return False


def empty_demonstration(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong: no row in any array."""
    here = pick(rng, {name.rsplit("/actions", 1)[0] for name in file.arrays if name.endswith("/actions")})
    for name in [name for name in file.arrays if name.startswith(here + "/")]:
        file.arrays[name] = file.arrays[name][:0]
    return False


def other_dones(file: File, rng: np.random.Generator) -> bool | None:
    """Right: nobody reads them."""
    for name in [name for name in file.arrays if name.endswith("/dones")]:
        file.arrays[name] = np.full(1, np.nan)
    return True


KINDS = {
    "ogbench": Kind(
        make_ogbench, ogbench_fields, write_ogbench, ogbench_meaning, (into_a_wall, another_maze, no_transition, no_end)
    ),
    "robomimic": Kind(
        make_robomimic, robomimic_fields, write_robomimic, robomimic_meaning, (other_groups, empty_demonstration, other_dones)
    ),
}
