"""Replay buffer that samples windows of consecutive steps (action chunks) from offline and online trajectories."""

import warnings
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.preprocessing import get_obs_shape
from stable_baselines3.common.type_aliases import TensorDict
from stable_baselines3.common.utils import get_device
from stable_baselines3.common.vec_env import VecNormalize

from sb3_flow.data.dataset import OfflineDataset
from sb3_flow.data.samples import ChunkSamples
from sb3_flow.data.trajectories import WINDOW_RULES, OnlineTrajectories, TrajectoryTable

ACTION_MARGIN = 1e-5
"""Offline actions are clipped to [-1 + 1e-5, 1 - 1e-5], as in the reference implementations (FQL, QC, RQL)."""


class _Rows(NamedTuple):
    """Stored steps, flat along the first dimension."""

    observations: th.Tensor | TensorDict
    actions: th.Tensor
    rewards: th.Tensor
    terminated: th.Tensor
    next_observations: th.Tensor | TensorDict | None = None  # online only, the window rule "rql" does without


class _Windows(NamedTuple):
    """Where the windows of a batch lie, each of shape ``(B,)``; see ``TrajectoryTable``."""

    column: th.Tensor
    trajectory: th.Tensor
    last: th.Tensor
    start: th.Tensor


def _as_tensor(array: np.ndarray | dict[str, np.ndarray], device: th.device, copy: bool) -> Any:
    if isinstance(array, dict):
        return {key: _as_tensor(value, device, copy) for key, value in array.items()}
    with warnings.catch_warnings():
        # datasets are read-only and nothing here writes into them
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = th.as_tensor(array)
    return tensor.to(device, copy=copy)


def _flat(array: np.ndarray | dict[str, np.ndarray]) -> Any:
    """(buffer_size, n_envs, ...) to (buffer_size * n_envs, ...), a view"""
    if isinstance(array, dict):
        return {key: _flat(value) for key, value in array.items()}
    return array.reshape(-1, *array.shape[2:])


class TrajectoryReplayBuffer(ReplayBuffer):
    """
    Replay buffer for offline-to-online training with action chunks.

    It holds an :class:`OfflineDataset` (read-only, never overwritten) beside SB3's own ring of online steps, keeps
    track of trajectories in both, and samples windows of ``horizon_length`` consecutive steps that never cross a
    trajectory's end, an environment's column or the ring's write head. Dict observations are supported.

    Window rules. ``"rql"`` is the reference implementation of RQL: the return is summed up to the trajectory's end,
    bootstrapping stops if the *last* step of the window is terminal, and the next observation is the stored row
    ``start + h``, clamped to the trajectory's last row. ``"q_chunking"`` (QC, FMQ): bootstrapping stops if *any* step
    of the window is terminal, and the next observation is the true successor of the window's last step. Under both,
    windows that stick out of their trajectory have ``valid = 0`` and their padded actions ``action_mask = 0``.

    :param buffer_size: online steps to keep, over all environments
    :param observation_space: Observation space
    :param action_space: Action space (Box)
    :param device: where samples are delivered
    :param n_envs: Number of parallel environments
    :param optimize_memory_usage: do not store ``next_observations`` (window rule ``"rql"`` does not need them)
    :param handle_timeout_termination: bootstrap after time limits (``info["TimeLimit.truncated"]``)
    :param horizon_length: window length h, in steps
    :param gamma: discount factor per step
    :param offline_fraction: share of each batch drawn from the offline dataset once both sources have data, in [0, 1];
        ``None`` draws from both together as ``sampling`` says, like the reference implementation. By trajectory, many
        short online episodes then soon outnumber long offline ones; by transition the rows count
    :param sampling: ``"trajectory"``: a trajectory uniformly, then a start in it uniformly (reference);
        ``"transition"``: uniformly over all starts. The same where all trajectories have the same length.
    :param window_rule: ``"rql"`` or ``"q_chunking"``, see above
    :param storage: ``"cpu"``: arrays stay where they are (a memory-mapped dataset stays mapped), samples are copied to
        ``device``; ``"device"``: everything resides on ``device`` and batches are gathered there
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        horizon_length: int = 1,
        gamma: float = 0.99,
        offline_fraction: float | None = None,
        sampling: str = "trajectory",
        window_rule: str = "rql",
        storage: str = "cpu",
    ) -> None:
        # Not ReplayBuffer's own constructor: it cannot allocate Dict observations
        super(ReplayBuffer, self).__init__(buffer_size, observation_space, action_space, device, n_envs)
        if not isinstance(action_space, spaces.Box):
            raise ValueError(f"`action_space` must be a Box, but {action_space} was given.")
        if horizon_length < 1:
            raise ValueError(f"`horizon_length` must be at least 1, but {horizon_length} was given.")
        if offline_fraction is not None and not 0.0 <= offline_fraction <= 1.0:
            raise ValueError(f"`offline_fraction` must be None or in [0, 1], but {offline_fraction} was given.")
        for name, value, known in (
            ("sampling", sampling, ("trajectory", "transition")),
            ("window_rule", window_rule, WINDOW_RULES),
            ("storage", storage, ("cpu", "device")),
        ):
            if value not in known:
                raise ValueError(f"`{name}` must be one of {known}, but {value!r} was given.")
        if optimize_memory_usage and window_rule == "q_chunking":
            raise ValueError("`optimize_memory_usage=True` drops the next observations that `window_rule='q_chunking'` needs.")
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self.horizon_length = horizon_length
        self.gamma = gamma
        self.offline_fraction = offline_fraction
        self.sampling = sampling
        self.window_rule = window_rule
        self.storage = storage
        # Generator on the storage device; None draws from torch's global one
        self.generator: th.Generator | None = None
        self.offline_only = False  # sample from the dataset alone, also if there are online steps

        self.observations = self._allocate(observation_space)
        if not optimize_memory_usage:
            self.next_observations = self._allocate(observation_space)
        self.actions = np.zeros((self.buffer_size, n_envs, self.action_dim), dtype=np.float32)
        self.rewards = np.zeros((self.buffer_size, n_envs), dtype=np.float32)
        self.dones = np.zeros((self.buffer_size, n_envs), dtype=np.float32)
        self.timeouts = np.zeros((self.buffer_size, n_envs), dtype=np.float32)
        self.terminated = np.zeros((self.buffer_size, n_envs), dtype=np.float32)

        self.trajectories = OnlineTrajectories(self.buffer_size, n_envs)
        self.offline_dataset: OfflineDataset | None = None
        self._build_tensors()

    def _allocate(self, space: spaces.Space) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: self._allocate(subspace) for key, subspace in space.spaces.items()}
        # zeros are not committed by the operating system before they are written
        return np.zeros((self.buffer_size, self.n_envs, *get_obs_shape(space)), dtype=space.dtype)  # type: ignore[misc]

    def _shaped(self, observations: Any, space: spaces.Space | None = None) -> Any:
        """SB3 stores Discrete observations with a dimension of one; so must the dataset's be."""
        space = self.observation_space if space is None else space
        if isinstance(space, spaces.Dict):
            return {key: self._shaped(observations[key], subspace) for key, subspace in space.spaces.items()}
        return observations.reshape(-1, *get_obs_shape(space))  # type: ignore[misc]

    # ---------------------------------------------------------------- storage

    @property
    def storage_device(self) -> th.device:
        return self.device if self.storage == "device" else th.device("cpu")

    def _arrays(self) -> list[Any]:
        """The ring's arrays in the order of ``_Rows``."""
        arrays = [self.observations, self.actions, self.rewards, self.terminated]
        return arrays if self.optimize_memory_usage else [*arrays, self.next_observations]

    def _build_tensors(self) -> None:
        copy = self.storage == "device"
        arrays = self._arrays()
        self._online = _Rows(*(_as_tensor(_flat(array), self.storage_device, copy) for array in arrays))
        self._offline: _Rows | None = None
        self._offline_table: TrajectoryTable | None = None
        self._final_observations: th.Tensor | TensorDict | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The dataset is the user's, the tensors are views or copies, the generator belongs to the algorithm
        drop = ("offline_dataset", "_online", "_offline", "_offline_table", "_final_observations", "generator")
        return {key: value for key, value in self.__dict__.items() if key not in drop}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.device.type == "cuda" and not th.cuda.is_available():
            self.device = get_device("auto")
        self.offline_dataset, self.generator = None, None
        self._build_tensors()

    @property
    def n_offline(self) -> int:
        """Rows of the offline dataset."""
        return 0 if self.offline_dataset is None else len(self.offline_dataset)

    def set_offline(self, dataset: OfflineDataset | None) -> None:
        """
        Put an offline dataset beside the online steps (``None`` takes it away). The arrays are shared, not copied, but
        for the actions, which are scaled to [-1, 1] as SB3 stores them.

        :param dataset: the dataset, in the layout of ``observation_space``
        :raises ValueError: if its spaces do not match or no trajectory is as long as ``horizon_length``
        """
        if dataset is None:
            self.offline_dataset = self._offline = self._offline_table = self._final_observations = None
            return
        dataset.check_spaces(self.observation_space, self.action_space)
        first, last = dataset.trajectories[:, 0], dataset.trajectories[:, 1]
        length = last - first + 1
        if length.max() < self.horizon_length:
            raise ValueError(
                f"`horizon_length={self.horizon_length}` is longer than every trajectory of {dataset.source} (longest: "
                f"{length.max()} steps): no whole chunk can be sampled. Use a smaller `horizon_length` or longer trajectories."
            )
        if length.min() < self.horizon_length:
            warnings.warn(
                f"{int((length < self.horizon_length).sum())} of {len(length)} trajectories of {dataset.source} are shorter "
                f"than `horizon_length={self.horizon_length}`: they train the policy but not the value function."
            )
        assert isinstance(self.action_space, spaces.Box)
        low, high = self.action_space.low, self.action_space.high
        limit = np.float32(1.0 - ACTION_MARGIN)
        actions = np.clip(2.0 * (dataset.actions - low) / (high - low) - 1.0, -limit, limit)
        arrays = (
            self._shaped(dataset.observations),
            actions.reshape(len(dataset), self.action_dim).astype(np.float32, copy=False),
            dataset.rewards,
            dataset.terminated.astype(np.float32),
        )
        table = TrajectoryTable.build(
            first,
            last,
            column=np.full_like(first, -1),
            trajectory=np.arange(len(first)),
            complete=np.ones(len(first), dtype=bool),
            ends_terminated=dataset.terminated[last],
            horizon_length=self.horizon_length,
            window_rule=self.window_rule,
        )
        if len(table) == 0:
            raise ValueError(
                f"{dataset.source} has no window to sample: every trajectory is a single step that does not end in a "
                "terminal. Use `window_rule='q_chunking'` or longer trajectories."
            )
        device, copy = self.storage_device, self.storage == "device"
        self._offline = _Rows(*(_as_tensor(array, device, copy) for array in arrays))
        self._final_observations = _as_tensor(self._shaped(dataset.final_observations), device, copy)
        self._offline_table = table
        self.offline_dataset = dataset

    def add(self, obs, next_obs, action, reward, done, infos) -> None:  # type: ignore[no-untyped-def]
        """Store one step of every environment; see ``ReplayBuffer.add``."""
        pos = self.pos
        self._write(self.observations, obs)
        if not self.optimize_memory_usage:
            self._write(self.next_observations, next_obs)
        self.actions[pos] = np.asarray(action).reshape(self.n_envs, self.action_dim)
        self.rewards[pos] = np.asarray(reward).reshape(self.n_envs)
        self.dones[pos] = np.asarray(done).reshape(self.n_envs)
        if self.handle_timeout_termination:
            self.timeouts[pos] = np.array([info.get("TimeLimit.truncated", False) for info in infos]).reshape(self.n_envs)
        self.terminated[pos] = self.dones[pos] * (1.0 - self.timeouts[pos])
        if self.storage == "device":
            self._mirror(pos)
        self.trajectories.step(self.dones[pos])
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full = True
            self.pos = 0

    def _write(self, target: Any, value: Any) -> None:
        if isinstance(target, dict):
            for key in target:
                self._write(target[key], value[key])
        else:
            # also gives Discrete observations of several environments their last dimension
            target[self.pos] = np.asarray(value).reshape(target.shape[1:])

    def _mirror(self, pos: int) -> None:
        rows = slice(pos * self.n_envs, (pos + 1) * self.n_envs)
        for tensor, array in zip(self._online, self._arrays(), strict=False):
            parts = tensor.items() if isinstance(tensor, dict) else [(None, tensor)]
            for key, part in parts:
                part[rows] = th.as_tensor((array if key is None else array[key])[pos])  # type: ignore[call-overload, index]

    def cut_trajectories(self) -> None:
        """Tell the buffer that the environments were reset: the next rows do not continue the stored ones."""
        self.trajectories.cut()

    def reset(self) -> None:
        """Forget all online steps; the offline dataset stays."""
        super().reset()
        self.trajectories = OnlineTrajectories(self.buffer_size, self.n_envs)

    # --------------------------------------------------------------- sampling

    def _tables(self) -> list[TrajectoryTable]:
        """What can be sampled now: offline before online, empty tables left out."""
        if self.offline_only and self._offline_table is not None:
            return [self._offline_table]
        online = self.trajectories.table(self.terminated, self.horizon_length, self.window_rule)
        return [table for table in (self._offline_table, online) if table is not None and len(table) > 0]

    def can_sample(self) -> bool:
        """:return: whether there is any window yet; the first ``horizon_length`` online steps hold none"""
        return len(self._tables()) > 0

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> ChunkSamples:  # type: ignore[override]
        """
        :param batch_size: number of windows B
        :param env: normalise observations and rewards with these statistics, as SB3's buffers do
        :return: the windows, on ``device``
        :raises ValueError: if there is nothing to sample yet
        """
        tables = self._tables()
        if not tables:
            raise ValueError(
                f"The replay buffer has no window of `horizon_length={self.horizon_length}` steps to sample yet: collect more "
                "steps first (`learning_starts`) or add an offline dataset."
            )
        if self.offline_fraction is None or len(tables) == 1:
            windows = self._draw(TrajectoryTable.concatenate(tables), batch_size)
        else:
            n_offline = round(self.offline_fraction * batch_size)
            parts = [self._draw(tables[0], n_offline), self._draw(tables[1], batch_size - n_offline)]
            windows = _Windows(*(th.cat(columns) for columns in zip(*parts, strict=True)))
        return self._gather(windows, env)

    def offline_windows(self, starts: np.ndarray, env: VecNormalize | None = None) -> ChunkSamples:
        """
        The windows that start at given rows of the offline dataset, e.g. to evaluate on fixed ones.

        :param starts: dataset rows, shape ``(B,)``
        :param env: normalise with these statistics
        :return: the windows, on ``device``
        """
        assert self.offline_dataset is not None, "no offline dataset is set"
        bounds = self.offline_dataset.trajectories
        trajectory = np.searchsorted(bounds[:, 0], starts, side="right") - 1
        columns = (np.full_like(trajectory, -1), trajectory, bounds[trajectory, 1], np.asarray(starts, dtype=np.int64))
        return self._gather(_Windows(*(_as_tensor(column, self.storage_device, False) for column in columns)), env)

    def _draw(self, table: TrajectoryTable, n: int) -> _Windows:
        device, generator = self.storage_device, self.generator
        first, last, column, trajectory, n_starts = (_as_tensor(values, device, False) for values in table)
        if self.sampling == "transition":
            cumulative = n_starts.cumsum(0)
            # n_starts in total is known on the host: no synchronisation
            number = th.randint(int(table.n_starts.sum()), (n,), generator=generator, device=device)
            index = th.searchsorted(cumulative, number, right=True)
            offset = number - (cumulative[index] - n_starts[index])
        else:
            if n < len(table):
                index = th.randperm(len(table), generator=generator, device=device)[:n]
            else:
                index = th.randint(len(table), (n,), generator=generator, device=device)
            uniform = th.rand(n, generator=generator, device=device, dtype=th.float64)
            offset = th.minimum((uniform * n_starts[index]).long(), n_starts[index] - 1)
        return _Windows(column[index], trajectory[index], last[index], first[index] + offset)

    def _rows_of(self, column: th.Tensor, step: th.Tensor) -> th.Tensor:
        """:return: global row numbers: dataset rows first, the ring's rows behind them"""
        ring = self.n_offline + (step % self.buffer_size) * self.n_envs + column
        return th.where(column < 0, step, ring)

    def _take(self, offline: Any, online: Any, rows: th.Tensor) -> Any:
        if isinstance(online, dict):
            return {key: self._take(None if offline is None else offline[key], online[key], rows) for key in online}
        if offline is None:
            return online[rows]
        if self.trajectories.clock == 0:
            return offline[rows]
        n = self.n_offline
        from_offline, from_online = offline[rows.clamp(max=n - 1)], online[(rows - n).clamp(min=0)]
        mask = (rows < n).reshape(rows.shape + (1,) * (from_offline.dim() - rows.dim()))
        return th.where(mask, from_offline, from_online)

    def _field(self, name: str, rows: th.Tensor) -> Any:
        return self._take(None if self._offline is None else getattr(self._offline, name), getattr(self._online, name), rows)

    def _gather(self, windows: _Windows, env: VecNormalize | None) -> ChunkSamples:
        h = self.horizon_length
        column, _, last, start = windows
        steps = start[:, None] + th.arange(h, device=start.device)  # (B, h)
        inside = steps <= last[:, None]  # 1 - p_j: not yet past the trajectory's end
        rows = self._rows_of(column[:, None], th.minimum(steps, last[:, None]))
        rewards = self._normalized_rewards(self._field("rewards", rows), env)
        powers = self.gamma ** th.arange(h, device=start.device, dtype=th.float64)
        continues = 1.0 - self._field("terminated", rows)
        next_observations = self._field("observations", self._rows_of(column, th.minimum(start + h, last)))
        if self.window_rule == "rql":
            bootstrap = continues[:, -1:]
        else:
            bootstrap = th.where(inside, continues, 1.0).prod(dim=1, keepdim=True)
            next_observations = self._true_successors(windows, next_observations)
        data = ChunkSamples(
            observations=self._normalized(self._field("observations", rows[:, 0]), env),
            actions=self._field("actions", rows).flatten(1),
            next_observations=self._normalized(next_observations, env),
            rewards=(rewards * inside * powers).sum(dim=1, keepdim=True).float(),
            discounts=(self.gamma**h * bootstrap).float(),
            valid=inside[:, -1:].float(),
            action_mask=inside.float().repeat_interleave(self.action_dim, dim=1),
        )
        return ChunkSamples(*(self._to_device(value) for value in data))

    def _true_successors(self, windows: _Windows, next_observations: Any) -> Any:
        """Where a window reaches its trajectory's end, the observation after it is not a stored row."""
        column, trajectory, last, start = windows
        at_end = start + self.horizon_length > last
        online_rows = (last % self.buffer_size) * self.n_envs + column.clamp(min=0)
        online_last: Any = self._online.next_observations

        def replace(value: th.Tensor, online: th.Tensor, offline: th.Tensor | None) -> th.Tensor:
            shape = (-1,) + (1,) * (value.dim() - 1)
            final = online[online_rows]
            if offline is not None:
                final = th.where((column < 0).reshape(shape), offline[trajectory.clamp(min=0)], final)
            return th.where(at_end.reshape(shape), final, value)

        final_observations = self._final_observations
        if isinstance(next_observations, dict):
            return {
                key: replace(value, online_last[key], None if final_observations is None else final_observations[key])  # type: ignore[index]
                for key, value in next_observations.items()
            }
        return replace(next_observations, online_last, final_observations)  # type: ignore[arg-type]

    def _normalized(self, observations: Any, env: VecNormalize | None) -> Any:
        if env is None:
            return observations
        if isinstance(observations, dict):
            arrays = {key: value.cpu().numpy() for key, value in observations.items()}
        else:
            arrays = observations.cpu().numpy()
        return _as_tensor(self._normalize_obs(arrays, env), self.storage_device, False)  # type: ignore[arg-type]

    def _normalized_rewards(self, rewards: th.Tensor, env: VecNormalize | None) -> th.Tensor:
        if env is None:
            return rewards
        return th.as_tensor(self._normalize_reward(rewards.cpu().numpy(), env), device=rewards.device)

    def _to_device(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._to_device(part) for key, part in value.items()}
        return value.to(self.device)
