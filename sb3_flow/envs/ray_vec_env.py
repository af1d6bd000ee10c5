"""Environments in Ray actors, on one machine or several, as a vectorised environment of SB3."""

import gc
import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

import cloudpickle
import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import CloudpickleWrapper, DummyVecEnv, VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from sb3_flow.common.checks import check_minimum, check_whole
from sb3_flow.common.observations import joined
from sb3_flow.common.ray_runtime import checked_actor_options, connected

CLOSE_TIMEOUT = 10.0
"""Seconds that environments have to close, before their actors are ended anyway."""


def _pack(value: Any) -> bytes:
    packed: bytes = cloudpickle.dumps(value)
    return packed


class EnvironmentActor:
    """
    Hold the environments of one actor in a ``DummyVecEnv``. Arrays that Ray moves are read-only on arrival: what the receiver
    does not copy anyway travels packed, and is writable when it is unpacked.
    """

    env: DummyVecEnv

    def make(self, env_fns: list[CloudpickleWrapper]) -> bytes:
        """Make the environments, and return their spaces. Errors of a constructor would not keep their class."""
        self.env = DummyVecEnv([env_fn.var for env_fn in env_fns])
        return _pack((self.env.observation_space, self.env.action_space))

    def reset(self, seeds: list[int | None], options: list[dict[str, Any]]) -> tuple[VecEnvObs, bytes]:
        """Reset the environments, each with a seed and with options."""
        # SB3 2.9.2 has no public method for seeds that are not in sequence
        self.env._seeds, self.env._options = seeds, options
        return self.env.reset(), _pack(self.env.reset_infos)

    def step(self, actions: bytes) -> tuple[VecEnvObs, np.ndarray, np.ndarray, bytes]:
        """Step the environments. The last part has the infos, and by place the infos of resets after ended episodes."""
        observations, rewards, dones, infos = self.env.step(pickle.loads(actions))
        resets = {place: self.env.reset_infos[place] for place in np.flatnonzero(dones).tolist()}
        return observations, rewards, dones, _pack((infos, resets))

    def call(self, packed: bytes) -> bytes:
        """Call a method of the ``DummyVecEnv``, with arguments and keywords."""
        name, arguments, keywords = pickle.loads(packed)
        return _pack(getattr(self.env, name)(*arguments, **keywords))

    def has_attr(self, name: str) -> bool:
        """Say whether all environments have an attribute, which may be one that cannot be sent."""
        return self.env.has_attr(name)

    def close(self) -> None:
        """Close the environments, if they were made."""
        if hasattr(self, "env"):
            self.env.close()


@cache
def _actor_class(ray: Any) -> Any:
    # once, since Ray sends the class to the cluster again after each `ray.remote`
    return ray.remote(EnvironmentActor)


class RayVecEnv(VecEnv):
    """
    Environments in actors of a `Ray <https://docs.ray.io>`_ cluster, so on several machines, behind SB3's ``VecEnv``. This
    class needs ``pip install 'sb3-flow[ray]'``, also on the other machines::

        ray.init(address="auto")  # the cluster; without this line a local one
        env = make_vec_env("HalfCheetah-v5", n_envs=64, vec_env_cls=RayVecEnv, vec_env_kwargs={"n_actors": 8})
        model = PPO("MlpPolicy", env)

    Every actor steps consecutive environments, one after the other, and gets one message for each step, however many
    environments it has. Few actors with many environments each suit fast environments; an actor for each suits slow ones.

    Everything else is as in SB3's ``DummyVecEnv``, of which each actor has one: automatic resets, ``terminal_observation``,
    seeds, options, rewards in float32. With the same seeds the episodes are the same, however environments are divided.

    **Errors.** An exception in an environment is raised here, with its class and the traceback of the actor; ``reset`` begins
    anew. If an actor or its machine is lost, so are its environments: a RuntimeError says so, and another ``RayVecEnv`` has to
    be made.

    **The end.** ``close`` closes the environments and ends the actors. Actors also end with the program, and when nothing
    refers to this object any more.

    :param env_fns: functions that make one environment each
    :param n_actors: number of actors; by default one for each environment, but no more than the CPUs of the cluster allow
    :param actor_options: options of Ray's actors, e.g. ``num_cpus`` (1 by default), ``resources``, ``runtime_env`` or
        ``scheduling_strategy`` ("SPREAD" by default)
    :param start_timeout: seconds that Ray has to start the actors, which wait for CPUs in use and for what a ``runtime_env``
        installs; to make the environments then may take any time
    :raises ImportError: if Ray is not installed
    :raises ValueError: if an argument does not fit, or the cluster has too few CPUs
    :raises RuntimeError: if Ray does not start the actors in time
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[Any, Any]]],
        n_actors: int | None = None,
        actor_options: Mapping[str, Any] | None = None,
        start_timeout: float = 120.0,
    ):
        functions = list(env_fns) if isinstance(env_fns, Iterable) else []
        if not functions or not all(map(callable, functions)):
            raise ValueError(f"`env_fns` must be a list of functions that make an environment, but {env_fns!r} was given.")
        options = checked_actor_options(actor_options=actor_options)
        each = options["num_cpus"]
        check_minimum(0, start_timeout=start_timeout, num_cpus=each)
        if n_actors is not None:
            check_whole(1, n_actors=n_actors)
            if n_actors > len(functions):
                raise ValueError(f"`n_actors` must be at most {len(functions)}, one per environment; {n_actors} was given.")
        self._ray = ray = connected("RayVecEnv")
        cpus = ray.cluster_resources().get("CPU", 0.0)
        n_actors = min(len(functions), max(1, int(cpus / (each or 1)))) if n_actors is None else int(n_actors)
        if n_actors * each > cpus:
            raise ValueError(
                f"`n_actors` is {n_actors}, which needs {n_actors * each:g} CPUs, but the cluster has {cpus:g}. Expected were "
                "fewer actors with more environments each, a smaller `num_cpus` in `actor_options`, or more nodes."
            )
        parts = np.array_split(range(len(functions)), n_actors)
        self._shares = [slice(int(part[0]), int(part[-1]) + 1) for part in parts]
        self._of = [(number, place) for number, part in enumerate(parts) for place in range(len(part))]
        self._pending: dict[int, Any] | None = None
        self._actors: list[Any] = []
        self.closed = self._started = False
        try:
            self._start(_actor_class(ray).options(**options), each, start_timeout)
            made = self._send("make", [([CloudpickleWrapper(one) for one in functions[share]],) for share in self._shares])
            super().__init__(len(functions), *pickle.loads(self._answers(made)[0]))
        except BaseException:
            self.close()
            raise

    def _start(self, kind: Any, each: float, timeout: float) -> None:
        ray, n_actors = self._ray, len(self._shares)
        gc.collect()  # environments that nobody refers to any more keep CPUs of the cluster until then
        self._actors = [kind.remote() for _ in self._shares]
        ready = [actor.__ray_ready__.remote() for actor in self._actors]
        started, waiting = ray.wait(ready, num_returns=n_actors, timeout=timeout)
        if waiting:
            cpus, free = (found().get("CPU", 0.0) for found in (ray.cluster_resources, ray.available_resources))
            raise RuntimeError(
                f"Ray has started {len(started)} of {n_actors} actors within {timeout:g} seconds. All of them need "
                f"{n_actors * each:g} CPUs; the cluster has {cpus:g}, of which {free:g} are free now. Expected were fewer "
                "actors (`n_actors`), `actor_options` that nodes of the cluster fulfil, or a longer `start_timeout`."
            )
        self._answers(dict(enumerate(ready)))
        self._started = True

    def _send(self, method: str, arguments: Iterable[tuple[Any, ...]], to: Iterable[int] | None = None) -> dict[int, Any]:
        """Send one message to each actor, and return by the actors' numbers where the answers will be."""
        if self.closed:
            raise RuntimeError("RayVecEnv is closed.")
        numbers = range(len(self._actors)) if to is None else to
        return {k: getattr(self._actors[k], method).remote(*given) for k, given in zip(numbers, arguments, strict=True)}

    def _answers(self, sent: Mapping[int, Any]) -> list[Any]:
        """Wait for the actors' answers; exceptions of environments are raised as they are."""
        found = []
        for number, answer in sent.items():
            try:
                found.append(self._ray.get(answer))
            except self._ray.exceptions.RayTaskError:
                raise
            except self._ray.exceptions.RayError as error:
                share = self._shares[number]
                raise RuntimeError(
                    f"Actor {number} of RayVecEnv is lost, and with it the environments {share.start} to {share.stop - 1}. "
                    f"Close this RayVecEnv and make another one. Ray says: {error}"
                ) from error
        return found

    def _call(self, name: str, indices: VecEnvIndices, /, *arguments: Any, **keywords: Any) -> list[Any]:
        """Call a method of the actors' ``DummyVecEnv``, and return the results in the order of the indices."""
        order, places = [], dict[int, list[int]]()
        for index in self._get_indices(int(indices) if isinstance(indices, np.integer) else indices):
            if not -self.num_envs <= index < self.num_envs:
                raise IndexError(f"`indices` must be below {self.num_envs}, the number of environments; {index} was given.")
            number, place = self._of[index]
            order.append(number)
            places.setdefault(number, []).append(place)
        messages = [(_pack((name, arguments, {**keywords, "indices": at})),) for at in places.values()]
        answers = self._answers(self._send("call", messages, places))
        # `set_attr` returns nothing
        results = {k: iter(pickle.loads(part) or places[k]) for k, part in zip(places, answers, strict=True)}
        return [next(results[number]) for number in order]

    def reset(self) -> VecEnvObs:
        """Begin an episode in each environment, with the seeds and options that were given before; forget a step that runs."""
        self._pending = None
        sent = self._send("reset", [(self._seeds[share], self._options[share]) for share in self._shares])
        observations, infos = zip(*self._answers(sent), strict=True)
        self.reset_infos = [info for part in infos for info in pickle.loads(part)]
        self._reset_seeds()
        self._reset_options()
        return joined(observations)

    def step_async(self, actions: np.ndarray) -> None:
        """
        Begin a step in all actors.

        :param actions: one for each environment; they may be changed afterwards
        """
        if len(actions) != self.num_envs:
            raise ValueError(f"`actions` must be one for each of {self.num_envs} environments, but {len(actions)} were given.")
        if self._pending is not None:
            raise RuntimeError("`step_wait` comes before the next step.")
        self._pending = self._send("step", [(_pack(actions[share]),) for share in self._shares])

    def step_wait(self) -> VecEnvStepReturn:
        """Wait for all actors, and return what SB3's ``DummyVecEnv`` would."""
        pending, self._pending = self._pending, None
        if pending is None:
            raise RuntimeError("`step_wait` comes after `step_async`.")
        observations, rewards, dones, packed = zip(*self._answers(pending), strict=True)
        infos: list[dict[str, Any]] = []
        for part, resets in map(pickle.loads, packed):
            for place, info in resets.items():
                self.reset_infos[len(infos) + place] = info
            infos += part
        return joined(observations), np.concatenate(rewards), np.concatenate(dones), infos

    def close(self) -> None:
        """Close the environments, for which they have ten seconds, and end their actors."""
        if self.closed:
            return
        actors, self._actors, self._pending, self.closed = self._actors, [], None, True
        ray = self._ray
        if not actors or not ray.is_initialized():
            return  # the actors ended with the connection
        asked = [actor.close.remote() for actor in actors]
        closed, late = ray.wait(asked, num_returns=len(asked), timeout=CLOSE_TIMEOUT if self._started else 0)
        for actor in actors:
            ray.kill(actor)
        if late and self._started:
            warnings.warn(f"{len(late)} of {len(actors)} actors were ended before their environments could be closed.")
        for answer in closed:
            try:
                ray.get(answer)
            except ray.exceptions.RayTaskError as error:
                warnings.warn(f"An environment could not be closed: {error}")
            except ray.exceptions.RayError:
                pass  # the actor was lost before

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "The environments of a RayVecEnv live in actors, and can be neither copied nor pickled. Save a model and load it "
            "with an environment of its own, or copy it while `env` is None."
        )

    def get_images(self) -> Sequence[np.ndarray | None]:
        """Render every environment, see ``VecEnv.get_images``."""
        if self.render_mode != "rgb_array":
            warnings.warn(f"The render mode is {self.render_mode}, but images need `rgb_array`: there are none.")
            return [None] * self.num_envs
        return self.env_method("render")

    def has_attr(self, attr_name: str) -> bool:
        """Say whether all environments have an attribute, see ``VecEnv.has_attr``."""
        return all(self._answers(self._send("has_attr", [(attr_name,)] * len(self._actors))))

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Read an attribute of environments, see ``VecEnv.get_attr``; the values are copies."""
        return self._call("get_attr", indices, attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute of environments, see ``VecEnv.set_attr``."""
        self._call("set_attr", indices, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of environments, see ``VecEnv.env_method``."""
        return self._call("env_method", indices, method_name, *method_args, **method_kwargs)

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        """Say which environments are wrapped, see ``VecEnv.env_is_wrapped``."""
        return self._call("env_is_wrapped", indices, wrapper_class)
