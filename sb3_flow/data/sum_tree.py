"""A tree of sums over priorities: numbers are drawn in proportion to their priorities, and priorities change in place."""

from itertools import pairwise

import torch as th

FAN_OUT = 128
"""Children of a node: a million numbers make three levels, each of which costs a draw a few operators."""


class SumTree:
    """
    Priorities of the numbers 0, ..., n - 1, all zero at first, in float64.

    A node is the sum of its children, computed from them whenever one of them changes: rounding errors do not accumulate. All
    tensors stay where they are, no size depends on data, and nothing waits for the device.

    :param n: count of numbers
    :param device: where the tree resides
    """

    def __init__(self, n: int, device: th.device) -> None:
        self.n = n
        self._levels: list[th.Tensor] = []  # from the leaves up, a row of siblings each, the last of a single row
        # a leaf more, whose priority is always zero: `change` sends there what is of no concern
        n_blocks = n + 1
        while not self._levels or n_blocks > 1:
            n_blocks = -(-n_blocks // FAN_OUT)
            self._levels.append(th.zeros((n_blocks, FAN_OUT), device=device, dtype=th.float64))
        self._place = th.arange(FAN_OUT, device=device)

    @property
    def device(self) -> th.device:
        return self._place.device

    @property
    def priorities(self) -> th.Tensor:
        """All priorities, shape ``(n,)``, a view."""
        return self._levels[0].view(-1)[: self.n]

    @property
    def total(self) -> th.Tensor:
        """The sum of all priorities, scalar."""
        return self._levels[-1].sum()

    def set(self, numbers: th.Tensor, priorities: th.Tensor) -> None:
        """
        Give numbers their priorities; of a number that comes several times the greatest.

        :param numbers: shape ``(B,)``
        :param priorities: at least zero, shape ``(B,)``
        """
        leaves = self._levels[0].view(-1)
        leaves.index_fill_(0, numbers, 0.0)
        leaves.scatter_reduce_(0, numbers, priorities, "amax")
        for below, above in pairwise(self._levels):
            numbers = numbers // FAN_OUT
            above.view(-1).index_copy_(0, numbers, below.index_select(0, numbers).sum(dim=1))

    def set_all(self, priorities: th.Tensor) -> None:
        """Give all numbers their priorities, shape ``(n,)``."""
        self.priorities.copy_(priorities)
        for below, above in pairwise(self._levels):
            above.view(-1)[: len(below)].copy_(below.sum(dim=1))

    def change(self, numbers: th.Tensor, priorities: th.Tensor, concerned: th.Tensor) -> None:
        """
        Change the priorities of numbers that have a priority; others keep zero.

        :param numbers: shape ``(B,)``
        :param priorities: above zero, shape ``(B,)``
        :param concerned: False where the number is another tree's, shape ``(B,)``
        """
        numbers = th.where(concerned, numbers, self.n)
        self.set(numbers, th.where(self._levels[0].view(-1).take(numbers) > 0, priorities, 0.0))

    def find(self, mass: th.Tensor) -> th.Tensor:
        """
        Find the numbers in whose priorities points of the line of all priorities, one after the other, lie. The result has a
        priority above zero, also where rounding puts the point beyond all of them; the tree must have a number with priority.

        :param mass: in [0, total], shape ``(B,)``
        :return: shape ``(B,)``
        """
        block = th.zeros_like(mass, dtype=th.int64)
        for level in reversed(self._levels):
            values = level.index_select(0, block)  # (B, FAN_OUT)
            ends = values.cumsum(dim=1)
            # the first sibling with a priority that ends after the point, or else the last with a priority
            rank = th.where(ends > mass.unsqueeze(1), 2 * FAN_OUT - self._place, self._place)
            place = rank.masked_fill_(values <= 0, -1).argmax(dim=1, keepdim=True)
            mass = (mass - (ends - values).gather(1, place).squeeze(1)).clamp(min=0.0)
            block = block * FAN_OUT + place.squeeze(1)
        return block
