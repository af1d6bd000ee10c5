"""Offline datasets: validated, read-only transitions from OGBench, Minari, D4RL, SB3 replay buffers or plain arrays."""

import dataclasses
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.vec_env import VecNormalize

from sb3_flow.common.observations import map_arrays
from sb3_flow.data import storage
from sb3_flow.data.columns import Parts, array_column, entries, flags, in_memory
from sb3_flow.data.demonstrations import read_trajectories
from sb3_flow.data.loading import load
from sb3_flow.data.minari import read_minari
from sb3_flow.data.replay_buffers import read_replay_buffer
from sb3_flow.data.returns import BehaviourReturn, behaviour_return, trajectory_returns
from sb3_flow.data.shards import Rotation
from sb3_flow.data.sources import require_extra
from sb3_flow.data.summary import describe
from sb3_flow.data.transitions import assemble, check_names, columns_of_arrays
from sb3_flow.data.validation import check_action_space, check_observations, check_space, checked
from sb3_flow.data.vec_normalize import fit_vec_normalize

if TYPE_CHECKING:
    import minari


class OfflineDataset:
    """
    Transitions collected beforehand, in the order of time, trajectory after trajectory. The arrays are read-only.

    ``terminated`` (bootstrapping stops here) and ``trajectory_ends`` (the trajectory ends here) are different arrays: a time
    limit never becomes a terminal, and a trajectory may run on after a terminated row (OGBench's single tasks do).

    :meth:`load`, :meth:`from_arrays`, :meth:`from_trajectories`, :meth:`from_minari` and :meth:`from_replay_buffer` make
    datasets. The constructor takes finished arrays and stores them without a copy and without looking at their values.

    :param observations: (N, \\*obs_shape), or a dict of such arrays; floats are float32, integers keep their type
    :param actions: (N, \\*action_shape) float32, in the environment's own units (not scaled)
    :param rewards: (N,) float32
    :param terminated: (N,) bool, bootstrapping stops after this row
    :param trajectory_ends: (N,) bool, last row of a trajectory; True in the last row
    :param final_observations: (n_trajectories, \\*obs_shape) or a dict, the observation after each trajectory's last row. It
        is meaningless (usually the row's own observation) where that row is terminated and no next observation was given
    :param observation_space: as the environment's
    :param action_space: as the environment's, a bounded Box
    :param source: names the data in messages
    """

    rotation: Rotation | None = None
    """The files that take turns in memory, of a dataset whose arrays are the rows of some of the files; see :meth:`load`."""

    def __init__(
        self,
        observations: np.ndarray | dict[str, np.ndarray],
        actions: np.ndarray,
        rewards: np.ndarray,
        terminated: np.ndarray,
        trajectory_ends: np.ndarray,
        final_observations: np.ndarray | dict[str, np.ndarray],
        observation_space: spaces.Space[Any],
        action_space: spaces.Box,
        source: str = "arrays",
    ):
        ends = int(np.count_nonzero(trajectory_ends))
        arrays = (*entries(observations).values(), actions, rewards, terminated, trajectory_ends)
        sizes = {len(array) for array in arrays}
        if len(sizes) != 1 or ends == 0 or not trajectory_ends[-1]:
            raise ValueError(f"arrays of one length whose last row ends a trajectory are needed, got lengths {sorted(sizes)}")
        if any(len(array) != ends for array in entries(final_observations).values()):
            raise ValueError(f"final_observations must have one row for each of the {ends} trajectories")
        self.observations = map_arrays(_read_only, observations)
        self.actions, self.rewards = _read_only(actions), _read_only(rewards)
        self.terminated, self.trajectory_ends = _read_only(terminated), _read_only(trajectory_ends)
        self.final_observations = map_arrays(_read_only, final_observations)
        self.observation_space, self.action_space, self.source = observation_space, action_space, source

    def __len__(self) -> int:
        return len(self.rewards)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OfflineDataset":
        return self  # read-only, and perhaps larger than memory

    def __repr__(self) -> str:
        part = f", {self.rotation}" if self.rotation else ""
        return f"OfflineDataset({self.source!r}, {len(self)} rows, {self.n_trajectories} trajectories{part})"

    @cached_property
    def trajectories(self) -> np.ndarray:
        """(n_trajectories, 2) int64: first and last row of each trajectory, both inclusive."""
        last = np.flatnonzero(self.trajectory_ends)
        first = np.append(0, last[:-1] + 1)
        return _read_only(np.stack([first, last], axis=1).astype(np.int64, copy=False))

    @property
    def n_trajectories(self) -> int:
        return len(next(iter(entries(self.final_observations).values())))

    @cached_property
    def returns(self) -> np.ndarray:
        """(n_trajectories,) float64: sum of the rewards of each trajectory, not discounted."""
        return _read_only(trajectory_returns(self.rewards, self.trajectories[:, 0]))

    @cached_property
    def behaviour_return(self) -> BehaviourReturn:
        """Mean of :attr:`returns` with its 95 % interval, which a policy trained on the data should exceed."""
        return behaviour_return(self.returns, self.terminated, self.trajectory_ends, self.source)

    @property
    def next_observations(self) -> np.ndarray | dict[str, np.ndarray]:
        """The observation after each row: a copy, made anew at each access. Training never needs it."""

        def shifted(array: np.ndarray, finals: np.ndarray) -> np.ndarray:
            out = np.empty(array.shape, array.dtype)
            out[:-1] = array[1:]
            out[self.trajectory_ends] = finals
            return out

        following: np.ndarray | dict[str, np.ndarray] = map_arrays(shifted, self.observations, self.final_observations)
        return following

    @classmethod
    def from_arrays(
        cls,
        observations: Any,
        actions: Any,
        rewards: Any,
        terminated: Any = None,
        trajectory_ends: Any = None,
        next_observations: Any = None,
        *,
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
        source: str = "arrays",
        **other_names: Any,
    ) -> "OfflineDataset":
        """
        Make a dataset from transitions in memory, N rows in the order of time. Arrays that have the right type are not copied.

        :param observations: (N, \\*obs_shape) or a dict of such arrays. Floats are stored as float32; integers keep their
            type, so give images as uint8
        :param actions: (N, \\*action_shape), in the environment's units; values beyond the bounds by no more than 1e-4 of
            the range are clipped
        :param rewards: (N,) or (N, 1)
        :param terminated: (N,) bool or 0/1, True where bootstrapping stops (never for a time limit)
        :param trajectory_ends: (N,) bool or 0/1, True in the last row of each trajectory; the last row of all counts as True
        :param next_observations: like ``observations``. Must equal the observations of the next row within a trajectory.
            Without them, nobody knows the observation after a truncated trajectory's last row: that row is left out (the row
            above becomes the last), and a trajectory of a single truncated row vanishes
        :param observation_space: default: unbounded Box for floats, the type's range for integers, Dict of these
        :param action_space: default: Box(-1, 1) if all actions lie in it
        :param source: names the data in messages
        :param other_names: ``terminals``, ``timeouts``, ``truncated`` and ``dones`` are refused with the rule that makes
            ``terminated`` and ``trajectory_ends`` of them
        :raises ValueError: for data that cannot be trained on, naming the argument, the row and the expected values
        """
        check_names(terminated, trajectory_ends, other_names)
        columns = columns_of_arrays(observations, next_observations, actions, rewards)
        check_space("observation_space", observation_space)
        check_space("action_space", action_space)
        stop, ends = flags(array_column("terminated", terminated)), flags(array_column("trajectory_ends", trajectory_ends))
        parts = assemble(columns, stop, ends, in_memory, observation_space, action_space)
        return cls._of(checked(parts, in_place=parts.actions is not columns["actions"].array), source)

    @classmethod
    def from_trajectories(
        cls,
        trajectories: Iterable[Any],
        *,
        rewards: float | None = None,
        time_limit: int | None = None,
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
        source: str = "trajectories",
    ) -> "OfflineDataset":
        """
        Make a dataset from trajectories as the package imitation has them, without that package: objects with the attributes
        ``obs`` (T + 1 observations), ``acts`` (T actions), ``terminal`` and optionally ``rews`` and ``infos``, or mappings of
        these names, as the rows of imitation's files are.

        :param trajectories: such as ``imitation.data.types.TrajectoryWithRew``. Observations may be dicts
        :param rewards: reward of each step of trajectories without ``rews``: 0.0 where the data are imitated alone, by
            ``RQL(objective="bc")`` or ``FlowMapPolicy``
        :param time_limit: terminal trajectories of this many steps were cut off, and bootstrapping does not stop there.
            Where the infos hold SB3's ``TimeLimit.truncated``, they decide; longer trajectories are an error
        :param observation_space: default: as in :meth:`from_arrays`
        :param action_space: likewise
        :param source: names the data in messages
        :raises ValueError: for data that cannot be trained on, naming the trajectory and the expected values
        """
        arrays = read_trajectories(trajectories, rewards, time_limit)
        return cls.from_arrays(**arrays, observation_space=observation_space, action_space=action_space, source=source)

    @classmethod
    def from_minari(cls, dataset: "minari.MinariDataset") -> "OfflineDataset":
        """
        Read all episodes of a Minari dataset, or of a part of it, which ``filter_episodes`` gives.

        :param dataset: flat Dict observations are supported; ``mask`` in the infos (0: stop) goes before terminations
        """
        minari = require_extra("minari", "minari", "minari")
        if not isinstance(dataset, minari.MinariDataset):
            raise TypeError(
                f"`dataset` must be a minari.MinariDataset, but a {type(dataset).__name__} was given; "
                "OfflineDataset.load('minari:<id>') opens a dataset by its id"
            )
        return cls._of(checked(read_minari(dataset, in_memory)), f"minari:{dataset.id}")

    @classmethod
    def from_replay_buffer(cls, buffer: ReplayBuffer) -> "OfflineDataset":
        """
        Copy the transitions of an SB3 replay buffer. A time limit in the buffer stays a time limit.

        :param buffer: ``ReplayBuffer`` or ``DictReplayBuffer``, full or not, of any number of environments
        """
        return cls._of(checked(read_replay_buffer(buffer, in_memory)), f"sb3:{type(buffer).__name__}")

    @classmethod
    def load(
        cls,
        location: str,
        *,
        mmap_dir: str | Path | None = None,
        observation_space: spaces.Space[Any] | None = None,
        action_space: spaces.Space[Any] | None = None,
        max_memory: int = 1 << 30,
        steps_per_file: int = 1000,
    ) -> "OfflineDataset":
        """
        Load ``"prefix:where"``, or a folder that :meth:`save` wrote. Nothing is ever downloaded.

        ============================================  ======================================================================
        ``ogbench:<single-task name>[@<file.npz>]``   OGBench's raw file, labelled for one task
        ``minari:<dataset id>``                       a Minari dataset on this machine
        ``d4rl:<file.hdf5>``                          a D4RL file
        ``robomimic:<file.hdf5>``                     RoboMimic's low-dimensional demonstrations
        ``sb3:<file.pkl>``                            a replay buffer saved by SB3. Unpickling runs code: only load files
                                                      that you trust
        ``npz:<file.npz>``                            arrays named as the arguments of :meth:`from_arrays`
        ``npz:<folder>``                              a folder of :meth:`save`, opened memory-mapped and read once to check it
        ============================================  ======================================================================

        With ``ogbench:...@<folder>`` and ``npz:<folder>`` all .npz files of a folder are one dataset, without those named
        ``...-val.npz``; each file ends a trajectory. If the files are larger than ``max_memory`` they take turns: a model
        trains on the rows of some files for ``steps_per_file`` gradient steps per file, then the next files are read, as in
        the reference implementation (QC). With ``mmap_dir`` batches come from all files.

        :param location: as above
        :param mmap_dir: for data larger than memory: convert the source into this folder by blocks and open the result
            memory-mapped. A folder that was finished from the same unchanged files is opened as it is. A killed conversion
            leaves a hidden ``.<name>.partial-...`` beside the folder, which may be deleted
        :param observation_space: for sources that do not record it (d4rl, npz file), default as in :meth:`from_arrays`; for
            other sources it replaces the recorded space. The data must fit
        :param action_space: likewise
        :param max_memory: of a folder of .npz files, bytes to hold in memory; files take turns in halves of it, because the
            rows of the first turn stay in memory with the dataset
        :param steps_per_file: gradient steps of a turn, per file
        :raises ValueError: for an unknown prefix, damaged files and data that cannot be trained on
        :raises FileNotFoundError: if there is no such file
        :raises ImportError: naming the extra that is needed
        """
        loaded = load(location, mmap_dir, observation_space, action_space, max_memory, steps_per_file)
        made = cls._of(loaded.parts, loaded.source)
        made.rotation = loaded.rotation
        return made

    @classmethod
    def _of(cls, parts: Parts, source: str) -> "OfflineDataset":
        return cls(**vars(parts), source=source)

    def _parts(self) -> Parts:
        return Parts(**{name: getattr(self, name) for name in Parts.__dataclass_fields__})

    def replace(self, source: str | None = None, **changes: Any) -> "OfflineDataset":
        """
        Exchange some of the arrays or spaces; the new dataset shares all others.

        :param source: names the new data; default: as before
        :param changes: arguments of the constructor
        :raises ValueError: if files take turns in memory, see :meth:`changed_by`
        """
        self._need_all_rows("replace", "use changed_by(lambda part: part.replace(...))")
        return self._of(dataclasses.replace(self._parts(), **changes), source or self.source)

    def changed_by(self, change: Callable[["OfflineDataset"], "OfflineDataset"]) -> "OfflineDataset":
        """
        Apply a change to the dataset, and, if files take turns in memory, to the rows of each file that is read later.

        :param change: makes a dataset of a dataset, for example by :meth:`replace`
        """
        made = change(self._of(self._parts(), self.source))
        if self.rotation is not None:
            made.rotation = dataclasses.replace(self.rotation, changes=(*self.rotation.changes, change))
        return made

    @classmethod
    def of_turn(cls, rotation: Rotation, source: str) -> "OfflineDataset":
        """
        Read the rows of a turn.

        :param rotation: the turn, see :meth:`load`
        :param source: names the data in messages
        """
        made = cls._of(rotation.rows(), source)
        for change in rotation.changes:
            made = change(made)
        made.rotation = rotation
        return made

    def _need_all_rows(self, method: str, instead: str) -> None:
        if self.rotation is not None:
            raise ValueError(
                f"`{method}` would see {self.rotation} of {self.source} alone, because the files take turns in memory: "
                f"{instead}, or load with `mmap_dir` or a larger `max_memory`"
            )

    def save(self, path: str | Path) -> None:
        """
        Write the dataset as a folder of .npy files, which ``OfflineDataset.load("npz:<folder>")`` opens memory-mapped.

        :param path: the folder; must not exist or be empty
        :raises FileExistsError: if ``path`` is anything else
        :raises ValueError: if files take turns in memory
        """
        self._need_all_rows("save", "copy the files")
        path = Path(path).expanduser()
        if storage.is_taken(path):
            raise FileExistsError(f"{path} exists already; save into a new folder")
        storage.write_folder(path, lambda allocate: self._parts(), self.source, None)

    def sparse_rewards(self) -> "OfflineDataset":
        """Make the dataset, sharing arrays, with rewards -1 where they are not 0, as used for OGBench's scene and puzzle."""
        source = f"{self.source} (sparse rewards)"

        def change(part: OfflineDataset) -> OfflineDataset:
            return part.replace(source, rewards=np.where(part.rewards != 0, np.float32(-1), np.float32(0)))

        return self.changed_by(change)

    def check_spaces(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        """
        Check that a model with these spaces can train on this dataset. Bounds of observations are not compared, because
        datasets often have none.

        :raises ValueError: naming the difference
        """
        check_action_space(action_space)
        assert isinstance(action_space, spaces.Box)
        if action_space.shape != self.action_space.shape:
            raise ValueError(
                f"the model's actions have shape {action_space.shape}, the actions of {self.source} have "
                f"{self.action_space.shape}"
            )
        for name in ("low", "high"):
            wanted, given = getattr(action_space, name), getattr(self.action_space, name)
            if not np.allclose(wanted, given, rtol=1e-5, atol=1e-6):
                raise ValueError(
                    f"the model's action space has {name} {wanted}, the space of {self.source} has {given}: actions would be "
                    "scaled differently"
                )
        check_observations(self.observations, observation_space, f"the model (dataset {self.source})")

    def fit_vec_normalize(self, vec_normalize: VecNormalize) -> None:
        """
        Set the statistics of a ``VecNormalize`` from this dataset: of observations (if it normalises them) from all N rows,
        and of returns (if it normalises rewards) by its own recursion, a discounted sum of past rewards that starts anew with
        each trajectory. Its counts become N, so later updates weigh accordingly.

        :param vec_normalize: the wrapper, changed in place
        :raises ValueError: if its observations have other keys or shapes
        """
        fit_vec_normalize(vec_normalize, self._parts(), self.source)

    def summary(self) -> str:
        """Describe the dataset in a few lines of text; reads all actions and rewards once."""
        text = describe(self._parts(), self.source, self.trajectories, self.returns, self.behaviour_return)
        return text + (f"\nin memory       {self.rotation}, which take turns" if self.rotation else "")


def _read_only(array: np.ndarray) -> np.ndarray:
    """Make a read-only view; the caller's own array keeps its flags."""
    view = array.view()
    view.flags.writeable = False
    return view
