"""The online phase: SB3's loop, in which the policy decides whole chunks of actions."""

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback

from sb3_flow.data import TrajectoryReplayBuffer
from sb3_flow.offline_to_online.chunking import ChunkedPolicy, ChunkState, next_actions
from sb3_flow.offline_to_online.persistence import PersistentAlgorithm
from sb3_flow.offline_to_online.spaces import same_but_for_bounds


class OnlinePhase(PersistentAlgorithm):
    """Off-policy algorithm that collects steps with action chunks, in an environment that may be set after the dataset."""

    policy: ChunkedPolicy
    offline_updates: int
    _chunk_state: ChunkState | None
    """Chunks under way in the training environments."""

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        """
        Set the environment, see ``BaseAlgorithm.set_env``. A model that was built from a dataset without bounds takes over
        the environment's bounds of observations.

        :param env: The environment for learning a policy
        :param force_reset: Force call to ``reset()`` before training
        """
        env = self._wrap_env(env, self.verbose)
        if self.env is None and same_but_for_bounds(self.observation_space, env.observation_space):
            self.observation_space = env.observation_space
        super().set_env(env, force_reset)

    def _start_online(self) -> None:
        """Prepare the online phase; called when it begins or goes on, before its first step."""

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        starts_anew = reset_num_timesteps or self._last_obs is None
        result = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)
        self._start_online()
        if starts_anew:
            self._chunk_state = None
            if isinstance(self.replay_buffer, TrajectoryReplayBuffer):
                self.replay_buffer.cut_trajectories()
        return result

    def _sample_action(
        self, learning_starts: int, action_noise: ActionNoise | None = None, n_envs: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        if self.num_timesteps < learning_starts and self.offline_updates == 0:
            # SB3's random warm-up; a policy that was trained offline acts from the first step
            return super()._sample_action(learning_starts, action_noise, n_envs)
        assert self._last_obs is not None, "self._last_obs was not set"
        observation = self._last_obs
        actions, self._chunk_state = next_actions(
            lambda: self.policy.plan(observation, self.policy.explore_chunk), self._chunk_state, self._last_episode_starts
        )
        scaled_actions = self.policy.scale_action(actions)
        if action_noise is not None:
            scaled_actions = np.clip(scaled_actions + action_noise(), -1, 1)
            actions = self.policy.unscale_action(scaled_actions)
        return actions, scaled_actions

    def _store_transition(self, replay_buffer, buffer_action, new_obs, reward, dones, infos) -> None:  # type: ignore[no-untyped-def]
        super()._store_transition(replay_buffer, buffer_action, new_obs, reward, dones, infos)
        self._last_episode_starts = dones
