"""
Multilayer perceptrons on blocks of a minibatch, forward and backward, from and to flat vectors of parameters and gradients.

A block of the workspace holds, feature by feature (see ``matrices``): the observations, then the outputs of every layer of
the actor, then of the critic.
"""

import math

import numpy as np

from sb3_flow.compiled import compiled
from sb3_flow.compiled.tanh import CLAMP, P1, P3, P5, P7, P9, P11, P13, Q0, Q2, Q4, Q6
from sb3_flow.native.matrices import LANES, STRIDE, add_inner_products, multiply, outlined
from sb3_flow.native.network_layout import BIAS, INPUTS, OUTPUTS, TANH, WEIGHT


@compiled()
def aligned(size, like):
    """Make an uninitialised flat array of the dtype of ``like`` that starts at a cache line."""
    array = np.empty(size + 64 // like.itemsize, like.dtype)
    skip = (-array.ctypes.data % 64) // like.itemsize
    return array[skip : skip + size]


@compiled()
def total_outputs(layers):
    """Count the features of all layers' outputs."""
    total = 0
    for i in range(len(layers)):
        total += layers[i, OUTPUTS]
    return total


@compiled()
def widest_output(layers):
    """Find the largest number of a layer's outputs."""
    widest = 0
    for i in range(len(layers)):
        widest = max(widest, layers[i, OUTPUTS])
    return widest


@compiled()
def padded(rows):
    """Round up to a multiple of a vector's lanes."""
    return (rows + LANES - 1) // LANES * LANES


FEW = 12
"""Rows up to which :func:`forward_few` is faster than :func:`forward`, which works on whole vectors of rows."""


@compiled()
def gather(table, rows, first, count, x):
    """Put ``table[rows[first : first + count]]`` at the start of x, transposed, and pad the vectors with zeros."""
    for c in range(count):
        row = rows[first + c]
        for f in range(table.shape[1]):
            x[f * STRIDE + c] = table[row, f]
    _pad(x, table.shape[1], count)


@compiled()
def gather_rows(table, first, count, x):
    """Put ``table[first : first + count]`` at the start of x, as :func:`gather`."""
    for c in range(count):
        for f in range(table.shape[1]):
            x[f * STRIDE + c] = table[first + c, f]
    _pad(x, table.shape[1], count)


@compiled()
def _pad(x, features, count):
    for f in range(features):
        for c in range(count, padded(count)):
            x[f * STRIDE + c] = 0


@compiled()
def _tanh_float32(x):
    # A rational function that is right to a few units in the last place (see ``compiled.tanh``). NaN stays NaN, since each
    # comparison with NaN is false. The loop works in place, so that the compiler makes vector operations of it.
    low, high = x.dtype.type(-CLAMP), x.dtype.type(CLAMP)
    for i in range(x.size):
        v = x[i]
        v = low if v < low else v
        v = high if v > high else v
        s = v * v
        p = P13 * s + P11
        p = p * s + P9
        p = p * s + P7
        p = p * s + P5
        p = p * s + P3
        p = p * s + P1
        q = Q6 * s + Q4
        q = q * s + Q2
        q = q * s + Q0
        x[i] = v * p / q


@compiled()
def _activate(x, activation):
    outlined()
    if activation != TANH:
        zero = x.dtype.type(0)
        for i in range(x.size):
            v = x[i]
            x[i] = zero if v < zero else v
    elif x.itemsize == 4:
        _tanh_float32(x)
    else:
        for i in range(x.size):
            x[i] = math.tanh(x[i])


@compiled()
def _times_slope(d, y, activation):
    zero, one = y.dtype.type(0), y.dtype.type(1)
    if activation != TANH:
        for i in range(y.size):
            d[i] = zero if y[i] <= zero else d[i]
    else:
        for i in range(y.size):
            d[i] *= one - y[i] * y[i]


@compiled(fastmath={"contract", "reassoc"})
def total(x):
    """Sum up a flat array."""
    s = x.dtype.type(0)
    for i in range(x.size):
        s += x[i]
    return s


@compiled()
def forward(params, layers, activation, x, inputs_at, outputs_at, columns):
    """
    Run a perceptron forward on a block.

    :param layers: layers of the perceptron, see ``Network``
    :param x: workspace, with the inputs at ``inputs_at``
    :param outputs_at: place of the first layer's outputs; the outputs of the next layers follow
    :param columns: rows of the block, padded
    :return: place of the last layer's outputs
    """
    outlined()
    for i in range(len(layers)):
        weight, bias, n_in, n_out = layers[i, WEIGHT], layers[i, BIAS], layers[i, INPUTS], layers[i, OUTPUTS]
        multiply(params, weight, n_in, 1, params, bias, 1, n_out, n_in, x, inputs_at, x, outputs_at, columns)
        inputs_at = outputs_at
        outputs_at += n_out * STRIDE
        if i + 1 < len(layers):
            for f in range(inputs_at, outputs_at, STRIDE):
                _activate(x[f : f + columns], activation)
    return inputs_at


@compiled(fastmath={"contract", "reassoc"})
def _multiply_few(params, weight, bias, n_in, n_out, x, inputs_at, outputs_at, count):
    """Compute a linear layer of a few rows, which lie row by row, so that vectors run along the weights."""
    outlined()
    whole, even = n_out - n_out % 4, count - count % 2
    for i in range(0, whole, 4):  # no sum waits for another, and weights are read once for two rows
        at, b = weight + i * n_in, bias + i
        w0, w1 = params[at : at + n_in], params[at + n_in : at + 2 * n_in]
        w2, w3 = params[at + 2 * n_in : at + 3 * n_in], params[at + 3 * n_in : at + 4 * n_in]
        for c in range(0, even, 2):
            u = x[inputs_at + c * n_in : inputs_at + (c + 1) * n_in]
            v = x[inputs_at + (c + 1) * n_in : inputs_at + (c + 2) * n_in]
            s0, s1, s2, s3 = params[b], params[b + 1], params[b + 2], params[b + 3]
            t0, t1, t2, t3 = s0, s1, s2, s3
            for k in range(n_in):
                s0 += w0[k] * u[k]
                s1 += w1[k] * u[k]
                s2 += w2[k] * u[k]
                s3 += w3[k] * u[k]
                t0 += w0[k] * v[k]
                t1 += w1[k] * v[k]
                t2 += w2[k] * v[k]
                t3 += w3[k] * v[k]
            out, other = outputs_at + c * n_out + i, outputs_at + (c + 1) * n_out + i
            x[out], x[out + 1], x[out + 2], x[out + 3] = s0, s1, s2, s3
            x[other], x[other + 1], x[other + 2], x[other + 3] = t0, t1, t2, t3
        for c in range(even, count):
            u = x[inputs_at + c * n_in : inputs_at + (c + 1) * n_in]
            s0, s1, s2, s3 = params[b], params[b + 1], params[b + 2], params[b + 3]
            for k in range(n_in):
                s0 += w0[k] * u[k]
                s1 += w1[k] * u[k]
                s2 += w2[k] * u[k]
                s3 += w3[k] * u[k]
            out = outputs_at + c * n_out + i
            x[out], x[out + 1], x[out + 2], x[out + 3] = s0, s1, s2, s3
    for i in range(whole, n_out):
        w0 = params[weight + i * n_in : weight + (i + 1) * n_in]
        for c in range(count):
            u = x[inputs_at + c * n_in : inputs_at + (c + 1) * n_in]
            s0 = params[bias + i]
            for k in range(n_in):
                s0 += w0[k] * u[k]
            x[outputs_at + c * n_out + i] = s0


@compiled()
def forward_few(params, layers, activation, x, outputs_at, observations, count):
    """
    Run :func:`forward` on at most ``FEW`` rows.

    :param x: workspace; from ``outputs_at`` on it has the room that :func:`forward` needs, and room for ``FEW`` rows of all
        outputs
    :param observations: shape ``(count, features)``
    :return: place of the last layer's outputs, which lie feature by feature as :func:`forward` leaves them
    """
    outlined()
    at, n_out = outputs_at, observations.shape[1]
    for c in range(count):
        for f in range(n_out):
            x[c * n_out + f] = observations[c, f]
    inputs_at = 0
    for i in range(len(layers)):
        weight, bias, n_in, n_out = layers[i, WEIGHT], layers[i, BIAS], layers[i, INPUTS], layers[i, OUTPUTS]
        _multiply_few(params, weight, bias, n_in, n_out, x, inputs_at, at, count)
        if i + 1 < len(layers):
            _activate(x[at : at + count * n_out], activation)
        inputs_at = at
        at += count * n_out
    for c in range(count):
        for f in range(n_out):
            x[at + f * STRIDE + c] = x[inputs_at + c * n_out + f]
    return at


@compiled()
def backward(params, layers, activation, x, inputs_at, last_at, columns, grad, d, d_at, other_at):
    """
    Add the gradients of the parameters to ``grad``.

    :param x: workspace, as :func:`forward` left it
    :param last_at: place of the last layer's outputs, which :func:`forward` returned
    :param d: flat, with the gradient of the last layer's outputs at ``d_at``, zero where rows are padded; overwritten
    :param other_at: has, like ``d_at``, room for the features of the widest layer
    """
    outlined()
    nothing = np.zeros(1, x.dtype)
    at = last_at
    for i in range(len(layers) - 1, -1, -1):
        weight, bias, n_in, n_out = layers[i, WEIGHT], layers[i, BIAS], layers[i, INPUTS], layers[i, OUTPUTS]
        at = at - n_in * STRIDE if i else inputs_at
        add_inner_products(d, d_at, n_out, x, at, n_in, columns, grad, weight)
        for f in range(n_out):
            start = d_at + f * STRIDE
            grad[bias + f] += total(d[start : start + columns])
        if i:
            multiply(params, weight, 1, n_in, nothing, 0, 0, n_in, n_out, d, d_at, d, other_at, columns)
            for f in range(n_in):
                start, of = other_at + f * STRIDE, at + f * STRIDE
                _times_slope(d[start : start + columns], x[of : of + columns], activation)
            d_at, other_at = other_at, d_at
