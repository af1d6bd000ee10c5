"""OGBench's raw files, labelled with the rewards of one task by the package's own function."""

import gc
import importlib
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numpy as np

from sb3_flow.data.columns import (
    Allocate,
    Parts,
    check_lengths,
    flags,
    gather,
    lockstep,
    npz_columns,
    observation_dtype,
    pick,
)
from sb3_flow.data.validation import check_action_space


@dataclass(frozen=True)
class SingleTask:
    """
    What a single-task name of OGBench says.

    :param env_id: OGBench's environment, without the kind of data
    :param dataset: OGBench's dataset, without the task
    :param sparse: rewards of -1 until the task is solved, instead of minus the number of unsolved parts
    """

    env_id: str
    dataset: str
    sparse: bool


def single_task(name: str) -> SingleTask:
    """
    :param name: ``<domain>-<kind of data>[-sparse]-singletask[-taskK]-v0``
    :raises ValueError: for other names
    """
    words = name.split("-")
    if "singletask" not in words[2:]:
        raise ValueError(
            f"'{name}' names no single task, which is what rewards are computed for: use "
            "'ogbench:<dataset>-singletask[-taskK]-v0[@file.npz]', for example "
            "'ogbench:pointmaze-medium-navigate-singletask-task1-v0@pointmaze-medium-navigate-v0.npz'"
        )
    sparse = "sparse" in words
    words = [word for word in words if word != "sparse"]
    at = words.index("singletask")
    return SingleTask("-".join(words[: at - 1] + words[at:]), "-".join([*words[:at], words[-1]]), sparse)


def read_ogbench(path: Path, task: SingleTask, allocate: Allocate) -> Parts:
    """
    All transitions. A file holds one row more than transitions for each episode, whose observation becomes the final one.

    :param path: the file
    :param task: what the rewards are computed for
    :param allocate: makes the arrays
    :return: the transitions
    :raises ValueError: if the file is damaged, holds no transition or is of another environment, or OGBench has no such task
    """
    relabel_dataset = importlib.import_module("ogbench.relabel_utils").relabel_dataset
    env_name = task.env_id
    labelled_by = ["qpos", "button_states"] if "scene" in env_name or "puzzle" in env_name else ["qpos"]
    columns = pick(npz_columns(path), ["observations", "actions", "terminals", *labelled_by], path)
    check_lengths(columns)
    try:
        env = gymnasium.make(env_name)
    except gymnasium.error.Error as error:
        raise ValueError(f"OGBench has no environment {env_name}: {error}") from error
    observation_space, action_space = env.observation_space, env.action_space
    check_action_space(action_space)
    if columns["observations"].shape[1:] != observation_space.shape:
        raise ValueError(
            f"{path} holds observations of shape {columns['observations'].shape[1:]}, {env_name} has "
            f"{observation_space.shape}: the file is of another dataset"
        )

    extra = flags(columns["terminals"])  # the row that each episode has beyond its transitions
    extra[-1] = True
    keep = ~extra
    last = keep & np.append(extra[1:], False)
    if not keep.any():
        raise ValueError(f"{path} holds no transition: every episode has a single row")
    transitions = int(np.count_nonzero(keep))
    rewards = allocate("rewards", (transitions,), np.float32)
    terminated = np.empty(transitions, bool)
    random_state = np.random.get_state()  # relabelling resets the environment, which draws from NumPy's global generator
    try:
        first = filled = 0
        for blocks in lockstep(*(columns[name] for name in labelled_by)):
            rows = keep[first : first + len(blocks[0])]
            first += len(rows)
            block = {name: values[rows] for name, values in zip(labelled_by, blocks, strict=True)}
            relabel_dataset(env_name, env, block)
            stop = filled + len(block["qpos"])
            rewards[filled:stop] = np.where(block["rewards"] != 0, -1, 0) if task.sparse else block["rewards"]
            terminated[filled:stop] = block["masks"] == 0
            filled = stop
    finally:
        np.random.set_state(random_state)
        env.close()
    del env
    gc.collect()  # the simulator is held by cycles and as large as a million rows: free it before they are read
    observations, finals = gather(
        columns["observations"], observation_dtype(columns["observations"]), allocate, keep, np.flatnonzero(last) + 1
    )
    actions, _ = gather(columns["actions"], np.float32, allocate, keep)
    return Parts(observations, actions, rewards, terminated, last[keep], finals, observation_space, action_space)
