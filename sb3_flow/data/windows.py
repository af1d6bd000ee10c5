"""Windows in tensors: drawing their places, and their shapes."""

from typing import NamedTuple

import torch as th

from sb3_flow.data.table import Sampling, Selection, TrajectoryTable

SHUFFLED_AS_A_WHOLE = 64
"""Up to this many times the numbers that are drawn, a whole permutation costs less (``distinct``; measured on a CPU)."""


class Windows(NamedTuple):
    """Places of the windows of a batch, each of shape ``(B,)``; see ``TrajectoryTable``."""

    column: th.Tensor
    trajectory: th.Tensor
    last: th.Tensor
    start: th.Tensor
    first: th.Tensor  # stored step of the trajectory


class Starts(NamedTuple):
    """The trajectories that windows are drawn from: a :class:`~sb3_flow.data.table.Selection` in tensors."""

    rows: th.Tensor
    starts_before: th.Tensor
    begin: int
    total: int  # known on the host: no synchronisation
    gaps: th.Tensor | None
    shifts: th.Tensor | None

    def draw(self, n: int, sampling: Sampling, generator: th.Generator | None) -> Windows:
        """Draw n windows, by ``sampling`` as ``TrajectoryReplayBuffer`` has it and as the selection was made."""
        device = self.rows.device
        if sampling == "trajectory" and n < self.total:
            index = distinct(self.total, n, generator, device)
        else:
            index = th.randint(self.total, (n,), generator=generator, device=device)
        if sampling == "transition":
            return self.by_start(index)
        return self.by_trajectory(index, th.rand(n, generator=generator, device=device, dtype=th.float64))

    def by_start(self, number: th.Tensor) -> Windows:
        """Find windows by the number of each window's start among all starts, below ``total``."""
        number = self._with_gaps(number)
        index = th.searchsorted(self.starts_before[1:], number, right=True)
        first, last, column, trajectory, _ = self.rows.index_select(0, index).unbind(1)
        return Windows(column, trajectory, last, first + number - self.starts_before.take(index), first)

    def by_trajectory(self, index: th.Tensor, uniform: th.Tensor) -> Windows:
        """
        Find windows by their trajectories.

        :param index: number of each window's trajectory, below ``total``
        :param uniform: where in the trajectory it starts, in [0, 1)
        """
        first, last, column, trajectory, n_starts = self.rows.index_select(0, self._with_gaps(index)).unbind(1)
        return Windows(column, trajectory, last, first + th.minimum((uniform * n_starts).long(), n_starts - 1), first)

    def _with_gaps(self, numbers: th.Tensor) -> th.Tensor:
        if self.gaps is None or self.shifts is None:
            return numbers + self.begin if self.begin > 0 else numbers
        return numbers + self.shifts.take(th.searchsorted(self.gaps, numbers, right=True))


class TableTensors:
    """
    A table's arrays in tensors.

    :param device: of the tensors
    :param share: whether the tensors use the arrays' own memory (a CPU's)
    """

    def __init__(self, table: TrajectoryTable, device: th.device, share: bool) -> None:
        self._table, self._device, self._share = table, device, share
        self._rows = self._starts_before = th.empty(0)

    def follow(self) -> None:
        """Copy the rows that the table's last update changed."""
        rows, starts_before = th.from_numpy(self._table.rows), th.from_numpy(self._table.starts_before)
        if self._share:
            self._rows, self._starts_before = rows, starts_before
            return
        begin, end = self._table.unchanged, self._table.n_rows
        if begin == 0:
            self._rows = th.empty_like(rows, device=self._device)
            self._starts_before = th.zeros_like(starts_before, device=self._device)
        self._rows[begin:end].copy_(rows[begin:end])
        self._starts_before[begin + 1 : end + 1].copy_(starts_before[begin + 1 : end + 1])

    def starts(self, selection: Selection) -> Starts:
        """Bring a selection into tensors."""
        n_rows, begin, total, gaps, shifts = selection
        rows, starts_before = self._rows[:n_rows], self._starts_before[: n_rows + 1]
        if len(gaps) == 0:
            return Starts(rows, starts_before, begin, total, None, None)
        in_tensors = (th.from_numpy(numbers).to(self._device) for numbers in (gaps, shifts))
        return Starts(rows, starts_before, begin, total, *in_tensors)


def distinct(n_numbers: int, n: int, generator: th.Generator | None, device: th.device) -> th.Tensor:
    """
    Draw different numbers, every choice and order of them with the same probability.

    The result is the beginning of a shuffle (Fisher and Yates): step i swaps the number in place i with the number in a place
    drawn from i, ..., n_numbers - 1. Few of the places are ever touched, so the swaps are followed backwards instead: without
    the array, without a loop over the steps and without waiting for the device.

    :param n_numbers: draw from 0, ..., n_numbers - 1
    :param n: size of the result, at most n_numbers
    """
    if n_numbers <= SHUFFLED_AS_A_WHOLE * n:
        return th.randperm(n_numbers, generator=generator, device=device)[:n]
    step = th.arange(n, device=device)
    place = step + (th.rand(n, generator=generator, device=device, dtype=th.float64) * (n_numbers - step)).long()
    # for each step's two places: the earlier step that swapped with that place last
    swaps = (place * n + step).sort().values
    places, now = th.cat([place, step]), step.repeat(2)
    latest = swaps.index_select(0, (th.searchsorted(swaps, places * n + now) - 1).clamp(min=0)) - places * n
    swapped = (latest >= 0) & (latest < now)
    latest = th.where(swapped, latest, now)
    drawn_from, origin = latest[:n], latest[n:]
    # the number in place i before step i had come from place origin[i], and so on to a place that was untouched
    for _ in range((n - 1).bit_length()):
        origin = origin.index_select(0, origin)
    return th.where(swapped[:n], origin.index_select(0, drawn_from), place)


def shapes_of_windows(h: int, action_dim: int, gamma: float, device: th.device) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
    """
    Row r = 0, ..., h of each result is for windows whose trajectory has r more steps (h: or more) after the window's start.

    :return: their steps counted from the start, none past the trajectory's end; the weights of their rewards; the action mask
    """
    step, ahead = th.arange(h, device=device), th.arange(h + 1, device=device)[:, None]
    powers = gamma ** th.arange(h, device=device, dtype=th.float64)
    inside = step <= ahead
    return th.minimum(step, ahead), inside * powers, inside.float().repeat_interleave(action_dim, dim=1)


def select(values: th.Tensor, rows: th.Tensor) -> th.Tensor:
    """``values[rows]``, several times as fast as that on a CPU."""
    if values.dim() == 1:
        return values.take(rows)
    if rows.dim() == 1:
        return values.index_select(0, rows)
    return values.index_select(0, rows.flatten()).view(*rows.shape, *values.shape[1:])
