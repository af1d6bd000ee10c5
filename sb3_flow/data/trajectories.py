"""Book-keeping of trajectories: which windows of steps may start where. Plain NumPy, knows nothing of what is stored."""

from typing import NamedTuple

import numpy as np

WINDOW_RULES = ("rql", "q_chunking")


class TrajectoryTable(NamedTuple):
    """
    One row per trajectory that can be sampled; all arrays int64 of shape ``(n,)``.

    Steps are absolute numbers: dataset rows offline, ``add`` calls since the buffer's birth online.
    """

    first: np.ndarray  # first step that is still stored
    last: np.ndarray  # last step
    column: np.ndarray  # environment of an online trajectory, -1 for an offline one
    trajectory: np.ndarray  # number of an offline trajectory in its dataset, -1 for an online one
    n_starts: np.ndarray  # windows may start at first, ..., first + n_starts - 1; always > 0

    @classmethod
    def build(
        cls,
        first: np.ndarray,
        last: np.ndarray,
        column: np.ndarray,
        trajectory: np.ndarray,
        complete: np.ndarray,
        ends_terminated: np.ndarray,
        horizon_length: int,
        window_rule: str,
    ) -> "TrajectoryTable":
        """
        Count the starts and drop the trajectories that have none.

        The reference (RQL) starts windows on every row but the last. A last row that ends in a true terminal is a start
        here as well: nothing is bootstrapped after it, and with ``horizon_length=1`` the terminal reward would otherwise
        never be seen. Q-chunking starts on every row. Of a trajectory that is still running (or was cut by a reset, so
        that its end is no end of the task) only windows that lie inside it are used, under both rules.

        :param complete: the trajectory's last row ended an episode (terminated or truncated)
        :param ends_terminated: its last row ended in a true terminal
        """
        length = last - first + 1
        if window_rule == "rql":
            n_complete = length - 1 + ends_terminated
            n_open = length - horizon_length
        else:
            n_complete = length
            n_open = length - horizon_length + 1
        n_starts = np.where(complete, n_complete, n_open)
        keep = n_starts > 0
        columns = (first, last, column, trajectory, n_starts)
        return cls(*(np.ascontiguousarray(values[keep], dtype=np.int64) for values in columns))

    @classmethod
    def concatenate(cls, tables: "list[TrajectoryTable]") -> "TrajectoryTable":
        """:return: one table of all rows; the table itself where there is only one"""
        return tables[0] if len(tables) == 1 else cls(*(np.concatenate(columns) for columns in zip(*tables, strict=True)))

    def __len__(self) -> int:  # number of trajectories, not of fields
        return int(self.first.shape[0])


class OnlineTrajectories:
    """
    Trajectories of a ring buffer with one column per environment, kept in step with its ``add``.

    :param buffer_size: rows of the ring (per environment)
    :param n_envs: number of columns
    """

    def __init__(self, buffer_size: int, n_envs: int) -> None:
        self.buffer_size = buffer_size
        self.n_envs = n_envs
        self.clock = 0  # rows written since birth; the row written at clock c sits at c % buffer_size
        self._running_since = np.zeros(n_envs, dtype=np.int64)
        # closed trajectories: column, first, last, complete, in the order in which they closed, so `last` never decreases
        self._closed = np.zeros((64, 4), dtype=np.int64)
        self._n_closed = 0

    def step(self, dones: np.ndarray) -> None:
        """:param dones: episode ends of the row just written, shape ``(n_envs,)``"""
        for column in np.flatnonzero(dones):
            self._close(int(column), self.clock, complete=True)
            self._running_since[column] = self.clock + 1
        self.clock += 1

    def cut(self) -> None:
        """The environments were reset or exchanged: what comes next does not continue what was stored."""
        for column in range(self.n_envs):
            if self._running_since[column] < self.clock:
                self._close(column, self.clock - 1, complete=False)
        self._running_since[:] = self.clock

    def _close(self, column: int, last: int, complete: bool) -> None:
        if self._n_closed == len(self._closed):
            # forget what was overwritten; grow only if that did not make room
            alive = self._closed[self._first_alive() :]
            grown = np.zeros((max(64, 2 * len(alive)), 4), dtype=np.int64)
            grown[: len(alive)] = alive
            self._closed, self._n_closed = grown, len(alive)
        self._closed[self._n_closed] = (column, self._running_since[column], last, complete)
        self._n_closed += 1

    def _first_alive(self) -> int:
        return int(np.searchsorted(self._closed[: self._n_closed, 2], self.clock - self.buffer_size))

    def table(self, terminated: np.ndarray, horizon_length: int, window_rule: str) -> TrajectoryTable:
        """
        :param terminated: the ring's true terminals, shape ``(buffer_size, n_envs)``
        :return: what can be sampled now, running trajectories included
        """
        oldest = max(0, self.clock - self.buffer_size)
        running = np.stack(
            [
                np.arange(self.n_envs),
                self._running_since,
                np.full(self.n_envs, self.clock - 1),
                np.zeros(self.n_envs, dtype=np.int64),
            ],
            axis=1,
        )
        rows = np.concatenate([self._closed[self._first_alive() : self._n_closed], running])
        column, last, complete = rows[:, 0], rows[:, 2], rows[:, 3].astype(bool)
        return TrajectoryTable.build(
            first=np.maximum(rows[:, 1], oldest),
            last=last,
            column=column,
            trajectory=np.full_like(column, -1),
            complete=complete,
            ends_terminated=terminated[last % self.buffer_size, column].astype(bool) & complete,
            horizon_length=horizon_length,
            window_rule=window_rule,
        )
