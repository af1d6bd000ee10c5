"""What a recording takes for granted of networks: their tensors, their settings, and that nobody hooks into them."""

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch as th
from torch import nn

from sb3_flow.execution.settings import Remembered, plain

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def networks_of(model: Any) -> list[nn.Module]:
    """List the networks that a model has as attributes."""
    return [value for value in vars(model).values() if isinstance(value, nn.Module)]


class WatchedNetworks:
    """
    Compare networks with what they were. A walk through all modules takes as long as an update on a GPU, so what the walk
    finds is kept: the dictionaries in which modules hold their parts, which show every exchange.

    :param networks: as long as :meth:`unchanged` says so, this object speaks of them
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        self._networks = list(networks)
        modules = list(dict.fromkeys(module for network in networks for module in network.modules()))
        self._dictionaries = [part for each in modules for part in (each._modules, each._parameters, each._buffers)]
        self._parts = self._present()
        self._tensors = [part for part in self._parts if isinstance(part, th.Tensor)]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._trained = [part for part in self._tensors if isinstance(part, nn.Parameter)]
        self._hooks = [getattr(module, name) for module in modules for name in HOOKS]
        found = [(vars(module), name) for module in modules for name in vars(module)]
        self._places = [(known, name) for known, name in found if known[name] is None or plain(known[name]) is not None]
        self._settings = Remembered()

    def __reduce__(self) -> tuple[type["WatchedNetworks"], tuple[list[nn.Module]]]:
        # a copy watches the copied networks; the dictionaries of some modules (LSTM) hold what cannot be pickled
        return WatchedNetworks, (self._networks,)

    def _present(self) -> list[Any]:
        return list(chain.from_iterable(part.values() for part in self._dictionaries))

    def unchanged(self, networks: Sequence[nn.Module]) -> bool:
        """
        Say whether these are the networks, with the same modules, parameters and buffers at the same addresses.

        :param networks: perhaps the same
        """
        present = self._present()
        return (
            len(networks) == len(self._networks)
            and all(map(is_, networks, self._networks))
            and len(present) == len(self._parts)
            and all(map(is_, present, self._parts))
            and [tensor.data_ptr() for tensor in self._tensors] == self._addresses
        )

    def settings(self) -> tuple[Any, ...]:
        """Give numbers, flags and texts of all modules, and which parameters get gradients; see ``WatchedSettings``."""
        found = [known.get(name) for known, name in self._places]
        found += [parameter.requires_grad for parameter in self._trained]
        settings: tuple[Any, ...] = self._settings.of(found, lambda: tuple(map(plain, found)))
        return settings

    @property
    def has_hooks(self) -> bool:
        """Say whether anything is called along with a module, or with the gradient of a parameter."""
        if any(self._hooks):
            return True
        return any(each._backward_hooks or each._post_accumulate_grad_hooks for each in self._trained)  # type: ignore[attr-defined]
