"""Episodes in which a model is evaluated: the environment as the model knows it, and what the episodes gave."""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from sb3_contrib.common.maskable import evaluation as with_masks
from stable_baselines3.common import evaluation
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize, unwrap_vec_normalize


class Episodes(NamedTuple):
    """
    What episodes gave.

    :param returns: shape ``(n_episodes,)``
    :param success_rate: share of successes among the episodes whose info has ``is_success``; None if no info has it
    """

    returns: np.ndarray
    success_rate: float | None


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


@contextmanager
def for_evaluation(env: GymEnv, normalizer: VecNormalize | None) -> Iterator[VecEnv]:
    """
    Prepare an environment for evaluation: observations are normalised like those of the training environment, by statistics
    that stay as they are meanwhile, and rewards are not.

    :param env: environment to evaluate on, as for SB3's ``evaluate_policy``
    :param normalizer: VecNormalize of the training environment, or None
    """
    vec_env = as_vec_env(normalized_alike(env, normalizer))
    own = unwrap_vec_normalize(vec_env)
    if own is None:
        yield vec_env
        return
    settings = own.training, own.norm_reward
    own.training = own.norm_reward = False
    if normalizer is not None and own is not normalizer:
        own.obs_rms, own.ret_rms = copy.deepcopy((normalizer.obs_rms, normalizer.ret_rms))
    try:
        yield vec_env
    finally:
        own.training, own.norm_reward = settings


def takes_masks(model: Any) -> bool:
    """Say whether an algorithm or policy takes masks of its actions."""
    return "action_masks" in inspect.signature(model.predict).parameters


def play(model: Any, env: VecEnv, n_episodes: int, deterministic: bool) -> Episodes:
    """
    Play episodes, with action masks if the model takes them; an environment without masks is an error then.

    :param model: an algorithm, or a policy
    :param env: see :func:`for_evaluation`
    :param n_episodes: their number, of all environments together
    :param deterministic: see ``predict``
    """
    successes: list[bool] = []

    def note(local: dict[str, Any], _: dict[str, Any]) -> None:
        if local["done"] and local["info"].get("is_success") is not None:
            successes.append(bool(local["info"]["is_success"]))

    evaluate: Any = (with_masks if takes_masks(model) else evaluation).evaluate_policy
    returns, _ = evaluate(model, env, n_episodes, deterministic, callback=note, return_episode_rewards=True)
    return Episodes(np.array(returns, dtype=np.float64), float(np.mean(successes)) if successes else None)
