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

    Each environment decides by itself, from the group's seed and its own count of episodes. So it works in any VecEnv and
    through its automatic resets, also where the members' episodes differ in length:

        env = make_vec_env("CartPole-v1", n_envs=8, wrapper_class=GroupedStart)

    The algorithm tells every environment its group by :func:`group_starts`; before that the wrapper changes nothing.

    A seed fixes an environment's start and all random numbers after it. Members that shared these too would differ by
    their actions alone, and a deterministic policy's group would have no spread. So after the start every member goes on
    with random numbers of its own, unless ``shared_noise``. This concerns the environment's ``np_random``, where Gymnasium
    environments draw; numbers from elsewhere are left alone.

    :param env: environment whose ``reset(seed=...)`` decides its start
    :param group: number of the group
    :param member: number within the group
    :param seed: the group's seed, not negative; ``None``: change nothing
    :param shared_noise: share the random numbers after the start too ("common random numbers")
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
        From the next reset on, be this member of this group; its episodes are counted from 0 again.

        :param group: see the constructor
        :param member: see the constructor
        :param seed: see the constructor
        :param shared_noise: see the constructor
        :raises ValueError: if a number is negative
        """
        check_minimum(0, group=group, member=member, seed=0 if seed is None else seed)
        self.group, self.member, self.shared_noise = int(group), int(member), bool(shared_noise)
        self.group_seed = None if seed is None else int(seed)
        self.episode = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """
        Start an episode.

        :param seed: an explicit seed is passed on as it is; that start belongs to no group, and the count of episodes begins
            again, since a seed makes what follows repeatable
        :param options: passed on
        :return: first observation and info
        """
        if seed is not None or self.group_seed is None:
            self.episode = 0
            return self.env.reset(seed=seed, options=options)
        # Spawn keys, since plain entropy is padded with zeros: [seed, group, episode] would equal [seed, group, episode, 0]
        key = (self.group, self.episode)
        start = np.random.SeedSequence(self.group_seed, spawn_key=key)
        # 31 bits: also what environments accept that hand their seed to a C int
        result = self.env.reset(seed=int(start.generate_state(1)[0]) >> 1, options=options)
        if not self.shared_noise:
            noise = np.random.SeedSequence(self.group_seed, spawn_key=(*key, self.member))
            self.unwrapped.np_random = np.random.default_rng(noise)
        self.episode += 1
        return result


def has_grouped_starts(env: VecEnv) -> bool:
    """:return: whether every environment is wrapped in :class:`GroupedStart`"""
    return all(env.env_is_wrapped(GroupedStart))


def check_groups(env: VecEnv, group_size: int) -> None:
    """
    Refuse environments that cannot form groups.

    :param env: N environments
    :param group_size: G, members of a group
    :raises ValueError: if G is less than 2 or does not divide N, or if an environment is not wrapped in
        :class:`GroupedStart`
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
    Form groups of neighbouring environments, from the next reset on: environment i is member i % G of group i // G.

    Seeds that ``VecEnv.seed`` left for the next reset are dropped, as they would give every environment a start of its own.

    :param env: N environments, each wrapped in :class:`GroupedStart`
    :param seeds: one per group, not negative, shape (N / G,)
    :param group_size: G, members of a group, at least 2
    :param shared_noise: see :class:`GroupedStart`
    :raises ValueError: if G is less than 2 or does not divide N, if there is not one seed per group, or if an environment is
        not wrapped
    """
    check_groups(env, group_size)
    if np.shape(seeds) != (env.num_envs // group_size,):
        raise ValueError(
            f"`seeds` must have one entry per group, shape ({env.num_envs // group_size},), but has {np.shape(seeds)}."
        )
    for index in range(env.num_envs):
        group, member = divmod(index, group_size)
        env.env_method("join_group", group, member, int(seeds[group]), shared_noise, indices=index)
    # SB3 2.9.2: `VecEnv.seed(None)` would draw new seeds, and nothing public forgets them
    env.unwrapped._reset_seeds()
