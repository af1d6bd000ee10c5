"""The return of the policy that made a dataset, with which a policy that is trained on the dataset is compared."""

from typing import NamedTuple

import numpy as np

from sb3_flow.data.columns import BLOCK_ROWS, row_slices

LABELLED = "they are walks labelled for this task, which do not start where its episodes do"
RUN_ON = "they run on after terminated rows, as relabelled walks do, which need not start where the task's episodes do"


class BehaviourReturn(NamedTuple):
    """
    Mean return of a dataset's trajectories, not discounted. The interval is normal, 1.96 standard errors to either side, which
    costs nothing with a million trajectories. With a single trajectory, both ends are the return itself.

    :param value: the mean
    :param low: lower end of its 95 % interval
    :param high: upper end
    :param n_trajectories: number of trajectories
    :param caveat: why the trajectories are not episodes of the task, a sentence without its full stop; "" if they may be
    """

    value: float
    low: float
    high: float
    n_trajectories: int
    caveat: str

    def __str__(self) -> str:
        interval = f"95 % interval [{self.low:.2f}, {self.high:.2f}], {self.n_trajectories} trajectories"
        caveat = f"; {self.caveat}" if self.caveat else ""
        return f"{self.value:.2f}, {interval if self.n_trajectories > 1 else 'one trajectory'}{caveat}"


def trajectory_returns(rewards: np.ndarray, first: np.ndarray) -> np.ndarray:
    """
    Sum the rewards of each trajectory.

    :param rewards: of all rows, ``(N,)``
    :param first: first row of each trajectory, ``(n_trajectories,)``
    :return: ``(n_trajectories,)``, float64
    """
    last = np.append(first[1:], len(rewards)) - 1
    returns = np.empty(len(first))
    begin = 0
    while begin < len(first):  # a block of whole trajectories at a time: NumPy converts all rewards that it sums at once
        end = max(begin + 1, int(np.searchsorted(last, first[begin] + BLOCK_ROWS)))
        rows = rewards[first[begin] : last[end - 1] + 1]
        returns[begin:end] = np.add.reduceat(rows, first[begin:end] - first[begin], dtype=np.float64)
        begin = end
    return returns


def behaviour_return(returns: np.ndarray, terminated: np.ndarray, trajectory_ends: np.ndarray, source: str) -> BehaviourReturn:
    """
    Average the returns of a dataset.

    :param returns: of each trajectory
    :param terminated: of all rows
    :param trajectory_ends: of all rows
    :param source: the location of the data, as ``OfflineDataset.load`` takes it
    :return: with a caveat for OGBench's single tasks, and if a trajectory runs on after a terminated row
    """
    mean, n = float(returns.mean()), len(returns)
    error = 1.96 * float(returns.std(ddof=1)) / n**0.5 if n > 1 else 0.0
    runs_on = any((terminated[rows] & ~trajectory_ends[rows]).any() for rows in row_slices(terminated))
    caveat = LABELLED if source.startswith("ogbench:") else RUN_ON if runs_on else ""
    return BehaviourReturn(mean, mean - error, mean + error, n, caveat)
