"""
Kullback-Leibler divergences KL(pi || ref) between the policy and a reference: exact, per state, or estimated from the
log-ratio of sampled actions. All functions return a number for each row, and the caller averages.

Prefer the exact form, which every distribution of SB3 has and which has no variance. Of the estimates only k2 is a loss; the
docstring of each estimate describes its gradient (a ~ pi; weights of samples of another policy carry no gradient).
"""

from collections.abc import Sequence

import torch as th
from torch.distributions import Bernoulli, Categorical, Distribution, kl_divergence
from torch.nn import functional as F

from sb3_flow.compiled.ratio_limit import MAX_LOG_RATIO


def exact_kl(p: Distribution | Sequence[Distribution], q: Distribution | Sequence[Distribution]) -> th.Tensor:
    """
    Compute KL(p || q) in closed form, summed over the components of the action. SB3's distributions hold p and q in
    ``.distribution``: Categorical, Normal, Bernoulli, and the list of Categoricals of MultiDiscrete actions.

    For squashed Gaussians give the Gaussians before squashing (as in ``.distribution``): both policies squash by the same
    bijection, under which the divergence does not change.

    torch's validation of a distribution's arguments waits for the device; build p and q with ``validate_args=False``.

    :param p: batch shape ``(B,)`` or ``(B, A)``, or a sequence of independent distributions
    :param q: the same kinds and shapes
    :return: shape ``(B,)``; differentiable in both
    :raises ValueError: if only p or only q is a sequence, or the lengths differ
    :raises NotImplementedError: if torch has no closed form for the pair
    """
    if isinstance(p, Distribution) and isinstance(q, Distribution):
        kl = _closed_form(p, q)
        return kl.flatten(1).sum(1) if kl.dim() > 1 else kl
    if isinstance(p, Distribution) or isinstance(q, Distribution):
        raise ValueError("Either both or none of `p` and `q` must be sequences of distributions.")
    return th.stack([exact_kl(p_i, q_i) for p_i, q_i in zip(p, q, strict=True)]).sum(0)


def _closed_form(p: Distribution, q: Distribution) -> th.Tensor:
    """
    Compute KL of every component by torch, but for two kinds whose KL is infinite in torch as soon as a probability of q
    underflows, which is about where a penalty is needed. From the logits it is finite.
    """
    if isinstance(p, Categorical) and isinstance(q, Categorical):
        # Actions that p never takes count as zero, also where both logits are -inf
        return (p.probs * (p.logits - q.logits).masked_fill(p.probs == 0, 0.0)).sum(-1)
    if isinstance(p, Bernoulli) and isinstance(q, Bernoulli):
        # log P(1) = -softplus(-logit), log P(0) = -softplus(logit)
        one, zero = (F.softplus(sign * q.logits) - F.softplus(sign * p.logits) for sign in (-1, 1))
        return p.probs * one + (1.0 - p.probs) * zero
    return kl_divergence(p, q)


def kl_k1(log_ratio: th.Tensor, weight: th.Tensor | None = None) -> th.Tensor:
    """
    Estimate by k1 = x: unbiased, can be negative, large variance.

    **Not a loss: its expected gradient is zero**, E_pi[d log pi] = 0. Subtract k1 from the reward instead, or give a
    ``weight`` pi / mu that carries a gradient: with it the gradient of k1 is the gradient of KL(pi || ref).

    :param log_ratio: x = log pi(a|s) - log ref(a|s) of a ~ pi, shape ``(B,)``
    :param weight: pi / mu of samples a ~ mu, shape ``(B,)``; None for a ~ pi
    :return: shape ``(B,)``
    """
    return _weighted(log_ratio, weight)


def kl_k2(log_ratio: th.Tensor, weight: th.Tensor | None = None) -> th.Tensor:
    """
    Estimate by k2 = x^2 / 2: never negative, slightly biased. As a loss k2 has the expected gradient of KL(pi || ref).

    :param log_ratio: x = log pi(a|s) - log ref(a|s) of a ~ pi, shape ``(B,)``
    :param weight: pi / mu of samples a ~ mu, shape ``(B,)``, detached; None for a ~ pi
    :return: shape ``(B,)``
    """
    return _weighted(0.5 * log_ratio.square(), weight)


def kl_k3(log_ratio: th.Tensor, weight: th.Tensor | None = None) -> th.Tensor:
    """
    Estimate by k3 = exp(-x) - 1 + x: unbiased and never negative. GRPO's penalty (arXiv 2402.03300, Eq. 4).

    **As a loss k3 follows the other direction**: it has the expected gradient of KL(ref || pi), unless the ``weight`` carries
    a gradient.

    SB3's logged ``approx_kl`` is its mean with a ~ mu and x = log mu(a|s) - log pi(a|s), which estimates KL(mu || pi).

    :param log_ratio: x = log pi(a|s) - log ref(a|s) of a ~ pi, shape ``(B,)``; below -20 the value stays, without gradient
    :param weight: pi / mu of samples a ~ mu, shape ``(B,)``; None for a ~ pi
    :return: shape ``(B,)``
    """
    x = log_ratio.clamp(min=-MAX_LOG_RATIO)
    return _weighted(th.expm1(-x) + x, weight)


def _weighted(estimate: th.Tensor, weight: th.Tensor | None) -> th.Tensor:
    return estimate if weight is None else weight * estimate
