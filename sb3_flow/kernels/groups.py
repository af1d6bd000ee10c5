"""
Advantages without a critic: a member of a group is compared with the others (GRPO, arXiv 2402.03300; Dr. GRPO, 2503.20783;
leave-one-out, RLOO). Statistics are computed in float64.

Differences that are only rounding must not be scaled up: the advantages are 0 where the standard deviation is at most 1e-6 of
the largest number, and where all numbers are equal.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from sb3_flow.compiled.choices import check_choice
from sb3_flow.kernels.array_arguments import (
    BOOL,
    check_positive,
    check_range,
    explain_result,
    flag_array,
    float_array,
    number,
    numbers,
    whole,
)
from sb3_flow.kernels.group_loops import (
    BASELINES,
    SCALES,
    compare_with_peers,
    discounted_sums,
    group_advantages,
    normalise_steps,
)

FEW_PEERS = ("pooled", "zero")
Baseline = Literal["mean", "loo", "median", "min"]
Scale = Literal["group", "batch", "none"]


def compute_group_advantages(
    rewards: ArrayLike,
    group_size: int | None = None,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    ddof: int = 0,
    eps: float = 1e-8,
) -> np.ndarray:
    """
    Compute A_i = (R_i - baseline) / (std + eps) of outcome rewards. The baseline is subtracted once, and no mean after it.

    :param rewards: a number for each episode, shape ``(n_groups, G)``, or ``(n_groups * G,)`` with ``group_size``
    :param group_size: G
    :param baseline: the group's "mean", "median" or "min", or "loo", the mean of the other members (unbiased)
    :param scale: divide by the standard deviation of the "group" (GRPO), of the "batch" of all rewards (as TRL), or by "none"
        (Dr. GRPO)
    :param ddof: 0 divides by G in the variance, 1 by G - 1 (as torch and TRL do)
    :param eps: added to the standard deviation
    :return: shape and dtype of ``rewards``, float64 for integers
    :raises ValueError: if the rewards do not form groups of at least 2, a reward is not finite, or an option is unknown
    """
    ddof, eps = _check_options(baseline, scale, ddof, eps)
    given = numbers("rewards", rewards, (1, 2))
    if given.ndim == 1 and group_size is None:
        raise ValueError(f"`group_size` must be given for flat rewards, but `rewards` has shape {given.shape}.")
    size = given.shape[-1] if group_size is None else whole("group_size", group_size, 1)
    if size < 2:
        raise ValueError(f"`group_size` must be at least 2, since members are compared, but {size} was given.")
    if given.ndim == 2 and given.shape[1] != size:
        raise ValueError(f"`group_size` must be the number of columns, {given.shape[1]}, but {size} was given.")
    if given.size % size:
        raise ValueError(f"`rewards` must hold whole groups of {size}, but {given.size} were given.")
    groups = given.reshape(-1, size)
    out = np.empty_like(groups)
    if not group_advantages(groups, BASELINES.index(baseline), SCALES.index(scale), ddof, eps, out):
        explain_result(out.dtype, rewards=given)
    return out.reshape(given.shape)


def compute_returns_to_go(rewards: np.ndarray, alive: np.ndarray | None = None, gamma: float = 0.99) -> np.ndarray:
    """
    Compute R_t = r_t + gamma R_{t+1} over the steps that are alive; the end of the arrays is not bootstrapped.

    :param rewards: float32 or float64, shape ``(T, ...)``
    :param alive: bool, same shape: True for the steps of the episode; None: all
    :param gamma: discount factor
    :return: same shape and dtype, 0 where not alive
    :raises ValueError: if shapes do not fit, a reward that is used is not finite, or gamma is not in [0, 1]
    """
    gamma = check_range("gamma", gamma, 0.0, 1.0)
    rewards = float_array("rewards", rewards)
    if not rewards.ndim or not rewards.size:
        raise ValueError(f"`rewards` must have shape (T, ...), none of them 0, but {rewards.shape} was given.")
    alive = np.ones(rewards.shape, BOOL) if alive is None else flag_array("alive", alive, rewards.shape)
    out = np.empty_like(rewards)
    rows = (len(rewards), -1)
    if not discounted_sums(rewards.reshape(rows), alive.reshape(rows), gamma, out.reshape(rows)):
        explain_result(rewards.dtype, rewards=np.where(alive, rewards, 0))
    return out


def compute_group_returns_to_go(
    rewards: np.ndarray,
    alive: np.ndarray | None = None,
    gamma: float = 0.99,
    *,
    values: np.ndarray | None = None,
    baseline: Baseline = "loo",
    scale: Scale = "batch",
    ddof: int = 0,
    eps: float = 1e-8,
    few_peers: Literal["pooled", "zero"] = "pooled",
) -> tuple[np.ndarray, np.ndarray]:
    """
    Compute credit per time step: the return-to-go minus the peers' return-to-go. Peers are the members of the group that are
    alive at the same step.

    :param rewards: float32 or float64, shape ``(T, K, G)``: time, group, member
    :param alive: bool, same shape: True for the steps of the member's episode, False for all later steps; None: all
    :param gamma: discount factor
    :param values: V(s_t), same shape and dtype; R - V is then compared
    :param baseline: "loo", "mean", "median" or "min" of the peers, as in :func:`compute_group_advantages`
    :param scale: divide by the standard deviation of the peers ("group"), of all differences from the baseline ("batch"; the
        returns spread more, because they shrink towards the end), or by "none"
    :param ddof: delta degrees of freedom of the standard deviations, 0 or 1
    :param eps: added to the standard deviation
    :param few_peers: peers of a member that is alone in its group: all environments alive at this step ("pooled"); with
        "zero", and without any other environment, the advantage is 0
    :return: advantages, and returns-to-go (without the values); same shape and dtype, 0 where not alive
    :raises ValueError: if shapes or dtypes do not fit, G is below 2, a member is alive again, a number that is used is not
        finite, or an option is unknown
    """
    ddof, eps = _check_options(baseline, scale, ddof, eps)
    check_choice(FEW_PEERS, few_peers=few_peers)
    rewards, alive = _check_groups(rewards, alive)
    if values is not None:
        values = float_array("values", values, rewards.shape, rewards.dtype)
    returns = compute_returns_to_go(rewards, alive, gamma)
    compared = returns if values is None else returns - np.where(alive, values, 0)
    advantages = np.zeros_like(returns)
    options = BASELINES.index(baseline), SCALES.index(scale), ddof, eps, few_peers == "pooled"
    if not compare_with_peers(compared, alive, *options, advantages):
        others = {} if values is None else {"values": np.where(alive, values, 0)}
        explain_result(rewards.dtype, rewards=np.where(alive, rewards, 0), **others)
    return advantages, returns


def compute_process_advantages(
    rewards: np.ndarray, alive: np.ndarray | None = None, *, ddof: int = 0, eps: float = 1e-8
) -> np.ndarray:
    """
    Compute advantages by GRPO's process supervision: each step's reward is normalised by mean and standard deviation of all
    rewards of the group; the advantage is the sum of the normalised rewards from this step on.

    :param rewards: float32 or float64, shape ``(T, K, G)``: time, group, member
    :param alive: as in :func:`compute_group_returns_to_go`
    :param ddof: delta degrees of freedom of the standard deviation, 0 or 1
    :param eps: added to the standard deviation
    :return: same shape and dtype, 0 where not alive
    :raises ValueError: if shapes do not fit, G is below 2, a member is alive again, or a reward that is used is not finite
    """
    ddof, eps = _check_options("mean", "group", ddof, eps)
    rewards, alive = _check_groups(rewards, alive)
    normalised = np.zeros_like(rewards)
    if not normalise_steps(rewards, alive, ddof, eps, normalised):
        explain_result(rewards.dtype, rewards=np.where(alive, rewards, 0))
    return compute_returns_to_go(normalised, alive, 1.0)


def _check_options(baseline: str, scale: str, ddof: int, eps: float) -> tuple[int, float]:
    check_choice(BASELINES, baseline=baseline)
    check_choice(SCALES, scale=scale)
    if number("ddof", ddof) not in (0, 1):
        raise ValueError(f"`ddof` must be 0 or 1, but {ddof} was given.")
    if number("eps", eps) != 0:
        check_positive(eps=eps)
    return int(ddof), float(eps)


def _check_groups(rewards: np.ndarray, alive: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    rewards = float_array("rewards", rewards)
    if rewards.ndim != 3 or not rewards.size or rewards.shape[2] < 2:
        raise ValueError(f"`rewards` must have shape (T, K, G) with at least 2 members G, but {rewards.shape} was given.")
    if alive is None:
        return rewards, np.ones(rewards.shape, BOOL)
    alive = flag_array("alive", alive, rewards.shape)
    back = alive[1:] & ~alive[:-1]
    if back.any():
        place = tuple(int(i) for i in np.argwhere(back)[0])
        raise ValueError(
            f"`alive` must stay False once it is, but {(place[0] + 1, *place[1:])} follows a step that is not alive."
        )
    return rewards, alive
