"""
Minibatches that several processes (ranks) learn from together: each has rows of its own rollout, and all count alike.

With one rank the functions do what SB3 does, operation by operation.
"""

from collections.abc import Iterator

import numpy as np
import torch as th
from stable_baselines3.common.utils import explained_variance

from sb3_flow.common.ranks import check_shares, from_first, n_ranks, of_all_ranks, rank, rows_of_ranks


def divided(order: np.ndarray, batch_size: int | None) -> Iterator[np.ndarray]:
    """
    Divide rows into minibatches, as many on every rank.

    :param order: this rank's rows, in the order in which they are learned from
    :param batch_size: rows of a minibatch of all ranks together, None for all rows
    :return: this rank's share of each minibatch. Where ranks have different numbers of rows, they have different shares, and a
        share may be empty
    """
    counts = of_all_ranks(len(order))
    if batch_size is not None and len(set(counts)) == 1:
        share = check_shares(batch_size)
        for start in range(0, len(order), share):
            yield order[start : start + share]
    elif sum(counts):
        yield from np.array_split(order, 1 if batch_size is None else -(-sum(counts) // batch_size))


def drawn_episodes(lengths: list[int], batch_size: int | None) -> Iterator[list[int]]:
    """
    Draw whole episodes of all ranks for each minibatch.

    :param lengths: rows of this rank's episodes
    :param batch_size: smallest number of rows of a minibatch of all ranks together, None for all rows
    :return: numbers of this rank's episodes in each minibatch, which may be none
    """
    of_ranks = of_all_ranks(lengths)
    before = sum(len(other) for other in of_ranks[: rank()])
    together = [length for other in of_ranks for length in other]
    order = from_first(lambda: np.random.permutation(len(together)))
    chosen: list[int] = []
    n_rows = 0
    for place, number in enumerate(order, start=1):
        chosen.append(number - before)
        n_rows += together[number]
        if place == len(together) or (batch_size is not None and n_rows >= batch_size):
            yield [own for own in chosen if 0 <= own < len(lengths)]
            chosen, n_rows = [], 0


def _moments(values: th.Tensor) -> th.Tensor:
    """Compute number, mean and sum of squared distances from the mean, in double precision."""
    values = values.double()
    mean = values.sum() / max(len(values), 1)
    return th.stack([values.new_tensor(len(values)), mean, (values - mean).square().sum()])


def _joined(moments: th.Tensor) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
    """
    Compute :func:`_moments` of the values of all ranks.

    :param moments: a row for each rank
    """
    numbers, means, squares = moments.unbind(dim=1)
    number = numbers.sum()
    mean = (numbers * means).sum() / number.clamp(min=1.0)
    return number, mean, (squares + numbers * (means - mean).square()).sum()


class WholeBatch:
    """
    A minibatch of all ranks together, of which this rank has some rows.

    :param advantages: of this rank's rows
    :param n_sequences: this rank's sequences, if the loss has a row for each
    :param stands_in: this rank has no rows; its row, which nothing is learned from, stands in
    """

    def __init__(self, advantages: th.Tensor, n_sequences: int = 0, stands_in: bool = False):
        self.stands_in, self.alone = stands_in, n_ranks() == 1
        if self.alone:
            return
        own = _moments(advantages[:0] if stands_in else advantages)
        sequences = own.new_tensor([0 if stands_in else n_sequences])
        of_ranks = rows_of_ranks(th.cat([own, sequences]))
        self.number, self.mean, self.squares = _joined(of_ranks[:, :3])
        weights = of_ranks[rank(), [0, 3]] * n_ranks() / of_ranks[:, [0, 3]].sum(dim=0).clamp(min=1.0)
        self.of_rows, self.of_sequences = weights.float().unbind()

    def normalised(self, advantages: th.Tensor) -> th.Tensor:
        """Normalise this rank's advantages by mean and standard deviation of all ranks'; a single advantage stays as it is."""
        if self.alone:
            if len(advantages) <= 1:
                return advantages
            return (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        std = (self.squares / (self.number - 1).clamp(min=1.0)).sqrt()
        scaled = (advantages - self.mean.to(advantages.dtype)) / (std.to(advantages.dtype) + 1e-8)
        return th.where(self.number > 1, scaled, advantages)

    def part(self, mean: th.Tensor, by_sequence: bool = False) -> th.Tensor:
        """
        Weigh a mean over this rank's rows, so that the mean of all ranks' parts is the mean over all rows.

        :param by_sequence: it is a mean over this rank's sequences
        """
        if self.alone:
            return mean
        return mean * (self.of_sequences if by_sequence else self.of_rows)

    def largest(self, ratios: th.Tensor) -> th.Tensor:
        """Find the largest of this rank's ratios, 0 if it has none."""
        return ratios.max() * 0 if self.stands_in else ratios.max()


def metrics_of_ranks(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """
    Join the metrics of all ranks' parts of minibatches: the largest of names that end with ``_max``, and means.

    :param columns: by name, the same on all ranks
    """
    if n_ranks() == 1:
        return columns
    of_ranks = of_all_ranks(columns)
    together = {name: np.stack([other[name] for other in of_ranks]) for name in columns}
    return {name: (table.max if name.endswith("_max") else table.mean)(axis=0) for name, table in together.items()}


def explained_of_ranks(values: np.ndarray, returns: np.ndarray) -> float:
    """Compute the share of the variance of all ranks' returns that the values explain."""
    if n_ranks() == 1:
        return explained_variance(values, returns)
    left, whole = (_joined(rows_of_ranks(_moments(th.from_numpy(column))))[2].item() for column in (returns - values, returns))
    return float("nan") if whole == 0 else 1 - left / whole
