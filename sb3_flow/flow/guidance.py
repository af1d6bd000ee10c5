"""
Guidance by the gradient of a value function: the trust-region projection of FMQ (arXiv 2605.12416), and Euler steps that
follow the gradient (QGF, arXiv 2606.11087).

A critic is ``critic(actions) -> Q_k(s, a)``, closed over the observation: actions of shape ``(..., A)``, values of the K
members of shape ``(K, ...)``.
"""

from collections.abc import Callable
from typing import Literal

import torch as th

from sb3_flow.compiled.choices import check_choice
from sb3_flow.flow.ode import Velocity

Critic = Callable[[th.Tensor], th.Tensor]
Aggregation = Literal["first", "min", "mean"]

EPS = 1e-8


def aggregate_q(q_values: th.Tensor, aggregation: Aggregation) -> th.Tensor:
    """
    Aggregate the values of the critic's members.

    :param q_values: values of the members, shape ``(K, ...)``
    :param aggregation: ``"min"`` (clipped double Q), ``"mean"``, or ``"first"`` for the first member alone
    :return: shape ``(...)``
    """
    if aggregation == "first":
        return q_values[0]
    if aggregation == "min":
        return q_values.amin(dim=0)
    check_choice(("first", "min", "mean"), aggregation=aggregation)
    return q_values.mean(dim=0)


def action_gradient(critic: Critic, actions: th.Tensor, aggregation: Aggregation = "first") -> tuple[th.Tensor, th.Tensor]:
    """
    Compute grad_a Q(s, a) of every action on its own. Nothing else gets a gradient, and neither result carries a gradient.

    :param critic: ``critic(actions)``; a critic that treats its weights as constants saves the time for their gradients
    :param actions: where the gradient is taken, shape ``(..., A)``
    :param aggregation: of the members, see :func:`aggregate_q`; FMQ trains with the first member, QGBS uses the minimum
    :return: values of all members, shape ``(K, ...)``, and the gradient, shape ``(..., A)``
    """
    with th.enable_grad():
        leaf = actions.detach().requires_grad_()
        q_values = critic(leaf)
        (gradient,) = th.autograd.grad(aggregate_q(q_values, aggregation).sum(), leaf)
    return q_values.detach(), gradient


def q_guided_projection(u_ref: th.Tensor, grad_q: th.Tensor, eta: float | th.Tensor) -> th.Tensor:
    """
    Maximise the linearised Q over velocities in a ball around u_ref: u* = u_ref + eta g / (||g||_2 + 1e-8)
    (Theorem 3.2). The norm is over all A coordinates, so the steps of a chunk share the radius; without a gradient
    u* is u_ref. The result is not clipped.

    :param u_ref: reference velocity, or the action itself in beam search, shape ``(..., A)``
    :param grad_q: g, shape ``(..., A)``
    :param eta: radius, a number, or a number per sample, shape ``(...)``, see :func:`effective_radius`
    :return: u*, shape ``(..., A)``
    """
    direction = grad_q / (th.linalg.vector_norm(grad_q, dim=-1, keepdim=True) + EPS)
    projection: th.Tensor = u_ref + (eta.unsqueeze(-1) if isinstance(eta, th.Tensor) else eta) * direction
    return projection


def effective_radius(
    q_values: th.Tensor,
    beta: float,
    eta: float,
    *,
    numerator: Literal["released", "published"] = "released",
    over_batch: Callable[[th.Tensor], th.Tensor] | None = None,
) -> th.Tensor:
    """
    Compute a radius that shrinks where the critics disagree: numerator / (1 + beta delta) (Eq. 13), with delta the members'
    population standard deviation relative to its mean over the batch. The published delta, ``|Q_1 - Q_2| / sqrt(2)``,
    differs by a factor that cancels.

    :param q_values: values of the members at the guided actions, shape ``(K, B)``
    :param beta: sensitivity to disagreement; 0 for a constant radius
    :param eta: base radius of the published form
    :param numerator: ``"published"`` has eta; the released implementation has 1 for every eta
    :param over_batch: turns the mean over these samples into the mean over the batch, if they are a share of it
    :return: shape ``(B,)``
    """
    check_choice(("released", "published"), numerator=numerator)
    deviation = q_values.std(dim=0, correction=0)
    mean = deviation.mean() if over_batch is None else over_batch(deviation.mean())
    return (eta if numerator == "published" else 1.0) / (1.0 + beta * deviation / (mean + EPS))


def guided_euler(velocity: Velocity, value: Velocity, noise: th.Tensor, steps: int, weight: float) -> th.Tensor:
    """
    Integrate a flow from noise to an action by Euler steps of size d = 1 / steps, and after each follow a value's gradient:

        y = x + d u(x, t),   x <- y + d weight grad_y mean_k V_k(y, t + d)

    (QGF, arXiv 2606.11087, with a value of partial actions in place of the value of an estimated action). The result is not
    clipped.

    :param velocity: u, ``velocity(x, t)``
    :param value: V_k of partial actions, ``value(y, t)`` of shape ``(K, B, 1)``
    :param noise: starting points, shape ``(B, A)``
    :param steps: number of Euler steps
    :param weight: of the gradient
    :return: shape ``(B, A)``
    """
    x, size = noise, 1 / steps
    for i in range(steps):
        y = x + size * velocity(x, noise.new_full((len(noise), 1), i * size))
        t = noise.new_full((len(noise), 1), (i + 1) * size)
        _, gradient = action_gradient(lambda points, t=t: value(points, t), y, "mean")  # type: ignore[misc]
        x = y + size * weight * gradient
    return x
