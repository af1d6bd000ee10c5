"""Sums over ranks on CPUs: in memory that they share if they run on one machine, which takes a fraction of gloo's time."""

import contextlib
import math
import os
import random
from typing import Any

import torch as th
import torch.distributed as dist


class SharedSums:
    """
    Adds float32 vectors of all ranks. Each rank writes its vector into a row of its own, waits for the others, and adds all
    rows in the same order, so that all have the same bits. Rows of two sums take turns: when a rank writes for the next sum
    but one, all others have begun the next sum. Ranks that share no memory (on several machines, or not on Linux) add by
    gloo's ``all_reduce``.

    :param room: most numbers of a vector
    :param group: of all ranks, between CPUs; all make this object together
    """

    def __init__(self, room: int, group: Any) -> None:
        self.room, self.group, self._turn = room, group, 0
        self._rank = dist.get_rank()
        self._rows = self._map(2, dist.get_world_size(), room)

    @property
    def in_memory(self) -> bool:
        """Say whether the ranks share memory."""
        return self._rows is not None

    def _map(self, *shape: int) -> th.Tensor | None:
        """Map memory that the first rank makes; None on all ranks unless all see the same memory."""
        numbers = math.prod(shape)
        place: list[Any] = [None, None]
        descriptor = -1
        if self._rank == 0:
            with contextlib.suppress(AttributeError, OSError):  # Linux alone has this
                descriptor = os.memfd_create("gradients")
                os.truncate(descriptor, 4 * numbers)
                place = [f"/proc/{os.getpid()}/fd/{descriptor}", random.SystemRandom().getrandbits(31)]
        dist.broadcast_object_list(place, group=self.group)
        path, mark = place
        rows = None
        if self._rank == 0 and path is not None:
            rows = _open(path, numbers)
            if rows is not None:
                rows[:1].view(th.int32).fill_(mark)
        dist.barrier(self.group)
        if self._rank != 0 and path is not None:
            rows = _open(path, numbers)
        # a path of another machine may be a file here, too, but not with this mark
        seen = th.tensor(float(rows is not None and rows[:1].view(th.int32).item() == mark))
        dist.all_reduce(seen, dist.ReduceOp.MIN, group=self.group)
        if descriptor >= 0:
            os.close(descriptor)  # the memory is there while it is mapped
        return rows.view(shape) if rows is not None and seen.item() else None

    def add(self, tensors: list[th.Tensor]) -> None:
        """
        Replace tensors by their sums over ranks, in place: memory that is new in each step would cost more time than the sums.

        :param tensors: float32, of the same shapes on all ranks
        """
        parts = [tensor.flatten() for tensor in tensors]
        sizes = [len(part) for part in parts]
        if self._rows is None:
            total = th.cat(parts)
            dist.all_reduce(total, group=self.group)
            copy_parts(total, tensors)
            return
        rows = self._rows[self._turn, :, : sum(sizes)]
        self._turn = 1 - self._turn
        th.cat(parts, out=rows[self._rank])
        dist.barrier(self.group)
        for tensor, first, second, *others in zip(tensors, *(row.split(sizes) for row in rows), strict=True):
            th.add(first.view_as(tensor), second.view_as(tensor), out=tensor)
            for other in others:
                tensor += other.view_as(tensor)


def copy_parts(vector: th.Tensor, tensors: list[th.Tensor]) -> None:
    """Copy a vector into tensors, one after the other."""
    for tensor, part in zip(tensors, vector.split([each.numel() for each in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def _open(path: str, numbers: int) -> th.Tensor | None:
    try:
        if os.path.getsize(path) != 4 * numbers:
            return None
        return th.from_file(path, shared=True, size=numbers, dtype=th.float32)
    except (OSError, RuntimeError):
        return None
