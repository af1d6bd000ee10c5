"""Book-keeping of online trajectories, and which steps of a trajectory may start windows. Stored arrays are not seen here."""

from typing import Literal

import numpy as np

WindowRule = Literal["rql", "q_chunking"]


def count_starts(
    length: np.ndarray, ends_terminated: np.ndarray | None, horizon_length: int, window_rule: WindowRule
) -> np.ndarray:
    """
    Count the steps of trajectories that windows may start at, from the first on.

    The reference (RQL) starts windows on every row but the last. A last row that ends in a true terminal is a start here as
    well: nothing is bootstrapped after it, and with ``horizon_length=1`` the terminal reward would otherwise never be seen.
    Q-chunking starts on every row. Of a trajectory that is still running (or was cut by a reset, so that its end is no end
    of the task) only windows that lie inside it are used, under both rules.

    :param length: stored steps of each trajectory
    :param ends_terminated: whether the last step is a true terminal, for trajectories that ended as the task has it
        (terminated or truncated); None for trajectories that are running or were cut
    :param horizon_length: steps of a window
    :param window_rule: ``"rql"`` or ``"q_chunking"``
    :return: the counts, 0 or below where there is no window
    """
    if ends_terminated is None:
        return length - horizon_length + (window_rule == "q_chunking")
    return length if window_rule == "q_chunking" else length - 1 + ends_terminated


class OnlineTrajectories:
    """
    Trajectories of a ring buffer with a column per environment, kept in step with its ``add``.

    Steps have absolute numbers: ``add`` calls since the buffer's birth. The row of step ``c`` is ``c % buffer_size``.

    :param buffer_size: rows of the ring (per environment)
    :param n_envs: number of columns
    """

    _n_forgotten = 0  # also of a pickle, which begins to count anew

    def __init__(self, buffer_size: int, n_envs: int) -> None:
        self.buffer_size, self.n_envs = buffer_size, n_envs
        self.clock = 0  # the next step
        self._running_since = np.zeros(n_envs, dtype=np.int64)
        # closed trajectories: column, first, last, complete, in the order in which they closed, so `last` never decreases
        self._closed = np.zeros((64, 4), dtype=np.int64)
        self._n_closed = 0

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in self.__dict__.items() if key != "_n_forgotten"}

    @property
    def oldest(self) -> int:
        """The first step that is still stored."""
        return max(0, self.clock - self.buffer_size)

    @property
    def running_since(self) -> np.ndarray:
        """First step of each column's running trajectory; equals ``clock`` where there is none yet."""
        return self._running_since

    @property
    def n_closed(self) -> int:
        """Number of trajectories that have closed so far, including overwritten trajectories."""
        return self._n_forgotten + self._n_closed

    def closed_since(self, number: int) -> np.ndarray:
        """
        List the trajectories that closed since an earlier time.

        :param number: the value of ``n_closed`` at that time
        :return: column, first step, last step and completeness of each that is not overwritten
        """
        return self._closed[max(number - self._n_forgotten, 0) : self._n_closed]

    def step(self, dones: np.ndarray) -> None:
        """Take note of a row that was just written, with the episode ends ``dones`` of shape ``(n_envs,)``."""
        for column in np.flatnonzero(dones):
            self._close(int(column), self.clock, complete=True)
            self._running_since[column] = self.clock + 1
        self.clock += 1

    def cut(self) -> None:
        """Note that the environments were reset or exchanged: later rows do not continue the stored trajectories."""
        for column in range(self.n_envs):
            if self._running_since[column] < self.clock:
                self._close(column, self.clock - 1, complete=False)
        self._running_since[:] = self.clock

    def _close(self, column: int, last: int, complete: bool) -> None:
        if self._n_closed == len(self._closed):
            # forget overwritten trajectories; grow only if that did not make room
            n_overwritten = int(np.searchsorted(self._closed[:, 2], self.oldest))
            alive = self._closed[n_overwritten:]
            grown = np.zeros((max(64, 2 * len(alive)), 4), dtype=np.int64)
            grown[: len(alive)] = alive
            self._closed, self._n_closed = grown, len(alive)
            self._n_forgotten += n_overwritten
        self._closed[self._n_closed] = (column, self._running_since[column], last, complete)
        self._n_closed += 1
