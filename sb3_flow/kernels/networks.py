"""What native update and forward pass know of a policy: two multilayer perceptrons whose parameters are one flat vector."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

TANH, RELU = 0, 1
CATEGORICAL, BERNOULLI, GAUSSIAN = 0, 1, 2


class Network(NamedTuple):
    """
    SB3's ``MlpPolicy``, made by :func:`describe_network`. Both tables are int64, shape ``(layers, 4)``: offset of a linear
    layer's weight (``outputs * inputs`` numbers, row by row as torch has them), offset of its bias, inputs, outputs.
    Offsets count from the start of the flat vector of parameters, in any order. Between layers, not after the last one,
    stands the activation.
    """

    actor: np.ndarray
    """From the observation to the distribution's parameters; its last row is ``action_net``."""
    critic: np.ndarray
    """From the observation to the value; its last row is ``value_net``. Without rows there is no critic."""
    components: np.ndarray
    """int64: numbers of choices of each part of a (multi-)discrete action; ones, for each number of another action."""
    distribution: int
    activation: int
    log_std: int
    """Offset of the Gaussian's logarithmic standard deviations, -1 for other distributions."""
    size: int
    """Length of the flat vector."""


def describe_network(
    actor: Sequence[Sequence[int]] | np.ndarray,
    critic: Sequence[Sequence[int]] | np.ndarray,
    components: Sequence[int] | np.ndarray,
    distribution: int,
    activation: int,
    size: int,
    log_std: int = -1,
) -> Network:
    """
    :param actor: rows (weight offset, bias offset, inputs, outputs), first layer first; see :class:`Network`
    :param critic: likewise, empty without a critic
    :param components: choices of every part of a categorical action, ``[n]`` or ``nvec``; ``[1] * n`` for n binary or
        Gaussian numbers
    :param distribution: ``CATEGORICAL`` (one or several), ``BERNOULLI`` or ``GAUSSIAN``
    :param activation: ``TANH`` or ``RELU``
    :param size: number of parameters
    :param log_std: offset of the Gaussian's logarithmic standard deviations
    :return: the network
    :raises ValueError: if a layer does not fit its neighbours or the vector, or a code is unknown
    """
    tables = [np.array(table, dtype=np.int64).reshape(-1, 4) for table in (actor, critic)]
    parts = np.array(components, dtype=np.int64)
    if distribution not in (CATEGORICAL, BERNOULLI, GAUSSIAN) or activation not in (TANH, RELU):
        raise ValueError(f"Codes that are known were expected, but {distribution=} and {activation=} were given.")
    if not len(tables[0]):
        raise ValueError("`actor` must have at least one layer.")
    for name, table, last in (("actor", tables[0], int(parts.sum())), ("critic", tables[1], 1)):
        if not len(table):
            continue
        weights, biases, inputs, outputs = table.T
        if (inputs[1:] != outputs[:-1]).any() or inputs[0] != tables[0][0, 2] or outputs[-1] != last or table.min() < 0:
            raise ValueError(f"The layers of `{name}` do not fit each other, the observation or its {last} outputs: {table}.")
        if (weights + inputs * outputs > size).any() or (biases + outputs > size).any():
            raise ValueError(f"The layers of `{name}` do not fit in {size} parameters: {table}.")
    if (distribution == GAUSSIAN) != (log_std >= 0) or log_std + len(parts) > size:
        raise ValueError(f"`log_std` is {log_std}; an offset was expected for Gaussians, and for them alone.")
    return Network(tables[0], tables[1], parts, distribution, activation, log_std, size)
