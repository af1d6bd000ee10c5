"""
Losses of flow maps (FMQ, arXiv 2605.12416, Eqs. 3-6): a loss that teaches the velocity on the diagonal r = t, and three
alternative losses that make the average velocities u_{r,t} agree with it (self-distillation).

In all losses ``velocity(a, r, t)`` is the live network, closed over the observation; the losses stop gradients themselves and
need no second copy of the weights. A self-distillation loss and the diagonal loss take independent noise. Derivatives in time
are exact (``torch.func.jvp``).
"""

from collections.abc import Callable
from typing import Literal

import torch as th

from sb3_flow.compiled.choices import check_choice

_AverageVelocity = Callable[[th.Tensor, th.Tensor, th.Tensor], th.Tensor]


def regression_loss(prediction: th.Tensor, target: th.Tensor, mask: th.Tensor | None = None) -> th.Tensor:
    """
    Compute the mean squared error over all B * A components.

    :param prediction: shape ``(B, A)``
    :param target: shape ``(B, A)``
    :param mask: weight of every component, shape ``(B, A)``, or of every sample, shape ``(B, 1)``, without renormalisation:
        components of weight zero count as zeros in the mean (as in the released implementation)
    :return: scalar
    """
    error = (prediction - target).square()
    return (error if mask is None else error * mask).mean()


def diagonal_loss(
    velocity: _AverageVelocity, actions: th.Tensor, noise: th.Tensor, t: th.Tensor, mask: th.Tensor | None = None
) -> th.Tensor:
    """
    Compute flow matching of the instantaneous velocity u_{t,t} (Eq. 3): ||u_{t,t}(a_t) - (a_1 - a_0)||^2.

    :param velocity: average velocity, ``velocity(a_r, r, t)``
    :param actions: a_1, shape ``(B, A)``
    :param noise: a_0 ~ N(0, I), shape ``(B, A)``
    :param t: t ~ U[0, 1), shape ``(B, 1)``
    :param mask: see :func:`regression_loss`
    :return: scalar
    """
    return regression_loss(velocity(_interpolate(noise, actions, t), t, t), actions - noise, mask)


def eulerian_loss(
    velocity: _AverageVelocity, actions: th.Tensor, noise: th.Tensor, r: th.Tensor, t: th.Tensor, mask: th.Tensor | None = None
) -> th.Tensor:
    """
    Compute Eulerian self-distillation, the mean flow loss (Eq. 5). Along a path, u_{r,t} = v_r + (t - r) d/dr u_{r,t}(a_r):

        ||u_{r,t}(a_r) - sg[v + (t - r) (d_r u + (d_a u) v)]||^2,   v = a_1 - a_0

    The target is linear in v, so v of the single sample instead of the mean v_r leaves the target unbiased.

    :param velocity: average velocity, ``velocity(a_r, r, t)``
    :param actions: a_1, shape ``(B, A)``
    :param noise: a_0 ~ N(0, I), shape ``(B, A)``
    :param r: r <= t, shape ``(B, 1)``
    :param t: shape ``(B, 1)``
    :param mask: see :func:`regression_loss`
    :return: scalar
    """
    a_r, v = _interpolate(noise, actions, r), actions - noise
    with th.no_grad():
        _, du_dr = th.func.jvp(lambda a, r: velocity(a, r, t), (a_r, r), (v, th.ones_like(r)))[:2]
        target = th.addcmul(v, t - r, du_dr)
    return regression_loss(velocity(a_r, r, t), target, mask)


def lagrangian_loss(
    velocity: _AverageVelocity,
    actions: th.Tensor,
    noise: th.Tensor,
    r: th.Tensor,
    t: th.Tensor,
    mask: th.Tensor | None = None,
    gradient: Literal["jump", "diagonal"] = "jump",
) -> th.Tensor:
    """
    Lagrangian self-distillation (Eq. 4): d/dt X_{r,t}(a_r) = u_{t,t}(X_{r,t}(a_r)) for the jump
    X_{r,t}(a_r) = a_r + (t - r) u_{r,t}(a_r). Which side learns is disputed:

    - ``"jump"``: ||d/dt X - sg[u_{t,t}(X)]||^2, the diagonal teaches the jumps (arXiv 2505.18825)
    - ``"diagonal"``: ||u_{t,t}(sg[X]) - sg[d/dt X]||^2, the released implementation of FMQ; nothing reaches u_{r,t}
      with r < t but through shared weights

    Measured on N(0.4, 0.3^2) data with small networks, five trainings each: one-step samples have mean and standard
    deviation within 0.03 with ``"jump"``; with ``"diagonal"`` their mean is off by 0.4 to 1.2, and that of samples
    integrated along the diagonal, exact to 0.01 without this loss, by 0.2 to 0.4. Hence the default.

    :param velocity: average velocity, ``velocity(a_r, r, t)``
    :param actions: a_1, shape ``(B, A)``
    :param noise: a_0 ~ N(0, I), shape ``(B, A)``
    :param r: r <= t, shape ``(B, 1)``
    :param t: shape ``(B, 1)``
    :param mask: see :func:`regression_loss`
    :param gradient: network evaluation that the gradient goes to
    :return: scalar
    """
    check_choice(("jump", "diagonal"), gradient=gradient)
    a_r = _interpolate(noise, actions, r)

    def jump(t: th.Tensor) -> th.Tensor:
        return th.addcmul(a_r, t - r, velocity(a_r, r, t))

    if gradient == "jump":
        x, dx_dt = th.func.jvp(jump, (t,), (th.ones_like(t),))[:2]
        with th.no_grad():
            u = velocity(x, t, t)
        return regression_loss(dx_dt, u, mask)
    with th.no_grad():
        x, dx_dt = th.func.jvp(jump, (t,), (th.ones_like(t),))[:2]
    return regression_loss(velocity(x, t, t), dx_dt, mask)


def progressive_loss(
    velocity: _AverageVelocity,
    actions: th.Tensor,
    noise: th.Tensor,
    r: th.Tensor,
    t: th.Tensor,
    gamma: th.Tensor,
    mask: th.Tensor | None = None,
) -> th.Tensor:
    """
    Compute progressive self-distillation (Eq. 6): one jump from r to t ends where two jumps over w = r + gamma (t - r) end:

        ||u_{r,t}(a_r) - sg[gamma u_{r,w}(a_r) + (1 - gamma) u_{w,t}(X_{r,w}(a_r))]||^2

    :param velocity: average velocity, ``velocity(a_r, r, t)``
    :param actions: a_1, shape ``(B, A)``
    :param noise: a_0 ~ N(0, I), shape ``(B, A)``
    :param r: r <= t, shape ``(B, 1)``
    :param t: shape ``(B, 1)``
    :param gamma: gamma ~ U[0, 1), shape ``(B, 1)``
    :param mask: see :func:`regression_loss`
    :return: scalar
    """
    a_r = _interpolate(noise, actions, r)
    with th.no_grad():
        w = th.lerp(r, t, gamma)
        first = velocity(a_r, r, w)
        second = velocity(th.addcmul(a_r, w - r, first), w, t)
        target = th.lerp(second, first, gamma)
    return regression_loss(velocity(a_r, r, t), target, mask)


def _interpolate(noise: th.Tensor, actions: th.Tensor, t: th.Tensor) -> th.Tensor:
    """Compute (1 - t) noise + t actions."""
    return (1.0 - t) * noise + t * actions
