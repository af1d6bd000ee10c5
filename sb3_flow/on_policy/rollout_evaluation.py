"""Rollouts under the present networks: values, log-probabilities, ratios, and estimates that follow them."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch as th
from gymnasium import spaces

from sb3_flow.on_policy.reference import WithReference

if TYPE_CHECKING:
    from sb3_flow.on_policy.native_learner import NativeLoops


class EvaluatesRollouts(WithReference):
    """On-policy algorithm that evaluates its rollout once more, while or after the policy changes."""

    native: "NativeLoops | None"

    def _actions(self, data: Any) -> th.Tensor:
        actions: th.Tensor = data.actions
        if isinstance(self.action_space, spaces.Discrete):
            return actions.long().flatten()
        # sb3-contrib's recurrent buffers leave binary actions as bytes, which have no log-probability
        return actions.float() if isinstance(self.action_space, spaces.MultiBinary) else actions

    def _evaluate(self, data: Any) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        """Compute values, log-probabilities of the recorded actions, and entropies under the present networks."""
        return self.policy.evaluate_actions(data.observations, self._actions(data))

    @th.no_grad()
    def _evaluate_rollout(self) -> tuple[np.ndarray, np.ndarray]:
        """Compute present values and log-probabilities of the rollout, flat."""
        if self.native is not None:
            return self.native.evaluate(self.rollout_buffer)
        training = self.policy.training
        self.policy.set_training_mode(False)
        values, log_probs = [], []
        for minibatch in self.rollout_buffer.in_order():
            present, log_prob, _ = self._evaluate(minibatch.data)
            rows = slice(None) if minibatch.mask is None else minibatch.mask
            values.append(present.flatten()[rows].cpu().numpy())
            log_probs.append(log_prob.flatten()[rows].cpu().numpy())
        self.policy.set_training_mode(training)
        return np.concatenate(values), np.concatenate(log_probs)

    def log_importance_ratios(self) -> tuple[np.ndarray, np.ndarray]:
        """
        Measure how far the policy has moved from the policy that collected the last rollout.

        :return: log pi(a|s) - log mu(a|s) and number of the episode, of every action that was learned from, shape ``(n,)``
        :raises ValueError: if the model has no rollout
        """
        buffer: Any = self.rollout_buffer
        if not buffer.full:
            raise ValueError("`model` has no rollout, which is not saved with it: call `learn` first.")
        buffer.prepare()
        present = self._evaluate_rollout()[1]
        starts = buffer.episode_starts if buffer.is_recurrent else buffer.swap_and_flatten(buffer.episode_starts)
        starts = starts.astype(bool).ravel()
        starts[:: buffer.buffer_size] = True  # a row of `n_steps` for each environment
        rows = slice(None) if buffer.rows is None else buffer.rows
        return (present - buffer.log_probs.ravel())[rows], np.cumsum(starts)[rows]

    @th.no_grad()
    def _estimate_again(self) -> None:
        """Estimate advantages and returns with the present networks; values and log-probabilities of the buffer stay."""
        buffer, training = self.rollout_buffer, self.policy.training
        values, log_probs = self._evaluate_rollout()
        self.policy.set_training_mode(False)
        final = buffer.final_observations
        final_values = self._values_of(final).cpu().numpy() if final else np.empty(0, np.float32)
        last_values = self._last_values().cpu().numpy().flatten()
        self.policy.set_training_mode(training)
        buffer.estimate_again(values, log_probs, final_values, last_values)
