"""
Episodes of OGBench's scripted oracles, each a function of its own seed and of nothing else.

The recipes (noise levels, goal and target distributions, redraws) are taken from the published OGBench data sets;
:mod:`sb3_flow.data.generate` turns the episodes into files.
"""

import contextlib
import copy
import importlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

Episode = dict[str, np.ndarray]
Cell = tuple[int, int]

# the arrays of an episode and their types on disk, in file order; button_states: scene and puzzle only
DTYPES: dict[str, type] = {
    "observations": np.float32,
    "actions": np.float32,
    "terminals": np.bool_,
    "qpos": np.float32,
    "qvel": np.float32,
    "button_states": np.int64,
}

NAVIGATE_NOISE = 0.5  # standard deviation, every action component
PLAN_OPTIONS = {"noise": 0.1, "noise_smoothing": 0.5}
MARKOV_OPTIONS = {"min_norm": 0.4}
MARKOV_NOISE = 0.1  # an episode's noise level is uniform in [0, this], times the scale below
MARKOV_NOISE_SCALE = np.array([1.0, 1.0, 1.0, 3.0, 10.0])  # x, y, z, yaw, gripper
STACK_PROBABILITY = {  # range of an episode's probability that a cube is put on another cube
    "cube-single": (0.0, 0.0),
    "cube-double": (0.0, 0.25),
    "cube-triple": (0.05, 0.35),
    "cube-quadruple": (0.1, 0.5),
}


@dataclass(frozen=True)
class Recipe:
    """
    The recipe of a published data set.

    :param domain: environment without version, e.g. ``cube-single``
    :param kind: ``navigate``, ``play`` (precomputed plans) or ``noisy`` (closed-loop oracle, noisy and random actions)
    :param episodes: number of training episodes of the published data set
    :param episode_length: rows of an episode, one more than its transitions
    :param random_actions: share of uniformly random actions
    """

    domain: str
    kind: str
    episodes: int = 1000
    episode_length: int = 1001
    random_actions: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.domain}-{self.kind}"


def _all_recipes() -> Iterator[Recipe]:
    for maze in ("medium", "large", "teleport"):
        yield Recipe(f"pointmaze-{maze}", "navigate")
    yield Recipe("pointmaze-giant", "navigate", episodes=500, episode_length=2001)
    sizes = {"cube-triple": 3000, "cube-quadruple": 5000, "puzzle-4x5": 3000, "puzzle-4x6": 5000}
    for domain in (*STACK_PROBABILITY, "scene", "puzzle-3x3", "puzzle-4x4", "puzzle-4x5", "puzzle-4x6"):
        episodes = sizes.get(domain, 1000)
        yield Recipe(domain, "play", episodes)
        yield Recipe(domain, "noisy", episodes, random_actions=0.2 if domain.startswith("puzzle") else 0.1)


RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _all_recipes()}
EXPERT_FAMILIES = ("antmaze", "humanoidmaze", "antsoccer")


def find_recipe(name: str) -> Recipe:
    """
    Find the recipe of a data set.

    :param name: e.g. ``cube-single-play`` or ``cube-single-play-v0``
    :raises ValueError: if there is no recipe of that name
    """
    if recipe := RECIPES.get(name.removesuffix("-v0")):
        return recipe
    if name.startswith(EXPERT_FAMILIES):
        raise ValueError(
            f"name={name!r}: {', '.join(EXPERT_FAMILIES)} data need trained expert policies, which cannot be made here; "
            "download the published files instead"
        )
    raise ValueError(f"name={name!r} is not a data set that can be generated; known: {', '.join(RECIPES)}")


@contextlib.contextmanager
def _numpy_state_kept() -> Iterator[None]:
    state = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(state)


class EpisodeMaker:
    """
    Makes the episodes of a data set, all in the same environment.

    An episode depends on ``(seed, split, index)`` only: not on the episodes made before, nor on global random state,
    which is left as it was found.

    :param episode_length: rows of an episode, one more than its transitions
    """

    def __init__(self, recipe: Recipe, episode_length: int) -> None:
        import ogbench  # noqa: F401  (registers the environments)

        self.recipe = recipe
        options: dict[str, Any] = {} if recipe.kind == "navigate" else {"mode": "data_collection"}
        options |= {"terminate_at_goal": False, "max_episode_steps": episode_length, "disable_env_checker": True}
        self.env = gym.make(f"{recipe.domain}-v0", **options)
        with _numpy_state_kept():
            self.env.reset(seed=0)  # compiles the model
        inner: Any = self.env.unwrapped
        # OGBench's reset leaves the scene's inactive targets as the last episode made them. They reach the data, since
        # the noisy oracles act once on the info of the step before their target was set.
        self._targets = {key: copy.deepcopy(value) for key, value in vars(inner).items() if key.startswith("_target_")}
        self._site_pos = inner.model.site_pos.copy()

    def episode(self, seed: int, split: int, index: int) -> Episode:
        """
        Make an episode.

        :param seed: of the data set
        :param split: 0 for training, 1 for validation
        :param index: number of the episode in its split
        :return: arrays by name, see ``DTYPES``; the last row only ends the episode
        """
        rollout = self._navigate if self.recipe.kind == "navigate" else self._manipulate
        with _numpy_state_kept():
            for attempt in itertools.count():
                rows = rollout(np.random.SeedSequence(seed, spawn_key=(split, index, attempt)))
                if self.recipe.domain != "scene" or cube_in_sight(np.asarray(rows["qpos"])):
                    break
        return {key: np.asarray(rows[key], dtype) for key, dtype in DTYPES.items() if key in rows}

    def _reset(self, seeds: np.random.SeedSequence, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset to a state that the seeds alone decide: all the randomness inside OGBench comes from them."""
        inner: Any = self.env.unwrapped
        vars(inner).update(copy.deepcopy(self._targets))
        inner.model.site_pos[:] = self._site_pos
        legacy, reset_seed, action_seed = seeds.spawn(3)
        np.random.seed(legacy.generate_state(8))  # start and goal noise, oracle plans
        if self.recipe.kind == "navigate":  # for the mazes' random first steps
            self.env.action_space.seed(int(action_seed.generate_state(1)[0]))
        return self.env.reset(seed=int(reset_seed.generate_state(1, np.uint64)[0]), options=options)

    def _navigate(self, seeds: np.random.SeedSequence) -> dict[str, list[Any]]:
        """Walk to random junctions of the maze, one after the other."""
        own_seeds, env_seeds = seeds.spawn(2)
        rng = np.random.default_rng(own_seeds)
        maze: Any = self.env.unwrapped
        free, junctions = maze_cells(maze.maze_map)
        task = {"init_ij": free[rng.integers(len(free))], "goal_ij": junctions[rng.integers(len(junctions))]}
        ob, _ = self._reset(env_seeds, {"task_info": task})

        rows: dict[str, list[Any]] = {key: [] for key in ("observations", "actions", "terminals", "qpos", "qvel")}
        waypoints: dict[tuple[Cell, Cell], np.ndarray] = {}  # the maze's path search, once per pair of cells
        done = False
        while not done:
            xy, goal_xy = maze.get_xy(), maze.cur_goal_xy
            cells = (maze.xy_to_ij(xy), maze.xy_to_ij(goal_xy))
            if cells not in waypoints:
                waypoints[cells] = maze.get_oracle_subgoal(xy, goal_xy)[0]
            direction = waypoints[cells] - xy
            direction = direction / (np.linalg.norm(direction) + 1e-6)
            action = np.clip(direction + rng.normal(0.0, NAVIGATE_NOISE, size=direction.shape), -1.0, 1.0)
            done, next_ob, info = self._step(rows, ob, action)
            if info["success"]:
                # as set_goal(goal_ij), which would also write NaN into the drawn goal's position
                goal = junctions[rng.integers(len(junctions))]
                maze.set_goal(goal_xy=maze.add_noise(maze.ij_to_xy(goal)))
            ob = next_ob
        return rows

    def _manipulate(self, seeds: np.random.SeedSequence) -> dict[str, list[Any]]:
        """Do random tasks of the scene, one after the other."""
        own_seeds, env_seeds = seeds.spawn(2)
        rng = np.random.default_rng(own_seeds)
        recipe, env = self.recipe, self.env
        target_setter: Any = env.unwrapped
        ob, info = self._reset(env_seeds)
        p_stack = rng.uniform(*STACK_PROBABILITY.get(recipe.domain, (0.5, 0.5)))
        noise = rng.uniform(0.0, MARKOV_NOISE) * MARKOV_NOISE_SCALE if recipe.kind == "noisy" else None
        oracles = make_oracles(recipe, env)
        oracle = oracles[info["privileged/target_task"]]
        oracle.reset(ob, info)

        keys = [key for key in DTYPES if key != "button_states" or "button_states" in info]
        rows: dict[str, list[Any]] = {key: [] for key in keys}
        done = False
        while not done:
            if rng.random() < recipe.random_actions:
                action = rng.uniform(-1.0, 1.0, size=5)
            else:
                action = np.asarray(oracle.select_action(ob, info))
                if noise is not None:
                    action = action + rng.normal(0.0, noise)
            done, ob, info = self._step(rows, ob, np.clip(action, -1.0, 1.0))
            if oracle.done:
                # `info` stays the step's: in the published data, too, the next action still sees the old target
                target_ob, target_info = target_setter.set_new_target(p_stack=p_stack)
                oracle = oracles[target_info["privileged/target_task"]]
                oracle.reset(target_ob, target_info)
        return rows

    def _step(self, rows: dict[str, list[Any]], ob: np.ndarray, action: np.ndarray) -> tuple[bool, np.ndarray, dict[str, Any]]:
        """Step and append the row that belongs to the state before the step."""
        next_ob, _, terminated, truncated, info = self.env.step(action)
        done = terminated or truncated
        row = {"observations": ob, "actions": action, "terminals": done}
        for key, values in rows.items():
            values.append(row[key] if key in row else info[f"prev_{key}"])
        return done, next_ob, info


def maze_cells(maze_map: np.ndarray) -> tuple[list[Cell], list[Cell]]:
    """
    List the free cells of a maze, and the free cells that are not straight corridors.

    :param maze_map: 1 where there is a wall; the border is wall
    :return: free cells (starts) and junction cells (goals)
    """
    wall = np.asarray(maze_map) == 1
    free = [(int(i), int(j)) for i, j in np.argwhere(~wall)]

    def is_corridor(i: int, j: int) -> bool:
        along_i, along_j = wall[[i - 1, i + 1], j], wall[i, [j - 1, j + 1]]
        return bool((not along_i.any() and along_j.all()) or (not along_j.any() and along_i.all()))

    return free, [cell for cell in free if not is_corridor(*cell)]


def cube_in_sight(qpos: np.ndarray) -> bool:
    """
    Say whether the cube of a scene episode always stays where a camera sees it, or in the drawer.

    :param qpos: joint positions, shape (rows, n)
    :return: False if the episode is to be redrawn
    """
    y, z = qpos[:, 15], qpos[:, 16]
    too_far_right = y >= 0.29
    too_far_left = (y <= -0.3) & ((z < 0.06) | (z > 0.08))  # between the two heights it lies in the drawer
    return not np.any(too_far_right | too_far_left)


def make_oracles(recipe: Recipe, env: gym.Env[Any, Any]) -> dict[str, Any]:
    """
    Make the oracles of a data set, by the task that each oracle does.

    :param env: the environment in data-collection mode
    """
    family = "plan" if recipe.kind == "play" else "markov"
    domain = recipe.domain.split("-")[0]
    tasks = {"cube": ("cube",), "scene": ("cube", "button", "drawer", "window"), "puzzle": ("button",)}[domain]
    oracles = {}
    for task in tasks:
        options: dict[str, Any] = dict(PLAN_OPTIONS if family == "plan" else MARKOV_OPTIONS)
        if domain == "puzzle":
            options["gripper_always_closed"] = True
        if (domain, task, family) == ("scene", "cube", "markov"):
            options["max_step"] = 100  # the published setting; ogbench 1.2 overwrites it with 200 in the oracle's reset
        module = importlib.import_module(f"ogbench.manipspace.oracles.{family}.{task}_{family}")
        oracles[task] = getattr(module, f"{task.title()}{family.title()}Oracle")(env=env, **options)
    return oracles
