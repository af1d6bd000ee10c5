"""The zoo's callbacks of evaluation, which show action masks to the models that take masks."""

import rl_zoo3.callbacks
import rl_zoo3.exp_manager
from sb3_contrib.common.maskable.callbacks import MaskableEvalCallback
from stable_baselines3.common import callbacks

from sb3_flow.common.episodes import takes_masks


class EvalCallback(MaskableEvalCallback):
    """SB3's ``EvalCallback``, and sb3-contrib's ``MaskableEvalCallback`` for models that take masks."""

    def _on_step(self) -> bool:
        evaluation = MaskableEvalCallback if takes_masks(self.model) else callbacks.EvalCallback
        goes_on: bool = evaluation._on_step(self)
        return goes_on


class TrialEvalCallback(rl_zoo3.callbacks.TrialEvalCallback, EvalCallback):
    """The zoo's callback of a trial, on top of our evaluation."""


def register() -> None:
    """Have rl-zoo3 evaluate by these callbacks."""
    rl_zoo3.exp_manager.EvalCallback = EvalCallback  # type: ignore[misc]
    rl_zoo3.exp_manager.TrialEvalCallback = TrialEvalCallback  # type: ignore[misc]
