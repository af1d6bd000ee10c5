"""Prioritised replay: windows whose values are wrong are drawn more often (T. Schaul et al., arXiv 1511.05952)."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize

from sb3_flow.common.checks import arguments_in, check_fraction, check_minimum, check_number
from sb3_flow.common.ranks import checksum
from sb3_flow.data.dataset import OfflineDataset
from sb3_flow.data.replay import VERSIONS, TrajectoryReplayBuffer
from sb3_flow.data.residence import Storage
from sb3_flow.data.samples import PrioritizedSamples
from sb3_flow.data.sum_tree import SumTree
from sb3_flow.data.table import Sampling
from sb3_flow.data.trajectories import WindowRule
from sb3_flow.data.windows import Starts, Windows


class PrioritizedReplayBuffer(TrajectoryReplayBuffer):
    """
    Replay buffer that draws a window in proportion to its priority ``p = (|delta| + eps)^alpha``, where delta is the error
    that the value had at the window when the window was drawn last (proportional prioritisation).

    A window that is new has the greatest priority so far, 1 at first. A window that reaches beyond its trajectory trains the
    policy but no value; its priority is the mean priority of its source, so that it is drawn as often as without priorities.
    Windows whose first step the ring overwrites are gone. The losses of values are weighted by
    w = (N p / sum p)^-beta / max w, with the greatest w of the batch: with beta = 1 the expected gradient is, but for the
    division, that of ``sampling="transition"``. Policies learn from the windows as they are drawn, without weights.

    With ``offline_fraction`` each source has its share of the batch, and priorities count within the source; with ``None``
    they count in both together. ``sampling`` has no effect. The priorities of a dataset begin anew when the dataset is
    exchanged, also by the next turn of files that take turns. A pickle has all priorities; those of the dataset wait for
    :meth:`set_offline` with the same dataset.

    ``TrajectoryReplayBuffer`` describes the other arguments.

    :param alpha: how much priorities count, in [0, 1]; 0 draws all windows alike
    :param beta: how much of the draw's bias the weights take back, in [0, 1], while SB3's remaining progress is 1
    :param final_beta: the same when the progress remaining is 0, linear in between (paper: 1); ``beta`` for no change
    :param eps: added to the errors, so that every window can be drawn
    """

    settings = (*TrajectoryReplayBuffer.settings, "alpha", "beta", "final_beta", "eps")

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        horizon_length: int = 1,
        gamma: float = 0.99,
        offline_fraction: float | None = None,
        sampling: Sampling = "trajectory",
        window_rule: WindowRule = "rql",
        storage: Storage = "auto",
        alpha: float = 0.6,
        beta: float = 0.4,
        final_beta: float = 1.0,
        eps: float = 1e-6,
    ) -> None:
        given = arguments_in(locals(), "alpha", "beta", "final_beta", "eps")
        check_number(alpha=alpha, beta=beta, final_beta=final_beta, eps=eps)
        check_fraction(alpha=alpha, beta=beta, final_beta=final_beta)
        check_minimum(1e-12, eps=eps)
        self.alpha, self.beta, self.final_beta, self.eps = alpha, beta, final_beta, eps
        self._saved: dict[str, Any] = {}
        super().__init__(**given)

    def _build_tensors(self) -> None:
        saved = self._state_of_priorities() if hasattr(self, "_online") else self._saved  # on another device now, or of a file
        super()._build_tensors()
        device = self.storage_device
        self._greatest = th.tensor(saved.get("greatest", 1.0), device=device, dtype=th.float64)
        self._beta = th.tensor(saved.get("beta", self.beta), device=device, dtype=th.float64)
        self._online, self._offline = SumTree(self.buffer_size * self.n_envs, device), None
        self._online.set_all(th.as_tensor(saved.get("online", 0.0)))
        # of each row of the ring the first and last step of its trajectory, once that has closed
        self._bounds = th.zeros((2, self._online.n), device=device, dtype=th.int64)
        self._running_since = th.zeros(self.n_envs, device=device, dtype=th.int64)
        self._n_starts = th.zeros(2, device=device, dtype=th.float64)
        # of each environment the first step that is no start yet, and the step up to which the ring was seen
        self._undecided = saved.get("undecided", np.zeros(self.n_envs, dtype=np.int64))
        self._seen: int = saved.get("seen", 0)
        self._waiting: tuple[Any, np.ndarray] | None = saved.get("offline")  # a dataset's name, and its priorities
        self._name_of_dataset: tuple[int, int, int] | None = None
        self._version_of_trees = next(VERSIONS)
        self.was_told = False
        """Whether an update has told errors of its windows."""

    _offline: SumTree | None

    def _build_table(self, offline: np.ndarray) -> None:
        super()._build_table(offline)
        self._counts = 0, 0  # starts that can be drawn, offline and online

    def _state_of_priorities(self) -> dict[str, Any]:
        def array(tree: SumTree) -> np.ndarray:
            return np.array(tree.priorities.cpu().numpy())

        return {
            "online": array(self._online),
            "offline": self._waiting if self._offline is None else (self._name_of_dataset, array(self._offline)),
            "greatest": float(self._greatest),
            "beta": float(self._beta),
            "undecided": self._undecided.copy(),
            "seen": self._seen,
        }

    def __getstate__(self) -> dict[str, Any]:
        tensors = {name for name, value in vars(self).items() if isinstance(value, th.Tensor | SumTree)}
        left_out = {*tensors, "_offline", "_undecided", "_seen", "_waiting", "_name_of_dataset"}
        state = {name: value for name, value in super().__getstate__().items() if name not in left_out}
        return {**state, "_saved": self._state_of_priorities()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._saved = {}

    def set_offline(self, dataset: OfflineDataset | None) -> None:
        """
        Put an offline dataset beside the online steps, see ``TrajectoryReplayBuffer.set_offline``. Its windows have the
        greatest priority so far, or the priorities of the pickle that this buffer comes from, if that had the same dataset.

        :param dataset: the dataset, or ``None`` to take it away
        """
        waiting = self._waiting
        super().set_offline(dataset)
        self._offline, self._version_of_trees = None, next(VERSIONS)
        if dataset is None:
            return
        n_offline = self._table.n_offline
        n_starts = int(self._table.starts_before[n_offline])
        whole = checksum(dataset.rewards, dataset.terminated, rows=len(dataset))  # which differ in few rows between tasks
        observations = dataset.observations.values() if isinstance(dataset.observations, dict) else [dataset.observations]
        name = checksum(self._table.rows[:n_offline], dataset.actions, *observations)
        self._name_of_dataset, self._waiting = (n_starts, whole, name), None
        self._offline = SumTree(n_starts, self.storage_device)
        known = waiting is not None and waiting[0] == self._name_of_dataset
        self._offline.set_all(th.as_tensor(waiting[1]) if waiting is not None and known else self._greatest)

    def priorities_of_dataset(self) -> tuple[th.Tensor, th.Tensor]:
        """Give the priorities of the dataset's windows, and the greatest priority so far."""
        assert self._offline is not None, "no offline dataset is set"
        return self._offline.priorities.clone(), self._greatest.clone()

    def set_priorities_of_dataset(self, priorities: th.Tensor, greatest: th.Tensor) -> None:
        """Set what :meth:`priorities_of_dataset` has given for the same dataset."""
        assert self._offline is not None, "no offline dataset is set"
        self._offline.set_all(priorities)
        self._greatest.copy_(greatest)

    def reset(self) -> None:
        """Forget all online steps; the offline dataset stays, with its priorities."""
        super().reset()
        self._online.set_all(th.zeros(()))
        self._undecided, self._seen = np.zeros(self.n_envs, dtype=np.int64), 0

    def anneal(self, progress_remaining: float) -> None:
        """
        Set beta for the windows that are drawn from now on.

        :param progress_remaining: from 1, ``beta``, to 0, ``final_beta``; SB3's is below 0 after the last step
        """
        progress_remaining = min(max(progress_remaining, 0.0), 1.0)
        self._beta.fill_(self.final_beta + (self.beta - self.final_beta) * progress_remaining)

    def _sources(self) -> list[Starts]:
        """List the sources that can be sampled now, offline before online."""
        table, alone = self._table, self.offline_only and self._table.n_offline > 0
        changed, key = table.update(self.terminated), (alone, False, "priorities")
        if changed:
            self._table_tensors.follow()
            self._follow_ring()
        if changed or self._drawn_from is None or self._drawn_from[0] != key:
            selections = [table.select(True, False, "transition"), table.select(False, not alone, "transition")]
            self._counts = selections[0].total, selections[1].total
            for place, count in enumerate(self._counts):
                self._n_starts[place].fill_(count)
            self._drawn_from = key, [self._table_tensors.starts(each) for each in selections if each.total > 0]
            self._version = next(VERSIONS)
        return self._drawn_from[1]

    def _follow_ring(self) -> None:
        """Give windows that are new the greatest priority so far, and take theirs from windows that the ring overwrote."""
        table, online = self._table, self.trajectories
        rows = table.rows[max(table.unchanged, table.n_offline) : table.n_rows]
        first, last, column, _, n_starts = rows.T
        new = spans(np.maximum(first, np.maximum(self._undecided[column], online.oldest)), first + n_starts, column)
        np.maximum.at(self._undecided, column, first + n_starts)
        written_since = online.clock if online.clock <= self.buffer_size else max(self._seen, online.oldest)
        self._seen = online.clock
        every = np.arange(self.n_envs)
        written = spans(np.full_like(every, written_since), np.full_like(every, online.clock), every)
        places = self._tensors(np.concatenate([self._places(written), self._places(new)]))
        if len(places) > 0:
            priorities = self._greatest.repeat(len(places))
            priorities[: len(written.step)] = 0.0
            self._online.set(places, priorities)
        n_closed = len(rows) - (table.n_rows - table.edge)
        closed = spans(np.maximum(first, online.oldest)[:n_closed], last[:n_closed] + 1, column[:n_closed])
        if len(closed.step) > 0:
            bounds = self._tensors(np.stack([first, last])[:, closed.row])
            self._bounds.index_copy_(1, self._tensors(self._places(closed)), bounds)
        self._running_since.copy_(th.from_numpy(online.running_since))

    def _places(self, steps: "Spans") -> np.ndarray:
        places: np.ndarray = steps.step % self.buffer_size * self.n_envs + steps.column
        return places

    def sampling_key(self, env: VecNormalize | None = None) -> Hashable | None:
        key = super().sampling_key(env)
        return None if key is None else (key, self.priorities_key)

    @property
    def priorities_key(self) -> Hashable:
        """All that :meth:`update_priorities` depends on besides tensors that stay where they are."""
        n_offline, n_online = self._counts
        return self._version_of_trees, n_offline > 0, n_online > 0, self.alpha, self.eps

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> PrioritizedSamples:  # type: ignore[override]
        """
        Draw windows, on ``device``, with their weights and with their numbers for :meth:`update_priorities`.

        :param batch_size: number of windows B
        :param env: normalise observations and rewards with these statistics, as SB3's buffers do
        :raises ValueError: if there is nothing to sample yet
        """
        starts = self._filled_sources()[0]
        n_offline, n_online = self._counts
        if n_offline == 0 or n_online == 0:
            drawn = self._draw(batch_size, starts if n_offline > 0 else None)
        elif self.offline_fraction is None:
            drawn = self._draw_together(batch_size, starts)
        else:
            share = round(self.offline_fraction * batch_size)
            parts = self._draw(share, starts), self._draw(batch_size - share, None)
            drawn = Drawn(*(th.cat([one, other]) for one, other in zip(*parts, strict=True)))
        windows = self._gather(Windows(*drawn[:5]), env)
        weights = drawn.relative.pow(-self._beta)
        weights = (weights / weights.amax()).float().unsqueeze(1)
        return PrioritizedSamples(*windows, weights=weights.to(self.device), numbers=drawn.number.to(self.device))

    def _points(self, n: int, total: th.Tensor) -> th.Tensor:
        """Draw a point in each of n equal parts of [0, total], as the paper does."""
        uniform = th.rand(n, generator=self.generator, device=total.device, dtype=th.float64)
        return (th.arange(n, device=total.device) + uniform) / n * total

    def _draw(self, n: int, starts: Starts | None) -> "Drawn":
        """Draw windows from one source, of the given starts offline or from the ring."""
        tree, source = (self._online, 1) if starts is None else (self._offline, 0)
        assert tree is not None
        total = tree.total
        number = tree.find(self._points(n, total))
        relative = tree.priorities.take(number) / (total / self._n_starts[source])
        if starts is not None:
            return Drawn(*starts.by_start(number), number, relative)
        return Drawn(*self._online_windows(number), number + self._n_offline_numbers, relative)

    def _draw_together(self, n: int, starts: Starts) -> "Drawn":
        """Draw windows from both sources as from one."""
        offline, online = self._offline, self._online
        assert offline is not None
        of_offline = offline.total
        total = of_offline + online.total
        points = self._points(n, total)
        is_offline = points < of_offline
        one, other = offline.find(th.minimum(points, of_offline)), online.find((points - of_offline).clamp(min=0.0))
        places = zip(starts.by_start(one), self._online_windows(other), strict=True)
        priorities = th.where(is_offline, offline.priorities.take(one), online.priorities.take(other))
        windows = Windows(*(th.where(is_offline, here, there) for here, there in places))
        number = th.where(is_offline, one, other + self._n_offline_numbers)
        return Drawn(*windows, number, priorities / (total / self._n_starts.sum()))

    def _online_windows(self, number: th.Tensor) -> Windows:
        """Find the windows that start in rows of the ring."""
        clock, oldest = self.trajectories.clock, self.trajectories.oldest
        row, column = number // self.n_envs, number % self.n_envs
        start = oldest + (row - oldest) % self.buffer_size
        since = self._running_since.take(column)
        runs = start >= since
        first, last = self._bounds.index_select(1, number)
        first, last = th.where(runs, since, first).clamp(min=oldest), last.masked_fill(runs, clock - 1)
        return Windows(column, th.full_like(number, -1), last, start, first)

    @property
    def _n_offline_numbers(self) -> int:
        """Numbers of the dataset's windows; the ring's rows have the numbers after these."""
        return 0 if self._offline is None else self._offline.n

    def update_priorities(self, numbers: th.Tensor, errors: th.Tensor, valid: th.Tensor) -> None:
        """
        Give windows the priorities of their errors, in place: without waiting for the device.

        :param numbers: of the windows as :meth:`sample` has given them, shape ``(B,)``; of a window that was drawn
            several times the greatest error counts
        :param errors: delta, shape ``(B,)``; errors that are not finite count as zero
        :param valid: 0 for windows that train no value, shape ``(B,)``
        :raises ValueError: if the shapes are others
        """
        shapes = [tuple(values.shape) for values in (numbers, errors, valid)]
        if shapes != [(len(numbers),)] * 3:
            raise ValueError(f"`numbers`, `errors` and `valid` must have the same shape (B,), but {shapes} were given.")
        numbers, errors, valid = (values.to(self.storage_device) for values in (numbers, errors, valid))
        finite = errors.double().abs().nan_to_num(nan=0.0, posinf=0.0)
        priorities = (finite + self.eps).pow(self.alpha)
        trains, is_online = valid > 0, numbers >= self._n_offline_numbers
        in_ring = numbers - self._n_offline_numbers
        sources = (self._offline, numbers, ~is_online), (self._online, in_ring, is_online)
        for count, n_starts, (tree, own_numbers, own) in zip(self._counts, self._n_starts, sources, strict=True):
            if tree is not None and count > 0:
                tree.change(own_numbers, th.where(trains, priorities, tree.total / n_starts), own)
        self._greatest.copy_(th.maximum(self._greatest, priorities.masked_fill(~trains, 0.0).amax()))
        self.was_told = True


class Drawn(NamedTuple):
    """Places of drawn windows, see ``Windows``, their numbers, and their priorities over the mean priority, ``(B,)`` each."""

    column: th.Tensor
    trajectory: th.Tensor
    last: th.Tensor
    start: th.Tensor
    first: th.Tensor
    number: th.Tensor
    relative: th.Tensor


class Spans(NamedTuple):
    """Steps of several spans, one after the other, with the environment and the number of the span."""

    step: np.ndarray
    column: np.ndarray
    row: np.ndarray


def spans(begin: np.ndarray, end: np.ndarray, column: np.ndarray) -> Spans:
    """List the steps from ``begin`` to before ``end``."""
    length = np.maximum(end - begin, 0)
    row = np.repeat(np.arange(len(length)), length)
    within = np.arange(len(row)) - np.repeat(length.cumsum() - length, length)
    return Spans(begin[row] + within, column[row], row)
