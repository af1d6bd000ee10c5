"""RecurrentPPO with action masks."""

from typing import Any, ClassVar, Self

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.vec_env import VecEnv

from sb3_flow.common.checks import arguments_in
from sb3_flow.compiled.policy_losses import PolicyLoss
from sb3_flow.on_policy.arguments import Recomputation
from sb3_flow.on_policy.estimators import Advantage
from sb3_flow.on_policy.masked_sequences import MaskableRecurrentDictRolloutBuffer, MaskableRecurrentRolloutBuffer
from sb3_flow.on_policy.reference import ReferencePolicy
from sb3_flow.on_policy.rollout_buffer import EstimatedRollouts
from sb3_flow.ppo.maskable import check_masking, masks_of
from sb3_flow.ppo.masked_policies import (
    MaskableGruCnnPolicy,
    MaskableGruMultiInputPolicy,
    MaskableGruPolicy,
    MaskableRecurrentCnnPolicy,
    MaskableRecurrentMultiInputPolicy,
    MaskableRecurrentPolicy,
    state_of_evaluation,
)
from sb3_flow.ppo.recurrent import RecurrentPPO


class MaskableRecurrentPPO(RecurrentPPO):
    """
    Train a policy with memory, as :class:`sb3_flow.RecurrentPPO` does, in environments that tell which actions are valid, as
    they tell sb3-contrib's MaskablePPO (arXiv 2006.14171): by a method ``action_masks()``, or by the wrapper ``ActionMasker``.
    The networks are those of RecurrentPPO, and without masks, or where all actions are valid, the numbers are those of
    RecurrentPPO to the last bit.

    The arguments from ``advantage`` to ``recompute_advantages`` are explained by :class:`sb3_flow.PPO`, all others are those
    of sb3-contrib's RecurrentPPO. Policies: ``MlpLstmPolicy``, ``MlpGruPolicy`` and their ``Cnn`` and ``MultiInput`` forms.
    ``learn(use_masking=False)`` takes all actions for valid.
    """

    policy: MaskableRecurrentPolicy
    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpLstmPolicy": MaskableRecurrentPolicy,
        "CnnLstmPolicy": MaskableRecurrentCnnPolicy,
        "MultiInputLstmPolicy": MaskableRecurrentMultiInputPolicy,
        "MlpGruPolicy": MaskableGruPolicy,
        "CnnGruPolicy": MaskableGruCnnPolicy,
        "MultiInputGruPolicy": MaskableGruMultiInputPolicy,
    }
    policy_base = MaskableRecurrentPolicy
    buffer_classes = MaskableRecurrentRolloutBuffer, MaskableRecurrentDictRolloutBuffer
    _use_masking = True

    def __init__(
        self,
        policy: str | type[MaskableRecurrentPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 3e-4,
        n_steps: int = 128,
        batch_size: int | None = 128,
        n_epochs: int = 10,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        clip_range: float | Schedule = 0.2,
        clip_range_vf: float | Schedule | None = None,
        normalize_advantage: bool = True,
        ent_coef: float = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float = 0.5,
        target_kl: float | None = None,
        advantage: Advantage = "gae",
        policy_loss: PolicyLoss = "clip",
        clip_range_high: float | Schedule | None = None,
        dual_clip: float = 3.0,
        rho_bar: float = 1.0,
        c_bar: float = 1.0,
        kl_coef: float = 0.0,
        reference_policy: ReferencePolicy = None,
        recompute_advantages: Recomputation = "auto",
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
    ):
        super().__init__(**arguments_in(locals()))

    def _build(self) -> None:
        spaces_of_choices = spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary
        assert isinstance(self.action_space, spaces_of_choices), (
            f"The algorithm only supports {spaces_of_choices} as action spaces but {self.action_space} was provided"
        )
        super()._build()

    def learn(  # type: ignore[override]
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "MaskableRecurrentPPO",
        reset_num_timesteps: bool = True,
        use_masking: bool = True,
        progress_bar: bool = False,
    ) -> Self:
        """
        Learn for a number of environment steps. Arguments and their order are those of sb3-contrib's MaskablePPO.

        :param total_timesteps: environment steps to train on
        :param callback: callback(s) called at every step
        :param log_interval: rollouts between two log lines, None for none
        :param tb_log_name: name of the run in TensorBoard
        :param reset_num_timesteps: count steps from 0 on
        :param use_masking: ask the environments for action masks; False: all actions are valid
        :param progress_bar: show a progress bar
        :return: the trained model
        :raises ValueError: if masks are used and the environments have none
        """
        self._use_masking = use_masking
        return super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: np.ndarray | None = None,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """
        Decide actions.

        :param observation: one observation, or several
        :param state: states that the last call returned; None in the first call
        :param episode_start: an episode begins here, so that its state is reset
        :param deterministic: the most probable actions
        :param action_masks: True where an action is valid; None: all actions are valid
        :return: actions, and states for the next call
        """
        state = state_of_evaluation() if state is None else state
        return self.policy.predict(observation, state, episode_start, deterministic, action_masks)

    def collect_rollouts(  # type: ignore[override]
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: EstimatedRollouts,
        n_rollout_steps: int,
        use_masking: bool = True,
    ) -> bool:
        # `learn` of sb3-contrib's RecurrentPPO does not hand its choice on
        return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps, use_masking and self._use_masking)

    def _begin_rollout(self, env: VecEnv, rollout_buffer: EstimatedRollouts, use_masking: bool) -> None:
        check_masking(env, use_masking)
        super()._begin_rollout(env, rollout_buffer, use_masking)

    def _act(self, env: VecEnv, use_masking: bool, **masks: Any) -> tuple[th.Tensor, th.Tensor, th.Tensor, dict[str, Any]]:
        return super()._act(env, use_masking, action_masks=masks_of(env, use_masking))

    def _masks(self, data: Any) -> dict[str, Any]:
        return {"action_masks": data.action_masks}

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_use_masking"]
