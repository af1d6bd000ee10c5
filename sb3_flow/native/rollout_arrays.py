"""The arrays that the native update learns from, and the checks that keep its loops within their arrays."""

from typing import Any, NamedTuple

import numpy as np

from sb3_flow.compiled.choices import shown
from sb3_flow.kernels.array_arguments import FLOAT32, FLOAT64, NDARRAY, float_rows, integers
from sb3_flow.native.network_layout import CATEGORICAL, GAUSSIAN, INPUTS, OUTPUTS, Network, check_network
from sb3_flow.native.objectives import DECOUPLED, Objective


class Rollout(NamedTuple):
    """Hold the arrays of a rollout, made by :func:`make_rollout`: of the parameters' dtype, empty if they are not needed."""

    observations: np.ndarray
    actions: np.ndarray
    old_log_probs: np.ndarray
    advantages: np.ndarray
    returns: np.ndarray
    old_values: np.ndarray
    proximal_log_probs: np.ndarray
    reference: np.ndarray
    reference_log_std: np.ndarray


def check_state(network: Network, **arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """
    Check a network, and the arrays that are changed in place.

    :param network: made by :func:`describe_network`
    :param arrays: vectors as long as the network's parameters, by argument name; all must have the dtype of the first
    :raises ValueError: if an array is not writable, not contiguous, or of another dtype or shape
    """
    check_network(network)
    dtype = getattr(next(iter(arrays.values())), "dtype", None)
    dtype = FLOAT64 if dtype == FLOAT64 else FLOAT32
    for name, array in arrays.items():
        if type(array) is not NDARRAY:
            raise ValueError(f"`{name}` must be a NumPy array of {dtype}, but {shown(array)} was given.")
        if array.dtype != dtype or array.shape != (network.size,) or not array.flags.carray:
            raise ValueError(
                f"`{name}` must be {dtype} of shape {(network.size,)}, contiguous and writable, as it is changed in place, "
                f"but {array.dtype} of shape {array.shape}, strides {array.strides}, was given."
            )
    return tuple(arrays.values())


def make_rollout(network: Network, objective: Objective, dtype: np.dtype, **arrays: Any) -> Rollout:
    """
    Check and convert the arrays of a rollout.

    :param network: made by :func:`describe_network`
    :param objective: decides which arrays are needed
    :param dtype: dtype of the parameters
    :param arrays: arrays by the names of :class:`Rollout`, None for an array that is not given
    :raises ValueError: if a needed array is missing or does not fit
    """
    observations = float_rows("observations", arrays["observations"], (None, int(network.actor[0, INPUTS])), dtype)
    n, n_parts = len(observations), len(network.components)
    critic, with_kl = len(network.critic) > 0, objective.kl_coef > 0
    rows: tuple[int, ...] = (n,)
    fields = {
        "actions": ((n, n_parts), True),
        "old_log_probs": (rows, True),
        "advantages": (rows, True),
        "returns": (rows, critic),
        "old_values": (rows, critic and objective.clip_range_vf >= 0),
        "proximal_log_probs": (rows, objective.policy_loss == DECOUPLED),
        "reference": ((n, int(network.actor[-1, OUTPUTS])), with_kl),
        "reference_log_std": ((n_parts,), with_kl and network.distribution == GAUSSIAN),
    }
    found = {"observations": observations}
    for name, (shape, needed) in fields.items():
        if not needed:
            found[name] = np.empty((0,) * len(shape), dtype)
        elif arrays[name] is None:
            raise ValueError(f"`{name}` must have shape {shape}, but None was given.")
        else:
            found[name] = float_rows(name, arrays[name], shape, dtype)
    check_actions(network, found["actions"])
    return Rollout(**found)


def check_actions(network: Network, actions: np.ndarray) -> None:
    """
    Refuse actions that the distribution cannot draw.

    :raises ValueError: if an action is not whole, negative or too large
    """
    if network.distribution == GAUSSIAN:
        return
    choices = network.components if network.distribution == CATEGORICAL else np.array([2])
    wrong = ~((actions >= 0) & (actions < choices) & (actions == np.floor(actions)))
    if wrong.any():
        below = shown(choices.tolist())
        raise ValueError(f"`actions` must be whole, at least 0 and below {below}, but {actions[wrong][0]} was given.")


def check_minibatches(
    n: int, order: Any, starts: Any, segments: Any, in_sequences: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Check the rows of each minibatch.

    :param n: number of the rollout's rows
    :param order: see :func:`ppo_epoch`, as for ``starts`` and ``segments``
    :param in_sequences: the loss needs ``segments``
    :return: ``order``, ``starts`` and ``segments`` as int64, C-contiguous
    :raises ValueError: if an array points out of the rollout, or does not fit
    """
    order, starts = integers("order", order, (None,)), integers("starts", starts, (None,))
    if len(order) and (order.min() < 0 or order.max() >= n):
        raise ValueError(f"`order` must hold rows from 0 to {n - 1}, but {order.min()} to {order.max()} were given.")
    # Compared, not subtracted: differences may overflow
    if len(starts) < 2 or starts[0] < 0 or starts[-1] > len(order) or (starts[1:] <= starts[:-1]).any():
        raise ValueError(f"`starts` must ascend between 0 and {len(order)}, but {shown(starts.tolist())} was given.")
    if not in_sequences:
        return order, starts, np.empty(0, np.int64)
    if segments is None:
        raise ValueError(f"`segments` must have the shape {order.shape} of `order`, but None was given.")
    segments = integers("segments", segments, order.shape)
    largest = np.diff(starts).max()
    if segments.min() < 0 or segments.max() >= largest:
        raise ValueError(
            "`segments` must be numbered from 0 in every minibatch, below the number of its rows, but "
            f"{segments.min()} to {segments.max()} were given for minibatches of at most {largest} rows."
        )
    return order, starts, segments
