"""Descriptions of policies for the compiled loops: two multilayer perceptrons whose parameters form a flat vector."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sb3_flow.compiled.choices import shown
from sb3_flow.kernels.array_arguments import INT64, float_array, float_rows, integers, whole

TANH, RELU = 0, 1
CATEGORICAL, BERNOULLI, GAUSSIAN = 0, 1, 2
WEIGHT, BIAS, INPUTS, OUTPUTS = range(4)
"""Columns of the tables of layers, see :class:`Network`."""


class _Fields(NamedTuple):
    actor: np.ndarray
    critic: np.ndarray
    components: np.ndarray
    distribution: int
    activation: int
    log_std: int
    size: int


class Network(_Fields):
    """
    Describe SB3's ``MlpPolicy``; :func:`describe_network` explains the arguments. The loops trust the offsets: these are
    checked whenever a network is made, also by ``_replace``, by copying and by unpickling, and the arrays cannot be written.

    Both tables are int64, shape ``(layers, 4)``: offset of a linear layer's weight (``outputs * inputs`` numbers, row by row
    as in torch), offset of its bias, inputs, outputs. Offsets count from the start of the flat vector of parameters. The last
    rows are ``action_net`` and ``value_net``. Between two layers, but not after the last layer, stands the activation.

    :raises ValueError: if a layer does not fit its neighbours or the vector, or a code is unknown
    """

    __slots__ = ()

    def __new__(
        cls, actor: Any, critic: Any, components: Any, distribution: Any, activation: Any, log_std: Any, size: Any
    ) -> "Network":
        size = whole("size", size, 1)
        distribution = whole("distribution", distribution, CATEGORICAL, GAUSSIAN)
        activation = whole("activation", activation, TANH, RELU)
        components = integers("components", components, (None,))
        parts: list[int] = components.tolist()
        if not parts or min(parts) < 1 or (distribution != CATEGORICAL and max(parts) > 1):
            expected = "positive" if distribution == CATEGORICAL else "ones"
            raise ValueError(f"`components` must be {expected}, at least one, but {shown(parts)} was given.")
        actor, critic = _table("actor", actor), _table("critic", critic)
        if not len(actor):
            raise ValueError("`actor` must have at least one layer, but it has none.")
        _check_layers("actor", actor, int(actor[0, INPUTS]), sum(parts), size)
        if len(critic):
            _check_layers("critic", critic, int(actor[0, INPUTS]), 1, size)
        log_std = whole("log_std", log_std, -1)
        if (distribution == GAUSSIAN) != (log_std >= 0) or log_std + len(parts) > size:
            raise ValueError(
                f"`log_std` must be an offset of {len(parts)} numbers among {size} for Gaussians, and -1 for other "
                f"distributions, but {log_std} was given."
            )
        actor, critic, components = map(_immutable, (actor, critic, components))
        return super().__new__(cls, actor, critic, components, distribution, activation, log_std, size)

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> "Network":  # type: ignore[override]
        return cls(*iterable)  # NamedTuple's own `_make` skips the checks


def _table(name: str, table: Any) -> np.ndarray:
    empty = (isinstance(table, (list, tuple)) and not table) or getattr(table, "shape", None) == (0,)
    return np.empty((0, 4), INT64) if empty else integers(name, table, (None, 4))


def _check_layers(name: str, table: np.ndarray, features: int, last: int, size: int) -> None:
    expected, rows = features, table.tolist()  # of Python's integers, whose products do not overflow
    for i, (weight, bias, inputs, outputs) in enumerate(rows):
        if min(weight, bias, inputs, outputs) < 0 or inputs != expected:
            raise ValueError(
                f"Layer {i} of `{name}` must have {expected} inputs and nothing negative, but {rows[i]} was given."
            )
        if weight + inputs * outputs > size or bias + outputs > size:
            raise ValueError(f"Layer {i} of `{name}` must lie within {size} parameters, but {rows[i]} was given.")
        expected = outputs
    if expected != last:
        raise ValueError(f"`{name}` must have {last} outputs, but {expected} were given.")


def _immutable(table: np.ndarray) -> np.ndarray:
    return np.ndarray(table.shape, INT64, table.tobytes())


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
    Describe a policy's networks to the loops.

    :param actor: rows (weight offset, bias offset, inputs, outputs), first layer first; see :class:`Network`
    :param critic: the same kind of rows, empty without a critic
    :param components: choices of every part of a categorical action, ``[n]`` or ``nvec``; ``[1] * n`` for n binary or
        Gaussian numbers
    :param distribution: ``CATEGORICAL`` (one or several), ``BERNOULLI`` or ``GAUSSIAN``
    :param activation: ``TANH`` or ``RELU``
    :param size: number of parameters
    :param log_std: offset of the Gaussian's logarithmic standard deviations, -1 for other distributions
    :return: the network
    :raises ValueError: if a layer does not fit its neighbours or the vector, or a code is unknown
    """
    return Network(actor, critic, components, distribution, activation, log_std, size)


def check_network(network: Network) -> None:
    """
    Refuse a network that :func:`describe_network`, which checks the offsets, did not make.

    :raises ValueError: if the network is anything else
    """
    if type(network) is not Network:
        raise ValueError(f"`network` must be made by `describe_network`, but {shown(network)} was given.")


def check_inputs(network: Network, params: np.ndarray, observations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Check a network, its parameters and a batch of observations.

    :return: parameters and observations, both of the parameters' dtype
    :raises ValueError: if a shape or a dtype does not fit
    """
    check_network(network)
    params = float_array("params", params, (network.size,))
    return params, float_rows("observations", observations, (None, int(network.actor[0, INPUTS])), params.dtype)
