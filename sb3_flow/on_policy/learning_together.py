"""
Rollouts of several processes (ranks) that train one model: each rank steps environments of its own, and after each rollout all
know what came to all.

It overrides SB3's protected ``_setup_learn`` and ``_update_info_buffer``, and reads ``_total_timesteps`` (checked with
stable-baselines3 2.9.2, named in ``tests/test_sb3_private_api.py``).
"""

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ProgressBarCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.type_aliases import MaybeCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_flow.common.normalisers import (
    merge_normalisers,
    normalisers,
    record_normalisers,
    recorded_normalisers,
    set_normalisers,
    stop_recording,
)
from sb3_flow.common.ranks import (
    check_alike,
    check_shares,
    from_first,
    is_first,
    n_ranks,
    of_all_ranks,
    plain_arguments,
    rank,
)


@dataclass
class Joint:
    """
    Hold what all ranks had when the present rollout began, and what has come to this rank since.

    :param timesteps: number of time steps
    :param statistics: statistics of the normalisers
    :param episodes: the last episodes
    :param successes: the successes of the last episodes
    """

    timesteps: int
    statistics: list[dict[str, Any]]
    episodes: list[Any]
    successes: list[Any]
    new_episodes: list[Any] = field(default_factory=list)
    new_successes: list[Any] = field(default_factory=list)


class LearnsTogether(OnPolicyAlgorithm):
    """On-policy algorithm that learns in one process, or in every process of ``torch.distributed``."""

    batch_size: int | None
    native: Any
    whole_episodes: Any
    _choose_backend: Any
    joint: Joint | None = None  # while several ranks learn
    _new_seed: tuple[int | None] | None = None  # a seed that was set, which would make the ranks' environments alike

    def set_random_seed(self, seed: int | None = None) -> None:
        """
        Set the seed of the pseudo-random generators (python, numpy, pytorch, gym, action space). Ranks but the first go on to
        seeds of their own when they begin to learn.

        :param seed: None: SB3 leaves the generators as they are
        """
        super().set_random_seed(seed)
        self._new_seed = (seed,)

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        if n_ranks() == 1:
            return super()._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)
        self._begin_alike(total_timesteps=total_timesteps, reset_num_timesteps=reset_num_timesteps)
        assert self.env is not None
        # the reset of the environments counts
        self.joint = Joint(0, normalisers(self.env), [], [])
        record_normalisers(self.env)
        if not is_first():
            callback, progress_bar = None, False
            self.set_logger(Logger(None, []))
        total, found = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)
        self._begin_together(self.joint.statistics)
        _count_all_ranks(found)
        return total, found

    def _begin_alike(self, **given: Any) -> None:
        """
        Give all ranks what the first rank has: weights, optimizer and statistics of normalisers; and each its own seed.

        :param given: arguments of ``learn`` by name
        :raises ValueError: if ranks were given different things, or a batch has no equal shares
        """
        if self.native is not None:  # the model was built before the ranks met
            self._choose_backend()
        check_alike(
            algorithm=type(self).__name__,
            **plain_arguments(self) | {"learning_rate": [self.lr_schedule(progress) for progress in (1.0, 0.5, 0.0)]},
            weights=[tuple(parameter.shape) for parameter in self.policy.parameters()],
            n_envs=self.n_envs,
            num_timesteps=self.num_timesteps,
            n_updates=self._n_updates,
            **given,
        )
        if self.whole_episodes and getattr(self.rollout_buffer, "is_recurrent", False):
            raise ValueError(
                f'{n_ranks()} ranks train, but {type(self).__name__} with `advantage="group"` trains in one process: the '
                "ranks' episodes would make different numbers of minibatches of sequences. Another advantage was expected."
            )
        share = None if self.batch_size is None else check_shares(self.batch_size)
        assert self.env is not None
        seed = from_first(self._seed_to_go_on_from)
        if seed is not None:
            if not is_first():
                self.set_random_seed((seed + rank() * self.n_envs) % 2**32)
            self._new_seed = None
        state: Any = from_first(lambda: (self.get_parameters(), normalisers(self.env)))  # type: ignore[arg-type]
        if not is_first():
            self.set_parameters(state[0], device=self.device)
            set_normalisers(self.env, state[1])
        elif self.verbose >= 1:
            rows = "all its rows" if share is None else f"{share} of a minibatch's {self.batch_size} rows"
            print(f"Training on {n_ranks()} ranks, each of which steps {self.n_envs} environments and takes {rows}")

    def _seed_to_go_on_from(self) -> int | None:
        """Give the seed that was set since the last time; a random one if it is None, and None if no seed was set."""
        if self._new_seed is None:
            return None
        return int(np.random.randint(2**31)) if self._new_seed[0] is None else self._new_seed[0]

    def _begin_together(self, statistics: list[dict[str, Any]]) -> None:
        """
        Begin a rollout.

        :param statistics: of the normalisers, as all ranks have them
        """
        assert self.ep_info_buffer is not None and self.ep_success_buffer is not None
        self.joint = Joint(self.num_timesteps, statistics, list(self.ep_info_buffer), list(self.ep_success_buffer))

    def _count_step(self, env: VecEnv) -> None:
        """Count a step: of the environments of all ranks, which take as many steps, but in whole episodes of this rank's."""
        self.num_timesteps += env.num_envs * (1 if self.whole_episodes else n_ranks())

    def _update_info_buffer(self, infos: list[dict[str, Any]], dones: np.ndarray | None = None) -> None:
        super()._update_info_buffer(infos, dones)
        if self.joint is None or dones is None:
            return
        for info, done in zip(infos, dones, strict=True):
            if info.get("episode") is not None:
                self.joint.new_episodes.append(info["episode"])
            if done and info.get("is_success") is not None:
                self.joint.new_successes.append(info["is_success"])

    def _end_together(self, going_on: bool) -> bool:
        """
        End the steps of a rollout: count the steps, episodes and statistics of all ranks.

        :param going_on: the callback has not ended training
        :return: the first rank's callback, for which the others wait, has not
        """
        joint = self.joint
        if joint is None:
            return going_on
        assert self.env is not None and self.ep_info_buffer is not None and self.ep_success_buffer is not None
        steps = (self.num_timesteps - joint.timesteps) // (1 if self.whole_episodes else n_ranks())
        news = recorded_normalisers(self.env)
        of_ranks = zip(*of_all_ranks((going_on, steps, joint.new_episodes, joint.new_successes, news)), strict=True)
        answers, all_steps, episodes, successes, all_news = of_ranks
        self.num_timesteps = joint.timesteps + sum(all_steps)
        for buffer, before, new in (
            (self.ep_info_buffer, joint.episodes, episodes),
            (self.ep_success_buffer, joint.successes, successes),
        ):
            buffer.clear()
            buffer.extend([*before, *_in_turn(new)])
        set_normalisers(self.env, joint.statistics)
        for of_rank in all_news:
            merge_normalisers(self.env, of_rank)
        self._begin_together(normalisers(self.env))
        record_normalisers(self.env)
        return bool(answers[0])

    def _stop_learning_together(self) -> None:
        """Leave the environments' normalisers as SB3 knows them, at the end of ``learn`` and after an error."""
        if self.joint is not None:
            assert self.env is not None
            self.joint = None
            stop_recording(self.env)

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "joint", "_new_seed"]


def _in_turn(lists: tuple[list[Any], ...]) -> list[Any]:
    """Join lists by taking one entry of each in turn, about the order in which episodes of several environments end."""
    nothing = object()
    return [entry for entries in zip_longest(*lists, fillvalue=nothing) for entry in entries if entry is not nothing]


class ProgressOfRanks(ProgressBarCallback):
    """Progress bar that counts the time steps of all ranks."""

    def _on_step(self) -> bool:
        started_at = self.model._total_timesteps - self.pbar.total
        self.pbar.update(self.model.num_timesteps - started_at - self.pbar.n)
        return True

    def _on_rollout_end(self) -> None:
        self._on_step()


def _count_all_ranks(callback: BaseCallback) -> None:
    """Have the progress bars among callbacks count the time steps of all ranks."""
    if type(callback) is ProgressBarCallback:
        callback.__class__ = ProgressOfRanks
    for part in callback.callbacks if isinstance(callback, CallbackList) else ():
        _count_all_ranks(part)
