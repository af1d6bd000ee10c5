"""Adam with a clipped gradient on flat vectors, as torch's ``clip_grad_norm_`` and ``Adam``."""

import numpy as np

from sb3_flow.compiled import compiled
from sb3_flow.native.matrices import outlined


@compiled(fastmath={"contract", "reassoc"})
def _squares(x):
    total = x.dtype.type(0)
    for i in range(x.size):
        total += x[i] * x[i]
    return total


@compiled()
def clip_norm(grad, max_norm):
    """Scale a flat gradient so that its norm is at most ``max_norm``. As in torch, a NaN makes all entries NaN."""
    outlined()
    real = grad.dtype.type
    factor = real(max_norm) / (np.sqrt(_squares(grad)) + real(1e-6))
    if not factor >= real(1):
        for i in range(grad.size):
            grad[i] *= factor


@compiled()
def adam_step(params, grad, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps):
    """
    Do a step of Adam on flat arrays: ``params``, ``exp_avg`` and ``exp_avg_sq`` change in place.

    :param step: number of this step, from 1 on
    :param beta1: decay of ``exp_avg``
    :param beta2: decay of ``exp_avg_sq``
    :param eps: added to the root
    """
    outlined()
    real = params.dtype.type
    size = real(lr / (1.0 - beta1**step))
    scale = real(np.sqrt(1.0 - beta2**step))
    rest1, decay2, rest2, small = real(1.0 - beta1), real(beta2), real(1.0 - beta2), real(eps)
    for i in range(params.size):
        g = grad[i]
        m = exp_avg[i]
        m += rest1 * (g - m)
        v = decay2 * exp_avg_sq[i] + rest2 * g * g
        exp_avg[i] = m
        exp_avg_sq[i] = v
        params[i] -= size * m / (np.sqrt(v) / scale + small)
