"""
Rollout buffers that keep the ends of episodes and estimate advantages.

:func:`with_estimates` makes such a class of any rollout buffer class: SB3's, sb3-contrib's (maskable, recurrent) or a user's.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch as th
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer

from sb3_flow.common.observations import map_arrays
from sb3_flow.common.ranks import of_all_ranks
from sb3_flow.on_policy.estimators import Estimator
from sb3_flow.on_policy.minibatches import MinibatchBuffer


@dataclass
class FinalObservation:
    """Hold the last observation of an episode that a time limit cut off, since the rollout does not hold it."""

    step: int
    env: int
    observation: Any
    lstm_states: tuple[th.Tensor, th.Tensor] | None = None


class EstimatedRollouts(MinibatchBuffer):
    """
    Estimate the advantages of a rollout by an :class:`Estimator`. SB3's arrays keep their meaning; ``rewards`` contain the
    discounted value of the final observation where a time limit cut the episode. Further arrays are time-major,
    ``(n_steps, n_envs)``:

    - ``raw_rewards``: rewards of the environment
    - ``terminated``, ``truncated``: the episode ended at this step by itself, or by a time limit; never both
    - ``final_values``: value of the final observation where truncated, else 0
    - ``alive``: False after the first end in rollouts of whole episodes, else True
    """

    estimator: Estimator
    has_cells = True  # recurrent states have cell states; without, their arrays are empty
    n_learned: tuple[int, int]  # steps to learn from, and episodes or parts of episodes with such steps

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.capacity = self.buffer_size

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle finds classes by their names, and this class is made by a function
        return _restore, (self.storage, self.__dict__)

    def reset(self) -> None:
        self.buffer_size = vars(self).get("capacity", self.buffer_size)
        super().reset()
        for name in () if self.has_cells else ("cell_states_pi", "cell_states_vf"):
            setattr(self, name, np.zeros((*getattr(self, name).shape[:-1], 0), dtype=np.float32))
        shape = (self.buffer_size, self.n_envs)
        self.raw_rewards = np.zeros(shape, dtype=np.float32)
        self.terminated = np.zeros(shape, dtype=bool)
        self.truncated = np.zeros(shape, dtype=bool)
        self.final_values = np.zeros(shape, dtype=np.float32)
        self.alive = np.ones(shape, dtype=bool)
        self.final_observations: list[FinalObservation] = []
        self.statistics: dict[str, float] = {}
        self.proximal_log_probs = None
        self.rows = None

    def record(self, rewards: np.ndarray, dones: np.ndarray, alive: np.ndarray | None) -> None:
        """
        Keep the arrays that SB3's ``add``, which is called afterwards, does not take, all of shape ``(n_envs,)``.

        :param rewards: raw rewards
        :param dones: the episode ended, by itself unless :meth:`record_final` corrects this
        :param alive: the step counts; None if all steps count
        """
        self.raw_rewards[self.pos] = rewards
        self.terminated[self.pos] = dones
        if alive is not None:
            self.alive[self.pos] = alive

    def record_final(self, final: list[FinalObservation], values: np.ndarray) -> None:
        """Keep the final observations of episodes that a time limit cut off, and their values, shape ``(len(final),)``."""
        self.final_observations += final
        for end, value in zip(final, values, strict=True):
            self.terminated[end.step, end.env], self.truncated[end.step, end.env] = False, True
            self.final_values[end.step, end.env] = value

    def fill(
        self,
        observations: Any,
        actions: np.ndarray,
        rewards: np.ndarray,
        episode_starts: np.ndarray,
        values: np.ndarray,
        log_probs: np.ndarray,
    ) -> None:
        """
        Add all steps of a rollout at once, or step by step if the buffer's class has its own ``add``. All arrays are
        time-major, ``(n_steps, n_envs)``.

        :param observations: an array, or a dictionary of arrays; tensors of a device stay there, and are read there
        :param actions: actions as sampled
        :param rewards: rewards with the discounted final values
        :param episode_starts: an episode begins at this step
        :param values: values of the policy that acted
        :param log_probs: log-probabilities of the policy that acted
        """
        if self.storage.add not in (RolloutBuffer.add, DictRolloutBuffer.add):
            observations = map_arrays(lambda part: part.cpu().numpy() if isinstance(part, th.Tensor) else part, observations)
            for step in range(self.buffer_size):
                nested = isinstance(observations, dict)
                seen: Any = {key: part[step] for key, part in observations.items()} if nested else observations[step]
                judged = th.from_numpy(values[step])[:, None], th.from_numpy(log_probs[step])
                self.add(seen, actions[step].reshape(self.n_envs, -1), rewards[step], episode_starts[step], *judged)
            return
        columns = {"actions": actions, "rewards": rewards, "episode_starts": episode_starts, "values": values}
        columns |= {"log_probs": log_probs, "observations": observations}
        for name, column in columns.items():
            place = getattr(self, name)
            if isinstance(column, th.Tensor):
                setattr(self, name, column.reshape(place.shape))
                continue
            for key in place if isinstance(place, dict) else [...]:
                if isinstance(column[key], th.Tensor):
                    place[key] = column[key].reshape(place[key].shape)
                else:
                    place[key][:] = column[key].reshape(place[key].shape)
        self.pos, self.full = self.buffer_size, True

    def to_torch(self, array: Any, copy: bool = True) -> th.Tensor:
        """Convert to a tensor of the device, as SB3 does; see also :meth:`fill`."""
        return array.to(self.device) if isinstance(array, th.Tensor) else super().to_torch(array, copy)

    def shorten(self) -> None:
        """Keep only the steps that were added so far; ``reset`` restores the full length."""
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray) and len(array) == self.buffer_size:
                setattr(self, name, array[: self.pos])
            elif name == "observations" and isinstance(array, dict):
                self.observations = {key: part[: self.pos] for key, part in array.items()}  # type: ignore[assignment]
        self.buffer_size, self.full = self.pos, True

    def compute_returns_and_advantage(self, last_values: th.Tensor, dones: np.ndarray) -> None:
        """
        Fill ``advantages`` and ``returns`` by the estimator.

        :param last_values: values of the observations after the last step
        :param dones: the last step ended an episode
        """
        self.last_values = last_values.detach().cpu().numpy().flatten()
        self.last_dones = np.asarray(dones)
        own = self.storage.compute_returns_and_advantage
        if self.estimator.kind == "gae" and own is not RolloutBuffer.compute_returns_and_advantage:
            super().compute_returns_and_advantage(last_values, dones)  # a user's buffer with its own estimate
            return
        estimate = self.estimator.of_rollout(self)
        self.advantages, self.returns, self.statistics = estimate.advantages, estimate.returns, estimate.statistics
        valid = self.alive if estimate.counts is None else self.alive & estimate.counts
        self.rows = None if valid.all() else np.flatnonzero(self.swap_and_flatten(valid))
        starts = self.episode_starts.astype(bool)
        starts[0] = True
        self.n_learned = int(valid.sum()), int((starts & valid).sum())

    def mean_episode_length(self) -> float:
        """Compute the mean number of steps of the episodes of all ranks, or of the parts that are in the rollouts."""
        steps, episodes = (sum(numbers) for numbers in zip(*of_all_ranks(self.n_learned), strict=True))
        return float(max(steps, 1) / max(episodes, 1))

    def estimate_again(
        self, values: np.ndarray, log_probs: np.ndarray, final_values: np.ndarray, last_values: np.ndarray
    ) -> None:
        """
        Estimate with the present networks; the buffer's ``values`` and ``log_probs`` stay as the acting policy gave them.

        :param values: present values of the rows, flat as a buffer is after ``prepare``
        :param log_probs: present log-probabilities of the rows' actions, flat
        :param final_values: present values of the ``final_observations``
        :param last_values: present values after the last step
        """

        def by_time(flat: np.ndarray) -> np.ndarray:
            return flat.reshape(self.n_envs, self.buffer_size).T

        log_rhos = by_time(log_probs) - (by_time(self.log_probs) if self.generator_ready else self.log_probs)
        for end, value in zip(self.final_observations, final_values, strict=True):
            self.final_values[end.step, end.env] = value
        estimate = self.estimator.of_values(self, by_time(values), last_values, log_rhos)
        found = estimate.advantages, estimate.returns
        self.advantages, self.returns = map(self.swap_and_flatten, found) if self.generator_ready else found
        self.last_values = last_values
        self.statistics = estimate.statistics


@cache
def with_estimates(buffer_class: type[RolloutBuffer]) -> type[EstimatedRollouts]:
    """
    Derive an :class:`EstimatedRollouts` from a rollout buffer class of SB3, of sb3-contrib or of a user.

    :return: a class with the same constructor; its buffers need an ``estimator`` before they estimate
    """

    class Estimated(EstimatedRollouts, buffer_class):  # type: ignore[misc, valid-type]
        storage = buffer_class

    Estimated.__qualname__ = Estimated.__name__ = f"Estimated{buffer_class.__name__}"
    return Estimated


def _restore(buffer_class: type[RolloutBuffer], state: dict[str, Any]) -> EstimatedRollouts:
    """Read a buffer from a pickle of this or an older version, by its class without estimates and its attributes."""
    estimated = with_estimates(buffer_class)
    buffer = estimated.__new__(estimated)
    vars(buffer).update(state)
    return buffer
