"""Stored steps in tensors, offline steps beside a ring of online steps, and how steps of windows are read from both."""

from typing import Any, NamedTuple

import torch as th
from stable_baselines3.common.type_aliases import TensorDict

from sb3_flow.common.observations import map_arrays
from sb3_flow.data.windows import Windows, select

ACTION_MARGIN = 1e-5
"""Offline actions are clipped to [-1 + 1e-5, 1 - 1e-5], as in the reference implementations (FQL, QC, RQL)."""


class Rows(NamedTuple):
    """
    Stored steps, flat along the first dimension. Online steps are as SB3 stores them, with actions in [-1, 1]; offline steps
    are as a dataset has them, with actions in the environment's units and flags as bool.
    """

    observations: th.Tensor | TensorDict
    actions: th.Tensor
    rewards: th.Tensor
    terminated: th.Tensor
    next_observations: th.Tensor | TensorDict | None = None  # online only; the window rule "rql" does not need it


class WindowSteps(NamedTuple):
    """What is read for a batch of windows, before it is normalised and summed; the tensors may be written to."""

    windows: Windows
    steps: th.Tensor  # dataset rows or absolute numbers, none past the trajectory's end, (B, h)
    observations: th.Tensor | TensorDict  # of the first step
    next_observations: th.Tensor | TensorDict
    rewards: th.Tensor  # (B, h)
    continues: th.Tensor  # 0 where bootstrapping stops, (B, h)


class Places(NamedTuple):
    """The rows in which steps of windows lie; None where no step needs the part."""

    is_offline: th.Tensor | None
    offline: th.Tensor | None
    online: th.Tensor | None

    def first(self) -> "Places":
        """Give the first of each window's places, ``(B, h)`` before and ``(B,)`` after."""
        return Places(*(None if part is None else part[:, 0] for part in self))


class StoredSteps:
    """
    The steps that windows are read from.

    :param online: rows of the ring, column after column of each step
    :param buffer_size: rows of the ring (per environment)
    :param n_envs: number of columns
    :param low: lower bounds of actions, flat
    :param high: upper bounds
    """

    def __init__(self, online: Rows, buffer_size: int, n_envs: int, low: th.Tensor, high: th.Tensor) -> None:
        self._low, self._width = low, high - low
        self.online, self._buffer_size, self._n_envs = online, buffer_size, n_envs
        self.offline: Rows | None = None
        self.final_observations: Any = None  # after the last row of each offline trajectory

    def places(self, column: th.Tensor, step: th.Tensor, n_online: int) -> Places:
        """
        Find the rows of steps.

        :param column: environment, -1 for offline steps
        :param step: dataset row or absolute number, of a shape that ``column`` broadcasts to
        :param n_online: online steps so far (per environment)
        """
        if self.offline is not None and n_online == 0:
            return Places(None, step, None)
        online = step % self._buffer_size if n_online >= self._buffer_size else step
        if self._n_envs > 1:
            online = online * self._n_envs + column
        if self.offline is None:
            return Places(None, None, online)
        # a step of either kind is read from the other source as well, from any row that exists, and then left out
        in_ring = online.clamp(0, self._buffer_size * self._n_envs - 1)
        return Places(column < 0, step.clamp(max=len(self.offline.rewards) - 1), in_ring)

    def read(self, name: str, places: Places) -> Any:
        """Read the field of ``Rows`` with this name at these places; all actions in [-1, 1]."""
        is_offline, offline_rows, online_rows = places

        def take(online: th.Tensor, offline: th.Tensor | None) -> th.Tensor:
            if offline is None or offline_rows is None:
                return select(online, online_rows)  # type: ignore[arg-type]
            from_offline = select(offline, offline_rows)
            if name == "actions":
                limit = 1.0 - ACTION_MARGIN
                scaled = (from_offline - self._low).mul_(2.0).div_(self._width).sub_(1.0)
                from_offline = scaled.clamp_(-limit, limit).to(online.dtype)
            if is_offline is None or online_rows is None:
                return from_offline
            mask = is_offline.view(is_offline.shape + (1,) * (from_offline.dim() - is_offline.dim()))
            return th.where(mask, from_offline, select(online, online_rows))

        return map_arrays(take, getattr(self.online, name), getattr(self.offline, name, None))

    def true_successors(self, windows: Windows, at_end: th.Tensor, next_observations: Any) -> Any:
        """Replace next observations of windows that reach their trajectory's end: no row of ``observations`` has these."""
        column, trajectory, last, *_ = windows
        online_rows = (last % self._buffer_size) * self._n_envs + column.clamp(min=0)

        def replace(value: th.Tensor, online: th.Tensor, offline: th.Tensor | None) -> th.Tensor:
            shape = (-1,) + (1,) * (value.dim() - 1)
            final = select(online, online_rows)
            if offline is not None:
                final = th.where((column < 0).view(shape), select(offline, trajectory.clamp(min=0)), final)
            return th.where(at_end.view(shape), final, value)

        return map_arrays(replace, next_observations, self.online.next_observations, self.final_observations)

    def after(self, key: str, windows: Windows, steps: th.Tensor, n_online: int) -> th.Tensor:
        """
        Read an entry of the Dict observations that follow steps.

        :param key: of the entry
        :param windows: windows in the trajectories of these steps
        :param steps: dataset rows or absolute numbers, ``(B, n)``
        :param n_online: online steps so far (per environment)
        :return: ``(B, n, ...)``
        """
        column, trajectory, last, *_ = windows
        is_offline, offline_rows, online_rows = self.places(column[:, None], steps, n_online)
        if online_rows is not None:
            assert isinstance(self.online.next_observations, dict)
            found = select(self.online.next_observations[key], online_rows)
            if offline_rows is None:
                return found
        assert self.offline is not None and offline_rows is not None and isinstance(self.offline.observations, dict)
        observations = self.offline.observations[key]

        def beside(mask: th.Tensor) -> th.Tensor:
            return mask.view(mask.shape + (1,) * (observations.dim() - 1))

        following = select(observations, (offline_rows + 1).clamp(max=len(observations) - 1))
        final = select(self.final_observations[key], trajectory.clamp(min=0))[:, None]
        from_offline = th.where(beside(steps >= last[:, None]), final, following)
        return from_offline if is_offline is None else th.where(beside(is_offline), from_offline, found)
