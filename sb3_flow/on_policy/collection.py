"""The collection loop of PPO and its variants with masks and memory: SB3's loop, which also records the ends of episodes."""

import warnings
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import MaybeCallback
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv

from sb3_flow.common.checkpoints import AtomicSaves
from sb3_flow.common.checks import check_learning
from sb3_flow.common.clear_errors import ClearErrors
from sb3_flow.common.copies import DeepCopies
from sb3_flow.on_policy.estimators import Advantage
from sb3_flow.on_policy.finite import decide
from sb3_flow.on_policy.gradient_steps import unchecked_distributions
from sb3_flow.on_policy.learning_together import LearnsTogether
from sb3_flow.on_policy.rollout_buffer import EstimatedRollouts, FinalObservation
from sb3_flow.on_policy.tensor_collection import TensorRollout, collect_tensors
from sb3_flow.on_policy.tensor_normalising import check_wrappers, of_tensors

if TYPE_CHECKING:
    from sb3_flow.on_policy.native_learner import NativeLoops


def stack_observations(observations: list[Any]) -> Any:
    """Stack observations of a space into a batch; the parts of Dict observations are stacked by key."""
    if isinstance(observations[0], dict):
        return {key: np.stack([observation[key] for observation in observations]) for key in observations[0]}
    return np.stack(observations)


def bounded_actions(policy: ActorCriticPolicy, action_space: spaces.Space[Any], actions: np.ndarray) -> np.ndarray:
    """
    Bring actions that a policy sampled into the bounds of the environments' action space.

    :return: the actions as the environments take them
    """
    if not isinstance(action_space, spaces.Box):
        return actions
    if policy.squash_output:
        return policy.unscale_action(actions)
    # an unbounded Gaussian samples outside of the bounds
    bounded: np.ndarray = np.minimum(np.maximum(actions, action_space.low), action_space.high)  # faster than `np.clip`
    return bounded


class RolloutCollection(LearnsTogether, AtomicSaves, DeepCopies, ClearErrors, OnPolicyAlgorithm):
    """
    Collect rollouts of two kinds, with hooks that subclasses override. SB3's rollouts are ``n_steps`` from the environments'
    present states. For whole episodes (``whole_episodes``) all environments are reset, and the rollout ends when each
    environment has finished its first episode, or after ``n_steps``. A vectorised environment steps all its members, so steps
    after a member's first end are taken and counted as time steps, but enter neither the update nor the episode statistics.
    """

    rollout_buffer: EstimatedRollouts
    advantage: Advantage
    native: "NativeLoops | None" = None
    tensor_rollout: TensorRollout | None = None
    tensors_seen: Any = None  # present observations, while a rollout is collected on another device than the CPU
    _actions_generator: np.random.Generator | None

    @property
    def whole_episodes(self) -> bool:
        """Say whether rollouts are whole episodes, without which peers cannot be compared."""
        return self.advantage == "group"

    def learn(
        self, total_timesteps: int, callback: MaybeCallback = None, log_interval: int = 1, *arguments: Any, **options: Any
    ) -> Self:
        """
        Learn for a number of environment steps.

        :param total_timesteps: environment steps to train on
        :param callback: callback(s) called at every step
        :param log_interval: rollouts between two log lines, None for none
        :param arguments: further arguments of SB3's (sb3-contrib's) ``learn``
        :param options: further arguments by name
        :return: the trained model
        :raises ValueError: if several processes that train together (the manual's "Scaling out") were given different things
        """
        check_learning(total_timesteps, log_interval)
        try:
            return super().learn(total_timesteps, callback, log_interval, *arguments, **options)
        finally:
            self._stop_learning_together()

    def collect_rollouts(  # type: ignore[override]
        self,
        env: VecEnv,
        callback: BaseCallback,
        rollout_buffer: EstimatedRollouts,
        n_rollout_steps: int,
        use_masking: bool = True,
    ) -> bool:
        """
        Collect experiences using the current policy and fill a rollout buffer, as SB3 does.

        :param env: the training environments
        :param callback: called at each step, and at the beginning and end of the rollout
        :param rollout_buffer: the buffer that is filled
        :param n_rollout_steps: steps to collect in each environment; for whole episodes, the largest number of steps
        :param use_masking: ask the environments for action masks (MaskablePPO, MaskableRecurrentPPO)
        :return: False if the callback ended training
        """
        assert self._last_obs is not None, "No previous observation was provided"
        by_tensors = type(self)._act is RolloutCollection._act
        if by_tensors and (tensors := of_tensors(env)) is not None:
            return collect_tensors(self, tensors, callback, rollout_buffer, n_rollout_steps)
        check_wrappers(self, env, by_tensors)
        n_steps = 0
        self._begin_rollout(env, rollout_buffer, use_masking)
        alive = np.ones(env.num_envs, dtype=bool) if self.whole_episodes else None

        callback.on_rollout_start()
        self.make_way_for_hooks()

        while n_steps < n_rollout_steps and (alive is None or alive.any()):
            self._draw_noise(n_steps)
            with th.no_grad():
                act = partial(self._act, env, use_masking)
                actions, values, log_probs, extras = decide(act, self.policy, self._last_obs)

            clipped_actions = bounded_actions(self.policy, self.action_space, actions)

            new_obs, rewards, dones, infos = env.step(clipped_actions)
            self._count_step(env)

            callback.update_locals(locals())
            if not callback.on_step():
                return self._end_together(False)

            if alive is None:
                self._update_info_buffer(infos, dones)
            else:
                self._update_info_buffer([info for info, lives in zip(infos, alive, strict=True) if lives], dones[alive])
            n_steps += 1

            if isinstance(self.action_space, spaces.Discrete):
                actions = actions.reshape(-1, 1)

            rollout_buffer.record(rewards, dones, alive)
            self._add_final_values(rollout_buffer, rewards, dones, infos, n_steps - 1)
            rollout_buffer.add(self._last_obs, actions, rewards, self._last_episode_starts, values, log_probs, **extras)  # type: ignore[arg-type]
            self._after_step()
            self._last_obs = new_obs  # type: ignore[assignment]
            self._last_episode_starts = dones
            if alive is not None:
                alive &= ~dones

        if alive is not None and alive.all():
            self._warn_of_cut_episodes(n_rollout_steps)
        if rollout_buffer.pos < rollout_buffer.buffer_size:
            rollout_buffer.shorten()
        if not self._end_together(True):
            return False
        with th.no_grad():
            values = self._last_values()
        self._estimate(rollout_buffer, values, dones)

        callback.update_locals(locals())
        callback.on_rollout_end()

        return True

    def _warn_of_cut_episodes(self, n_steps: int) -> None:
        warnings.warn(
            f"No episode ended within `n_steps={n_steps}` steps: all were cut off there, and are compared by their "
            "beginnings. For whole episodes `n_steps` must be the environments' time limit."
        )

    def set_random_seed(self, seed: int | None = None) -> None:
        """
        Set the seed of the pseudo-random generators (python, numpy, pytorch, gym, action space), and of native actions.

        :param seed: None: native actions are seeded from NumPy's global generator when they are first needed
        """
        super().set_random_seed(seed)
        self._actions_generator = None if seed is None else np.random.default_rng(seed)

    def _generator_of_actions(self) -> np.random.Generator:
        """Return the random generator of native actions, and make it first if there is none."""
        if self._actions_generator is None:
            self._actions_generator = np.random.default_rng(np.random.randint(2**31))
        return self._actions_generator

    def _update_current_progress_remaining(self, num_timesteps: int, total_timesteps: int) -> None:
        super()._update_current_progress_remaining(num_timesteps, total_timesteps)
        if self.whole_episodes:  # the last rollout may exceed the number of steps, where SB3's schedules are negative
            self._current_progress_remaining = max(self._current_progress_remaining, 0.0)

    def _begin_rollout(self, env: VecEnv, rollout_buffer: EstimatedRollouts, use_masking: bool) -> None:
        """Prepare the first step of a rollout."""
        self.policy.set_training_mode(False)
        rollout_buffer.reset()
        if self.use_sde:
            self.policy.reset_noise(env.num_envs)
        if self.whole_episodes:
            self._last_obs = env.reset()  # type: ignore[assignment]
            self._last_episode_starts = np.ones(env.num_envs, dtype=bool)

    def make_way_for_hooks(self) -> None:
        """Look for hooks that the callback has set; algorithms with compiled loops override this method."""

    def _draw_noise(self, step: int) -> None:
        """Draw gSDE's noise again if this step of the rollout is due for it."""
        if self.use_sde and self.sde_sample_freq > 0 and step % self.sde_sample_freq == 0:
            self.policy.reset_noise(self.n_envs)

    def _last_observations(self) -> Any:
        """Convert the last observations to tensors."""
        if self.tensors_seen is not None:
            return self.tensors_seen
        return obs_as_tensor(self._last_obs, self.device)  # type: ignore[arg-type]

    def _act(self, env: VecEnv, use_masking: bool) -> tuple[th.Tensor, th.Tensor, th.Tensor, dict[str, Any]]:
        """Return actions, values, log-probabilities, and further keyword arguments of the buffer's ``add``."""
        if self.native is not None:
            return *self.native.act(self._last_obs, self._generator_of_actions()), {}
        # on a GPU, sampling from a distribution that is not finite ends all use of the device in this process
        with unchecked_distributions() if self.device.type == "cpu" else nullcontext():
            return *self.policy(self._last_observations()), {}

    def _after_step(self) -> None:
        """Keep further states after a step has been added to the buffer; recurrent policies override this hook."""

    def _add_final_values(
        self, rollout_buffer: EstimatedRollouts, rewards: np.ndarray, dones: np.ndarray, infos: list[dict[str, Any]], step: int
    ) -> None:
        """Add discounted values of final observations to rewards, as SB3 does: a time limit is not an end of the task."""
        final = self._final_observations(dones, infos, step)
        if not final:
            return
        with th.no_grad():
            values = self._final_values(final)
        for end, discounted in zip(final, (self.gamma * values).cpu().numpy(), strict=True):
            rewards[end.env] += discounted
        rollout_buffer.record_final(final, values.cpu().numpy())

    def _estimate(self, rollout_buffer: EstimatedRollouts, last_values: th.Tensor, dones: np.ndarray) -> None:
        """Estimate advantages and returns of a full rollout."""
        rollout_buffer.compute_returns_and_advantage(last_values=last_values, dones=dones)
        for key, value in rollout_buffer.statistics.items():
            if key.startswith("rollout/"):  # keys under "train/" belong to the update, which is logged after the next rollout
                self.logger.record(key, value)

    def _final_observations(self, dones: np.ndarray, infos: list[dict[str, Any]], step: int) -> list[FinalObservation]:
        """Find the observations at which a time limit cut an episode, as SB3 does."""
        if not dones.any():
            return []
        return [
            FinalObservation(step, index, infos[index]["terminal_observation"])
            for index in np.flatnonzero(dones).tolist()
            if infos[index].get("terminal_observation") is not None and infos[index].get("TimeLimit.truncated", False)
        ]

    def _final_values(self, final: list[FinalObservation]) -> th.Tensor:
        """Compute the values of final observations, shape ``(len(final),)``, in one forward pass if bits need not be SB3's."""
        # SB3 passes each observation by itself, and matrix products of one row and of several rows round differently
        if self.advantage == "gae" and self.device.type == "cpu" and self.native is None:
            return th.cat([self._values_of([end]) for end in final])
        return self._values_of(final)

    def _values_of(self, final: list[FinalObservation]) -> th.Tensor:
        stacked = stack_observations([end.observation for end in final])
        if self.native is not None:
            return self.native.values(stacked).flatten()
        observations, _ = self.policy.obs_to_tensor(stacked)
        return self.policy.predict_values(observations).flatten()

    def _last_values(self) -> th.Tensor:
        """Compute values of the observations after the last step, shape ``(n_envs, 1)``."""
        if self.native is not None:
            return self.native.values(self._last_obs)
        return self.policy.predict_values(self._last_observations())
