"""
Rollout buffers that keep what advantage estimators need, and hand out minibatches of rows, of episodes or of sequences.

:func:`with_estimates` makes them of any rollout buffer class: SB3's, sb3-contrib's (maskable, recurrent) and users' own.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch as th
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer

from sb3_flow.common.checks import check_minimum
from sb3_flow.on_policy.estimators import Estimator
from sb3_flow.on_policy.minibatches import Minibatch

# What SB3's and sb3-contrib's `get` flatten to rows, index = environment * steps + step
FLATTENED = ("observations", "actions", "values", "log_probs", "advantages", "returns", "action_masks")
# Buffers whose samples are rows by themselves: many minibatches can be read at once
ROW_BY_ROW = (RolloutBuffer, DictRolloutBuffer, MaskableRolloutBuffer, MaskableDictRolloutBuffer)
AT_ONCE = 8192
"""Rows that are read from the buffer, and moved to the device, at a time; a bound of the memory that this takes."""
RECURRENT_STATES = ("hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf")


@dataclass
class FinalObservation:
    """The last observation of an episode that a time limit cut off, which is not in the rollout."""

    step: int
    env: int
    observation: Any
    lstm_states: tuple[th.Tensor, th.Tensor] | None = None


class EstimatedRollouts(RolloutBuffer):
    """
    A rollout buffer whose advantages come from an :class:`Estimator`. SB3's arrays keep their meaning, ``rewards`` with the
    discounted value of the final observation added where a time limit cut the episode; beside them, time-major
    ``(n_steps, n_envs)``:

    - ``raw_rewards``: what the environment paid
    - ``terminated``, ``truncated``: why the episode ended at this step, never both
    - ``final_values``: value of the final observation where truncated, else 0
    - ``alive``: steps that count; all, except after the first end in rollouts of whole episodes
    """

    storage: type[RolloutBuffer]  # the class that the arrays are added and read by
    estimator: Estimator
    mean_episode_length: float  # of the episodes' parts that are in the rollout

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.capacity = self.buffer_size

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle finds classes by their names, and this class is made by a function
        return _restore, (self.storage, self.__dict__)

    def reset(self) -> None:
        self.buffer_size = vars(self).get("capacity", self.buffer_size)
        super().reset()
        shape = (self.buffer_size, self.n_envs)
        self.raw_rewards = np.zeros(shape, dtype=np.float32)
        self.terminated = np.zeros(shape, dtype=bool)
        self.truncated = np.zeros(shape, dtype=bool)
        self.final_values = np.zeros(shape, dtype=np.float32)
        self.alive = np.ones(shape, dtype=bool)
        self.final_observations: list[FinalObservation] = []
        self.statistics: dict[str, float] = {}
        self.proximal_log_probs: np.ndarray | None = None
        self.rows: np.ndarray | None = None  # flat numbers of the rows to learn from, None for all

    def record(self, rewards: np.ndarray, dones: np.ndarray, alive: np.ndarray | None) -> None:
        """
        Keep what SB3's ``add``, which is called afterwards, has no room for.

        :param rewards: raw rewards, shape ``(n_envs,)``, as are the others
        :param dones: the episode ended, by itself unless :meth:`record_final` is told otherwise
        :param alive: the step counts; None if all steps do
        """
        self.raw_rewards[self.pos] = rewards
        self.terminated[self.pos] = dones
        if alive is not None:
            self.alive[self.pos] = alive

    def record_final(self, final: list[FinalObservation], values: np.ndarray) -> None:
        """
        Keep the ends of episodes that a time limit cut off.

        :param final: final observations of this step
        :param values: their values, shape ``(len(final),)``
        """
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
        Add all steps of a rollout, time-major: at once, unless the class of the buffer adds in its own way.

        :param observations: an array, or a dictionary of arrays
        :param actions: as sampled
        :param rewards: with the discounted final values, shape ``(n_steps, n_envs)``, as are the others
        :param episode_starts: an episode begins at this step
        :param values: of the policy that acted
        :param log_probs: of the policy that acted
        """
        if self.storage.add not in (RolloutBuffer.add, DictRolloutBuffer.add):
            for step in range(self.buffer_size):
                seen: Any = (
                    observations[step]
                    if not isinstance(observations, dict)
                    else {key: part[step] for key, part in observations.items()}
                )
                judged = th.from_numpy(values[step])[:, None], th.from_numpy(log_probs[step])
                self.add(seen, actions[step].reshape(self.n_envs, -1), rewards[step], episode_starts[step], *judged)
            return
        columns = {"actions": actions, "rewards": rewards, "episode_starts": episode_starts, "values": values}
        columns |= {"log_probs": log_probs, "observations": observations}
        for name, column in columns.items():
            place = getattr(self, name)
            for key in place if isinstance(place, dict) else [...]:
                place[key][:] = column[key].reshape(place[key].shape)
        self.pos, self.full = self.buffer_size, True

    def shorten(self) -> None:
        """Keep only the steps added so far; ``reset`` restores the full length."""
        for name, array in vars(self).items():
            if isinstance(array, np.ndarray) and len(array) == self.buffer_size:
                setattr(self, name, array[: self.pos])
            elif name == "observations" and isinstance(array, dict):
                self.observations = {key: part[: self.pos] for key, part in array.items()}  # type: ignore[assignment]
        self.buffer_size, self.full = self.pos, True

    def compute_returns_and_advantage(self, last_values: th.Tensor, dones: np.ndarray) -> None:
        """
        Fill ``advantages`` and ``returns`` with the estimator's.

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
        self.mean_episode_length = float(max(valid.sum(), 1) / max((starts & valid).sum(), 1))

    def estimate_again(
        self, values: np.ndarray, log_probs: np.ndarray, final_values: np.ndarray, last_values: np.ndarray
    ) -> None:
        """
        Estimate with the present networks; ``values`` and ``log_probs`` of the buffer stay the behaviour's.

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

    @property
    def is_recurrent(self) -> bool:
        """Say whether minibatches are padded sequences (sb3-contrib's recurrent buffers)."""
        return isinstance(self, (RecurrentRolloutBuffer, RecurrentDictRolloutBuffer))

    def prepare(self) -> None:
        """Flatten to rows, once for a rollout, as SB3's and sb3-contrib's ``get`` do on their first call."""
        if self.generator_ready:
            return
        names = [name for name in FLATTENED if hasattr(self, name)]
        if self.is_recurrent:
            names += [*RECURRENT_STATES, "episode_starts"]
            for name in RECURRENT_STATES:  # (steps, layers, envs, size) -> (steps, envs, layers, size)
                setattr(self, name, getattr(self, name).swapaxes(1, 2))
        for name in names:
            array = getattr(self, name)
            if isinstance(array, dict):
                setattr(self, name, {key: self.swap_and_flatten(part) for key, part in array.items()})
            else:
                setattr(self, name, self.swap_and_flatten(array))
        self.generator_ready = True

    def flat(self) -> "EstimatedRollouts":
        """:return: a copy with the same arrays, flattened to rows"""
        copied = copy.copy(self)
        copied.prepare()
        return copied

    def minibatches(self, batch_size: int | None, by_episode: bool = False, at_once: int = AT_ONCE) -> Iterator[Minibatch]:
        """
        One pass over the rollout, in the random order of SB3's (sb3-contrib's) ``get``.

        :param batch_size: rows of a minibatch, None for all; with ``by_episode`` at least that many
        :param by_episode: keep the rows of an episode together and number the episodes
        :param at_once: rows that are read at a time; 0: each minibatch when it is its turn, for a buffer that changes between
        """
        assert self.full, "Rollout buffer must be full before sampling from it"
        self.prepare()
        if self.is_recurrent:
            yield from self._sequences(self._size(batch_size))
            return
        if not any(self.storage._get_samples is known._get_samples for known in ROW_BY_ROW):
            at_once = 0  # a user's samples may depend on what else is in the minibatch
        waiting: list[tuple[np.ndarray, np.ndarray | None]] = []
        n_rows = 0
        for batch in self.batches_of_rows(batch_size, by_episode):
            if waiting and n_rows + len(batch[0]) > at_once:
                yield from self._read(waiting)
                waiting, n_rows = [], 0
            waiting.append(batch)
            n_rows += len(batch[0])
        if waiting:
            yield from self._read(waiting)

    def _read(self, batches: list[tuple[np.ndarray, np.ndarray | None]]) -> Iterator[Minibatch]:
        """:return: the minibatches of several :meth:`batches_of_rows`, out of a single read of the buffer"""
        together = self._minibatch(np.concatenate([rows for rows, _ in batches]))
        for minibatch, (_, segments) in zip(together.split([len(rows) for rows, _ in batches]), batches, strict=True):
            if segments is not None:
                minibatch.segments = th.as_tensor(segments, device=self.device)
                minibatch.n_segments = int(segments[-1]) + 1
            yield minibatch

    def _size(self, batch_size: int | None) -> int:
        batch_size = self.buffer_size * self.n_envs if batch_size is None else batch_size
        check_minimum(1, batch_size=batch_size)
        return batch_size

    def batches_of_rows(
        self, batch_size: int | None, by_episode: bool = False
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """
        Draw the rows of each minibatch.

        :param batch_size: see :meth:`minibatches`
        :param by_episode: see :meth:`minibatches`
        :return: flat numbers of the rows and, by episode, the episode of each row within the minibatch
        """
        total = self.buffer_size * self.n_envs
        batch_size = self._size(batch_size)
        rows = np.arange(total) if self.rows is None else self.rows
        if not by_episode:
            order = np.random.permutation(len(rows))
            order = order if self.rows is None else rows[order]
            for start in range(0, len(rows), batch_size):
                yield order[start : start + batch_size], None
            return
        starts = self.episode_starts.astype(bool)  # time-major, except in recurrent buffers
        starts[0] = True
        of_row = np.cumsum(self.swap_and_flatten(starts)) - 1
        # whole episodes, or what of them is in the rollout
        episodes = np.split(rows, np.flatnonzero(np.diff(of_row[rows])) + 1) if len(rows) else []
        chosen: list[np.ndarray] = []
        for place, number in enumerate(np.random.permutation(len(episodes)), start=1):
            chosen.append(episodes[number])
            lengths = [len(episode) for episode in chosen]
            if sum(lengths) >= batch_size or place == len(episodes):
                yield np.concatenate(chosen), np.repeat(np.arange(len(chosen)), lengths)
                chosen = []

    def _minibatch(self, rows: np.ndarray) -> Minibatch:
        proximal = self.proximal_log_probs
        return Minibatch(
            data=self._get_samples(rows), proximal_log_prob=None if proximal is None else self.to_torch(proximal[rows])
        )

    def _sequences(self, batch_size: int) -> Iterator[Minibatch]:
        """Minibatches of padded sequences in the order of sb3-contrib's ``get``; the sequences are the segments."""
        total = self.buffer_size * self.n_envs
        split = np.random.randint(total)
        order = np.roll(np.arange(total), -split)
        for start in range(0, total, batch_size):
            minibatch = self._padded(order[start : start + batch_size])
            if self.rows is None or bool(minibatch.mask.any()):  # type: ignore[union-attr]
                yield minibatch

    def _padded(self, rows: np.ndarray) -> Minibatch:
        env_change = np.zeros((self.buffer_size, self.n_envs), dtype=np.float32)
        env_change[0] = 1.0
        data = self._get_samples(rows, self.swap_and_flatten(env_change))  # type: ignore[arg-type]
        pad = self.pad_and_flatten  # type: ignore[attr-defined]
        mask = data.mask > 1e-8  # type: ignore[attr-defined]
        if self.rows is not None:
            counts = np.zeros(self.buffer_size * self.n_envs, dtype=np.float32)
            counts[self.rows] = 1.0
            mask = mask & (pad(counts[rows]) > 0.5)
        n_sequences = len(self.seq_start_indices)  # type: ignore[attr-defined]
        segments = th.arange(n_sequences, device=mask.device).repeat_interleave(len(mask) // n_sequences)
        if self.rows is not None:  # sequences without a row that counts are none
            present = mask.view(n_sequences, -1).any(dim=1)
            segments, n_sequences = (present.cumsum(0) - 1)[segments], int(present.sum())
        proximal = None if self.proximal_log_probs is None else pad(self.proximal_log_probs[rows])
        return Minibatch(data=data, mask=mask, segments=segments, n_segments=n_sequences, proximal_log_prob=proximal)

    def in_order(self, batch_size: int = 8192) -> Iterator[Minibatch]:
        """Read all rows in the order of a flat buffer, without learning from them; the buffer stays as it is."""
        flat, total = self.flat(), self.buffer_size * self.n_envs
        if self.is_recurrent:
            flat.rows = None
            yield flat._padded(np.arange(total))
            return
        for start in range(0, total, batch_size):
            yield flat._minibatch(np.arange(start, min(start + batch_size, total)))


@cache
def with_estimates(buffer_class: type[RolloutBuffer]) -> type[EstimatedRollouts]:
    """
    Make the subclass of a rollout buffer class that is an :class:`EstimatedRollouts`.

    :param buffer_class: of SB3, of sb3-contrib or a user's own
    :return: a class with the same constructor; its buffers need an ``estimator`` before they estimate
    """

    class Estimated(EstimatedRollouts, buffer_class):  # type: ignore[misc, valid-type]
        storage = buffer_class

    Estimated.__qualname__ = Estimated.__name__ = f"Estimated{buffer_class.__name__}"
    return Estimated


def _restore(buffer_class: type[RolloutBuffer], state: dict[str, Any]) -> EstimatedRollouts:
    """
    Read a buffer from a pickle, of this version or an older one.

    :param buffer_class: without estimates
    :param state: attributes of the buffer
    :return: the buffer
    """
    estimated = with_estimates(buffer_class)
    buffer = estimated.__new__(estimated)
    vars(buffer).update(state)
    return buffer
