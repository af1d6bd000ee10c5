"""Losses of generative flow policies."""

import torch as th

from sb3_flow.losses.self_distillation import regression_loss


def flow_matching_loss(velocity: th.Tensor, noise: th.Tensor, actions: th.Tensor, mask: th.Tensor | None = None) -> th.Tensor:
    """
    Compute the loss of conditional flow matching along straight paths x_t = (1 - t) noise + t actions (arXiv 2210.02747, Eq.
    23 with sigma_min = 0): mean squared distance of the predicted velocity at x_t to ``actions - noise``.

    :param velocity: predicted velocity in unit time at (x_t, t), shape ``(B, A)``
    :param noise: x_0, shape ``(B, A)``
    :param actions: x_1, shape ``(B, A)``
    :param mask: 1 for an action component, 0 for padding, shape ``(B, A)``; masked components count as zeros in the mean, as
        in the reference implementation of RQL
    :return: scalar
    """
    return regression_loss(velocity, actions - noise, mask)
