"""Losses and aggregations of value functions."""

import torch as th


def expectile_loss(difference: th.Tensor, expectile: float) -> th.Tensor:
    """
    Compute the asymmetric squared error of implicit Q-learning (IQL, arXiv 2110.06169, Eq. 5) elementwise: ``expectile * d^2``
    where ``d = target - value >= 0``, else ``(1 - expectile) * d^2``. An expectile of 0.5 gives half the squared error.

    :param difference: ``target - value``, any shape
    :param expectile: kappa in (0, 1); above 0.5 the value leans towards the largest targets
    :return: loss of the same shape, not reduced
    """
    return th.where(difference >= 0, expectile, 1.0 - expectile) * difference.square()


def pessimistic_mean(values: th.Tensor, rho: float) -> th.Tensor:
    """
    Aggregate the members of an ensemble: mean minus ``rho`` population standard deviations (divisor K).

    :param values: member predictions, shape ``(K, B, 1)``
    :param rho: pessimism, 0 for the plain mean
    :return: shape ``(B, 1)``
    """
    mean = values.mean(dim=0)
    return mean if rho == 0.0 else mean - rho * values.std(dim=0, correction=0)


def td_loss(q_values: th.Tensor, target: th.Tensor, valid: th.Tensor) -> th.Tensor:
    """
    Compute the mean squared error of an ensemble of critics. Windows that are not valid count as zeros.

    :param q_values: Q_k(s, a) of the data chunks, shape ``(K, B)``
    :param target: y, shape ``(B, 1)``
    :param valid: 1, or another weight; 0 for windows that reach beyond their trajectory, shape ``(B, 1)``
    :return: scalar
    """
    return (valid * (q_values.mT - target).square()).mean()
