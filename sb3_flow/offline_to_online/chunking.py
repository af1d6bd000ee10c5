"""Policies that decide several actions at once and execute them open loop."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch as th
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import PyTorchObs

from sb3_flow.common.checks import check_computed

ChunkState = tuple[np.ndarray, ...]


class ChunkedPolicy(BasePolicy):
    """
    A policy whose decision is a chunk of ``horizon_length`` consecutive actions.

    ``predict`` returns one action per call. The rest of a chunk travels in ``state``, which SB3 has for recurrent policies, so
    ``evaluate_policy``, ``EvalCallback`` and the zoo's ``enjoy`` execute chunks without further code. A caller that drops the
    state gets a fresh decision at every step (receding horizon).
    """

    horizon_length: int
    execution_horizon: int | None = None
    """Actions of a chunk that are executed before the next decision; ``None`` for all of them."""
    generator: th.Generator | None = None
    """Source of fresh noise in ``predict``, given by the algorithm; ``None`` draws from torch's global generator."""
    exploration_generator: th.Generator | None = None
    """Source of fresh noise in ``explore_chunk``, so that evaluations in between do not change the collected data."""

    def set_execution_horizon(self, steps: int | None) -> None:
        """
        Choose how much of a chunk is executed. A model does not save this; ``load(..., execution_horizon=...)`` does it, too.

        :param steps: actions of a chunk to execute before the next decision, ``None`` for all of them
        """
        if steps is not None and steps not in range(1, self.horizon_length + 1):
            raise ValueError(
                f"`execution_horizon` must be from 1 to `horizon_length={self.horizon_length}`, but {steps} was given."
            )
        self.execution_horizon = steps

    def predict_chunk(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        """
        Decide chunks of actions.

        :param observation: batch of observations
        :param deterministic: repeatable actions
        :return: actions in [-1, 1], shape ``(B, horizon_length * action_dim)``
        """
        raise NotImplementedError  # pragma: no cover

    def explore_chunk(self, observation: PyTorchObs) -> th.Tensor:
        """
        Decide chunks of actions to collect data with.

        :param observation: batch of observations
        :return: actions in [-1, 1], shape ``(B, horizon_length * action_dim)``
        """
        return self.predict_chunk(observation, deterministic=False)

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        steps: th.Tensor = self.predict_chunk(observation, deterministic).unflatten(1, (self.horizon_length, -1))
        return steps[:, 0]

    def plan(self, observation: np.ndarray | dict[str, np.ndarray], decide: Callable[[PyTorchObs], th.Tensor]) -> np.ndarray:
        """
        Decide actions in the units of the action space.

        :param observation: observations of ``n`` environments
        :param decide: gives chunks in [-1, 1] for a batch of observations
        :return: the part of the chunks that is executed, shape ``(n, execution_horizon, *action_space.shape)``
        :raises FloatingPointError: if an action is not finite
        """
        with th.no_grad():
            chunk = decide(self.obs_to_tensor(observation)[0])
        assert self.action_space.shape is not None
        actions = chunk.cpu().numpy().reshape(-1, self.horizon_length, *self.action_space.shape)
        check_computed(f"{type(self).__name__} decided", action=actions)
        return self.unscale_action(actions[:, : self.execution_horizon])

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: ChunkState | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, ChunkState | None]:
        """
        Get the next action, see ``BasePolicy.predict``.

        :param observation: the input observation
        :param state: second result of the last call: the chunks under way, shape ``(n, h, *action_space.shape)``, and the
            count of their executed actions, shape ``(n,)``; ``None`` starts anew
        :param episode_start: environments whose episode has just begun; their chunks are dropped
        :param deterministic: Whether or not to return deterministic (repeatable) actions.
        :return: the action and the next state
        """
        if self.horizon_length == 1 or isinstance(observation, tuple):
            # SB3 has a message for the tuple (obs, info), which a caller may give by mistake
            actions, state = super().predict(observation, state, episode_start, deterministic)
            check_computed(f"{type(self).__name__} decided", action=actions)
            return actions, state
        self.set_training_mode(False)
        actions, state = next_actions(
            lambda: self.plan(observation, partial(self.predict_chunk, deterministic=deterministic)), state, episode_start
        )
        return (actions if self.is_vectorized_observation(observation) else actions[0]), state


def next_actions(
    plan: Callable[[], np.ndarray], state: ChunkState | None, episode_start: np.ndarray | None
) -> tuple[np.ndarray, ChunkState]:
    """
    Take the next action out of every environment's chunk, and plan anew where a chunk is used up or its episode is over.

    :param plan: new chunks for all ``n`` environments, shape ``(n, h, *action_space.shape)``; called at most once
    :param state: the chunks under way and the count of their executed actions, ``None`` at the very start
    :param episode_start: environments whose episode has just begun, shape ``(n,)``
    :return: actions of shape ``(n, *action_space.shape)`` and the next state
    """
    if state is None:
        chunks = plan()
        position = np.zeros(len(chunks), dtype=np.int64)
    else:
        chunks, position = state[0], state[1].copy()
        fresh = position >= chunks.shape[1]
        if episode_start is not None:
            fresh = fresh | np.asarray(episode_start, dtype=bool)
        if fresh.any():
            # one forward pass over all environments, of constant shape
            chunks = np.where(fresh.reshape(-1, *(1,) * (chunks.ndim - 1)), plan(), chunks)
            position[fresh] = 0
    return chunks[np.arange(len(chunks)), position], (chunks, position + 1)
