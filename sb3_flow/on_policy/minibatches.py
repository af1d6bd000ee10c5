"""Minibatches of a rollout, which consist of rows, episodes or sequences."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch as th
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer

from sb3_flow.common.checks import check_minimum
from sb3_flow.common.ranks import check_shares
from sb3_flow.on_policy.whole_batch import divided, drawn_episodes

# Arrays that SB3's and sb3-contrib's `get` flatten to rows, index = environment * steps + step
FLATTENED = ("observations", "actions", "values", "log_probs", "advantages", "returns", "action_masks")
# Buffers whose samples do not depend on other rows, so that many minibatches can be read at once
ROW_BY_ROW = (RolloutBuffer, DictRolloutBuffer, MaskableRolloutBuffer, MaskableDictRolloutBuffer)
AT_ONCE = 8192
"""Largest number of rows that are read from the buffer, and moved to the device, at a time, which bounds the memory."""
RECURRENT_STATES = ("hidden_states_pi", "cell_states_pi", "hidden_states_vf", "cell_states_vf")
ALIGNMENT = 64
"""Alignment of torch's tensors on the CPU, in bytes; the last bit of a matrix product may depend on it."""


@dataclass
class Minibatch:
    """
    Hold a minibatch of a rollout.

    :param data: SB3's or sb3-contrib's samples
    :param mask: True for the rows to learn from, bool ``(B,)``; None for all rows
    :param segments: the episode of each row within the minibatch, int64 ``(B,)``; None if episodes are not kept together
    :param n_segments: number of these episodes
    :param proximal_log_prob: log-probability under the policy at the start of the update, ``(B,)``; None if it is not known
    :param stands_in: nothing is learned from the rows, since other ranks alone have rows for this minibatch
    """

    data: Any
    mask: th.Tensor | None = None
    segments: th.Tensor | None = None
    n_segments: int = 0
    proximal_log_prob: th.Tensor | None = None
    stands_in: bool = False

    def split(self, sizes: list[int]) -> "Iterator[Minibatch]":
        """Divide ``data`` and ``proximal_log_prob`` into parts of these sizes, as if each part had been read by itself."""
        if len(sizes) == 1:
            yield self
            return
        proximal = [None] * len(sizes) if self.proximal_log_prob is None else self.proximal_log_prob.split(sizes)
        parts = zip(*(_split(column, sizes) for column in self.data), strict=True)
        for part, log_prob in zip(parts, proximal, strict=True):
            yield Minibatch(data=type(self.data)(*part), proximal_log_prob=log_prob)


def _split(column: Any, sizes: list[int]) -> list[Any]:
    """Divide a tensor or a dictionary of tensors; the parts are views where these are aligned."""
    if isinstance(column, dict):
        parts = zip(*(_split(entry, sizes) for entry in column.values()), strict=True)
        return [dict(zip(column, part, strict=True)) for part in parts]
    return [part if part.data_ptr() % ALIGNMENT == 0 else part.clone() for part in column.split(sizes)]


class MinibatchBuffer(RolloutBuffer):
    """Read a rollout buffer in minibatches, in the order of SB3's and sb3-contrib's ``get``."""

    storage: type[RolloutBuffer]  # the class that the arrays are added and read by
    rows: np.ndarray | None  # flat numbers of the rows to learn from, None for all
    proximal_log_probs: np.ndarray | None

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

    def flat(self) -> Self:
        """Copy the buffer, with arrays that are flattened to rows."""
        copied = copy.copy(self)
        copied.prepare()
        return copied

    def minibatches(self, batch_size: int | None, by_episode: bool = False, at_once: int = AT_ONCE) -> Iterator[Minibatch]:
        """
        Pass over the rollout once, in the random order of SB3's (sb3-contrib's) ``get``.

        :param batch_size: rows of a minibatch of all ranks together, None for all; with ``by_episode``, the smallest number of
            rows
        :param by_episode: keep the rows of an episode together and number the episodes
        :param at_once: rows that are read at a time; 0: a minibatch is read in its turn, since the buffer changes in between
        """
        assert self.full, "Rollout buffer must be full before sampling from it"
        self.prepare()
        if self.is_recurrent:
            yield from self._sequences(None if batch_size is None else check_shares(self._size(batch_size)))
            return
        if not any(self.storage._get_samples is known._get_samples for known in ROW_BY_ROW):
            at_once = 0  # a user's samples may depend on the other rows of the minibatch
        waiting: list[tuple[np.ndarray, np.ndarray | None]] = []
        n_rows = 0
        for batch in self.batches_of_rows(batch_size, by_episode):
            if waiting and n_rows + len(batch[0]) > at_once:
                yield from self._read(waiting)
                waiting, n_rows = [], 0
            waiting.append(batch)
            n_rows += max(len(batch[0]), 1)
        if waiting:
            yield from self._read(waiting)

    def _read(self, batches: list[tuple[np.ndarray, np.ndarray | None]]) -> Iterator[Minibatch]:
        """Make the minibatches of several :meth:`batches_of_rows` by a single read of the buffer."""
        first = np.zeros(1, dtype=np.int64)
        numbers = [rows if len(rows) else first for rows, _ in batches]
        together = self._minibatch(np.concatenate(numbers))
        for minibatch, (rows, segments) in zip(together.split(list(map(len, numbers))), batches, strict=True):
            minibatch.stands_in = len(rows) == 0
            if segments is not None:
                segments = first if minibatch.stands_in else segments
                minibatch.segments = th.as_tensor(segments, device=self.device)
                minibatch.n_segments = int(segments[-1]) + 1
            yield minibatch

    def _size(self, batch_size: int) -> int:
        check_minimum(1, batch_size=batch_size)
        return batch_size

    def batches_of_rows(
        self, batch_size: int | None, by_episode: bool = False
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """
        Draw the rows of each minibatch, see :meth:`minibatches`.

        :return: flat numbers of this rank's rows, which may be none if there are other ranks, and, with ``by_episode``, the
            episode of each row within the minibatch
        """
        if batch_size is not None:
            check_minimum(1, batch_size=batch_size)
        rows = np.arange(self.buffer_size * self.n_envs) if self.rows is None else self.rows
        if not by_episode:
            order = np.random.permutation(len(rows))
            order = order if self.rows is None else rows[order]
            for part in divided(order, batch_size):
                yield part, None
            return
        starts = self.episode_starts.astype(bool)  # time-major, except in recurrent buffers
        starts[0] = True
        of_row = np.cumsum(self.swap_and_flatten(starts)) - 1
        # whole episodes, or the parts of episodes that are in the rollout
        episodes = np.split(rows, np.flatnonzero(np.diff(of_row[rows])) + 1) if len(rows) else []
        for numbers in drawn_episodes(list(map(len, episodes)), batch_size):
            chosen = [episodes[number] for number in numbers]
            segments = np.repeat(np.arange(len(chosen)), list(map(len, chosen)))
            yield np.concatenate([rows[:0], *chosen]), segments

    def _minibatch(self, rows: np.ndarray) -> Minibatch:
        proximal = self.proximal_log_probs
        return Minibatch(
            data=self._get_samples(rows), proximal_log_prob=None if proximal is None else self.to_torch(proximal[rows])
        )

    def _sequences(self, batch_size: int | None) -> Iterator[Minibatch]:
        """Make minibatches of padded sequences in the order of sb3-contrib's ``get``; the sequences are the segments."""
        total = self.buffer_size * self.n_envs
        split = np.random.randint(total)
        order = np.roll(np.arange(total), -split)
        batch_size = total if batch_size is None else batch_size
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
        if self.rows is not None:  # sequences without a row to learn from are left out
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
