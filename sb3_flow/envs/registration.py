"""
Gymnasium ids of OGBench's single tasks. An environment has the name of its dataset, which stands after "ogbench:" there.

    env = gymnasium.make("sb3_flow.envs:cube-double-play-singletask-task2-v0")
    dataset = OfflineDataset.load("ogbench:cube-double-play-singletask-task2-v0")

OGBench itself registers environments without the kind of data in their names ("cube-double-singletask-task2-v0") once it is
imported. Importing ``sb3_flow.envs`` registers the names here, and the prefix ``sb3_flow.envs:`` has Gymnasium import it.
Making an environment imports OGBench.
"""

import importlib
from collections.abc import Iterator
from typing import Any

import gymnasium as gym

from sb3_flow.data.ogbench import single_task
from sb3_flow.envs.wrappers import SparseReward, SuccessInfo

MAZES = {
    **{f"pointmaze-{maze}": ("navigate", "stitch") for maze in ("medium", "large", "giant", "teleport")},
    **{f"antmaze-{maze}": ("navigate", "stitch", "explore") for maze in ("medium", "large", "teleport")},
    "antmaze-giant": ("navigate", "stitch"),
    **{f"humanoidmaze-{maze}": ("navigate", "stitch") for maze in ("medium", "large", "giant")},
    **{f"antsoccer-{arena}": ("navigate", "stitch") for arena in ("arena", "medium")},
}
CUBES = ("cube-single", "cube-double", "cube-triple", "cube-quadruple")
# with several kinds of sub-goals; published results are for rewards of -1 until all are reached
SPARSE = ("scene", "puzzle-3x3", "puzzle-4x4", "puzzle-4x5", "puzzle-4x6")
TASKS = ("", "-task1", "-task2", "-task3", "-task4", "-task5")


def make_single_task(name: str, **kwargs: Any) -> gym.Env[Any, Any]:
    """
    Make OGBench's environment, with success where SB3 looks for it (``info["is_success"]``).

    :param name: a single-task name, for example ``scene-play-sparse-singletask-task4-v0``
    :param kwargs: for OGBench, such as ``render_mode``
    :raises ImportError: without OGBench
    """
    try:
        importlib.import_module("ogbench")  # registers the environments
    except ImportError as error:
        raise ImportError(f"{name} needs the package ogbench: pip install 'sb3-flow[ogbench]' ({error})") from error
    task = single_task(name)
    env = SuccessInfo(gym.make(task.env_id, **kwargs))
    return SparseReward(env) if task.sparse else env


def single_task_names() -> Iterator[str]:
    """List all of OGBench's single tasks with state observations, by dataset."""
    kinds = {**MAZES, **{domain: ("play", "noisy") for domain in CUBES}}
    kinds |= {domain: ("play", "noisy", "play-sparse", "noisy-sparse") for domain in SPARSE}
    for domain, names in kinds.items():
        for kind in names:
            yield from (f"{domain}-{kind}-singletask{task}-v0" for task in TASKS)


for _name in single_task_names():
    # OGBench's own id brings the time limit. gym.register is not used, since it searches the whole registry for each name
    gym.registry[_name] = gym.envs.registration.EnvSpec(
        id=_name,
        entry_point="sb3_flow.envs.registration:make_single_task",
        order_enforce=False,
        disable_env_checker=True,
        kwargs={"name": _name},
    )
