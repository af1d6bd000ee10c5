"""Comparison of a policy's modes of acting on an environment."""

import time
from typing import Any, NamedTuple

import numpy as np
from stable_baselines3.common.type_aliases import GymEnv

from sb3_flow.common.checks import check_minimum
from sb3_flow.common.episodes import for_evaluation, play
from sb3_flow.common.statistics import Estimate, bootstrap_interval
from sb3_flow.offline_to_online.acting import ActingPolicy
from sb3_flow.offline_to_online.algorithm import OfflineToOnlineAlgorithm

TIMED = 30
"""Decisions whose median time is measured."""


class ModeResult(NamedTuple):
    """
    Returns and cost of a mode of acting.

    :param returns: returns of the episodes, shape ``(n_episodes,)``
    :param mean_return: mean of the returns and its 95 % interval
    :param success_rate: share of successes among the episodes whose info has ``is_success``; None if no info has it
    :param milliseconds: median time of a decision for one observation
    """

    returns: np.ndarray
    mean_return: Estimate
    success_rate: float | None
    milliseconds: float


def compare_acting(
    model: OfflineToOnlineAlgorithm | ActingPolicy,
    env: GymEnv,
    n_episodes: int = 50,
    deterministic: bool = True,
    seed: int = 0,
    verbose: int = 1,
) -> dict[str, ModeResult]:
    """
    Evaluate all modes of acting and print a table: mean return with its 95 % bootstrap interval, success rate, and
    milliseconds per decision. The model keeps its mode.

    :param model: an RQL, FMQ, FQL, DSRL, QAM or RLPD, or a policy alone
    :param env: environment to evaluate on, as for SB3's ``evaluate_policy``, normalised like the model's environment. The
        statistics of a ``VecNormalize`` do not change
    :param n_episodes: episodes of each mode, at least 2
    :param deterministic: see ``predict``; either way the modes are the same policies
    :param seed: seed of the environments, the same for every mode
    :param verbose: 0 to print nothing
    :return: the result of each mode, the best first
    :raises ValueError: if there are not 2 episodes
    """
    check_minimum(2, n_episodes=n_episodes)
    policy: Any = model.policy if isinstance(model, OfflineToOnlineAlgorithm) else model
    own, mode, found = getattr(model, "_vec_normalize_env", None), policy.acting_mode, {}
    try:
        with for_evaluation(env, own) as vec_env:
            for each in policy.acting_modes:
                policy.set_acting_mode(each)
                vec_env.seed(seed)
                found[each] = _evaluate(model, vec_env, n_episodes, deterministic)
    finally:
        policy.set_acting_mode(mode)
    ranked = dict(sorted(found.items(), key=lambda item: -item[1].mean_return.value))
    if verbose:
        print(_table(ranked, n_episodes))
    return ranked


def _evaluate(model: Any, env: Any, n_episodes: int, deterministic: bool) -> ModeResult:
    returns, rate = play(model, env, n_episodes, deterministic)
    observation = env.reset()
    one = {key: value[:1] for key, value in observation.items()} if isinstance(observation, dict) else observation[:1]
    times = []
    for _ in range(TIMED):
        start = time.perf_counter()
        model.predict(one, deterministic=deterministic)
        times.append(1e3 * (time.perf_counter() - start))
    return ModeResult(returns, bootstrap_interval(returns, np.mean), rate, float(np.median(times)))


def _table(ranked: dict[str, ModeResult], n_episodes: int) -> str:
    lines = [f"{'mode':<10} {'mean return [95 % interval]':>38} {'success':>8} {'ms per decision':>16}"]
    for mode, result in ranked.items():
        mean, low, high = result.mean_return
        success = "-" if result.success_rate is None else f"{result.success_rate:.2f}"
        lines.append(f"{mode:<10} {f'{mean:.2f} [{low:.2f}, {high:.2f}]':>38} {success:>8} {result.milliseconds:>16.2f}")
    (best, first), *others = ranked.items()
    near = [mode for mode, result in others if result.mean_return.high >= first.mean_return.low]
    lines.append(f"Best of {n_episodes} episodes each: {best}.")
    if near:
        lines.append(f"Intervals overlap with {', '.join(near)}: more episodes may rank them otherwise.")
    return "\n".join(lines)
