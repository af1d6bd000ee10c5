"""A minibatch of a rollout, and the division of rows that were read together into minibatches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch as th

ALIGNMENT = 64
"""Of the memory of torch's tensors on the CPU, in bytes; the last bit of a matrix product may depend on it."""


@dataclass
class Minibatch:
    """
    A minibatch of a rollout.

    :param data: SB3's or sb3-contrib's samples
    :param mask: rows that count, bool ``(B,)``; None if all rows do
    :param segments: the episode of each row within the minibatch, int64 ``(B,)``; only where sequences are asked for
    :param n_segments: number of these episodes
    :param proximal_log_prob: log-probability under the policy at the start of the update, ``(B,)``; only if it is known
    """

    data: Any
    mask: th.Tensor | None = None
    segments: th.Tensor | None = None
    n_segments: int = 0
    proximal_log_prob: th.Tensor | None = None

    def split(self, sizes: list[int]) -> "Iterator[Minibatch]":
        """
        Divide the rows.

        :param sizes: rows of each part
        :return: the parts of ``data`` and ``proximal_log_prob``, as if each had been read by itself
        """
        if len(sizes) == 1:
            yield self
            return
        proximal = [None] * len(sizes) if self.proximal_log_prob is None else self.proximal_log_prob.split(sizes)
        parts = zip(*(_split(column, sizes) for column in self.data), strict=True)
        for part, log_prob in zip(parts, proximal, strict=True):
            yield Minibatch(data=type(self.data)(*part), proximal_log_prob=log_prob)


def _split(column: Any, sizes: list[int]) -> list[Any]:
    """:return: parts of a tensor or of a dictionary of tensors; views where these are aligned"""
    if isinstance(column, dict):
        parts = zip(*(_split(entry, sizes) for entry in column.values()), strict=True)
        return [dict(zip(column, part, strict=True)) for part in parts]
    return [part if part.data_ptr() % ALIGNMENT == 0 else part.clone() for part in column.split(sizes)]
