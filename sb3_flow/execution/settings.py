"""What a recorded update holds as numbers: the plain attributes of a model and its policy."""

from collections.abc import Callable
from operator import is_, itemgetter
from typing import Any

import numpy as np
import torch as th

from sb3_flow.common.wrapper_chain import unwrapped

PLAIN = frozenset({bool, int, float, str, type(None)})
COUNTERS = frozenset(
    {
        *("num_timesteps", "start_time", "offline_updates", "anchored_at"),
        *("_n_updates", "_n_calls", "_episode_num", "_current_progress_remaining"),
        *("_total_timesteps", "_num_timesteps_at_start", "_stopped_offline", "_had_dataset", "trained_on"),
        *("_last_obs", "_last_original_obs", "_last_episode_starts", "policy_version", "dropped_rollouts"),
    }
)
"""Attributes of SB3 and of this package that change as training goes on, and that no update reads."""


def plain(value: Any) -> Any:
    """
    Give what a recording holds of an attribute.

    :return: a number, flag or text itself, the place of a tensor, a tuple of these, and ``None`` for anything else
    """
    if type(value) in PLAIN or isinstance(value, (int, float, str, np.generic)):
        return value
    if isinstance(value, th.Tensor) and value.layout == th.strided:
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    return tuple(map(plain, value)) if type(value) is tuple else None


def holds(kind: type) -> bool:
    """Say whether :func:`plain` has something of an object of this type."""
    return kind is tuple or issubclass(kind, (int, float, str, np.generic, th.Tensor, type(None)))


class Remembered:
    """
    A value that is made anew when one of the objects that it is made of was exchanged; to compare objects costs little. Other
    objects than numbers, texts and tensors are not kept: through one of them a model would keep itself and its memory alive.
    """

    def __init__(self) -> None:
        self._types: list[type] = []
        self._pick: Callable[[list[Any]], tuple[Any, ...]] = tuple
        self._held: tuple[Any, ...] = ()
        self._tensors: list[th.Tensor] = []
        self._addresses: list[int] = []
        self._value: Any = None

    def of(self, parts: list[Any], make: Callable[[], Any]) -> Any:
        """
        Give the value.

        :param parts: objects that the value is made of; tensors also count as exchanged when their memory was
        :param make: makes the value
        """
        parts = [None, None, *parts]  # `itemgetter` of less than two places gives no tuple
        types = list(map(type, parts))
        same = types == self._types and all(map(is_, self._pick(parts), self._held))
        if not same or [tensor.data_ptr() for tensor in self._tensors] != self._addresses:
            self._types, self._value = types, make()
            self._pick = itemgetter(*(place for place, kind in enumerate(types) if holds(kind)))
            self._held = self._pick(parts)
            nested = [value for part in self._held if type(part) is tuple for value in part]
            self._tensors = [part for part in (*self._held, *nested) if isinstance(part, th.Tensor)]
            self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        return self._value


class WatchedSettings(Remembered):
    """The attributes that an update may read as numbers, so that a recording is not used after one has changed."""

    def present(self, model: Any) -> tuple[tuple[str, Any], ...]:
        """
        List the attributes.

        :param model: an algorithm; its policy may be inside the wrapper that ``torch.compile`` returns
        :return: names and values, see :func:`plain`; the same object as long as nothing has changed
        """
        policy = unwrapped(model.policy)
        own = [pair for pair in vars(model).items() if pair[0] not in COUNTERS]
        names, values = [name for name, _ in own], [value for _, value in own]
        of_policy = vars(policy)

        def make() -> tuple[tuple[str, Any], ...]:
            found = [*own, *((f"policy.{name}", value) for name, value in of_policy.items())]
            return tuple((name, value if type(value) in PLAIN else plain(value)) for name, value in found)

        found: tuple[tuple[str, Any], ...] = self.of([*names, *values, *of_policy, *of_policy.values()], make)
        return found
