"""OGBench's raw files, labelled with the rewards of a task by the package's own function."""

import gc
import importlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from sb3_flow.data.columns import Allocate, Column, Parts, check_numbers, flags, gather, lockstep, observation_dtype
from sb3_flow.data.files import npz_columns, pick
from sb3_flow.data.shards import inner_borders, joined
from sb3_flow.data.validation import check_action_space

WALL_DEPTH = 0.5
"""How deep a robot's middle may be in a wall of a maze; a wall is 4 wide, and simulated robots stay outside."""


@dataclass(frozen=True)
class SingleTask:
    """
    The parts of a single-task name of OGBench.

    :param env_id: OGBench's environment, without the kind of data
    :param dataset: OGBench's dataset, without the task
    :param sparse: rewards of -1 until the task is solved, instead of minus the number of unsolved parts
    """

    env_id: str
    dataset: str
    sparse: bool


def single_task(name: str) -> SingleTask:
    """
    Split a single-task name into its parts.

    :param name: ``<domain>-<kind of data>[-sparse]-singletask[-taskK]-v0``
    :raises ValueError: if the name is none of a single task
    """
    fields = name.split("-")
    if "singletask" not in fields[2:]:
        raise ValueError(
            f"'{name}' names no single task, and rewards are computed for single tasks: use "
            "'ogbench:<dataset>-singletask[-taskK]-v0[@file.npz]', for example "
            "'ogbench:pointmaze-medium-navigate-singletask-task1-v0@pointmaze-medium-navigate-v0.npz'"
        )
    sparse = "sparse" in fields
    fields = [field for field in fields if field != "sparse"]
    at = fields.index("singletask")
    return SingleTask("-".join(fields[: at - 1] + fields[at:]), "-".join([*fields[:at], fields[-1]]), sparse)


def ogbench_columns(path: Path, task: SingleTask) -> dict[str, Column]:
    """
    List the columns of a raw file that a task's transitions and labels are made from.

    :raises ValueError: if the file is damaged or lacks an array
    """
    labelled_by = ["qpos", "button_states"] if "scene" in task.env_id or "puzzle" in task.env_id else ["qpos"]
    return pick(npz_columns(path), ["observations", "actions", "terminals", *labelled_by], path)


def read_ogbench(files: list[Path], task: SingleTask, allocate: Allocate) -> Parts:
    """
    Read all transitions. In a file, each episode has a row beyond its transitions, which holds the final observation.

    :param files: one, or several of the same dataset, each of which ends an episode
    :param task: the task that the rewards are computed for
    :param allocate: makes the arrays
    :raises ValueError: if a file is damaged, holds no transition or is of another environment, or OGBench has no such task
    """
    relabel_dataset = importlib.import_module("ogbench.relabel_utils").relabel_dataset
    env_name, path = task.env_id, files[0]
    of_files = [ogbench_columns(each, task) for each in files]
    columns = joined(files, of_files)
    labelled_by = [name for name in ("qpos", "button_states") if name in columns]
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
    _check_widths(columns, env, path)

    extra = flags(columns["terminals"])  # the row that each episode has beyond its transitions
    extra[inner_borders(of_files)] = extra[-1] = True
    keep = ~extra
    last = keep & np.append(extra[1:], False)
    if not keep.any():
        raise ValueError(f"{path} holds no transition: every episode has a single row")
    transitions = int(np.count_nonzero(keep))
    rewards = allocate("rewards", (transitions,), np.float32)
    terminated = np.empty(transitions, bool)
    random_state = np.random.get_state()  # relabelling resets the environment, which draws from NumPy's global generator
    try:
        begin = filled = 0
        for each, of_file in zip(files, of_files, strict=True):
            first = 0
            for blocks in lockstep(*(of_file[name] for name in labelled_by)):
                states = dict(zip(labelled_by, blocks, strict=True))
                _check_states(states, env, first, each)
                rows = keep[begin + first : begin + first + len(blocks[0])]
                first += len(rows)
                block = {name: values[rows] for name, values in states.items()}
                relabel_dataset(env_name, env, block)
                stop = filled + len(block["qpos"])
                rewards[filled:stop] = np.where(block["rewards"] != 0, -1, 0) if task.sparse else block["rewards"]
                terminated[filled:stop] = block["masks"] == 0
                filled = stop
            begin += first
    finally:
        np.random.set_state(random_state)
        env.close()
    del env
    gc.collect()  # the simulator is held by cycles and as large as a million rows: free it before they are read
    column = columns["observations"]
    observations, finals = gather(column, observation_dtype(column), allocate, keep, np.flatnonzero(last) + 1)
    actions, _ = gather(columns["actions"], np.float32, allocate, keep)
    return Parts(observations, actions, rewards, terminated, last[keep], finals, observation_space, action_space)


def _check_widths(columns: dict[str, Column], env: gymnasium.Env, path: Path) -> None:
    """Check that the states, which labels are made from, belong to the environment's simulator."""
    robot: Any = env.unwrapped
    for name, width in (("qpos", robot.model.nq), ("button_states", getattr(robot, "_num_buttons", None))):
        if name not in columns:
            continue
        check_numbers(name, columns[name].dtype)
        if columns[name].shape[1:] != (width,):
            raise ValueError(
                f"{path}: {name} has shape {columns[name].shape}, so {columns[name].shape[1:]} per row, {robot.spec.id} has "
                f"{width} values: the file is of another dataset"
            )


def _check_states(block: dict[str, np.ndarray], env: gymnasium.Env, first: int, path: Path) -> None:
    """Check the values that labels are made from; ``first`` is the number of the block's first row."""
    wrong = np.flatnonzero(~np.isfinite(block["qpos"]).all(axis=1))
    if len(wrong):
        bad = block["qpos"][wrong[0]]
        raise ValueError(f"{path}: qpos must be finite, got {bad[~np.isfinite(bad)][0]} in row {first + wrong[0]}")
    if "button_states" in block:
        states = block["button_states"]
        wrong = np.flatnonzero(((states != 0) & (states != 1)).any(axis=1))
        if len(wrong):
            raise ValueError(f"{path}: button_states must be 0 or 1, got {states[wrong[0]]} in row {first + wrong[0]}")
    maze: Any = env.unwrapped
    if hasattr(maze, "maze_map"):
        positions = block["qpos"][:, :2].astype(np.float64)
        wrong = np.flatnonzero(_in_walls(positions, maze))
        if len(wrong):
            raise ValueError(
                f"{path}: the position {positions[wrong[0]]} in row {first + wrong[0]} is in a wall of {maze.spec.id}: the "
                "file is of another maze"
            )


def _in_walls(positions: np.ndarray, maze: Any) -> np.ndarray:
    """(rows,) bool: which positions (rows, 2) are deeper in a wall of OGBench's maze than ``WALL_DEPTH``, or outside of it."""
    wall, offset = maze.maze_map == 1, np.array([maze._offset_x, maze._offset_y])

    def free(places: np.ndarray) -> np.ndarray:
        column, row = np.floor((places + offset) / maze._maze_unit + 0.5).T
        known: np.ndarray = (row >= 0) & (row < wall.shape[0]) & (column >= 0) & (column < wall.shape[1])
        known &= ~wall[np.where(known, row, 0).astype(int), np.where(known, column, 0).astype(int)]
        return known

    deep = ~free(positions)
    for shift in itertools.product((-WALL_DEPTH, 0.0, WALL_DEPTH), repeat=2):  # a free place this near is near enough
        deep[deep] = ~free(positions[deep] + shift)
    return deep
