"""
Group-relative advantages: no critic, every trajectory is compared with its peers, the G members of its group that started
alike. K groups of G members are N = K G environments; group k owns the environments k G to k G + G - 1. The functions do not
wait for the device, and the results carry no gradient.
"""

from typing import Literal, get_args

import torch as th

from sb3_flow.compiled.choices import check_choice
from sb3_flow.losses.advantage_scans import Advantages, linear_scan
from sb3_flow.losses.tensors import require_same_shape

Baseline = Literal["mean", "loo", "median", "min"]
Scale = Literal["group", "batch", "none"]

# Deviations of equal rewards are rounding errors; a division by their size would make advantages of them
_SMALLEST_RELATIVE_STD = 1e-6


@th.no_grad()
def group_advantages(
    rewards: th.Tensor, baseline: Baseline = "mean", scale: Scale = "group", ddof: int = 0, eps: float = 1e-8
) -> th.Tensor:
    """
    Compute advantages of whole trajectories. The defaults are GRPO's (arXiv 2402.03300, 4.1.2); ``scale="none"`` is Dr. GRPO's
    (arXiv 2503.20783).

    :param rewards: one number per trajectory, shape ``(K, G)``
    :param baseline: subtrahend: the group's ``"mean"``, ``"median"`` or ``"min"``, or the mean of the other members
        (``"loo"``, G / (G - 1) times the advantage against the mean)
    :param scale: divisor: the standard deviation of the group's rewards (``"group"``) or of all advantages (``"batch"``), or
        ``"none"``. Where the deviation is below a millionth of the largest reward, the rewards count as equal: zeros
    :param ddof: the divisor of variances is n - ddof, 0 or 1
    :param eps: added to the divisor
    :return: shape ``(K, G)``
    :raises ValueError: if G < 2 or an option is unknown
    """
    _check(rewards, 2, baseline, scale, ddof)
    alive = th.ones_like(rewards, dtype=th.bool)
    centred, inverse_std = _against_peers(rewards, alive, baseline, ddof, eps)
    if scale == "group":
        return centred * inverse_std
    return centred * _inverse_batch_std(centred, rewards, alive, ddof, eps) if scale == "batch" else centred


@th.no_grad()
def group_returns_to_go(
    rewards: th.Tensor,
    alive: th.Tensor,
    gamma: float,
    baseline: Baseline = "loo",
    scale: Scale = "batch",
    few_peers: Literal["pooled", "zero"] = "pooled",
    ddof: int = 0,
    eps: float = 1e-8,
) -> Advantages:
    """
    Compute advantages of single steps: the discounted return-to-go against the returns-to-go of the group's members alive at
    the same step.

    :param rewards: shape ``(T, K, G)``; the rewards of dead steps are not read
    :param alive: true from the first step of an episode to its last, both included, bool, shape ``(T, K, G)``
    :param gamma: discount
    :param baseline: see :func:`group_advantages`, over the members alive at the step
    :param scale: divisor, see :func:`group_advantages`: the standard deviation of the returns-to-go of the members alive at
        the step (``"group"``) or of the advantages of all steps alive (``"batch"``), or ``"none"``
    :param few_peers: rule where fewer than two members are alive: ``"pooled"`` compares with all environments alive at the
        step, ``"zero"`` gives zero. A step without any peer gets zero either way
    :param ddof: the divisor of variances is n - ddof, 0 or 1
    :param eps: added to the divisor
    :return: advantages and returns-to-go, shape ``(T, K, G)`` each, zero in dead steps
    :raises ValueError: if G < 2, the shapes differ or an option is unknown
    """
    _check(rewards, 3, baseline, scale, ddof)
    require_same_shape(rewards=rewards, alive=alive)
    check_choice(("pooled", "zero"), few_peers=few_peers)
    alive = alive.bool()
    # A dead step has return zero, so nothing passes from one episode to another
    returns = linear_scan(gamma * alive.to(rewards.dtype), rewards.masked_fill(~alive, 0.0))
    centred, inverse_std = _against_peers(returns, alive, baseline, ddof, eps)
    if few_peers == "pooled":
        pool = returns.flatten(1), alive.flatten(1)
        pooled, pooled_inverse_std = _against_peers(*pool, baseline, ddof, eps)
        lonely = alive.sum(-1, keepdim=True) < 2
        centred = th.where(lonely, pooled.view_as(centred), centred)
        inverse_std = th.where(lonely, pooled_inverse_std.unsqueeze(-1), inverse_std)
    if scale == "group":
        centred = centred * inverse_std
    elif scale == "batch":
        centred = centred * _inverse_batch_std(centred, returns, alive, ddof, eps)
    return Advantages(centred, returns)


def _check(rewards: th.Tensor, dims: int, baseline: str, scale: str, ddof: int) -> None:
    if rewards.dim() != dims or rewards.shape[-1] < 2:
        shape = "(K, G)" if dims == 2 else "(T, K, G)"
        raise ValueError(f"`rewards` must be {shape} with at least 2 members G, but have shape {tuple(rewards.shape)}.")
    check_choice(get_args(Baseline), baseline=baseline)
    check_choice(get_args(Scale), scale=scale)
    check_choice((0, 1), ddof=ddof)


def _against_peers(x: th.Tensor, alive: th.Tensor, baseline: Baseline, ddof: int, eps: float) -> tuple[th.Tensor, th.Tensor]:
    """
    Compute x minus the baseline of the peers alive (the last dimension), shape ``(..., G)``, and the inverse of their standard
    deviation, shape ``(..., 1)``. Where a peer is not alive, x is zero and the result, too.
    """
    n = alive.sum(-1, keepdim=True)
    deviation = (x - x.sum(-1, keepdim=True) / n.clamp(min=1)).masked_fill(~alive, 0.0)
    std = (deviation.square().sum(-1, keepdim=True) / (n - ddof).clamp(min=1)).sqrt()
    inverse_std = _inverse(std, x.abs().amax(-1, keepdim=True), eps)
    if baseline == "mean":
        return deviation, inverse_std
    if baseline == "loo":
        # The sum of the other members would not cancel large equal parts
        return deviation * (n.to(x.dtype) / (n - 1).clamp(min=1)), inverse_std
    # the dead are sorted behind the living
    ordered = x.masked_fill(~alive, th.inf).sort(-1).values
    if baseline == "min":
        statistic = ordered[..., :1]
    else:
        middle = th.cat(((n - 1).clamp(min=0) // 2, (n // 2).clamp(max=x.shape[-1] - 1)), -1)
        statistic = ordered.gather(-1, middle).mean(-1, keepdim=True)
    return (x - statistic).masked_fill(~alive, 0.0), inverse_std


def _inverse_batch_std(centred: th.Tensor, x: th.Tensor, alive: th.Tensor, ddof: int, eps: float) -> th.Tensor:
    """Invert the standard deviation of ``centred`` over all that are alive; return a scalar."""
    n = alive.sum()
    deviation = (centred - centred.sum() / n.clamp(min=1)).masked_fill(~alive, 0.0)
    return _inverse((deviation.square().sum() / (n - ddof).clamp(min=1)).sqrt(), x.abs().amax(), eps)


def _inverse(std: th.Tensor, size: th.Tensor, eps: float) -> th.Tensor:
    """Compute 1 / (std + eps), zero where std is nothing but rounding errors of numbers of that size."""
    return (1.0 / (std + eps)).masked_fill(std <= _SMALLEST_RELATIVE_STD * size, 0.0)
