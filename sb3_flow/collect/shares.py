"""Environments that several collectors step, as the learner has them: one vectorised environment of all shares."""

from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn

from sb3_flow.collect.environment_transfer import coming_reset, factory_of, made_by, set_coming_reset
from sb3_flow.common.normalisers import normalisers, set_normalisers
from sb3_flow.common.observations import joined


def of_share(coming: tuple[Any, Any], number: int) -> tuple[Any, Any]:
    """
    Give the seeds and options of a share's next reset, from those of the first share: seeds count on from share to share, as
    those of environments do.

    :param coming: what ``coming_reset`` read from the first share
    :param number: number of the share
    """
    seeds, options = coming
    return seeds and [None if seed is None else seed + number * len(seeds) for seed in seeds], options


class Shares(VecEnvWrapper):
    """
    Hold ``n_shares`` vectorised environments of the same function as one. The first share is there, and is what a look through
    the wrappers finds. The other shares, which have the first share's normaliser statistics, are made when they are needed:
    ``learn`` does not need them, because collectors make their own.

    :param first: the first share, made by :func:`made_by`
    :param n_shares: number of shares
    :raises TypeError: if the first share does not come from a function
    """

    def __init__(self, first: VecEnv, n_shares: int):
        factory = factory_of(first)
        if factory is None:
            raise TypeError(
                f"`env` must be an id, or a function that makes the environments of one collector, if `n_collectors` is "
                f"{n_shares}; but {type(first).__name__} was given, which exists already and cannot be split. A function was "
                'expected, e.g. `env=lambda: make_vec_env("CartPole-v1", n_envs=4)`, or `n_collectors=1`.'
            )
        self._factory, self.n_shares, self.share = factory, n_shares, first.num_envs
        self._others: list[VecEnv] = []
        self.only_first = True  # for the questions that SB3's constructor asks
        super().__init__(first)
        self.num_envs = n_shares * self.share
        self.only_first, self._waiting = False, False
        self._coming = coming_reset(first)
        self.reset_infos = [{} for _ in range(self.num_envs)]

    def _shares(self) -> list[VecEnv]:
        if self.only_first:
            return [self.venv] * self.n_shares
        while len(self._others) < self.n_shares - 1:
            self._others.append(made_by(self._factory))
        for other in self._others:
            set_normalisers(other, normalisers(self.venv, settings=True))
        return [self.venv, *self._others]

    def _places(self, indices: VecEnvIndices) -> Iterator[tuple[VecEnv, int]]:
        shares = self._shares()
        for index in self._get_indices(indices):
            number, place = divmod(index, self.share)
            yield shares[number], place

    def reset(self) -> VecEnvObs:
        """Reset all shares; with ``only_first`` the first alone, whose observations then stand for the others' as well."""
        self._coming, self._waiting = coming_reset(self.venv), self.only_first
        first = self.venv.reset()
        if self.only_first:
            return joined([first] * self.n_shares)
        found = joined([first, *self._reset_others()])
        self.reset_infos = [info for share in self._shares() for info in share.reset_infos]
        return found

    def _reset_others(self) -> list[VecEnvObs]:
        others = self._shares()[1:]
        for number, other in enumerate(others, start=1):
            set_coming_reset(other, of_share(self._coming, number))
        return [other.reset() for other in others]

    def step_async(self, actions: np.ndarray) -> None:
        if self._waiting:
            self._reset_others()
            self._waiting = False
        for share, part in zip(self._shares(), np.split(actions, self.n_shares), strict=True):
            share.step_async(part)

    def step_wait(self) -> VecEnvStepReturn:
        observations, rewards, dones, infos = zip(*(share.step_wait() for share in self._shares()), strict=True)
        return joined(observations), np.concatenate(rewards), np.concatenate(dones), [info for part in infos for info in part]

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Set the options of the next reset, the same for all shares."""
        if isinstance(options, list) and len(options) != self.share:
            raise ValueError(
                f"`options` must be one dictionary, or a list of {self.share}, one for each environment of a share; a list of "
                f"{len(options)} was given."
            )
        self.venv.set_options(options)

    def close(self) -> None:
        for share in (self.venv, *self._others):
            share.close()

    def get_images(self) -> Sequence[np.ndarray | None]:
        return [image for share in self._shares() for image in share.get_images()]

    def render(self, mode: str | None = None) -> np.ndarray | None:
        return VecEnv.render(self, mode)

    def has_attr(self, attr_name: str) -> bool:
        return self.venv.has_attr(attr_name)

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return [share.get_attr(attr_name, place)[0] for share, place in self._places(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        for share, place in self._places(indices):
            share.set_attr(attr_name, value, place)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        places = self._places(indices)
        return [share.env_method(method_name, *method_args, indices=at, **method_kwargs)[0] for share, at in places]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        return [share.env_is_wrapped(wrapper_class, place)[0] for share, place in self._places(indices)]
