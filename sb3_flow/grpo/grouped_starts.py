"""Starts of episodes that the members of a group share, so that their returns can be compared."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import RecordConstructorArgs
from stable_baselines3.common.vec_env import VecEnv

from sb3_flow.common.checks import check_minimum


class GroupedStart(gym.Wrapper, RecordConstructorArgs):
    """
    Start the e-th episode of every member of a group in the same state.

    Each environment derives its start from the group's seed and its own count of episodes. So the wrapper works in any VecEnv
    and through automatic resets, also if the members' episodes differ in length:

        env = make_vec_env("CartPole-v1", n_envs=8, wrapper_class=GroupedStart)

    The algorithm tells every environment its group by :func:`group_starts`; before this call the wrapper changes nothing.

    A seed fixes an environment's start and all random numbers after it. Members that shared these numbers, too, would differ
    by their actions alone, and a deterministic policy's group would have no spread. So after the start every member draws its
    own random numbers, unless ``shared_noise`` is set. The wrapper replaces the environment's ``np_random``, by which
    Gymnasium environments draw; other generators are left alone.

    :param env: environment whose ``reset(seed=...)`` decides its start
    :param group: number of the group
    :param member: number within the group
    :param seed: the group's seed, not negative; None: change nothing
    :param shared_noise: share the random numbers after the start, too ("common random numbers")
    :raises ValueError: if a number is negative
    """

    def __init__(
        self, env: gym.Env, group: int = 0, member: int = 0, seed: int | None = None, shared_noise: bool = False
    ) -> None:
        RecordConstructorArgs.__init__(self, group=group, member=member, seed=seed, shared_noise=shared_noise)
        gym.Wrapper.__init__(self, env)
        self.join_group(group, member, seed, shared_noise)

    def join_group(self, group: int, member: int, seed: int | None, shared_noise: bool = False) -> None:
        """
        Join a group from the next reset on, and count episodes from 0 again; the constructor explains the arguments.

        :raises ValueError: if a number is negative
        """
        check_minimum(0, group=group, member=member, seed=0 if seed is None else seed)
        self.group, self.member, self.shared_noise = int(group), int(member), bool(shared_noise)
        self.group_seed = None if seed is None else int(seed)
        self.episode = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """
        Start an episode.

        :param seed: a seed is passed on as it is; the start then belongs to no group, and the count of episodes begins again,
            so that all later episodes repeat with the seed
        :param options: passed on
        :return: first observation and info
        """
        if seed is not None or self.group_seed is None:
            self.episode = 0
            return self.env.reset(seed=seed, options=options)
        # Spawn keys, because entropy is padded with zeros: [seed, group, episode] would equal [seed, group, episode, 0]
        key = (self.group, self.episode)
        start = np.random.SeedSequence(self.group_seed, spawn_key=key)
        # 31 bits, for environments that convert their seed to a C int
        result = self.env.reset(seed=int(start.generate_state(1)[0]) >> 1, options=options)
        if not self.shared_noise:
            noise = np.random.SeedSequence(self.group_seed, spawn_key=(*key, self.member))
            self.unwrapped.np_random = np.random.default_rng(noise)
        self.episode += 1
        return result


def has_grouped_starts(env: VecEnv) -> bool:
    """Say whether every environment is wrapped in :class:`GroupedStart`."""
    return all(env.env_is_wrapped(GroupedStart))


def check_groups(env: VecEnv, group_size: int) -> None:
    """
    Refuse environments that cannot form groups.

    :raises ValueError: if the size is less than 2 or does not divide the number of environments, or if an environment is not
        wrapped in :class:`GroupedStart`
    """
    check_minimum(2, group_size=group_size)
    if env.num_envs % group_size:
        raise ValueError(
            f"`group_size` must divide the number of environments, but {group_size} does not divide {env.num_envs}."
        )
    if not has_grouped_starts(env):
        raise ValueError(
            "Environments of a group start alike only if each is wrapped: "
            '`make_vec_env(..., wrapper_class=GroupedStart)`. Or choose `group_by="none"`, which shares no starts.'
        )


def group_starts(env: VecEnv, seeds: np.ndarray, group_size: int, shared_noise: bool = False) -> None:
    """
    Form groups of neighbouring environments, from the next reset on: environment i is member i % G of group i // G. Seeds that
    ``VecEnv.seed`` left for the next reset are dropped, since they would give every environment a start of its own.

    :param env: N environments, each wrapped in :class:`GroupedStart`
    :param seeds: the groups' seeds, not negative, shape ``(N / G,)``
    :param group_size: G, members of a group, at least 2
    :param shared_noise: see :class:`GroupedStart`
    :raises ValueError: if G is less than 2 or does not divide N, if the number of seeds is not the number of groups, or if an
        environment is not wrapped
    """
    check_groups(env, group_size)
    if np.shape(seeds) != (env.num_envs // group_size,):
        raise ValueError(
            f"`seeds` must have one entry per group, shape ({env.num_envs // group_size},), but has {np.shape(seeds)}."
        )
    for index in range(env.num_envs):
        group, member = divmod(index, group_size)
        env.env_method("join_group", group, member, int(seeds[group]), shared_noise, indices=index)
    # SB3 2.9.2 has no public method for this: `VecEnv.seed(None)` would draw new seeds
    env.unwrapped._reset_seeds()
