"""
Whole MLPs with tanh-GELU, forward and backward, a block of a minibatch's rows at a time: its activations stay in the cache
from one layer to the next, and threads need not wait for each other between layers.

Activations have shape ``(K, B, size)`` for K independent members, parameters ``(K, ...)``; all are float32, C-contiguous,
given by addresses, and outputs overlap no input.

A kernel is a C function of one pointer, ``void kernel(int64_t *arguments)``: a counter that starts at 0, then what the
kernel's description lists. It takes tasks off the counter until none is left, so any number of threads may call it on the
same arguments, whoever owns them; results do not depend on how many do.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sb3_flow.compiled import c_function, inlined
from sb3_flow.kernels.activations import gelu_backward, gelu_forward, gelu_layer_norm_backward, gelu_layer_norm_forward
from sb3_flow.kernels.panels import TILE_ROWS, apart, pointer, product

FORWARD, BACKWARD, GRADIENTS = 16, 12, 12
"""Arguments per layer."""
INPUT, PRODUCT = 5, 11
"""Where the arguments of :func:`forward` name the first layer's input, and a layer its product."""

PART = 22 * TILE_ROWS
"""Rows of a gradient that a thread works out at a time."""

_intrinsic: Any = intrinsic  # its signature names the compiler's argument, too


@_intrinsic
def _take(typingctx, counter):  # type: ignore[no-untyped-def]
    """Atomically: the counter's value, then one more."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("add", args[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.CPointer(types.int64)), codegen


def block_rows(members: int) -> int:
    """:return: rows of a block: many, for all weights are read for each; but there should be some blocks for each thread"""
    return (44 if members >= 4 else 22) * TILE_ROWS


def fewer_rows(members: int, batch: int, threads: int) -> int:
    """:return: rows of a block where nothing is summed over blocks, so that all of so many threads have something to do"""
    return min(block_rows(members), max(4 * TILE_ROWS, -(-members * batch // threads)))


@inlined()
def _evaluate(arguments, k, first, rows):  # type: ignore[no-untyped-def]
    """Rows of a member, through all layers; the arguments are those of :func:`forward`."""
    apart()
    members, batch, layers, at = arguments[1], arguments[2], arguments[4], INPUT
    row = k * batch + first
    for layer in range(layers):
        depth, size = arguments[at + 2], arguments[at + 10]
        z = arguments[at + PRODUCT] + 4 * row * size
        product(
            *(arguments[at] + 4 * (k * arguments[at + 1] + first * depth), depth, 1),
            *(arguments[at + 3] + 4 * k * arguments[at + 4], arguments[at + 5], arguments[at + 6]),
            *(arguments[at + 7] + 4 * (k * arguments[at + 8] + first * arguments[at + 9]), arguments[at + 9]),
            *(z, rows, depth, size),
        )
        if layer < layers - 1:
            out, scale, shift = pointer(arguments[at + 12] + 4 * row * size), arguments[at + 13], arguments[at + 14]
            if scale == 0:
                gelu_forward(pointer(z), out, rows, size)
            else:
                means, parameters = arguments[at + 15] + 4 * row, 4 * k * size
                gelu_layer_norm_forward(
                    *(pointer(z), pointer(scale + parameters), pointer(shift + parameters), out),
                    *(pointer(means), pointer(means + 4 * members * batch), rows, size),
                )
        at += FORWARD


@c_function
def forward(arguments):  # type: ignore[no-untyped-def]
    """
    Layers of one network: products, after all but the last GELU and, where there is a scale, LayerNorm. K; B; rows of a
    block; layers; and of each layer

    - input: address, distance of members (0 if they share it), size;
    - weights: address, distances of members, rows and columns;
    - start that the product is added to: address, distances of members and rows (0 for a bias);
    - size of the output; addresses of the product, of what becomes of it, of scale and shift, of statistics, shape
      ``(2, K, B)``.
    """
    members, batch, block = arguments[1], arguments[2], arguments[3]
    blocks = (batch + block - 1) // block
    while True:
        task = _take(arguments)
        if task >= members * blocks:
            break
        first = (task % blocks) * block
        _evaluate(arguments, task // blocks, first, min(block, batch - first))


@c_function
def integrate(arguments):  # type: ignore[no-untyped-def]
    """
    Euler steps x <- x + h u(x, t), t <- t + h with a network of one member for u, whose inputs are x and t. The arguments of
    :func:`forward`; then the number of steps, the size of x, and addresses of x, shape ``(B, size)``, which is changed in
    place, of the times at the start and of h, shape ``(B,)``.
    """
    batch, block, last = arguments[2], arguments[3], INPUT + FORWARD * arguments[4]
    steps, size = arguments[last], arguments[last + 1]
    while True:
        first = _take(arguments) * block
        if first >= batch:
            break
        rows = min(block, batch - first)
        x, inputs = pointer(arguments[last + 2] + 4 * first * size), pointer(arguments[INPUT] + 4 * first * (size + 1))
        velocity = pointer(arguments[last - FORWARD + PRODUCT] + 4 * first * size)
        time, step = pointer(arguments[last + 3] + 4 * first), pointer(arguments[last + 4] + 4 * first)
        for i in range(steps):
            for b in range(rows):
                for j in range(size):
                    inputs[b * (size + 1) + j] = x[b * size + j]
                inputs[b * (size + 1) + size] = time[b] + np.float32(i) * step[b]
            _evaluate(arguments, 0, first, rows)
            for b in range(rows):
                for j in range(size):
                    x[b * size + j] += step[b] * velocity[b * size + j]


@c_function
def backward(arguments):  # type: ignore[no-untyped-def]
    """
    Gradients of :func:`forward`, from the last layer to the first; those of weights are left out, they are products of what
    this leaves behind. K; B; rows of a block; layers; zeros, as many as the widest input; and of each layer

    - gradient of its product: address, size;
    - transposed weights: address, distances of members, rows and columns;
    - gradient of its input, which is turned into that of the product of the layer below: address, size;
    - of the layer below (0 if there is none) addresses of its product, of its scale (or 0), of statistics and of shares of
      the gradients of bias (and of scale and shift), shape ``(1 or 3, K, blocks, size)``, to be summed over blocks.
    """
    members, batch, block, layers, zeros = arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]
    blocks = (batch + block - 1) // block
    while True:
        task = _take(arguments)
        if task >= members * blocks:
            break
        k, first = task // blocks, (task % blocks) * block
        row, rows, at = k * batch + first, min(block, batch - first), 6
        for _ in range(layers):
            size, below = arguments[at + 1], arguments[at + 7]
            grad = arguments[at + 6] + 4 * row * below
            product(
                *(arguments[at] + 4 * row * size, size, 1),
                *(arguments[at + 2] + 4 * k * arguments[at + 3], arguments[at + 4], arguments[at + 5]),
                *(zeros, 0, grad, rows, size, below),
            )
            if arguments[at + 8] != 0:
                z, scale = pointer(arguments[at + 8] + 4 * row * below), arguments[at + 9]
                shares, a_third = arguments[at + 11] + 4 * task * below, 4 * members * blocks * below
                if scale == 0:
                    gelu_backward(z, pointer(grad), pointer(shares), rows, below)
                else:
                    means = arguments[at + 10] + 4 * row
                    gelu_layer_norm_backward(
                        *(z, pointer(scale + 4 * k * below), pointer(means), pointer(means + 4 * members * batch)),
                        *(pointer(grad), pointer(shares), pointer(shares + a_third), pointer(shares + 2 * a_third)),
                        *(rows, below),
                    )
            at += BACKWARD


@inlined()
def _sum_shares(shares, total, rows, blocks, size):  # type: ignore[no-untyped-def]
    """total[i, j] = sum_b shares[i, b, j], of pointers."""
    apart()
    for i in range(rows):
        for j in range(size):
            total[i * size + j] = shares[i * blocks * size + j]
        for b in range(1, blocks):
            for j in range(size):
                total[i * size + j] += shares[(i * blocks + b) * size + j]


@c_function
def parameter_gradients(arguments):  # type: ignore[no-untyped-def]
    """
    Gradients of parameters from what :func:`forward` and :func:`backward` leave. K; B; layers; zeros, as many as the widest
    layer; and of each layer

    - gradient of its weights, shape ``(K, rows, columns)``: address, rows, columns;
    - the two arrays whose product over the minibatch it is, of shapes ``(K, B, rows)`` and ``(K, B, columns)``: address and
      distance of members;
    - shares of other gradients: address, rows, blocks, size, and the address of their sums over blocks.
    """
    members, batch, layers, zeros = arguments[1], arguments[2], arguments[3], arguments[4]
    while True:
        task, layer, at = _take(arguments), 0, 5
        while layer < layers:
            blocks = (arguments[at + 1] + PART - 1) // PART
            if task <= members * blocks:
                break
            task, layer, at = task - members * blocks - 1, layer + 1, at + GRADIENTS
        if layer == layers:
            break
        rows, columns = arguments[at + 1], arguments[at + 2]
        if task == members * blocks:
            _sum_shares(
                *(pointer(arguments[at + 7]), pointer(arguments[at + 11])),
                *(arguments[at + 8], arguments[at + 9], arguments[at + 10]),
            )
        else:
            k, first = task // blocks, (task % blocks) * PART
            product(
                *(arguments[at + 3] + 4 * (k * arguments[at + 4] + first), 1, rows),
                *(arguments[at + 5] + 4 * k * arguments[at + 6], columns, 1, zeros, 0),
                *(arguments[at] + 4 * (k * rows + first) * columns, min(PART, rows - first), batch, columns),
            )
