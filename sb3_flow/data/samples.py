"""The batches that the replay buffer gives to gradient updates."""

from typing import Any, NamedTuple

import torch as th
from stable_baselines3.common.type_aliases import ReplayBufferSamples, TensorDict


def _no_dones(samples: Any) -> AttributeError:
    return AttributeError(
        f"{type(samples).__name__} has `discounts` in place of `dones`: replay buffers of sb3_flow are for algorithms of "
        "sb3_flow, such as RLPD, which is SAC with an ensemble."
    )


class ChunkSamples(NamedTuple):
    """
    A batch of windows of h steps; A = h * action_dim, time-major (all components of step 0 first).

    With h = 1 these are plain transitions.
    """

    observations: th.Tensor | TensorDict  # s, (B, ...)
    actions: th.Tensor  # the chunk, scaled to [-1, 1], (B, A)
    next_observations: th.Tensor | TensorDict  # s_{+h}, (B, ...)
    rewards: th.Tensor  # R_h = sum_j gamma^j r_j up to the trajectory's end, (B, 1)
    discounts: th.Tensor  # gamma^h, 0 where bootstrapping stops, (B, 1)
    valid: th.Tensor  # 1 where the whole window lies inside its trajectory, (B, 1)
    action_mask: th.Tensor  # 0 for the components of steps past the trajectory's end, (B, A)

    @property
    def dones(self) -> th.Tensor:
        """Say what is here in the place of SB3's ``dones``."""
        raise _no_dones(self)

    @classmethod
    def from_transitions(cls, samples: ReplayBufferSamples, gamma: float) -> "ChunkSamples":
        """Turn samples of a stock SB3 buffer into windows of one step (n-step returns included)."""
        discounts = gamma if samples.discounts is None else samples.discounts
        return cls(
            samples.observations,
            samples.actions,
            samples.next_observations,
            samples.rewards,
            (1.0 - samples.dones) * discounts,
            th.ones_like(samples.dones),
            th.ones_like(samples.actions),
        )


class PrioritizedSamples(NamedTuple):
    """A batch of a ``PrioritizedReplayBuffer``: the fields of ``ChunkSamples``, and two more."""

    observations: th.Tensor | TensorDict
    actions: th.Tensor
    next_observations: th.Tensor | TensorDict
    rewards: th.Tensor
    discounts: th.Tensor
    valid: th.Tensor
    action_mask: th.Tensor
    weights: th.Tensor  # w, of the rows in losses of values, (B, 1)
    numbers: th.Tensor  # the windows' numbers in the buffer, (B,)

    @property
    def dones(self) -> th.Tensor:
        """Say what is here in the place of SB3's ``dones``."""
        raise _no_dones(self)
