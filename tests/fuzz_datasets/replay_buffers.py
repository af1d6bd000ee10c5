"""Pickles of SB3's replay buffers."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import ogbench  # noqa: F401
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, ReplayBuffer

from tests.fuzz_datasets.files import (
    Field,
    File,
    Kind,
    dataset_of,
    eighths,
    pick,
    plain,
    under,
)

FLOATS = spaces.Box(-np.inf, np.inf, (2,), np.float32)


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


KINDS = {"sb3": Kind(make_sb3, sb3_fields, write_sb3, sb3_meaning, (other_attributes, empty_buffer, gap))}
