"""EnvPool's environments, which are stepped by threads in C++, as a vectorised environment of SB3."""

import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial, reduce
from operator import getitem
from typing import Any, NoReturn

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from sb3_flow.envs.envpool_spaces import leaves, plain_action_space, plain_space

# arguments that this class sets itself: a row for each environment, in order, and no pictures
RESERVED = ("env_type", "env_seed", "batch_size", "max_num_players", "gym_reset_return_info", "render_mode", "render_env_id")
# EnvPool's seeds are C++ integers
SEEDS = 2**31


def _maker(task: str, num_envs: int | None, seed: int | None, options: dict[str, Any]) -> Callable[..., Any]:
    """Check the arguments of a pool, and return the function that makes the pool, by default with this seed."""
    try:
        import envpool
    except ImportError as error:
        raise ImportError(f"EnvPoolVecEnv needs the package envpool: pip install 'sb3-flow[envpool]' ({error})") from error
    num_envs = 1 if num_envs is None else num_envs
    if isinstance(num_envs, bool) or not isinstance(num_envs, (int, np.integer)) or num_envs < 1:
        raise ValueError(f"`num_envs` must be an integer of at least 1, but {num_envs!r} was given.")
    known = envpool.list_all_envs()
    if task not in known:
        close = ", ".join(map(repr, get_close_matches(task, known))) or "a name of `envpool.list_all_envs()`"
        raise ValueError(f"`task` must be a task of EnvPool, but {task!r} was given; expected is, for example, {close}.")
    for name in RESERVED:
        if name in options:
            raise ValueError(f"`{name}` cannot be chosen: all environments are stepped at once, and none is rendered.")
    # EnvPool's default would be the same number always
    seed = int(np.random.randint(SEEDS)) if seed is None else seed % SEEDS
    return partial(envpool.make, task, env_type="gymnasium", num_envs=int(num_envs), seed=seed, **options)


class EnvPoolVecEnv(VecEnv):
    """
    The environments of `EnvPool <https://github.com/sail-sg/envpool>`_, stepped by threads in C++, behind SB3's ``VecEnv``.
    This class needs ``pip install 'sb3-flow[envpool]'``::

        env = VecMonitor(EnvPoolVecEnv("CartPole-v1", num_envs=8, seed=0))
        model = PPO("MlpPolicy", env)
        model = AsyncPPO("MlpPolicy", lambda: VecMonitor(EnvPoolVecEnv("CartPole-v1", num_envs=8)))

    There is no ``Monitor`` around the environments: without ``VecMonitor`` there are no statistics of episodes.

    **Ends of episodes.** EnvPool by itself returns the last observation of an episode, and spends the next step, whose action
    it ignores, on the reset. SB3 expects the first observation of the next episode at once, and the last observation in
    ``infos``. So environments that are done make that step here, alone and at once: the episodes are the same, and no action
    is lost.

    **Episodes that terminate at the very step of the time limit** are called truncated by EnvPool, and there is nothing to
    tell them from other truncated episodes: their value is bootstrapped.

    **Spaces.** Observations in nested dictionaries become flat, with keys like ``"grid/walls"``; scalars get a dimension;
    integers count from zero; arrays of integer actions are ``MultiDiscrete``.

    **Seeds** are fixed when a pool is made. ``seed`` (and so ``PPO(seed=...)``) therefore has the next ``reset`` make another
    pool, which is not possible if a pool was given.

    **Missing**: rendering, attributes, methods and wrappers of single environments, options of resets, pools with a
    ``batch_size`` of their own, tasks with several players. Infos have EnvPool's entries, without the ids of environments.

    :param task: name of a task, see ``envpool.list_all_envs()``, or a pool from ``envpool.make(..., env_type="gymnasium")``
    :param num_envs: number of environments, 1 by default
    :param seed: of the first environment; the others count on. By default taken from NumPy's global generator
    :param options: of ``envpool.make``, e.g. ``num_threads`` or ``max_episode_steps``
    :raises ImportError: if envpool is not installed
    :raises ValueError: if there is no such task, or the task or an argument does not fit
    """

    def __init__(self, task: Any, num_envs: int | None = None, seed: int | None = None, **options: Any):
        self._make: Callable[..., Any] | None = None
        if isinstance(task, str):
            self._make = _maker(task, num_envs, seed, options)
            pool = self._make()
        else:
            pool = task
            if not (hasattr(pool, "recv") and hasattr(pool, "single_observation_space")):
                raise ValueError(
                    "`task` must be the name of a task or a pool of `envpool.make(..., env_type='gymnasium')`, but "
                    f"{type(task).__name__} was given."
                )
            if seed is not None or options or num_envs not in (None, len(pool)):
                raise ValueError("`num_envs`, `seed` and options belong to the pool `task`, and cannot be chosen here.")
        if pool.config["max_num_players"] > 1:
            raise ValueError("`task` must be for one player, but this task is for several.")
        if pool.is_async:
            raise ValueError("`batch_size` of the pool must be its number of environments: SB3 steps all of them at once.")
        self._pool: Any = pool
        self._started = self._stepping = False  # stepping: actions are sent, and not answered yet
        raw = pool.observation_space
        self._observed = [("/".join(path), path, leaf, plain_space(leaf)) for path, leaf in leaves(raw)]
        nested = isinstance(raw, (spaces.Dict, dict))
        plain = spaces.Dict({name: space for name, _, _, space in self._observed}) if nested else self._observed[0][-1]
        actions, self._first_action = plain_action_space(pool.action_space)
        self._action_shape = tuple(size for size in list(pool.spec.action_array_spec.values())[-1].shape if size != -1)
        super().__init__(len(pool), plain, actions)

    @property
    def pool(self) -> Any:
        """Give EnvPool's object; a RuntimeError says that it is closed."""
        if self._pool is None:
            raise RuntimeError("EnvPoolVecEnv is closed.")
        return self._pool

    def _observation(self, raw: Any) -> Any:
        """Bring EnvPool's observation into the space of this object."""
        found = {}
        for name, path, leaf, space in self._observed:
            value = reduce(getitem, path, raw)
            if isinstance(leaf, spaces.Discrete):
                value = value - leaf.start
            found[name] = value.reshape(len(value), *space.shape).astype(space.dtype, copy=False)
        return found if isinstance(self.observation_space, spaces.Dict) else found[""]

    def _infos(self, info: dict[str, Any]) -> list[dict[str, Any]]:
        """Turn EnvPool's arrays into a dictionary for each environment."""
        columns = {"/".join(path): reduce(getitem, path, info) for path, _ in leaves(info)}
        names = [name for name in columns if name not in ("env_id", "players/env_id")]
        return [dict(zip(names, row, strict=True)) for row in zip(*map(columns.__getitem__, names), strict=True)]

    def reset(self) -> VecEnvObs:
        """Begin an episode in each environment, with the seeds that were given before, and return observations."""
        pool = self.pool
        if self._stepping:
            pool.recv()
            self._stepping = False
        if self._make is not None and self._seeds[0] is not None:
            self._pool = pool = self._make(seed=[seed % SEEDS for seed in self._seeds])  # type: ignore[operator]
        self._reset_seeds()
        raw, info = pool.reset()
        self.reset_infos = self._infos(info)
        self._started = True
        first: VecEnvObs = self._observation(raw)
        return first

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """
        Seed the environments at the next reset, see ``VecEnv.seed``.

        :param seed: of the first environment
        """
        if self._make is None:
            warnings.warn("The seeds of a pool are fixed: give them to `envpool.make`, or give EnvPoolVecEnv the task's name.")
            return [None] * self.num_envs
        return super().seed(seed)

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Refuse options of resets, which EnvPool does not have, with a NotImplementedError; see ``VecEnv.set_options``."""
        if any(options) if isinstance(options, list) else options:
            raise NotImplementedError("EnvPool has no options of resets; give EnvPoolVecEnv the options of `envpool.make`.")

    def step_async(self, actions: np.ndarray) -> None:
        """
        Begin a step. The threads of the pool go on while Python does other things.

        :param actions: of shape ``(n_envs, ...)``
        """
        pool = self.pool
        if not self._started or self._stepping:
            raise RuntimeError("`reset` comes before the first step, and `step_wait` before the next step.")
        actions, space = np.asarray(actions), self.action_space
        # EnvPool ends the process if there are too few, and does not look at their values
        if actions.shape != (self.num_envs, *space.shape):  # type: ignore[misc]
            raise ValueError(f"`actions` must be of shape {(self.num_envs, *space.shape)}, but {actions.shape} was given.")  # type: ignore[misc]
        if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            count = space.n if isinstance(space, spaces.Discrete) else space.nvec
            if (actions < 0).any() or (actions >= count).any():
                raise ValueError(f"`actions` must be in {space}, but {actions} was given.")
            actions = actions + self._first_action
        self._actions = actions.reshape(self.num_envs, *self._action_shape).copy()
        pool.send(self._actions)
        self._stepping = True

    def step_wait(self) -> VecEnvStepReturn:
        """Finish the step, and reset the environments whose episodes have ended; see ``VecEnv.step_wait``."""
        pool = self.pool
        if not self._stepping:
            raise RuntimeError("`step_wait` comes after `step_async`.")
        raw, rewards, terminated, truncated, info = pool.recv()
        self._stepping = False
        observation, infos, dones = self._observation(raw), self._infos(info), terminated | truncated
        for entry, cut in zip(infos, (truncated & ~terminated).tolist(), strict=True):
            entry["TimeLimit.truncated"] = cut
        if dones.any():
            ended = np.flatnonzero(dones)
            # A step of these environments alone is their automatic reset: the action, though needed, is ignored. It is not
            # `pool.reset`, which would end an Atari game that only lost a life. Rows come in the order of the request
            raw, _, _, _, info = pool.step(self._actions[ended], ended.astype(np.int32))
            first, nested = self._observation(raw), isinstance(observation, dict)
            for env, reset_info in zip(ended, self._infos(info), strict=True):
                last = {key: part[env].copy() for key, part in observation.items()} if nested else observation[env].copy()
                infos[env]["terminal_observation"] = last
                self.reset_infos[env] = reset_info
            # a step's arrays are its own, EnvPool does not use them again
            for key in observation if nested else ():
                observation[key][ended] = first[key]
            if not nested:
                observation[ended] = first
        return observation, rewards.astype(np.float32, copy=False), dones, infos

    def close(self) -> None:
        """End the threads of the pool. Nothing can be done with this object afterwards."""
        pool, self._pool = self._pool, None
        if pool is not None:
            if self._stepping:
                pool.recv()
                self._stepping = False
            pool.close()

    def get_images(self) -> Sequence[np.ndarray | None]:
        """Raise NotImplementedError, since EnvPool does not render."""
        raise NotImplementedError("EnvPoolVecEnv does not render; make the environment with `gymnasium.make` for pictures.")

    def render(self, mode: str | None = None) -> np.ndarray | None:
        """Raise NotImplementedError, since EnvPool does not render."""
        self.get_images()
        return None

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """
        Read an attribute of the pool, once for each environment: the environments, in C++, have no attributes for Python.

        :raises AttributeError: if the pool does not have the attribute
        """
        if not hasattr(self.pool, attr_name):
            raise AttributeError(f"EnvPool's environments have no attribute {attr_name!r} that Python can read.")
        return [getattr(self.pool, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Raise NotImplementedError, since EnvPool's environments have no attributes for Python."""
        raise NotImplementedError(f"`{attr_name}` cannot be set: EnvPool's environments take options only when they are made.")

    def env_method(self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any) -> NoReturn:
        """Raise NotImplementedError, since EnvPool's environments have no methods for Python."""
        raise NotImplementedError(f"`{method_name}` cannot be called: EnvPool's environments have no methods for Python.")

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        """Say that no environment is wrapped; see ``VecEnv.env_is_wrapped``."""
        return [False for _ in self._get_indices(indices)]
