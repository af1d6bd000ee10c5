"""RecurrentPPO with a choice of advantages and losses."""

from typing import Any, ClassVar

import numpy as np
import torch as th
from gymnasium import spaces
from sb3_contrib import RecurrentPPO as ContribRecurrentPPO
from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, Schedule
from stable_baselines3.common.vec_env import VecEnv

from sb3_flow.common.checks import arguments_in, check_choice
from sb3_flow.compiled.policy_losses import PolicyLoss
from sb3_flow.on_policy.arguments import Recomputation
from sb3_flow.on_policy.collection import stack_observations
from sb3_flow.on_policy.estimators import Advantage
from sb3_flow.on_policy.policy_gradient import PolicyGradient
from sb3_flow.on_policy.reference import ReferencePolicy
from sb3_flow.on_policy.rollout_buffer import FinalObservation, with_estimates
from sb3_flow.ppo.gru_policies import Gru, GruCnnPolicy, GruMultiInputPolicy, GruPolicy


class RecurrentPPO(PolicyGradient, ContribRecurrentPPO):  # type: ignore[misc]
    """
    Extend sb3-contrib's RecurrentPPO by the choices of :class:`sb3_flow.PPO`, whose docstring explains the arguments from
    ``advantage`` to ``recompute_advantages``; all other arguments, and the treatment of recurrent states, are sb3-contrib's.
    Minibatches hold sequences, not whole episodes: "gspo" takes its ratio over an episode's part in the minibatch.

    Beside sb3-contrib's policies there are ``MlpGruPolicy``, ``CnnGruPolicy`` and ``MultiInputGruPolicy``, with a GRU in place
    of the LSTM and the same arguments. A GRU has no cell state: the second part of the states of ``predict`` is empty.
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        **ContribRecurrentPPO.policy_aliases,
        "MlpGruPolicy": GruPolicy,
        "CnnGruPolicy": GruCnnPolicy,
        "MultiInputGruPolicy": GruMultiInputPolicy,
    }
    policy_base: type[RecurrentActorCriticPolicy] = RecurrentActorCriticPolicy
    buffer_classes = RecurrentRolloutBuffer, RecurrentDictRolloutBuffer

    policy: RecurrentActorCriticPolicy
    _last_lstm_states: RNNStates  # type: ignore[assignment]
    _new_lstm_states: RNNStates  # after the present step

    def __init__(
        self,
        policy: str | type[RecurrentActorCriticPolicy],
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
        use_sde: bool = False,
        sde_sample_freq: int = -1,
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

    def _get_policy_from_name(self, policy_name: str) -> type[BasePolicy]:
        check_choice(tuple(self.policy_aliases), policy=policy_name)
        return super()._get_policy_from_name(policy_name)

    def _build(self) -> None:
        if not issubclass(self.policy_class, self.policy_base):
            raise ValueError(
                f"`policy` must be one of {', '.join(self.policy_aliases)} or a subclass of {self.policy_base.__name__}, but "
                f"{self.policy_class.__name__} was given."
            )
        ContribRecurrentPPO._setup_model(self)
        stock: Any = self.rollout_buffer  # sb3-contrib's RecurrentPPO takes no class of buffers
        buffer_class: Any = self.buffer_classes[isinstance(self.observation_space, spaces.Dict)]
        settings = {"device": self.device, "gamma": self.gamma, "gae_lambda": self.gae_lambda, "n_envs": self.n_envs}
        shapes = self.n_steps, self.observation_space, self.action_space, stock.hidden_state_shape
        self.rollout_buffer = with_estimates(buffer_class)(*shapes, **settings)
        if isinstance(self.policy.lstm_actor, Gru):
            self.rollout_buffer.has_cells = False
            self._last_lstm_states = RNNStates(*((hidden, cell[..., :0]) for hidden, cell in self._last_lstm_states))

    def _act(self, env: VecEnv, use_masking: bool, **masks: Any) -> tuple[th.Tensor, th.Tensor, th.Tensor, dict[str, Any]]:
        episode_starts = th.tensor(self._last_episode_starts, dtype=th.float32, device=self.device)
        actions, values, log_probs, self._new_lstm_states = self.policy(
            self._last_observations(), self._last_lstm_states, episode_starts, **masks
        )
        return actions, values, log_probs, {"lstm_states": self._last_lstm_states, **masks}

    def _after_step(self) -> None:
        self._last_lstm_states = self._new_lstm_states

    def _final_observations(self, dones: np.ndarray, infos: list[dict[str, Any]], step: int) -> list[FinalObservation]:
        final = super()._final_observations(dones, infos, step)
        hidden, cell = self._new_lstm_states.vf
        for end in final:
            member = slice(end.env, end.env + 1)
            end.lstm_states = hidden[:, member].contiguous(), cell[:, member].contiguous()
        return final

    def _values_of(self, final: list[FinalObservation]) -> th.Tensor:
        observations, _ = self.policy.obs_to_tensor(stack_observations([end.observation for end in final]))
        hidden, cell = (th.cat(states, dim=1) for states in zip(*[end.lstm_states for end in final], strict=True))
        # the cut-off episode goes on, so its state is not reset
        starts = th.zeros(len(final), device=self.device)
        return self.policy.predict_values(observations, (hidden, cell), starts).flatten()  # type: ignore[arg-type]

    def _last_values(self) -> th.Tensor:
        episode_starts = th.tensor(self._last_episode_starts, dtype=th.float32, device=self.device)
        states: Any = self._last_lstm_states.vf
        return self.policy.predict_values(self._last_observations(), states, episode_starts)

    def _masks(self, data: Any) -> dict[str, Any]:
        """Return the masks of a minibatch's actions as an argument of the policy, if there are any."""
        return {}

    def _evaluate(self, data: Any) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        given = data.observations, self._actions(data), data.lstm_states, data.episode_starts
        return self.policy.evaluate_actions(*given, **self._masks(data))

    def _distribution(self, policy: Any, data: Any) -> Distribution:
        given = data.observations, data.lstm_states.pi, data.episode_starts
        found: Distribution = policy.get_distribution(*given, **self._masks(data))[0]
        return found

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_new_lstm_states"]
