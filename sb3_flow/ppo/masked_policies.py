"""Policies of MaskableRecurrentPPO: recurrent policies that take the masks of their actions."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from sb3_contrib.common.recurrent.policies import (
    RecurrentActorCriticCnnPolicy,
    RecurrentMultiInputActorCriticPolicy,
)
from stable_baselines3.common.distributions import Distribution

from sb3_flow.ppo.gru_policies import GruCnnPolicy, GruMultiInputPolicy, GruPolicy, RecurrentPolicy

Masks = np.ndarray | th.Tensor | None
"""True where an action is valid, ``(B, n_choices)``; None: all actions are valid."""
INVALID = -1e8
"""Logit of an invalid action, as in sb3-contrib: its probability is 0, and no number overflows."""


def masked_logits(logits: th.Tensor, masks: th.Tensor, binary: bool) -> th.Tensor:
    """
    Replace the logits of invalid actions.

    :param logits: shape ``(B, n)``
    :param masks: bool, shape ``(B, n)``; of binary actions ``(B, 2 n)``, for each action whether 0 and whether 1 is valid.
        Where nothing is valid, all is equally probable, as in sb3-contrib
    :param binary: these are logits of Bernoulli distributions
    """
    if not binary:
        return th.where(masks, logits, INVALID)
    zero, one = masks.unflatten(1, (-1, 2)).unbind(2)
    return th.where(zero & one, logits, INVALID * (zero.to(logits.dtype) - one.to(logits.dtype)))


def state_of_evaluation() -> tuple[np.ndarray, ...] | None:
    """
    Find the state that sb3-contrib's ``evaluate_policy`` loses, if it called the function that calls this one.

    sb3-contrib 2.9.2 stores the state in its variable ``state`` and hands on its variable ``states``, which stays None where
    it uses masks, so that policies with memory would forget all. Nothing is kept here: the state lies in the frame of the
    evaluation in progress, which begins all its episodes anew.

    :return: the state that the last call returned to it; None in its first call, and for every other caller
    """
    frame = sys._getframe(2)
    is_evaluation = frame.f_globals.get("__name__") == "sb3_contrib.common.maskable.evaluation"
    return frame.f_locals.get("state") if is_evaluation and frame.f_code.co_name == "evaluate_policy" else None


def _check_shape(given: th.Size, wanted: tuple[int, int]) -> None:
    """Check masks, of which an observation's may have several axes, and one observation's be alone."""
    if given.numel() != wanted[0] * wanted[1] or (wanted[0] != 1 and given[0] != wanted[0]):
        raise ValueError(f"`action_masks` must have the shape {wanted}, but {tuple(given)} was given.")


class MaskableRecurrentPolicy(RecurrentPolicy):
    """
    sb3-contrib's ``MlpLstmPolicy`` with masks of its actions. The networks are those of the policy without masks, so that
    weights go from one to the other.
    """

    _masks: th.Tensor | None = None  # of the call in progress

    @property
    def n_choices(self) -> int:
        """Number of entries of an observation's mask."""
        space = self.action_space
        n: int = self.action_net.out_features  # type: ignore[assignment]
        return 2 * n if isinstance(space, spaces.MultiBinary) else n

    @contextmanager
    def masked(self, action_masks: Masks) -> Iterator[None]:
        """
        Mask the actions of the distributions that are made within the context.

        :param action_masks: None leaves things as they are
        """
        before = self._masks
        if action_masks is not None:
            self._masks = th.as_tensor(action_masks, device=self.device).bool()
        try:
            yield
        finally:
            self._masks = before

    def _get_action_dist_from_latent(self, latent_pi: th.Tensor) -> Distribution:
        if self._masks is None:
            return super()._get_action_dist_from_latent(latent_pi)
        shape = latent_pi.shape[0], self.n_choices
        if not th.compiler.is_compiling():  # also while torch exports, when the number of observations is no number
            _check_shape(self._masks.shape, shape)
        binary = isinstance(self.action_space, spaces.MultiBinary)
        logits = masked_logits(self.action_net(latent_pi), self._masks.reshape(shape), binary)
        found: Distribution = self.action_dist.proba_distribution(action_logits=logits)
        return found

    def forward(self, *arguments: Any, action_masks: Masks = None, **options: Any) -> Any:
        """
        Act.

        :param arguments: of the policy without masks
        :param action_masks: bool, shape ``(B, n_choices)``; None: all actions are valid
        :param options: arguments by name
        :return: as the policy without masks
        """
        with self.masked(action_masks):
            return super().forward(*arguments, **options)

    def get_distribution(self, *arguments: Any, action_masks: Masks = None, **options: Any) -> Any:
        """Make distributions of actions, see :meth:`forward`."""
        with self.masked(action_masks):
            return super().get_distribution(*arguments, **options)

    def evaluate_actions(self, *arguments: Any, action_masks: Masks = None, **options: Any) -> Any:
        """Compute values, log-probabilities and entropies, see :meth:`forward`."""
        with self.masked(action_masks):
            return super().evaluate_actions(*arguments, **options)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: Masks = None,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """
        Decide actions, as the policy without masks does.

        :param observation: one observation, or several
        :param state: hidden and cell states before the observations; None: zeros
        :param episode_start: an episode begins here, so that its state is reset
        :param deterministic: the most probable actions
        :param action_masks: True where an action is valid; None: all actions are valid
        :return: actions, and the states after the observations
        """
        state = state_of_evaluation() if state is None else state
        with self.masked(action_masks):
            return super().predict(observation, state, episode_start, deterministic)


class MaskableRecurrentCnnPolicy(MaskableRecurrentPolicy, RecurrentActorCriticCnnPolicy):
    """The same for images."""


class MaskableRecurrentMultiInputPolicy(MaskableRecurrentPolicy, RecurrentMultiInputActorCriticPolicy):
    """The same for Dict observations."""


class MaskableGruPolicy(MaskableRecurrentPolicy, GruPolicy):
    """Its counterpart with a GRU, see :class:`~sb3_flow.ppo.gru_policies.GruPolicy`."""


class MaskableGruCnnPolicy(MaskableRecurrentPolicy, GruCnnPolicy):
    """The same for images."""


class MaskableGruMultiInputPolicy(MaskableRecurrentPolicy, GruMultiInputPolicy):
    """The same for Dict observations."""
