"""Reward statistics and transformations. Sums are computed in float64; results have the rewards' dtype."""

import numpy as np
from numpy.typing import ArrayLike

from sb3_flow.compiled import compiled
from sb3_flow.kernels.array_arguments import BOOL, check_range, check_shape, finite_result, flag_array, number, numbers, whole

FLAT_RANGE = 1e-10
"""Rewards that spread less than this are not stretched."""
LARGEST = float(np.finfo(float).max)


def normalize_rewards(
    rewards: ArrayLike, running_mean: float = 0.0, running_var: float = 1.0, count: int = 0, epsilon: float = 1e-8
) -> tuple[np.ndarray, float, float, int]:
    """
    Normalise rewards by running statistics. Mean and variance are updated with the whole batch (Chan's merge of Welford's
    sums), then every reward is normalised: (r - mean) / sqrt(var + epsilon).

    :param rewards: shape ``(n,)``
    :param running_mean: mean so far
    :param running_var: population variance so far; without weight while ``count`` is 0
    :param count: number of rewards so far
    :param epsilon: added to the variance
    :return: normalised rewards, shape ``(n,)``, and the new mean, variance (0 for a single reward) and count
    :raises ValueError: if a number is not finite, or ``running_var``, ``count`` or ``epsilon`` is negative
    """
    r = numbers("rewards", rewards)
    running_mean = check_range("running_mean", running_mean, -LARGEST, LARGEST)
    running_var = check_range("running_var", running_var, 0.0, LARGEST)
    count, epsilon = whole("count", count, 0), check_range("epsilon", epsilon, 0.0, LARGEST)
    if not r.size:
        return r, running_mean, running_var, count
    total = count + r.size
    batch_mean = float(r.mean(dtype=np.float64))
    difference = batch_mean - running_mean if count else 0.0
    mean = running_mean + difference * r.size / total if count else batch_mean
    squares = float(np.square(r - batch_mean, dtype=np.float64).sum())
    squares += running_var * count + difference * difference * count * r.size / total
    variance = squares / total if total > 1 else 0.0
    if not np.isfinite(variance):
        raise ValueError("The numbers in `rewards` are too large: their variance does not fit float64.")
    normalised = (r.astype(np.float64) - mean) / np.sqrt(max(variance + epsilon, np.finfo(float).tiny))
    return normalised.astype(r.dtype), mean, variance, total


def clip_rewards(rewards: ArrayLike, minimum: float, maximum: float) -> np.ndarray:
    """
    Clip rewards to an interval.

    :param rewards: shape ``(n,)``, ``(T, N)`` or ``(T, K, G)``
    :param minimum: lower bound; -inf for none
    :param maximum: upper bound; inf for none
    :return: rewards in [minimum, maximum]
    :raises ValueError: if ``minimum`` exceeds ``maximum``, a bound is NaN, or a reward is not finite
    """
    minimum, maximum = number("minimum", minimum), number("maximum", maximum)
    if not minimum <= maximum:
        raise ValueError(f"`minimum` must not exceed `maximum`, but {minimum:g} and {maximum:g} were given.")
    r = numbers("rewards", rewards, (1, 2, 3))
    clipped = np.clip(r, minimum, maximum).astype(r.dtype, copy=False)
    if not np.isfinite(clipped).all():
        raise ValueError(
            f"`minimum` and `maximum` must bound numbers of {r.dtype}, but {minimum:g} and {maximum:g} were given."
        )
    return clipped


def compute_reward_statistics(rewards: ArrayLike) -> dict[str, float]:
    """
    Compute statistics of rewards.

    :param rewards: at least one, shape ``(n,)``, ``(T, N)`` or ``(T, K, G)``
    :return: mean, std (population), min, max, median, count
    :raises ValueError: if there is no reward, or a reward is not finite
    """
    r = numbers("rewards", rewards, (1, 2, 3))
    if not r.size:
        raise ValueError("`rewards` must hold at least one reward, but it is empty.")
    r = r.astype(np.float64, copy=False)
    mean, std = finite_result(np.array([r.mean(), r.std()]), rewards=r).tolist()
    low, high, median = float(r.min()), float(r.max()), float(np.median(r))
    return {"mean": mean, "std": std, "min": low, "max": high, "median": median, "count": r.size}


def shape_rewards(
    rewards: ArrayLike, potentials: ArrayLike, next_potentials: ArrayLike, gamma: float, terminated: np.ndarray | None = None
) -> np.ndarray:
    """
    Compute r + gamma Phi(s') - Phi(s) (Ng et al. 1999), which leaves optimal policies as they are if terminal states have
    potential 0.

    :param rewards: shape ``(n,)`` or ``(T, N)``
    :param potentials: Phi(s), same shape
    :param next_potentials: Phi(s') of the true successor, same shape
    :param gamma: discount factor
    :param terminated: bool, same shape: True where Phi(s') is 0; None: nowhere
    :return: same shape
    :raises ValueError: if shapes differ, a number is not finite, or gamma is not in [0, 1]
    """
    gamma = check_range("gamma", gamma, 0.0, 1.0)
    r = numbers("rewards", rewards, (1, 2))
    before, after = numbers("potentials", potentials, (1, 2)), numbers("next_potentials", next_potentials, (1, 2))
    check_shape("potentials", before.shape, r.shape)
    check_shape("next_potentials", after.shape, r.shape)
    ends = np.zeros(r.shape, BOOL) if terminated is None else flag_array("terminated", terminated, r.shape)
    shaped = (r + gamma * np.where(ends, 0, after) - before).astype(r.dtype, copy=False)
    return finite_result(shaped, rewards=r, potentials=before, next_potentials=after)


def exponential_moving_average(x: ArrayLike, alpha: float) -> np.ndarray:
    """
    Compute e_0 = x_0;  e_t = alpha x_t + (1 - alpha) e_{t-1}

    :param x: shape ``(n,)``
    :param alpha: weight of the newest number, in [0, 1]
    :return: shape ``(n,)``
    :raises ValueError: if a number is not finite or alpha is not in [0, 1]
    """
    alpha = check_range("alpha", alpha, 0.0, 1.0)
    series = numbers("x", x)
    out = np.empty_like(series)
    _moving_average(series, alpha, out)
    return out


def auto_scale_rewards(rewards: ArrayLike, target_min: float, target_max: float) -> np.ndarray:
    """
    Map [min, max] linearly onto the target range; rewards that spread less than 1e-10 become its middle.

    :param rewards: shape ``(n,)`` or ``(T, N)``
    :param target_min: result of the smallest reward
    :param target_max: result of the largest reward
    :return: same shape
    :raises ValueError: if a number is not finite, or ``target_min`` exceeds ``target_max``
    """
    target_min, target_max = number("target_min", target_min), number("target_max", target_max)
    if not -np.inf < target_min <= target_max < np.inf:
        raise ValueError(
            f"`target_min` must not exceed `target_max`, both finite, but {target_min:g}, {target_max:g} were given."
        )
    r = numbers("rewards", rewards, (1, 2))
    if not r.size:
        return r
    low, high = float(r.min()), float(r.max())
    if high - low < FLAT_RANGE:
        scaled: np.ndarray = np.full(r.shape, 0.5 * target_min + 0.5 * target_max)
    else:
        share = (r.astype(np.float64) / 2 - low / 2) / (high / 2 - low / 2)  # halves: differences may overflow
        scaled = (1.0 - share) * target_min + share * target_max
    return finite_result(scaled.astype(r.dtype), rewards=r, target_min=target_min, target_max=target_max)


@compiled()
def _moving_average(x, alpha, out):
    average = 0.0
    for i in range(x.size):
        average = alpha * x[i] + (1.0 - alpha) * average if i else np.float64(x[i])
        out[i] = average
