"""A VecEnv for models without environment, and small helpers around environments."""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
from gymnasium import spaces
from stable_baselines3.common.callbacks import ProgressBarCallback
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize, unwrap_vec_normalize


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


def as_vec_env(env: GymEnv) -> VecEnv:
    """Wrap a single environment in a Monitor and a DummyVecEnv; return a ``VecEnv`` as it is."""
    if isinstance(env, VecEnv):
        return env
    monitored = env if is_wrapped(env, Monitor) else Monitor(env)
    return DummyVecEnv([lambda: monitored])


def normalized_alike(env: GymEnv, normalizer: VecNormalize | None) -> GymEnv:
    """
    Normalise an environment like the training environment.

    :param env: an environment to evaluate on
    :param normalizer: VecNormalize of the training environment, or None
    :return: ``env`` in a VecNormalize with the same settings, unless ``env`` has a VecNormalize or needs none; rewards stay
    """
    if normalizer is None or (isinstance(env, VecEnv) and unwrap_vec_normalize(env) is not None):
        return env
    env = as_vec_env(env)
    names = ("norm_obs", "clip_obs", "epsilon", "norm_obs_keys")
    settings: dict[str, Any] = {name: getattr(normalizer, name) for name in names}
    return VecNormalize(env, training=False, norm_reward=False, **settings)
