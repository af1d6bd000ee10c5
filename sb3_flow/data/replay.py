"""Replay buffer that samples windows of consecutive steps (action chunks) from offline and online trajectories."""

import itertools
import warnings
from collections.abc import Hashable
from typing import Any, ClassVar, get_args

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.utils import get_device
from stable_baselines3.common.vec_env import VecNormalize

from sb3_flow.common.checks import check_choice, check_fraction, check_whole
from sb3_flow.common.observations import map_arrays
from sb3_flow.common.saved_by import SAVED_VERSION, warn_of_newer
from sb3_flow.data.columns import expect_random_reads
from sb3_flow.data.dataset import OfflineDataset
from sb3_flow.data.normalization import TensorNormalizer
from sb3_flow.data.residence import Storage, delivered, n_bytes
from sb3_flow.data.rows import Rows, WindowSteps
from sb3_flow.data.samples import ChunkSamples
from sb3_flow.data.step_storage import StepStorage
from sb3_flow.data.table import Sampling, TrajectoryTable
from sb3_flow.data.trajectories import OnlineTrajectories, WindowRule, count_starts
from sb3_flow.data.windows import Starts, TableTensors, Windows, select, shapes_of_windows
from sb3_flow.version import __version__

VERSIONS = itertools.count()
"""A number for each change of the tensors that some replay buffer samples from."""


class TrajectoryReplayBuffer(StepStorage):
    """
    Replay buffer for offline-to-online training with action chunks.

    The buffer holds an :class:`OfflineDataset` (read-only, never overwritten) beside SB3's own ring of online steps, keeps
    track of trajectories in both, and samples windows of ``horizon_length`` consecutive steps that never cross a
    trajectory's end, an environment's column or the ring's write head. Dict observations are supported.

    Window rules. ``"rql"`` is the reference implementation of RQL: the return is summed up to the trajectory's end,
    bootstrapping stops if the *last* step of the window is terminal, and the next observation is the stored row
    ``start + h``, clamped to the trajectory's last row. ``"q_chunking"`` (all others): bootstrapping stops if *any* step of
    the window is terminal, and the next observation is the true successor of the window's last step. Under both,
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
        short online episodes then soon outnumber long offline episodes; by transition the rows count
    :param sampling: ``"trajectory"``: a trajectory uniformly, then a start in it uniformly (reference);
        ``"transition"``: uniformly over all starts. Both are the same where all trajectories have the same length
    :param window_rule: ``"rql"`` or ``"q_chunking"``, see above
    :param storage: ``"cpu"``: arrays stay where they are (a memory-mapped dataset stays mapped), samples are copied to
        ``device``; ``"device"``: everything resides on ``device`` and batches are gathered there; ``"auto"``: on ``device``
        if that is a GPU and dataset and ring together take no more than half of its free memory
    """

    settings: ClassVar[tuple[str, ...]] = ("sampling", "offline_fraction")
    """A model decides these, also over the steps of a file."""
    fixed_settings: ClassVar[tuple[str, ...]] = ("window_rule",)
    """A file's must be the model's."""

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
    ) -> None:
        # Not ReplayBuffer's own constructor: it cannot allocate Dict observations
        super(ReplayBuffer, self).__init__(buffer_size, observation_space, action_space, device, n_envs)
        if not isinstance(action_space, spaces.Box):
            raise ValueError(f"`action_space` must be a Box, but {action_space} was given.")
        check_whole(1, horizon_length=horizon_length, n_envs=n_envs)
        check_whole(0, buffer_size=buffer_size)
        check_fraction(gamma=gamma)
        if offline_fraction is not None and not 0.0 <= offline_fraction <= 1.0:
            raise ValueError(f"`offline_fraction` must be None or in [0, 1], but {offline_fraction} was given.")
        check_choice(get_args(Sampling), sampling=sampling)
        check_choice(get_args(WindowRule), window_rule=window_rule)
        check_choice(get_args(Storage), storage=storage)
        if optimize_memory_usage and window_rule == "q_chunking":
            raise ValueError(
                "`optimize_memory_usage=True` drops the next observations that windows beyond the end of a trajectory need "
                "(`window_rule='q_chunking'`): leave it out. RQL alone can do without them."
            )
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage, self.handle_timeout_termination = optimize_memory_usage, handle_timeout_termination
        self.horizon_length, self.gamma, self.offline_fraction = horizon_length, gamma, offline_fraction
        self.sampling, self.window_rule, self.storage = sampling, window_rule, storage
        # Generator on the storage device; None draws from torch's global generator
        self.generator: th.Generator | None = None
        self.offline_only = False  # sample from the dataset alone, also if there are online steps

        self._allocate_ring()

        self.trajectories = OnlineTrajectories(self.buffer_size, n_envs)
        self.offline_dataset: OfflineDataset | None = None
        self._settle()

    def _build_tensors(self) -> None:
        super()._build_tensors()
        self._shapes: Any = None
        self._normalizer = TensorNormalizer(self.storage_device)
        self._build_table(np.zeros((0, 5), dtype=np.int64))

    def _build_table(self, offline: np.ndarray) -> None:
        self._table = TrajectoryTable(offline, self.trajectories, self.horizon_length, self.window_rule)
        self._table_tensors = TableTensors(self._table, self.storage_device, share=not self.is_resident)
        self._drawn_from: tuple[tuple[bool, bool, str], list[Starts]] | None = None
        self._version = next(VERSIONS)

    def __getstate__(self) -> dict[str, Any]:
        # The dataset is the user's, phase and generator are the algorithm's, the tensors are views or copies
        of_others = ("offline_dataset", "offline_only", "generator")
        drop = (*of_others, "_stored", "_normalizer", "_table", "_table_tensors", "_drawn_from", "_shapes")
        return {SAVED_VERSION: __version__} | {key: value for key, value in self.__dict__.items() if key not in drop}

    def __setstate__(self, state: dict[str, Any]) -> None:
        warn_of_newer(state.pop(SAVED_VERSION, None), "The replay buffer")
        self.__dict__.update(state)
        if self.device.type == "cuda" and not th.cuda.is_available():
            self.device = get_device("auto")
        self.offline_dataset, self.offline_only, self.generator = None, False, None
        self._settle()

    def take_settings(self, other: "TrajectoryReplayBuffer") -> None:
        """
        Take what a model decides about its buffer from another buffer of the model.

        :param other: of the same class
        """
        for name in self.settings:
            setattr(self, name, getattr(other, name))

    @property
    def n_offline(self) -> int:
        """Rows of the offline dataset."""
        return 0 if self.offline_dataset is None else len(self.offline_dataset)

    def set_offline(self, dataset: OfflineDataset | None) -> None:
        """
        Put an offline dataset beside the online steps (``None`` takes it away). The arrays are shared, not copied; samples
        have actions scaled to [-1, 1], as SB3 stores them.

        :param dataset: the dataset, in the layout of ``observation_space``
        :raises ValueError: if its spaces do not match, or it has no window of ``horizon_length`` steps
        """
        if dataset is None:
            self.offline_dataset = self._stored.offline = self._stored.final_observations = None
            self._build_table(np.zeros((0, 5), dtype=np.int64))
            return
        dataset.check_spaces(self.observation_space, self.action_space)
        first, last = dataset.trajectories.T
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
        actions = dataset.actions.reshape(len(dataset), self.action_dim)
        arrays = (self._shaped(dataset.observations), actions, dataset.rewards, dataset.terminated)
        n_starts = count_starts(length, dataset.terminated[last], self.horizon_length, self.window_rule)
        trajectory = np.arange(len(first))
        table = np.stack([first, last, np.full_like(first, -1), trajectory, n_starts], axis=1)[n_starts > 0]
        if len(table) == 0:
            raise ValueError(
                f"{dataset.source} has no window to sample: every trajectory is a single step that does not end in a "
                "terminal. Use `window_rule='q_chunking'` or longer trajectories."
            )
        self._find_room(n_bytes([*arrays, dataset.final_observations]))
        if not self.is_resident:  # of the other arrays a page has so many rows that they are in memory soon
            map_arrays(expect_random_reads, dataset.observations)
            expect_random_reads(dataset.actions)
        self._stored.offline = Rows(*(self._tensors(array) for array in arrays))
        self._stored.final_observations = self._tensors(self._shaped(dataset.final_observations))
        self._build_table(table)
        self.offline_dataset = dataset

    def follow_rotation(self, gradient_steps: int) -> bool:
        """
        Read the rows that are due, of a dataset whose files take turns in memory. The rows of the last turn are let go before.

        :param gradient_steps: of the model, since its beginning
        :return: whether a turn has begun
        """
        dataset = self.offline_dataset
        if dataset is None or dataset.rotation is None or (due := dataset.rotation.after(gradient_steps)) is None:
            return False
        source = dataset.source
        del dataset
        self.set_offline(None)
        self.set_offline(OfflineDataset.of_turn(due, source))
        return True

    def add(self, obs, next_obs, action, reward, done, infos) -> None:  # type: ignore[no-untyped-def]
        """Store one step of every environment; see ``ReplayBuffer.add``."""
        pos = self.pos

        def write(target: np.ndarray, value: Any) -> None:
            # also gives Discrete observations of several environments their last dimension
            target[pos] = np.asarray(value).reshape(target.shape[1:])

        map_arrays(write, self.observations, obs)
        if not self.optimize_memory_usage:
            map_arrays(write, self.next_observations, next_obs)
        self.actions[pos] = np.asarray(action).reshape(self.n_envs, self.action_dim)
        self.rewards[pos] = np.asarray(reward).reshape(self.n_envs)
        self.dones[pos] = np.asarray(done).reshape(self.n_envs)
        if self.handle_timeout_termination:
            self.timeouts[pos] = np.array([info.get("TimeLimit.truncated", False) for info in infos]).reshape(self.n_envs)
        self.terminated[pos] = self.dones[pos] * (1.0 - self.timeouts[pos])
        if self.is_resident:
            self._mirror(pos)
        self.trajectories.step(self.dones[pos])
        self.pos = (self.pos + 1) % self.buffer_size
        self.full = self.full or self.pos == 0

    def cut_trajectories(self) -> None:
        """Tell the buffer that the environments were reset: the next rows do not continue the stored rows."""
        self.trajectories.cut()

    def reset(self) -> None:
        """Forget all online steps; the offline dataset stays."""
        super().reset()
        self.trajectories = OnlineTrajectories(self.buffer_size, self.n_envs)
        self._build_table(self._table.rows[: self._table.n_offline])

    def _sources(self) -> list[Starts]:
        """List the sources that can be sampled now: offline before online, or both together if no share is given."""
        table, offline = self._table, self._table.n_offline > 0
        changed = table.update(self.terminated)
        if changed:
            self._table_tensors.follow()
        key = (self.offline_only and offline, self.offline_fraction is None, self.sampling)
        if changed or self._drawn_from is None or self._drawn_from[0] != key:
            online = not key[0]
            parts = [(offline, online)] if self.offline_fraction is None else [(offline, False), (False, online)]
            selections = [table.select(*part, self.sampling) for part in parts]
            self._drawn_from = key, [self._table_tensors.starts(part) for part in selections if part.total > 0]
            self._version = next(VERSIONS)
        return self._drawn_from[1]

    def sampling_key(self, env: VecNormalize | None = None) -> Hashable | None:
        """
        Name all that :meth:`sample` depends on besides tensors that stay where they are: while the name is the same, a
        recording of :meth:`sample` draws as :meth:`sample` would.

        :param env: as for :meth:`sample`
        :return: None if that changes all the time, or samples come from another device
        """
        alone = self.offline_only or self.trajectories.clock == 0
        if not alone or self.n_offline == 0 or self.device != self.storage_device:
            return None
        if env is not None and (type(env) is not VecNormalize or env.norm_obs or env.norm_reward):
            return None  # statistics may change, and a class of the user's may do anything
        self._sources()
        self._window_shapes()
        return self._version, self.trajectories.clock, self.horizon_length, self.sampling, self.window_rule

    def _window_shapes(self) -> tuple[th.Tensor, ...]:
        """Give :func:`shapes_of_windows`, which recordings read as long as :meth:`sampling_key` stays the same."""
        given = self.horizon_length, self.action_dim, self.gamma, self.storage_device
        if self._shapes is None or self._shapes[0] != given:
            self._shapes = given, shapes_of_windows(*given)
            self._version = next(VERSIONS)
        shapes: tuple[th.Tensor, ...] = self._shapes[1]
        return shapes

    def can_sample(self) -> bool:
        """Say whether there is any window yet; the first ``horizon_length`` online steps hold no window."""
        return len(self._sources()) > 0

    def _filled_sources(self) -> list[Starts]:
        sources = self._sources()
        if not sources:
            raise ValueError(
                f"The replay buffer has no window of `horizon_length={self.horizon_length}` steps to sample yet: collect more "
                "steps first (`learning_starts`) or add an offline dataset."
            )
        return sources

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> ChunkSamples:  # type: ignore[override]
        """
        Draw windows, on ``device``.

        :param batch_size: number of windows B
        :param env: normalise observations and rewards with these statistics, as SB3's buffers do
        :raises ValueError: if there is nothing to sample yet
        """
        sources = self._filled_sources()
        if len(sources) == 1:
            windows = sources[0].draw(batch_size, self.sampling, self.generator)
        else:
            assert self.offline_fraction is not None
            n_offline = round(self.offline_fraction * batch_size)
            offline = sources[0].draw(n_offline, self.sampling, self.generator)
            online = sources[1].draw(batch_size - n_offline, self.sampling, self.generator)
            windows = Windows(*(th.cat(columns) for columns in zip(offline, online, strict=True)))
        return self._gather(windows, env, relabels=True)

    def offline_windows(self, starts: np.ndarray, env: VecNormalize | None = None) -> ChunkSamples:
        """
        Gather the windows that start at given rows of the offline dataset on ``device``, e.g. to evaluate on the same windows.

        :param starts: dataset rows, shape ``(B,)``
        :param env: normalise with these statistics
        """
        assert self.offline_dataset is not None, "no offline dataset is set"
        bounds = self.offline_dataset.trajectories
        trajectory = np.searchsorted(bounds[:, 0], starts, side="right") - 1
        first, last = bounds[trajectory].T
        columns = (np.full_like(trajectory, -1), trajectory, last, np.asarray(starts, dtype=np.int64), first)
        return self._gather(Windows(*(self._tensors(column) for column in columns)), env)

    @property
    def _reads_true_successors(self) -> bool:
        return self.window_rule == "q_chunking"

    def _relabel(self, parts: WindowSteps) -> None:
        """Change steps of windows that were drawn, in place; here none (see ``HerReplayBuffer``)."""

    def _gather(self, windows: Windows, env: VecNormalize | None, relabels: bool = False) -> ChunkSamples:
        h, stored, n_online = self.horizon_length, self._stored, self.trajectories.clock
        column, _, last, start, _ = windows
        ahead = (last - start).clamp(max=h)
        steps, weights, action_masks = (select(shape, ahead) for shape in self._window_shapes())
        steps = start[:, None] + steps
        rows = stored.places(column[:, None], steps, n_online)  # (B, h)
        rewards = stored.read("rewards", rows)
        continues = 1.0 - stored.read("terminated", rows).float()
        next_observations = stored.read("observations", stored.places(column, start + ahead, n_online))
        if self._reads_true_successors:
            next_observations = stored.true_successors(windows, ahead < h, next_observations)
        observations = stored.read("observations", rows.first())
        if relabels:
            self._relabel(WindowSteps(windows, steps, observations, next_observations, rewards, continues))
        # steps past the trajectory's end repeat its last step, which changes no product of zeros and ones
        bootstrap = continues[:, -1:] if self.window_rule == "rql" else continues.prod(dim=1, keepdim=True)
        if env is not None:
            rewards = self._normalizer.rewards(rewards, env)
            observations = self._normalizer.observations(observations, env)
            next_observations = self._normalizer.observations(next_observations, env)
        data = ChunkSamples(
            observations=observations,
            actions=stored.read("actions", rows).flatten(1),
            next_observations=next_observations,
            rewards=(rewards * weights).sum(dim=1, keepdim=True).float(),
            discounts=self.gamma**h * bootstrap,
            valid=(ahead[:, None] >= h - 1).float(),
            action_mask=action_masks,
        )
        if self.device == self.storage_device:
            return data
        return ChunkSamples(*(map_arrays(lambda value: delivered(value, self.device), value) for value in data))
