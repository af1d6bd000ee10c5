"""Euler integration of a flow between noise (t = 0) and action (t = 1)."""

from collections.abc import Callable

import torch as th

Velocity = Callable[[th.Tensor, th.Tensor], th.Tensor]
"""``velocity(x, t) -> dx/dt`` with ``x`` of shape ``(B, A)`` and ``t`` of shape ``(B, 1)``, closed over the observation."""


def euler(velocity: Velocity, x: th.Tensor, time: th.Tensor, step: th.Tensor, steps: int) -> th.Tensor:
    """
    Do Euler steps x <- x + step u(x, t), t <- t + step.

    :param velocity: ``velocity(x, t)``; its method ``euler``, if there is one, does all steps at once or returns None
    :param x: shape ``(B, A)``
    :param time: t at the start, shape ``(B, 1)``
    :param step: shape ``(B, 1)``
    :param steps: number of steps
    :return: shape ``(B, A)``
    """
    at_once: Callable[..., th.Tensor | None] = getattr(velocity, "euler", lambda *_: None)
    if (end := at_once(x, time, step, steps)) is not None:
        return end
    for i in range(steps):
        # With time + i * step instead of repeated addition t does not drift
        x = th.addcmul(x, step, velocity(x, th.add(time, step, alpha=i)))
    return x


def euler_forward(velocity: Velocity, noise: th.Tensor, steps: int) -> th.Tensor:
    """
    Integrate the flow from noise at t = 0 to an action at t = 1 with ``steps`` Euler steps of size ``1 / steps``. The result
    is not clipped.

    :param velocity: velocity in unit time, ``velocity(x, t)``
    :param noise: starting point x^0, shape ``(B, A)``
    :param steps: number of Euler steps F
    :return: x^F, shape ``(B, A)``
    """
    step = noise.new_full((noise.shape[0], 1), 1 / steps)
    return euler(velocity, noise, th.zeros_like(step), step, steps)


def euler_reverse(velocity: Velocity, x: th.Tensor, depth: th.Tensor, steps: int) -> tuple[th.Tensor, th.Tensor]:
    """
    Reverse the flow (RQL, arXiv 2606.17551): integrate backwards from the action at t = 1 to t = 1 - depth.

    There are always ``steps`` Euler steps, of size ``depth / steps``; the velocity is evaluated at the later point and time.
    Therefore, as in the reference implementation, the result is not the exact inverse of :func:`euler_forward`.

    :param velocity: velocity in unit time, ``velocity(x, t)``
    :param x: actions at t = 1, shape ``(B, A)``
    :param depth: flow time to go back per sample, in [0, 1], shape ``(B, 1)``; 0 returns the action itself
    :param steps: number of Euler steps F
    :return: the reversed point and its flow time ``1 - depth``, shapes ``(B, A)`` and ``(B, 1)``
    """
    return euler(velocity, x, th.ones_like(depth), depth / -steps, steps), 1.0 - depth
