"""The arrays of a replay buffer's online steps, and where they and a dataset reside."""

import warnings
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.preprocessing import get_obs_shape

from sb3_flow.common.observations import map_arrays
from sb3_flow.data.residence import Storage, delivered, fits, n_bytes
from sb3_flow.data.rows import Rows, StoredSteps


class StepStorage(ReplayBuffer):
    """
    SB3's ring of online steps in arrays, and tensors of these steps and of a dataset on the device where batches are gathered.
    """

    storage: Storage
    terminated: np.ndarray
    _stored: StoredSteps

    def _allocate_ring(self) -> None:
        self.observations = self._allocate(self.observation_space)
        if not self.optimize_memory_usage:
            self.next_observations = self._allocate(self.observation_space)
        sizes = (self.buffer_size, self.n_envs)
        self.actions = np.zeros((*sizes, self.action_dim), dtype=np.float32)
        self.rewards, self.dones, self.timeouts, self.terminated = (np.zeros(sizes, dtype=np.float32) for _ in range(4))

    def _allocate(self, space: spaces.Space[Any]) -> Any:
        # zeros are not committed by the operating system before they are written
        sizes = (self.buffer_size, self.n_envs)
        return map_arrays(lambda sub: np.zeros((*sizes, *get_obs_shape(sub)), dtype=sub.dtype), space)

    def _shaped(self, observations: Any) -> Any:
        """Give a dataset's observations the shapes in which SB3 stores them: Discrete observations get a dimension."""
        return map_arrays(lambda space, array: array.reshape(-1, *get_obs_shape(space)), self.observation_space, observations)

    @property
    def storage_device(self) -> th.device:
        return self.device if self.is_resident else th.device("cpu")

    @property
    def is_resident(self) -> bool:
        """Say whether dataset and online steps are copied to ``device``, where batches are gathered."""
        return self.storage == "device" or (self.storage == "auto" and self._fits)

    def _arrays(self) -> list[Any]:
        """List the ring's arrays in the order of ``Rows``."""
        arrays = [self.observations, self.actions, self.rewards, self.terminated]
        return arrays if self.optimize_memory_usage else [*arrays, self.next_observations]

    def _tensors(self, arrays: Any) -> Any:
        """Make tensors on the storage device, which share the arrays' memory if the arrays are there."""
        with warnings.catch_warnings():
            # datasets are read-only and nothing here writes into them
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensors = map_arrays(th.as_tensor, arrays)
        return map_arrays(lambda tensor: tensor.to(self.storage_device, copy=self.is_resident), tensors)

    @property
    def residence(self) -> str:
        """Say where how many steps reside."""
        size, kind = f"{self._size / 1e9:.2f} GB", f'`storage="{self.storage}"`'
        return f"The steps of dataset and replay buffer ({size}) reside on {self.storage_device} ({kind})"

    def _settle(self) -> None:
        self._size = n_bytes(self._arrays())
        self._fits = fits(self._size, self.device)
        self._build_tensors()

    def _build_tensors(self) -> None:
        # (buffer_size, n_envs, ...) to (buffer_size * n_envs, ...), views
        online = Rows(*(map_arrays(lambda ring: ring.flatten(0, 1), self._tensors(part)) for part in self._arrays()))
        assert isinstance(self.action_space, spaces.Box)
        bounds = (self._tensors(bound.flatten()) for bound in (self.action_space.low, self.action_space.high))
        self._stored = StoredSteps(online, self.buffer_size, self.n_envs, *bounds)

    def _find_room(self, of_dataset: int) -> None:
        """Decide where online steps and a dataset of so many bytes reside, and bring the online steps there."""
        size, was_resident = n_bytes(self._arrays()) + of_dataset, self.is_resident
        stays = was_resident and size <= self._size  # in the place of the steps before, e.g. of the last turn of files
        self._fits = stays or fits(size, self.device, already_there=self._size if was_resident else 0)
        self._size = size
        if self.is_resident != was_resident:
            self._build_tensors()

    def _mirror(self, pos: int) -> None:
        rows = slice(pos * self.n_envs, (pos + 1) * self.n_envs)
        for tensor, array in zip(self._stored.online, self._arrays(), strict=False):
            map_arrays(lambda part, new: part[rows].copy_(delivered(th.as_tensor(new[pos]), part.device)), tensor, array)
