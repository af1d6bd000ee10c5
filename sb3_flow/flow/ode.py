"""Euler integration of a flow between noise (t = 0) and action (t = 1)."""

from collections.abc import Callable

import torch as th

Velocity = Callable[[th.Tensor, th.Tensor], th.Tensor]
"""``velocity(x, t) -> dx/dt`` with ``x`` of shape ``(B, A)`` and ``t`` of shape ``(B, 1)``, closed over the observation."""


def euler_forward(velocity: Velocity, noise: th.Tensor, steps: int) -> th.Tensor:
    """
    Integrate the flow from noise at t = 0 to an action at t = 1 with ``steps`` Euler steps of size ``1 / steps``.

    The result is not clipped: the caller clips once, at the end.

    :param velocity: velocity in unit time, ``velocity(x, t)``
    :param noise: starting point x^0, shape ``(B, A)``
    :param steps: number of Euler steps F
    :return: x^F, shape ``(B, A)``
    """
    x = noise
    for i in range(steps):
        t = x.new_full((x.shape[0], 1), i / steps)
        x = th.add(x, velocity(x, t), alpha=1 / steps)
    return x


def euler_reverse(velocity: Velocity, x: th.Tensor, depth: th.Tensor, steps: int) -> tuple[th.Tensor, th.Tensor]:
    """
    Flow reversal (RQL, arXiv 2606.17551): integrate backwards from the action at t = 1 to t = 1 - depth.

    There are always ``steps`` Euler steps, of size ``depth / steps``; the velocity is evaluated at the later point and
    the later time. It is therefore not the exact inverse of :func:`euler_forward`, as in the reference implementation.

    :param velocity: velocity in unit time, ``velocity(x, t)``
    :param x: actions at t = 1, shape ``(B, A)``
    :param depth: how far to go back per sample, in [0, 1], shape ``(B, 1)``; 0 returns the action itself
    :param steps: number of Euler steps F
    :return: the reversed point and its flow time ``1 - depth``, shapes ``(B, A)`` and ``(B, 1)``
    """
    step = depth / steps
    for i in range(steps):
        # 1 - i * step instead of repeated subtraction: t does not drift
        x = th.addcmul(x, step, velocity(x, th.rsub(step, 1.0, alpha=i)), value=-1.0)
    return x, 1.0 - depth
