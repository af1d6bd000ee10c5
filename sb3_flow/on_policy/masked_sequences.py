"""Rollout buffers that keep action masks beside recurrent states, of sb3-contrib's buffers with either."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch as th
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableRolloutBuffer
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from sb3_contrib.common.recurrent.type_aliases import RNNStates


class MaskedSequences(NamedTuple):
    """Hold padded sequences, see sb3-contrib's ``RecurrentRolloutBufferSamples``, with the masks of their actions."""

    observations: Any
    actions: th.Tensor
    old_values: th.Tensor
    old_log_prob: th.Tensor
    advantages: th.Tensor
    returns: th.Tensor
    lstm_states: RNNStates
    episode_starts: th.Tensor
    mask: th.Tensor
    action_masks: th.Tensor


class _WithMasks:
    """Read action masks with the sequences. In the padding all actions are valid."""

    action_masks: np.ndarray

    def get(self, batch_size: int | None = None) -> Iterator[Any]:
        if self.full and not self.generator_ready:  # type: ignore[attr-defined]
            self.action_masks = self.swap_and_flatten(self.action_masks)  # type: ignore[attr-defined]
        yield from super().get(batch_size)  # type: ignore[misc]

    def _get_samples(self, batch_inds: np.ndarray, *arguments: Any) -> MaskedSequences:
        sequences = super()._get_samples(batch_inds, *arguments)  # type: ignore[misc]
        masks = self.pad(self.action_masks[batch_inds], padding_value=1.0)  # type: ignore[attr-defined]
        return MaskedSequences(**sequences._asdict(), action_masks=masks.flatten(end_dim=1))


class MaskableRecurrentRolloutBuffer(_WithMasks, RecurrentRolloutBuffer, MaskableRolloutBuffer):  # type: ignore[misc]
    """Rollouts with action masks and recurrent states; its arguments are those of sb3-contrib's ``RecurrentRolloutBuffer``."""


class MaskableRecurrentDictRolloutBuffer(  # type: ignore[misc]
    _WithMasks, RecurrentDictRolloutBuffer, MaskableDictRolloutBuffer
):
    """The same for Dict observations."""
