"""Weights of a batch's rows in the losses of values, and the errors that prioritised replay is told."""

import torch as th

from sb3_flow.common.ranks import rows_of_ranks
from sb3_flow.data import ChunkSamples
from sb3_flow.data.prioritized import PrioritizedReplayBuffer
from sb3_flow.data.samples import PrioritizedSamples
from sb3_flow.offline_to_online.offline_phase import OfflinePhase


class WeightedRows(OfflinePhase):
    """Off-policy algorithm whose updates may learn from a ``PrioritizedReplayBuffer``."""

    def row_weights(self, batch: ChunkSamples | PrioritizedSamples, values: th.Tensor, target: th.Tensor) -> th.Tensor:
        """
        Give the weights of the batch's rows in the loss of the values: ``valid``, times the weights of prioritised replay,
        whose buffer is told the errors ``mean_k |y - Q_k|``. Updates call this once; losses of policies have no such weights.

        :param values: Q_k that the loss compares with the target, shape ``(K, B)``
        :param target: y, shape ``(B, 1)``
        :return: shape ``(B, 1)``
        """
        if not isinstance(batch, PrioritizedSamples):
            return batch.valid
        buffer = self.replay_buffer
        if isinstance(buffer, PrioritizedReplayBuffer):
            errors = (target.mT - values.detach()).abs().mean(dim=0)
            of_all = (rows_of_ranks(part).flatten() for part in (batch.numbers, errors.float(), batch.valid[:, 0]))
            buffer.update_priorities(*of_all)
        return batch.valid * batch.weights

    def _anneal_weights(self) -> None:
        """Let the weights of prioritised replay follow the progress of the phase."""
        if isinstance(self.replay_buffer, PrioritizedReplayBuffer):
            self.replay_buffer.anneal(self._current_progress_remaining)

    def _check_told(self) -> None:
        """
        Refuse to go on with priorities that no update changes.

        :raises ValueError: if no update has told errors
        """
        if isinstance(self.replay_buffer, PrioritizedReplayBuffer) and not self.replay_buffer.was_told:
            raise ValueError(
                f"`replay_buffer_class=PrioritizedReplayBuffer` needs errors of the values, but an update of "
                f"{type(self).__name__} told none: leave `replay_buffer_class` at its default, or call "
                "`self.row_weights(batch, values, target)` in `update`."
            )
