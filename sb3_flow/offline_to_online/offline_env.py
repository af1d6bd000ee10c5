"""A VecEnv for models without environment, and what an offline phase asks of environments."""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
from gymnasium import spaces
from stable_baselines3.common.callbacks import ProgressBarCallback
from stable_baselines3.common.vec_env import VecEnv, VecNormalize


class SpacesOnlyVecEnv(VecEnv):
    """
    A VecEnv with spaces but without steps, the ``training_env`` of callbacks while a model trains from a dataset alone.

    :param observation_space: Observation space
    :param action_space: Action space
    """

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        super().__init__(1, observation_space, action_space)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("This model was built from a dataset, without an environment: call `model.set_env(env)` first.")

    reset = step_async = step_wait = env_method = _refuse

    def close(self) -> None:
        pass

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        if attr_name == "render_mode":  # read by VecEnv's constructor
            return [None]
        raise AttributeError(f"An environment that consists of spaces only has no attribute {attr_name!r}")

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        self._refuse()

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: Any = None) -> list[bool]:
        return [False]

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        return [seed]


class OfflineProgressBar(ProgressBarCallback):
    """Progress bar with one tick per gradient step, however many environments the model has."""

    def close(self) -> None:
        """Take the bar away, also after an error: until then, it keeps stdout to itself."""
        if hasattr(self, "pbar"):
            self.pbar.close()

    def _on_step(self) -> bool:
        self.pbar.update(1)
        return True


def has_statistics(normalizer: VecNormalize) -> bool:
    """Say whether a VecNormalize has counted anything; its counts start at a small epsilon."""
    statistics: Any = normalizer.obs_rms if normalizer.norm_obs else normalizer.ret_rms
    return any(item.count >= 1.0 for item in (statistics.values() if isinstance(statistics, dict) else [statistics]))
