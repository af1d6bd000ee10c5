"""Files of recorded episodes: OGBench, Minari, RoboMimic, and SB3's replay buffers."""

import functools
import json
import os
import pickle
import tempfile
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import ogbench  # noqa: F401
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer

from sb3_flow.data.robomimic import KEYS
from tests.fuzz_datasets.files import (
    BOX,
    Field,
    File,
    Kind,
    dataset_of,
    eighths,
    episodes,
    flat,
    pick,
    plain,
    under,
    write_hdf5,
)

FLOATS = spaces.Box(-np.inf, np.inf, (2,), np.float32)

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


# ---------------------------------------------------------------------------------------------------------------- minari


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


# ------------------------------------------------------------------------------------------------------------------- sb3


def make_sb3(rng: np.random.Generator) -> File:
    """One environment or two, a ring that is full or not, one array of observations or two, time limits or not."""
    n_envs, size, as_dict = int(rng.integers(1, 3)), int(rng.integers(5, 10)), rng.random() < 0.4
    shared = not as_dict and rng.random() < 0.2
    steps = int(rng.integers(4, 16))
    space = spaces.Dict({"x": FLOATS, "number": spaces.Discrete(90)}) if as_dict else FLOATS
    bounds = spaces.Box(-2.0, 2.0, (2,), np.float32)
    kind = DictReplayBuffer if as_dict else ReplayBuffer
    options = {"optimize_memory_usage": shared, "handle_timeout_termination": not shared}
    buffer = kind(size * n_envs, space, bounds, device="cpu", n_envs=n_envs, **options)
    count = 0

    def observed(numbers: np.ndarray) -> Any:
        rows = np.stack([numbers / 8, numbers / 16], axis=1).astype(np.float32)
        return {"x": rows, "number": numbers} if as_dict else rows

    numbers = np.arange(n_envs) * 40
    for _ in range(steps):
        done = rng.random(n_envs) < 0.25
        infos = [{"TimeLimit.truncated": bool(rng.integers(2))} if end else {} for end in done]
        buffer.add(observed(numbers), observed(numbers + 1), eighths(rng, n_envs, 2), eighths(rng, n_envs), done, infos)
        numbers = numbers + 1 + done
        count += 1
    arrays: dict[str, Any] = {name: getattr(buffer, name) for name in ("actions", "rewards", "dones", "timeouts")}
    for name in ("observations", "next_observations")[: 2 - shared]:
        found = getattr(buffer, name)
        arrays |= {f"{name}/{key}": array for key, array in found.items()} if as_dict else {name: found}
    return File(arrays, {}, {"buffer": buffer, "shared": shared})


def sb3_fields(file: File) -> dict[str, Field]:
    """The first row that is used is the second oldest of a full ring."""
    buffer = file.about["buffer"]
    row = (buffer.pos + 1) % buffer.buffer_size if buffer.full else 0
    roles = {"actions": "actions", "rewards": "rewards", "dones": "flags", "timeouts": "flags"}
    return {
        name: Field(roles.get(name, "observations"), row=row, members=90 if name.endswith("/number") else None, whole=False)
        for name in file.arrays
    }


def write_sb3(file: File, folder: Path) -> str:
    """A pickle of the buffer with the file's arrays."""
    buffer, state = file.about["buffer"], dict(vars(file.about["buffer"]))
    for name in ("actions", "rewards", "dones", "timeouts", "observations", "next_observations"):
        found = {key: array for key, array in under(file.arrays, name).items() if array is not None}
        state.pop(name, None)
        if found:
            state[name] = found.get("", found)
    state |= file.about.get("state", {})
    for name in file.about.get("without", ()):
        state.pop(name, None)
    other = type(buffer).__new__(type(buffer))
    other.__dict__.update(state)
    (folder / "buffer.pkl").write_bytes(pickle.dumps(other))
    return f"sb3:{folder / 'buffer.pkl'}"


def sb3_meaning(file: File) -> dict[str, np.ndarray]:
    """One environment after the other, each in the order of time."""
    buffer, arrays = file.about["buffer"], file.arrays
    size = buffer.buffer_size
    steps = [(buffer.pos + i) % size for i in range(size)] if buffer.full else list(range(buffer.pos))
    if buffer.full and file.about["shared"]:
        steps = steps[1:]
    parts: dict[str, list[np.ndarray]] = {}
    for env in range(buffer.n_envs):

        def of(array: Any, shift: int = 0, env: int = env) -> np.ndarray:
            return plain(array)[[(step + shift) % size for step in steps], env]

        keys = under(arrays, "observations")
        observations = {key: of(array) for key, array in keys.items()}
        if file.about["shared"]:
            successors = {key: of(array, 1) for key, array in keys.items()}
        else:
            successors = {key: of(array) for key, array in under(arrays, "next_observations").items()}
        if "number" in observations:
            observations["number"], successors["number"] = observations["number"][:, 0], successors["number"][:, 0]
        dones = of(arrays["dones"]) != 0
        ends = dones.copy()
        for key in keys:
            differ = successors[key][:-1] != observations[key][1:]
            ends[:-1] |= differ.reshape(len(differ), -1).any(axis=1)
        stop = dones & (of(arrays["timeouts"]) == 0)
        found = dataset_of(observations, of(arrays["actions"]) * 2, of(arrays["rewards"]), stop, ends, successors, (-2, 2))
        for name, array in found.items():
            parts.setdefault(name, []).append(array)
    return {name: np.concatenate(found) for name, found in parts.items()}


def other_attributes(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong: sizes and spaces that do not fit the arrays, or none."""
    buffer = file.about["buffer"]
    wrong: dict[str, list[Any]] = {
        "pos": [-1, buffer.buffer_size + 1, 0.5, None, "1"],
        "buffer_size": [0, buffer.buffer_size + 1, -3, None],
        "n_envs": [0, buffer.n_envs + 1, None, "2"],
        "observation_space": [None, spaces.Text(3), spaces.Box(-1, 1, (3,)), spaces.Dict({"z": FLOATS}), "Box"],
        "action_space": [None, spaces.Discrete(3), spaces.Box(-1, 1, (3,)), spaces.Box(-np.inf, np.inf, (2,)), FLOATS],
        "rewards": [None, [1.0], {}],
        "observations": [None, 3, {}],
    }
    name = pick(rng, wrong)
    if rng.random() < 0.2:
        file.about["without"] = [name]
    else:
        file.about["state"] = {name: pick(rng, wrong[name])}
    file.notes.append(f"{name} is {file.about.get('state')}")
    return False


def empty_buffer(file: File, rng: np.random.Generator) -> bool | None:
    """Wrong: nothing was added."""
    file.about["state"] = {"pos": 0, "full": False}
    return False


def gap(file: File, rng: np.random.Generator) -> bool | None:
    """Right: a trajectory ends where the next row is not the successor."""
    if "observations" not in file.arrays or file.about["shared"]:
        return None
    changed = file.arrays["next_observations"].copy()
    changed[rng.integers(len(changed))] = 0.25
    file.arrays["next_observations"] = changed
    return True


KINDS = {
    "ogbench": Kind(
        make_ogbench, ogbench_fields, write_ogbench, ogbench_meaning, (into_a_wall, another_maze, no_transition, no_end)
    ),
    "minari": Kind(make_minari, minari_fields, write_minari, minari_meaning, (other_metadata, fewer_steps, no_episode)),
    "robomimic": Kind(
        make_robomimic, robomimic_fields, write_robomimic, robomimic_meaning, (other_groups, empty_demonstration, other_dones)
    ),
    "sb3": Kind(make_sb3, sb3_fields, write_sb3, sb3_meaning, (other_attributes, empty_buffer, gap)),
}
