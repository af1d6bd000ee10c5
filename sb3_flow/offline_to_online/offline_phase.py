"""The offline phase: training from a dataset alone, with SB3's callbacks, evaluation and logs in gradient steps."""

import time
import warnings
from collections import deque
from typing import Any, Self

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback
from stable_baselines3.common.utils import configure_logger

from sb3_flow.common.checks import check_learning, check_whole
from sb3_flow.common.clear_errors import check_progress_bar
from sb3_flow.common.episodes import normalized_alike
from sb3_flow.common.ranks import first_says, is_first
from sb3_flow.data import OfflineDataset, TrajectoryReplayBuffer
from sb3_flow.offline_to_online.evaluation_notes import NoteEvaluationModes, as_list, find_evaluations
from sb3_flow.offline_to_online.metrics import MetricSums
from sb3_flow.offline_to_online.offline_env import OfflineProgressBar, SpacesOnlyVecEnv, has_statistics
from sb3_flow.offline_to_online.offline_labels import logged_in_gradient_steps, printed_in_gradient_steps
from sb3_flow.offline_to_online.phase import ONLINE, Phase
from sb3_flow.offline_to_online.several_ranks import TrainsOnSeveralRanks
from sb3_flow.offline_to_online.spaces import channels_first, channels_first_space


class OfflinePhase(TrainsOnSeveralRanks):
    """Off-policy algorithm that can train on a dataset, with or without an environment."""

    offline_steps: int
    _metrics: MetricSums
    _loaded: tuple[str, OfflineDataset] | None
    _stopped_offline: bool
    _had_dataset: bool
    trained_on: str | None

    @property
    def is_offline(self) -> bool:
        """Say whether an offline phase is running."""
        return self.phase.name == "offline"

    def _load(self, dataset: OfflineDataset | str) -> OfflineDataset:
        if isinstance(dataset, str):
            if self._loaded is None or self._loaded[0] != dataset:
                self._loaded = (dataset, OfflineDataset.load(dataset))
            return self._loaded[1]
        if not isinstance(dataset, OfflineDataset):
            raise TypeError(
                f"`dataset` must be an OfflineDataset or a location such as 'minari:...', but a {type(dataset).__name__} "
                "was given; OfflineDataset.from_arrays, from_minari and from_replay_buffer make one."
            )
        return dataset

    def _take_spaces_from_dataset(self, policy: str | type[BasePolicy]) -> None:
        if self.offline_dataset is None:
            raise ValueError("`env=None` needs `offline_dataset`, from which the observation and action spaces are taken.")
        dataset = self._load(self.offline_dataset)
        self.observation_space = channels_first_space(dataset.observation_space)
        self.action_space = dataset.action_space
        self.n_envs = 1
        if policy in ("MlpPolicy", "CnnPolicy") and isinstance(self.observation_space, spaces.Dict):
            raise ValueError(f"You must use `MultiInputPolicy` when working with dict observation space, not {policy}")

    def set_offline_dataset(self, dataset: OfflineDataset | str) -> OfflineDataset:
        """
        Put a dataset beside the online steps of the replay buffer. If the model's VecNormalize has not seen data yet, it takes
        its statistics from the dataset.

        :param dataset: an ``OfflineDataset`` or its location
        :return: the dataset as the model sees it (images channel-first)
        :raises ValueError: if the dataset does not fit the model, which is unchanged then
        """
        if not isinstance(self.replay_buffer, TrajectoryReplayBuffer):
            raise ValueError(
                f"Offline training needs a TrajectoryReplayBuffer, but this model has a {type(self.replay_buffer).__name__}: "
                "leave `replay_buffer_class` and `n_steps` at their defaults. For hindsight give `sb3_flow.HerReplayBuffer`."
            )
        dataset = channels_first(self._load(dataset), self.observation_space)
        present = self.replay_buffer.offline_dataset
        known = present is not None and present.rotation is not None and present.rotation.is_turn_of(dataset.rotation)
        if dataset is not present and not known:
            self.replay_buffer.set_offline(dataset)
            if self.verbose >= 1 and self.device.type == "cuda":
                print(self.replay_buffer.residence)
        normalizer = self._vec_normalize_env
        if normalizer is not None and normalizer.training and not has_statistics(normalizer):
            dataset.fit_vec_normalize(normalizer)
        self._had_dataset = True
        self.trained_on = f"{dataset.source} ({len(dataset)} rows, mean return {dataset.behaviour_return})"
        return dataset

    def learn_offline(
        self,
        dataset: OfflineDataset | str,
        gradient_steps: int,
        callback: MaybeCallback = None,
        log_interval: int | None = 1000,
        eval_env: GymEnv | None = None,
        eval_freq: int = 10_000,
        n_eval_episodes: int = 50,
        tb_log_name: str | None = None,
        progress_bar: bool = False,
        eval_log_path: str | None = None,
    ) -> Self:
        """
        Train on a dataset alone, without stepping an environment. Callbacks are called once per gradient step, and
        ``num_timesteps`` counts gradient steps while the phase lasts, so that ``CheckpointCallback``, ``EvalCallback``
        and the logger work as they do online. Evaluations are printed beside the dataset's own mean return, which is logged as
        ``offline/behaviour_return``. Another call continues the training.

        :param dataset: an ``OfflineDataset`` or its location, see ``OfflineDataset.load``
        :param gradient_steps: gradient steps to make now
        :param callback: callback(s) called at every gradient step; returning False stops the phase
        :param log_interval: gradient steps between two log lines, the last of which is at the end; ``None`` for no lines
        :param eval_env: evaluate on this environment during the phase; if only the model has a VecNormalize, the environment
            gets a VecNormalize with the same statistics
        :param eval_freq: gradient steps between two evaluations
        :param n_eval_episodes: episodes per evaluation
        :param tb_log_name: the name of the run for TensorBoard (default: class name + "_offline")
        :param progress_bar: Display a progress bar using tqdm and rich.
        :param eval_log_path: folder for ``evaluations.npz`` and the best model of ``eval_env``
        :return: the model
        :raises ValueError: if the dataset does not fit the model, which is unchanged then, or several processes that train
            together (see the manual, "Scaling out") were given different things
        """
        check_whole(0, gradient_steps=gradient_steps)
        check_progress_bar(progress_bar)
        check_learning(gradient_steps, log_interval)
        if eval_env is not None:
            check_whole(1, eval_freq=eval_freq, n_eval_episodes=n_eval_episodes)
        dataset = self.set_offline_dataset(dataset)
        without_env = self.env is None
        if without_env:
            self.env = SpacesOnlyVecEnv(self.observation_space, self.action_space)
        self._begin_alike(dataset, gradient_steps=gradient_steps, log_interval=log_interval)
        callback, eval_env = self._of_first_rank(callback), eval_env if is_first() else None
        if not self._custom_logger:
            name = tb_log_name or f"{type(self).__name__}_offline"
            self._logger = configure_logger(self.verbose, self.tensorboard_log, name, self.offline_updates == 0)
        if self.ep_info_buffer is None:
            self.ep_info_buffer, self.ep_success_buffer = (deque(maxlen=self._stats_window_size) for _ in range(2))
        total_timesteps = self.offline_updates + gradient_steps
        self.phase = Phase("offline", environment_steps=self.num_timesteps)
        self.num_timesteps = self._num_timesteps_at_start = self.offline_updates
        self.start_time = time.time_ns()
        self._stopped_offline = False
        bar = OfflineProgressBar() if progress_bar and is_first() else None
        try:
            extra: list[BaseCallback] = [] if bar is None else [bar]
            if eval_env is not None:
                wrapped = self._wrap_env(normalized_alike(eval_env, self._vec_normalize_env), self.verbose)
                paths: dict[str, Any] = {"log_path": eval_log_path, "best_model_save_path": eval_log_path}
                counts: dict[str, Any] = {"n_eval_episodes": n_eval_episodes, "eval_freq": eval_freq}
                extra.append(EvalCallback(wrapped, **counts, **paths, verbose=self.verbose))
            with warnings.catch_warnings():
                if without_env:
                    warnings.filterwarnings("ignore", message="Training and eval env are not of the same type")
                callback = self._init_callback([*as_list(callback), *extra])
            with logged_in_gradient_steps(self.logger, dataset.behaviour_return):
                callback.on_training_start(locals(), globals())
                self.replay_buffer.offline_only = True  # type: ignore[union-attr]
                with printed_in_gradient_steps():
                    self._run_offline(total_timesteps, callback, log_interval)
                callback.on_training_end()
        finally:
            if bar is not None:
                bar.close()
            self.replay_buffer.offline_only = False  # type: ignore[union-attr]
            assert self.phase.environment_steps is not None
            self.num_timesteps, self.phase = self.phase.environment_steps, ONLINE
            if without_env:
                self.env = None
        return self

    def _run_offline(self, total_timesteps: int, callback: BaseCallback, log_interval: int | None) -> None:
        # callbacks find these in their `locals` after an environment step; here no episode ever ends
        nothing = {"dones": np.zeros(self.n_envs, dtype=bool), "infos": [{} for _ in range(self.n_envs)]}
        callback.update_locals({**nothing, "rewards": np.zeros(self.n_envs, dtype=np.float32)})
        while self.num_timesteps < total_timesteps:
            self._update_current_progress_remaining(self.num_timesteps, total_timesteps)
            self.train(gradient_steps=1, batch_size=self.batch_size)
            self.num_timesteps += 1
            self.offline_updates += 1
            if log_interval is not None and self.num_timesteps % log_interval == 0:
                self.dump_logs()
            if not first_says(callback.on_step()):
                self._stopped_offline = True
                break
        if log_interval is None:
            self._metrics.clear()
        elif self.num_timesteps % log_interval != 0:
            self.dump_logs()  # the metrics of the last steps belong to this phase, not to the next

    def _init_callback(self, callback: MaybeCallback, progress_bar: bool = False) -> BaseCallback:
        evaluations = find_evaluations(as_list(callback))
        if evaluations:
            callback = [*as_list(callback), NoteEvaluationModes(evaluations)]
        return super()._init_callback(callback, progress_bar)
