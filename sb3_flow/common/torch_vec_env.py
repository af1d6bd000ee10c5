"""Environments that take and return tensors, behind SB3's ``VecEnv``."""

import time
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from sb3_flow.common.observations import map_arrays

Tensors = th.Tensor | dict[str, th.Tensor]
"""Observations of all environments, shape ``(n_envs, ...)`` each."""


def to_numpy(observations: Any) -> Any:
    """Convert tensors to arrays, which share the memory of tensors on the CPU."""
    return map_arrays(lambda part: part.detach().cpu().numpy(), observations)


@dataclass
class TensorStep:
    """
    Hold what a step of all environments returned. All tensors have a row for each environment.

    :param observations: after the step, and after the reset of environments that reset within the step
    :param rewards: float32, shape ``(n_envs,)``
    :param terminated: the episode ended by itself, bool, shape ``(n_envs,)``
    :param truncated: a time limit cut the episode, bool, shape ``(n_envs,)``
    :param final_observations: last observations of the episodes that ended, in full size: other rows mean nothing. None if
        no episode ended, if environments reset a step later, so that ``observations`` are the last, or if they are not known
    :param resets: the step only reset the environment, and its action had no effect, bool, shape ``(n_envs,)``; None if
        environments reset within the step that ends an episode
    :param successes: the episode that ended was a success, bool, shape ``(n_envs,)``; None if there is no such thing
    """

    observations: Tensors
    rewards: th.Tensor
    terminated: th.Tensor
    truncated: th.Tensor
    final_observations: Tensors | None = None
    resets: th.Tensor | None = None
    successes: th.Tensor | None = None

    episode_returns: th.Tensor = field(init=False)
    """Sum of rewards of the present episode, of an ended one where one ended; set by :meth:`TorchVecEnv.step_tensors`."""
    episode_lengths: th.Tensor = field(init=False)
    """Steps of the same episode."""

    @property
    def dones(self) -> th.Tensor:
        """Return where an episode ended."""
        return self.terminated | self.truncated


class Infos(Sequence[dict[str, Any]]):
    """
    List SB3's infos of a step, made when they are asked for, at the latest before the next step.

    :param found: the step
    :param started: when the first episode began, in seconds of ``time.time``
    :param before: observations before the step, which stand for the last ones if nobody tells these
    """

    def __init__(self, found: TensorStep, started: float, before: Tensors):
        self._found, self._started, self._before = found, started, before
        self._made: list[dict[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self._found.rewards)

    def __getitem__(self, place: Any) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made[place]

    def _make(self) -> list[dict[str, Any]]:
        found = self._found
        terminated, truncated = to_numpy(found.terminated), to_numpy(found.truncated)
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in terminated]
        ended = np.flatnonzero(terminated | truncated).tolist()
        if found.resets is not None:
            for number in np.flatnonzero(to_numpy(found.resets)).tolist():
                infos[number]["reset_step"] = True
        if not ended:
            return infos
        last = found.observations
        if found.resets is None:
            last = self._before if found.final_observations is None else found.final_observations
        final = map_arrays(np.array, to_numpy(last))
        returns, lengths = to_numpy(found.episode_returns), to_numpy(found.episode_lengths)
        seconds = round(time.time() - self._started, 6)
        for number in ended:
            infos[number]["TimeLimit.truncated"] = bool(truncated[number] and not terminated[number])
            infos[number]["episode"] = {"r": float(returns[number]), "l": int(lengths[number]), "t": seconds}
            infos[number]["terminal_observation"] = map_arrays(itemgetter(number), final)
            if found.successes is not None:
                infos[number]["is_success"] = bool(found.successes[number])
        return infos


class TorchVecEnv(VecEnv):
    """
    Environments that take and return tensors of a device, so that nothing needs to leave it: ``PPO``, ``GRPO`` and ``GSPO``
    collect by :meth:`step_tensors`. Everything else steps through SB3's NumPy interface, which copies.

    A subclass defines :meth:`_reset` and :meth:`_step`. Statistics of episodes are kept here, so neither ``Monitor`` nor
    ``VecMonitor`` is needed.

    **Resets.** Environments of most simulators reset within the step that ends an episode, as SB3's do. Others, of Gymnasium
    among them, do so one step later (``resets_late``): that step ignores its action, and the classes above do not learn from
    it. SB3's NumPy interface has no word for such a step: there it looks like any other (``infos`` mark it by "reset_step"),
    and a warning says so.

    :param num_envs: number of environments
    :param observation_space: space of one environment's observations
    :param action_space: space of one environment's actions
    :param device: device of the tensors
    :param resets_late: environments reset in the step after the one that ended an episode
    """

    render_mode: str | None = None
    observations: Tensors
    """Present observations."""
    episode_starts: th.Tensor
    """The next step begins an episode, bool, shape ``(n_envs,)``."""
    tells_last = False
    """Steps have had ``final_observations``."""
    warns_of_late_resets = True
    """The first late reset that is seen through NumPy is warned of; False for who counts episodes alone."""

    def __init__(
        self,
        num_envs: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "cpu",
        resets_late: bool = False,
    ):
        self.device, self.resets_late = th.device(device), resets_late
        self._actions: th.Tensor | None = None
        super().__init__(num_envs, observation_space, action_space)

    @abstractmethod
    def _reset(self, seed: int | None, options: dict[str, Any] | None) -> Tensors:
        """Reset all environments; return their observations."""

    @abstractmethod
    def _step(self, actions: th.Tensor) -> TensorStep:
        """Step all environments; ``resets`` need not be filled in."""

    def reset_tensors(self) -> Tensors:
        """Reset all environments, with the seed and options of :meth:`seed` and :meth:`set_options`, if there are any."""
        if any(options != self._options[0] for options in self._options):
            raise ValueError(f"Options of all environments must be equal, since they reset together, but are {self._options}.")
        self.observations = map_arrays(th.Tensor.detach, self._reset(self._seeds[0], self._options[0] or None))
        self._reset_seeds()
        self._reset_options()
        first = next(iter(self.observations.values())) if isinstance(self.observations, dict) else self.observations
        self.device = first.device
        self.episode_starts = th.ones(self.num_envs, dtype=th.bool, device=self.device)
        self._ended = th.zeros_like(self.episode_starts)
        self._returns = th.zeros(self.num_envs, device=self.device)
        self._lengths = th.zeros(self.num_envs, dtype=th.int64, device=self.device)
        self.started = time.time()
        return self.observations

    def step_tensors(self, actions: th.Tensor) -> TensorStep:
        """
        Step all environments.

        :param actions: shape ``(n_envs, ...)``
        :return: what the environments returned, and statistics of the episodes
        """
        found = self._checked(self._step(actions))
        self.observations, dones = found.observations, found.dones
        if self.resets_late:
            found.resets = self._ended
            self._returns = self._returns + th.where(found.resets, 0.0, found.rewards)
            self._lengths = self._lengths + ~found.resets
            self.episode_starts, self._ended = dones | found.resets, dones
        else:
            self._returns, self._lengths = self._returns + found.rewards, self._lengths + 1
            self.episode_starts = dones
        found.episode_returns, found.episode_lengths = self._returns, self._lengths
        self._returns, self._lengths = th.where(dones, 0.0, self._returns), th.where(dones, 0, self._lengths)
        return found

    def _checked(self, found: TensorStep) -> TensorStep:
        """Bring a step into the types of :class:`TensorStep`, without gradients; refuse other shapes."""

        def flat(name: str, dtype: th.dtype) -> th.Tensor:
            given = getattr(found, name)
            if not isinstance(given, th.Tensor) or given.shape != (self.num_envs,):
                shown = f"a tensor of shape {tuple(given.shape)}" if isinstance(given, th.Tensor) else repr(given)
                raise ValueError(
                    f"`{name}` of a step must be a tensor of shape ({self.num_envs},), but {type(self).__name__} gave {shown}."
                )
            return given.detach().to(dtype)

        found.rewards = flat("rewards", th.float32)
        found.terminated, found.truncated = flat("terminated", th.bool), flat("truncated", th.bool)
        if found.successes is not None:
            found.successes = flat("successes", th.bool)
        found.observations = map_arrays(th.Tensor.detach, found.observations)
        if found.final_observations is not None:
            found.final_observations = map_arrays(th.Tensor.detach, found.final_observations)
        return found

    def reset(self) -> VecEnvObs:
        """Reset all environments; return arrays."""
        observations: VecEnvObs = map_arrays(np.array, to_numpy(self.reset_tensors()))
        return observations

    def step_async(self, actions: np.ndarray) -> None:
        """Keep the actions for :meth:`step_wait`."""
        self._actions = th.tensor(np.asarray(actions), device=self.device)

    def step_wait(self) -> VecEnvStepReturn:
        """Step all environments; return arrays."""
        assert self._actions is not None, "`step_async` was not called"
        before = map_arrays(th.clone, self.observations)  # the environments may use their memory again
        found = self.step_tensors(self._actions)
        if found.resets is not None and self.warns_of_late_resets and bool(found.resets.any()):
            self.warns_of_late_resets = False
            warnings.warn(
                f"{type(self).__name__} resets its environments one step late. Stepped through NumPy, this step looks like "
                "any other: an algorithm that learns from it learns something wrong, and `evaluate_policy` counts episodes "
                "rightly only without a VecMonitor. sb3_flow's PPO, GRPO and GSPO step by tensors, and leave it out."
            )
        observations = map_arrays(np.array, to_numpy(found.observations))
        infos = list(Infos(found, self.started, before))
        return observations, np.array(to_numpy(found.rewards)), np.array(to_numpy(found.dones)), infos

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Get an attribute, which all environments share."""
        return [getattr(self, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute of all environments."""
        self._need_all(indices)
        setattr(self, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of all environments together; return each one's row of the result, or, without rows, all of it."""
        self._need_all(indices)
        return self._each(getattr(self, method_name)(*method_args, **method_kwargs))

    def _each(self, told: Any) -> list[Any]:
        told = to_numpy(told) if isinstance(told, th.Tensor) else told
        return list(told) if isinstance(told, np.ndarray) and told.shape[:1] == (self.num_envs,) else [told] * self.num_envs

    def _need_all(self, indices: VecEnvIndices) -> None:
        if indices is not None and len(list(self._get_indices(indices))) < self.num_envs:
            raise ValueError(
                f"`indices` must be None, but {indices!r} was given: the environments of {type(self).__name__} are one object."
            )

    def env_is_wrapped(self, wrapper_class: type[Any], indices: VecEnvIndices = None) -> list[bool]:
        """Say True of ``Monitor``, since infos have its statistics."""
        return [wrapper_class is Monitor] * len(list(self._get_indices(indices)))

    def close(self) -> None:
        """Close the environments."""
