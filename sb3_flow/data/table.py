"""The table of trajectories that windows are drawn from, kept up to date at a cost that does not grow with their number."""

from typing import Literal, NamedTuple

import numpy as np

from sb3_flow.data.trajectories import OnlineTrajectories, WindowRule, count_starts

Sampling = Literal["trajectory", "transition"]

FIRST, LAST, COLUMN, TRAJECTORY, N_STARTS = range(5)
"""
Columns of the table. Steps are dataset rows offline, absolute numbers online. ``COLUMN`` is the environment of an online
trajectory, -1 offline. ``TRAJECTORY`` is the number of an offline trajectory in its dataset, -1 online.
Windows may start at ``FIRST``, ..., ``FIRST + N_STARTS - 1``; ``N_STARTS`` is above 0.
"""


class Selection(NamedTuple):
    """
    Rows of the table that can be drawn: from ``begin`` on and before ``n_rows``, but for gaps. If rows (or starts) are counted
    from the first that can be drawn and without the gaps, number ``gaps[i]`` is the first after the i-th gap, and the numbers
    between the gaps i - 1 and i lie ``shifts[i]`` further on in the table.
    """

    n_rows: int
    begin: int
    total: int  # of rows or starts that can be drawn
    gaps: np.ndarray
    shifts: np.ndarray


class TrajectoryTable:
    """
    A table with a row per trajectory: the offline trajectories, the closed online trajectories in the order in which they
    closed, and the edge, which changes with every step: the running trajectories and the trajectories that the ring is
    overwriting (at most one of each kind per environment). All rows before the edge stay as they were written. Gaps leave
    out rows whose steps the ring has reached: a gap for all overwritten rows, and a gap for each row that moved to the edge.

    :param offline: rows of the offline trajectories, shape ``(n, 5)``
    :param online: the online trajectories, which :meth:`update` follows
    :param horizon_length: steps of a window
    :param window_rule: ``"rql"`` or ``"q_chunking"``
    """

    def __init__(self, offline: np.ndarray, online: OnlineTrajectories, horizon_length: int, window_rule: WindowRule) -> None:
        self.n_offline = len(offline)
        # rows of closed online trajectories end at the tail; from the head on, all but `_cut_into` are stored in full
        self._head = self._tail = len(offline)
        self.n_rows = len(offline)  # with the edge
        self.unchanged = 0  # rows before this number are as they were before the last update
        self.rows = offline
        self.starts_before = np.append(0, offline[:, N_STARTS].cumsum())  # of all rows before each row, (n_rows + 1,)
        self._online, self._horizon_length, self._window_rule = online, horizon_length, window_rule
        self._seen: tuple[int, int] | None = None  # clock and number of closed trajectories
        # of each environment the first and last row that holds a closed trajectory not yet overwritten, -1 for none, ...
        self._oldest_row = np.full(online.n_envs, -1)
        self._newest_row = np.full(online.n_envs, -1)
        self._next_row = np.full(len(offline), -1)  # ... and of each row the environment's next
        self._cut_into = np.zeros(0, dtype=np.int64)  # rows after the head that moved to the edge
        self._running = np.full((online.n_envs, 5), -1)
        self._running[:, COLUMN] = np.arange(online.n_envs)

    @property
    def edge(self) -> int:
        """Number of the first row of the edge; the rows before hold offline and closed trajectories."""
        return self._tail

    def update(self, terminated: np.ndarray) -> bool:
        """
        Follow the online trajectories.

        :param terminated: the ring's true terminals, shape ``(buffer_size, n_envs)``
        :return: whether anything changed
        """
        online = self._online
        if self._seen == (online.clock, online.n_closed):
            return False
        n_known = -1 if self._seen is None else self._seen[1]
        self.unchanged = 0 if self._seen is None else self._tail
        self._seen = online.clock, online.n_closed
        if online.n_closed > n_known:
            self._append(online.closed_since(max(n_known, 0)), terminated)
        self._write_edge(self._leave_out_overwritten())
        return True

    def select(self, offline: bool, online: bool, sampling: Sampling) -> Selection:
        """
        Select rows to draw from.

        :param offline: whether offline trajectories can be drawn
        :param online: whether online trajectories can be drawn
        :param sampling: ``"trajectory"`` counts rows, ``"transition"`` starts
        """
        if not online:
            n_rows, begin, gaps, ends = self.n_offline if offline else 0, 0, self._cut_into[:0], self._cut_into[:0]
        else:
            n_rows, begin, gaps, ends = self.n_rows, 0 if offline else self._head, self._cut_into, self._cut_into + 1
            if offline and self.n_offline < self._head:
                gaps, ends = np.concatenate([[self.n_offline], gaps]), np.concatenate([[self._head], ends])
        stop = n_rows
        if sampling == "transition":
            begin, stop = int(self.starts_before[begin]), int(self.starts_before[n_rows])
            gaps, ends = self.starts_before[gaps], self.starts_before[ends]
        shifts = np.zeros(len(gaps) + 1, dtype=np.int64)
        (ends - gaps).cumsum(out=shifts[1:])
        shifts += begin
        return Selection(n_rows, begin, stop - int(shifts[-1]), gaps - shifts[:-1], shifts)

    def _leave_out_overwritten(self) -> np.ndarray:
        """Find, for each environment that has any, the row of the oldest closed trajectory that is not wholly overwritten."""
        oldest = self._online.oldest
        while self._head < self._tail and self.rows[self._head, FIRST] < oldest:
            self._head += 1
        while True:
            front = self._oldest_row[self._oldest_row >= 0]
            gone = front[self.rows[front, LAST] < oldest]
            if len(gone) == 0:
                return front
            self._oldest_row[self.rows[gone, COLUMN]] = self._next_row[gone]

    def _append(self, closed: np.ndarray, terminated: np.ndarray) -> None:
        closed = closed[closed[:, 2] >= self._online.oldest]
        column, first, last = closed[:, :3].T
        terminal = terminated[last % self._online.buffer_size, column].astype(bool)
        length = last - first + 1
        complete, cut = (count_starts(length, ends, self._horizon_length, self._window_rule) for ends in (terminal, None))
        n_starts = np.where(closed[:, 3], complete, cut)
        rows = np.stack([first, last, column, np.full_like(column, -1), n_starts], axis=1)[n_starts > 0]
        self._make_room(len(rows) + 2 * self._online.n_envs)
        begin = self._tail
        self._write(begin, rows)
        self._tail = self.n_rows
        self._next_row[begin : self._tail] = -1
        for row, environment in enumerate(rows[:, COLUMN].tolist(), begin):
            if self._oldest_row[environment] < 0:
                self._oldest_row[environment] = row
            else:
                self._next_row[self._newest_row[environment]] = row
            self._newest_row[environment] = row

    def _write(self, begin: int, rows: np.ndarray) -> None:
        end = self.n_rows = begin + len(rows)
        self.rows[begin:end] = rows
        self.starts_before[begin + 1 : end + 1] = self.starts_before[begin] + rows[:, N_STARTS].cumsum()

    def _make_room(self, n: int) -> None:
        """Forget overwritten trajectories; grow if that does not free half of the room for online trajectories."""
        if self._tail + n <= len(self.rows):
            return
        n_offline, tail = self.n_offline, self._tail
        alive = int(self._leave_out_overwritten().min(initial=self._head))  # all from here on, and perhaps a few that are not
        n_alive, shift = tail - alive, alive - n_offline
        old_rows, old_starts, old_next = self.rows, self.starts_before, self._next_row
        capacity = n_offline + 2 * max(64, n_alive + n)
        self.unchanged = n_offline
        if capacity > len(old_rows):
            self.rows = np.empty((capacity, 5), dtype=np.int64)
            self.starts_before = np.empty(capacity + 1, dtype=np.int64)
            self._next_row = np.full(capacity, -1)
            self.rows[:n_offline] = old_rows[:n_offline]
            self.starts_before[: n_offline + 1] = old_starts[: n_offline + 1]
            self.unchanged = 0
        self._head, self._tail = self._head - shift, tail - shift
        self.rows[n_offline : self._tail] = old_rows[alive:tail]
        starts_alive = old_starts[alive : tail + 1] - old_starts[alive]
        self.starts_before[n_offline : self._tail + 1] = starts_alive + old_starts[n_offline]
        following = old_next[alive:tail]
        self._next_row[n_offline : self._tail] = np.where(following < 0, -1, following - shift)
        for numbers in (self._oldest_row, self._newest_row):
            numbers -= np.where(numbers < 0, 0, shift)

    def _write_edge(self, front: np.ndarray) -> None:
        oldest, running = self._online.oldest, self._running
        partly = self.rows[front]
        reached = partly[:, FIRST] < oldest
        self._cut_into = np.sort(front[reached & (front >= self._head)])
        partly = partly[reached]
        partly[:, N_STARTS] -= oldest - partly[:, FIRST]
        partly[:, FIRST] = oldest
        np.maximum(self._online.running_since, oldest, out=running[:, FIRST])
        running[:, LAST] = self._online.clock - 1
        length = self._online.clock - running[:, FIRST]
        running[:, N_STARTS] = count_starts(length, None, self._horizon_length, self._window_rule)
        edge = np.concatenate([partly, running])
        self._write(self._tail, edge[edge[:, N_STARTS] > 0])
