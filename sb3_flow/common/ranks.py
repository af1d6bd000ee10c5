"""
Several processes (ranks) that train one model: each takes its share of a batch's rows, and gradients are added.

Ranks are the processes of ``torch.distributed``'s default group, which the user or our zoo initialises. Without a group there
is one rank, and every function here hands on what it is given. Tensors of GPUs travel by the group's own backend. Messages
between the processes (to begin alike, to stop) travel by gloo, and wait a day for a rank that evaluates or saves meanwhile.
"""

import inspect
import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch as th
import torch.distributed as dist
from stable_baselines3.common.utils import FloatSchedule

from sb3_flow.common.nests import map_tensors

PATIENCE = timedelta(days=1)
"""How long ranks wait for a message; a rank that ends is noticed at once."""
_messages: tuple[Any, Any] = (None, None)  # the default group and the group of its messages


def n_ranks() -> int:
    """Count the processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Give the number of this process; the first is 0."""
    return dist.get_rank() if n_ranks() > 1 else 0


def is_first() -> bool:
    """Say whether this process logs, evaluates and saves."""
    return rank() == 0


def check_shares(batch_size: int) -> int:
    """
    Compute how many rows of a batch each rank takes.

    :raises ValueError: if that is no whole number
    """
    if batch_size % n_ranks():
        raise ValueError(
            f"`batch_size` is the whole batch's, of which each rank takes the same share: it must be a multiple of the "
            f"{n_ranks()} ranks, but {batch_size} was given."
        )
    return batch_size // n_ranks()


def own_rows(values: Any, dim: int = 0) -> Any:
    """
    Cut this rank's rows out of values of a whole batch, which every rank has drawn alike.

    :param values: a tensor, or a dictionary, tuple or NamedTuple of such values; None stays None
    :param dim: the dimension whose entries are the batch's samples
    :return: views, of the same structure
    :raises ValueError: if the batch has no equal shares
    """
    if n_ranks() == 1:
        return values

    def own(tensor: th.Tensor) -> th.Tensor:
        share = check_shares(tensor.shape[dim])
        return tensor.narrow(dim, rank() * share, share)

    return map_tensors(own, values)


def backward(loss: th.Tensor, parameters: Iterable[th.Tensor]) -> None:
    """
    Compute the gradient of the whole batch's loss, the mean of the ranks' losses, on every rank: the gradients of all
    parameters travel as one vector.

    :param loss: scalar mean over this rank's rows
    :param parameters: leaves whose gradients are added; every rank has the same, with the same gradients missing
    """
    ranks = n_ranks()
    if ranks == 1:
        loss.backward()
        return
    (loss / ranks).backward()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    with _naming_ranks():
        total = th.cat([gradient.flatten() for gradient in gradients])
        _add(total)
    parts = total.split([gradient.numel() for gradient in gradients])
    th._foreach_copy_(gradients, [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)])


def _add(numbers: th.Tensor) -> None:
    """Replace numbers by their sums over ranks."""
    dist.all_reduce(numbers, group=_group_of_messages() if numbers.device.type == "cpu" else None)


def mean_over_ranks(mean: th.Tensor) -> th.Tensor:
    """
    Compute the mean over the whole batch, without a gradient.

    :param mean: mean over this rank's rows, or several such means
    """
    if n_ranks() == 1:
        return mean
    mean = mean.detach() / n_ranks()
    with _naming_ranks():
        _add(mean)
    return mean


def from_first(make: Callable[[], Any]) -> Any:
    """
    Give every rank what the first rank makes.

    :param make: makes an object of tensors and Python's own types; called on the first rank alone
    """
    if n_ranks() == 1:
        return make()
    sent: list[Any] = [None]
    if is_first():
        file = io.BytesIO()  # tensors of one device are tensors of another device elsewhere
        th.save(make(), file)
        sent = [file.getvalue()]
    with _naming_ranks():
        dist.broadcast_object_list(sent, group=_group_of_messages())
    return th.load(io.BytesIO(sent[0]), map_location="cpu", weights_only=False)


def first_says(yes: bool) -> bool:
    """Give every rank the answer of the first rank, for which the others wait."""
    if n_ranks() == 1:
        return yes
    answer = th.tensor(bool(yes))
    with _naming_ranks():
        dist.broadcast(answer, 0, group=_group_of_messages())
    return bool(answer)


def of_all_ranks(value: Any) -> list[Any]:
    """
    Collect a value of every rank, for which all wait.

    :param value: of this rank; pickle takes it
    :return: of each rank in turn, the same on all
    """
    if n_ranks() == 1:
        return [value]
    values: list[Any] = [None] * n_ranks()
    with _naming_ranks():
        dist.all_gather_object(values, value, group=_group_of_messages())
    return values


def rows_of_ranks(numbers: th.Tensor) -> th.Tensor:
    """
    Collect numbers of every rank on the numbers' device.

    :param numbers: shape ``(K,)``
    :return: a row for each rank, shape ``(n_ranks, K)``, without a gradient
    """
    rows = numbers.new_zeros((n_ranks(), len(numbers)))
    rows[rank()] = numbers.detach()
    if n_ranks() > 1:
        with _naming_ranks():
            _add(rows)
    return rows


OF_EACH_RANK = {"seed", "device", "verbose", "tensorboard_log", "offline_dataset"}
"""Arguments of algorithms that ranks may differ in; the first rank's weights and random numbers count."""


def plain_arguments(model: Any) -> dict[str, Any]:
    """List the arguments of a model that ranks must share: numbers, names, and schedules by three of their values."""
    found: dict[str, Any] = {}
    for name in sorted(inspect.signature(type(model)).parameters.keys() - OF_EACH_RANK):
        value = vars(model).get(name)
        if isinstance(value, FloatSchedule):
            found[name] = [value(progress) for progress in (1.0, 0.5, 0.0)]
        elif value is None or isinstance(value, bool | int | float | str):
            found[name] = value
    return found


def check_alike(**values: Any) -> None:
    """
    Refuse to train ranks that were given different things.

    :param values: by name
    :raises ValueError: naming the first value in which ranks differ, on every rank
    """
    of_ranks = of_all_ranks(values)
    for name in of_ranks[0]:
        given = [of_rank.get(name) for of_rank in of_ranks]
        if any(value != given[0] for value in given):
            told = ", ".join(f"{value!r} on rank {i}" for i, value in enumerate(given))
            raise ValueError(f"All ranks must train the same, but `{name}` is {told}.")


def checksum(*arrays: Any, rows: int = 10_000) -> int:
    """Compute a number that tells arrays apart, from at most so many rows of each."""
    total = 0
    for array in arrays:
        total = zlib.crc32(array[:: max(1, len(array) // rows)].tobytes(), total)
    return total


def _group_of_messages() -> Any:
    """Make the group of messages, once for each default group; all ranks come here together."""
    global _messages
    if _messages[0] is not dist.group.WORLD:
        _messages = dist.group.WORLD, dist.new_group(backend="gloo", timeout=PATIENCE)
    return _messages[1]


@contextmanager
def _naming_ranks() -> Iterator[None]:
    """Say which rank lost the others; the rank that failed has told why in its own error."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"Rank {rank()} (of {n_ranks()}, counted from 0) cannot reach the others: {error}. If another rank has ended, its "
            "own error is above or below, and torchrun's report names it as the root cause."
        ) from error
