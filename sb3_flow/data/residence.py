"""Where a replay buffer's steps reside: on the model's device if they fit there, or else in the host's memory."""

from collections.abc import Iterable
from typing import Any, Literal

import torch as th

from sb3_flow.common.observations import map_arrays

Storage = Literal["auto", "cpu", "device"]

SHARE = 0.5
"""Share of a device's free memory that steps may take with ``storage="auto"``; the rest is for networks and gradients."""


def free_memory(device: th.device) -> int:
    """Measure the free memory of a CUDA device, in bytes; other devices are not known to have any."""
    return int(th.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def n_bytes(arrays: Iterable[Any]) -> int:
    """Add up the sizes of arrays, and of arrays in dictionaries, in bytes."""
    sizes: list[int] = []
    for part in arrays:
        map_arrays(lambda array: sizes.append(array.nbytes), part)
    return sum(sizes)


def fits(size: int, device: th.device, already_there: int = 0) -> bool:
    """
    Say whether steps are to reside on a device.

    :param size: of all steps, in bytes
    :param device: the model's device
    :param already_there: bytes of steps that make room for these, or are among these
    """
    return size <= SHARE * (free_memory(device) + already_there)


def delivered(value: th.Tensor, device: th.device) -> th.Tensor:
    """Bring a tensor of the host to a device; the copy to a GPU runs beside the host, which goes on with the next batch."""
    if device.type != "cuda":
        return value.to(device)
    return value.pin_memory().to(device, non_blocking=True)
