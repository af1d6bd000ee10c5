"""Several processes that train one model on a dataset: they begin alike, and the first alone logs and calls callbacks."""

from typing import Any

from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import MaybeCallback

from sb3_flow.common.ranks import check_alike, check_shares, checksum, from_first, is_first, n_ranks, plain_arguments
from sb3_flow.data import OfflineDataset, PrioritizedReplayBuffer
from sb3_flow.offline_to_online.persistence import PersistentAlgorithm


class TrainsOnSeveralRanks(PersistentAlgorithm):
    """Off-policy algorithm whose offline phase runs in one process or in every process of ``torch.distributed``."""

    offline_updates: int

    def _begin_alike(self, dataset: OfflineDataset, **numbers: int | None) -> None:
        """
        Give all ranks what the first rank has: weights, optimisers, random numbers and statistics of ``VecNormalize``.

        :param dataset: to train on
        :param numbers: arguments of the phase by name
        :raises ValueError: if ranks were given different things, or a batch has no equal shares
        """
        if n_ranks() == 1:
            return
        check_shares(self.batch_size)
        of_phase = {
            "algorithm": type(self).__name__,
            "replay_buffer_class": type(self.replay_buffer).__name__,
            "dataset": (len(dataset), checksum(dataset.actions, dataset.rewards, dataset.terminated)),
            "offline_updates": self.offline_updates,
            "n_updates": self._n_updates,
        }
        check_alike(**plain_arguments(self) | of_phase | numbers)
        assert self.random_streams is not None
        normalizer = self._vec_normalize_env
        state: dict[str, Any] = from_first(self._state_of_training)
        if not is_first():
            self.set_parameters(state["parameters"])
            self.random_streams.set_state(state["streams"])
            self.noise_seed = state["noise_seed"]
            if normalizer is not None:
                normalizer.obs_rms, normalizer.ret_rms = state["statistics"]
            if isinstance(self.replay_buffer, PrioritizedReplayBuffer):
                self.replay_buffer.set_priorities_of_dataset(*state["priorities"])
            self._connect_buffer_and_policy()
        elif self.verbose >= 1:
            share = check_shares(self.batch_size)
            print(f"Training on {n_ranks()} ranks, each of which takes {share} of a batch's {self.batch_size} rows")

    def _state_of_training(self) -> dict[str, Any]:
        assert self.random_streams is not None
        normalizer, buffer = self._vec_normalize_env, self.replay_buffer
        return {
            "parameters": self.get_parameters(),
            "streams": self.random_streams.get_state(),
            "noise_seed": self.noise_seed,
            "priorities": buffer.priorities_of_dataset() if isinstance(buffer, PrioritizedReplayBuffer) else None,
            "statistics": None if normalizer is None else (normalizer.obs_rms, normalizer.ret_rms),
        }

    def _of_first_rank(self, callback: MaybeCallback) -> MaybeCallback:
        """Give the first rank its callbacks; other ranks have none, and log nothing."""
        if is_first():
            return callback
        self.set_logger(Logger(None, []))
        return None
