"""
Whole MLPs with tanh-GELU, forward and backward, a block of a minibatch's rows at a time: the block's activations stay in the
cache from one layer to the next, and threads need not wait for each other between layers.

Activations have shape ``(K, B, size)`` for K independent members, parameters ``(K, ...)``; all are float32, C-contiguous,
given by addresses, and outputs overlap no input.

A kernel is a C function of one pointer, ``void kernel(int64_t *arguments)``, to a block that
:mod:`sb3_flow.fused.argument_blocks` declares. It takes tasks off the counter until none is left, so any number of
threads may call it on the same arguments, whoever owns them; results do not depend on how many do.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from sb3_flow.compiled import c_function, inlined
from sb3_flow.compiled.simd import intrinsic
from sb3_flow.fused import argument_blocks
from sb3_flow.fused.activation_loops import gelu_backward, gelu_forward, gelu_layer_norm_backward, gelu_layer_norm_forward
from sb3_flow.fused.argument_blocks import COUNTER, entry_places
from sb3_flow.fused.panels import TILE_ROWS, no_overlap, pointer, product

_FIRST = COUNTER + 1
_forward_head, _forward_layer = entry_places(argument_blocks.ForwardHead, _FIRST), entry_places(argument_blocks.ForwardLayer)
_integration = entry_places(argument_blocks.Integration)
_backward_head, _backward_layer = (
    entry_places(argument_blocks.BackwardHead, _FIRST),
    entry_places(argument_blocks.BackwardLayer),
)
_gradients_head, _gradients_layer = (
    entry_places(argument_blocks.GradientsHead, _FIRST),
    entry_places(argument_blocks.GradientsLayer),
)
_FORWARD, _BACKWARD, _GRADIENTS = len(_forward_layer), len(_backward_layer), len(_gradients_layer)
_FIRST_FORWARD, _FIRST_BACKWARD = _FIRST + len(_forward_head), _FIRST + len(_backward_head)
_FIRST_GRADIENTS = _FIRST + len(_gradients_head)

PART = 22 * TILE_ROWS
"""Rows of a gradient that a thread works out at a time."""


@intrinsic
def _next_task(typingctx, counter):
    """Return the counter's value and add 1 to it, atomically."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", args[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.CPointer(types.int64)), codegen


def block_rows(members: int) -> int:
    """Choose the rows of a block: many, for each block reads all weights; but each thread should have some blocks."""
    return (44 if members >= 4 else 22) * TILE_ROWS


def fewer_rows(members: int, batch: int, threads: int) -> int:
    """Choose the rows of a block where nothing is summed over blocks, so that all threads have something to do."""
    return min(block_rows(members), max(4 * TILE_ROWS, -(-members * batch // threads)))


class Kernel(NamedTuple):
    """A kernel and the parts of its argument block: the head, a part for each layer, and the end if there is one."""

    code: c_function
    head: type
    layer: type
    end: type | None


def _kernel(head: type, layer: type, end: type | None = None) -> Callable[[Callable[[Any], None]], Kernel]:
    return lambda function: Kernel(c_function(function), head, layer, end)


@inlined()
def _evaluate(arguments, k, first, rows):
    """Take rows of a member through all layers; the arguments are as of :func:`forward`."""
    no_overlap()
    members, batch = arguments[_forward_head.members], arguments[_forward_head.batch]
    layers, at = arguments[_forward_head.layers], _FIRST_FORWARD
    row = k * batch + first
    for layer in range(layers):
        depth, size = arguments[at + _forward_layer.depth], arguments[at + _forward_layer.size]
        x, x_member = arguments[at + _forward_layer.input], arguments[at + _forward_layer.input_member]
        w, w_member = arguments[at + _forward_layer.weights], arguments[at + _forward_layer.weights_member]
        start, start_member = arguments[at + _forward_layer.start], arguments[at + _forward_layer.start_member]
        start_row = arguments[at + _forward_layer.start_row]
        z = arguments[at + _forward_layer.product] + 4 * row * size
        product(
            *(x + 4 * (k * x_member + first * depth), depth, 1),
            *(w + 4 * k * w_member, arguments[at + _forward_layer.weights_row], arguments[at + _forward_layer.weights_column]),
            *(start + 4 * (k * start_member + first * start_row), start_row),
            *(z, rows, depth, size),
        )
        if layer < layers - 1:
            out = pointer(arguments[at + _forward_layer.output] + 4 * row * size)
            scale, shift = arguments[at + _forward_layer.scale], arguments[at + _forward_layer.shift]
            if scale == 0:
                gelu_forward(pointer(z), out, rows, size)
            else:
                means, parameters = arguments[at + _forward_layer.statistics] + 4 * row, 4 * k * size
                gelu_layer_norm_forward(
                    *(pointer(z), pointer(scale + parameters), pointer(shift + parameters), out),
                    *(pointer(means), pointer(means + 4 * members * batch), rows, size),
                )
        at += _FORWARD


@_kernel(argument_blocks.ForwardHead, argument_blocks.ForwardLayer)
def forward(arguments):
    """Compute a network: products, which in all but the last layer GELU and, where there is a scale, LayerNorm follow."""
    members, batch = arguments[_forward_head.members], arguments[_forward_head.batch]
    block = arguments[_forward_head.block]
    blocks = (batch + block - 1) // block
    while True:
        task = _next_task(arguments)
        if task >= members * blocks:
            break
        first = (task % blocks) * block
        _evaluate(arguments, task // blocks, first, min(block, batch - first))


@_kernel(argument_blocks.ForwardHead, argument_blocks.ForwardLayer, argument_blocks.Integration)
def integrate(arguments):
    """Do Euler steps x <- x + h u(x, t), t <- t + h, where u is a network of one member with the inputs x and t."""
    batch, block = arguments[_forward_head.batch], arguments[_forward_head.block]
    end = _FIRST_FORWARD + _FORWARD * arguments[_forward_head.layers]
    steps, size = arguments[end + _integration.steps], arguments[end + _integration.size]
    while True:
        first = _next_task(arguments) * block
        if first >= batch:
            break
        rows = min(block, batch - first)
        x = pointer(arguments[end + _integration.x] + 4 * first * size)
        inputs = pointer(arguments[_FIRST_FORWARD + _forward_layer.input] + 4 * first * (size + 1))
        velocity = pointer(arguments[end - _FORWARD + _forward_layer.product] + 4 * first * size)
        time = pointer(arguments[end + _integration.time] + 4 * first)
        step = pointer(arguments[end + _integration.step] + 4 * first)
        for i in range(steps):
            for b in range(rows):
                for j in range(size):
                    inputs[b * (size + 1) + j] = x[b * size + j]
                inputs[b * (size + 1) + size] = time[b] + np.float32(i) * step[b]
            _evaluate(arguments, 0, first, rows)
            for b in range(rows):
                for j in range(size):
                    x[b * size + j] += step[b] * velocity[b * size + j]


@_kernel(argument_blocks.BackwardHead, argument_blocks.BackwardLayer)
def backward(arguments):
    """
    Compute gradients of :func:`forward`, from the last layer to the first. The gradients of weights are left out: they are
    products of the arrays that this kernel leaves behind.
    """
    members, batch = arguments[_backward_head.members], arguments[_backward_head.batch]
    block, layers = arguments[_backward_head.block], arguments[_backward_head.layers]
    zeros = arguments[_backward_head.zeros]
    blocks = (batch + block - 1) // block
    while True:
        task = _next_task(arguments)
        if task >= members * blocks:
            break
        k, first = task // blocks, (task % blocks) * block
        row, rows, at = k * batch + first, min(block, batch - first), _FIRST_BACKWARD
        for _ in range(layers):
            size, below = arguments[at + _backward_layer.size], arguments[at + _backward_layer.size_below]
            w, w_member = arguments[at + _backward_layer.weights], arguments[at + _backward_layer.weights_member]
            w_row, w_column = arguments[at + _backward_layer.weights_row], arguments[at + _backward_layer.weights_column]
            grad = arguments[at + _backward_layer.grad_below] + 4 * row * below
            product(
                *(arguments[at + _backward_layer.grad] + 4 * row * size, size, 1),
                *(w + 4 * k * w_member, w_row, w_column),
                *(zeros, 0, grad, rows, size, below),
            )
            if arguments[at + _backward_layer.product_below] != 0:
                z = pointer(arguments[at + _backward_layer.product_below] + 4 * row * below)
                scale = arguments[at + _backward_layer.scale_below]
                shares, a_third = arguments[at + _backward_layer.shares] + 4 * task * below, 4 * members * blocks * below
                if scale == 0:
                    gelu_backward(z, pointer(grad), pointer(shares), rows, below)
                else:
                    means = arguments[at + _backward_layer.statistics_below] + 4 * row
                    gelu_layer_norm_backward(
                        *(z, pointer(scale + 4 * k * below), pointer(means), pointer(means + 4 * members * batch)),
                        *(pointer(grad), pointer(shares), pointer(shares + a_third), pointer(shares + 2 * a_third)),
                        *(rows, below),
                    )
            at += _BACKWARD


@inlined()
def _sum_shares(shares, total, rows, blocks, size):
    """Compute total[i, j] = sum_b shares[i, b, j], of pointers."""
    no_overlap()
    for i in range(rows):
        for j in range(size):
            total[i * size + j] = shares[i * blocks * size + j]
        for b in range(1, blocks):
            for j in range(size):
                total[i * size + j] += shares[(i * blocks + b) * size + j]


@_kernel(argument_blocks.GradientsHead, argument_blocks.GradientsLayer)
def parameter_gradients(arguments):
    """Compute gradients of parameters from the arrays that :func:`forward` and :func:`backward` leave."""
    members, batch = arguments[_gradients_head.members], arguments[_gradients_head.batch]
    layers, zeros = arguments[_gradients_head.layers], arguments[_gradients_head.zeros]
    while True:
        task, layer, at = _next_task(arguments), 0, _FIRST_GRADIENTS
        while layer < layers:
            blocks = (arguments[at + _gradients_layer.rows] + PART - 1) // PART
            if task <= members * blocks:
                break
            task, layer, at = task - members * blocks - 1, layer + 1, at + _GRADIENTS
        if layer == layers:
            break
        rows, columns = arguments[at + _gradients_layer.rows], arguments[at + _gradients_layer.columns]
        if task == members * blocks:
            shares, of_others = arguments[at + _gradients_layer.shares], arguments[at + _gradients_layer.of_others]
            share_rows, share_size = arguments[at + _gradients_layer.share_rows], arguments[at + _gradients_layer.share_size]
            share_blocks = arguments[at + _gradients_layer.share_blocks]
            _sum_shares(pointer(shares), pointer(of_others), share_rows, share_blocks, share_size)
        else:
            k, first = task // blocks, (task % blocks) * PART
            left, left_member = arguments[at + _gradients_layer.left], arguments[at + _gradients_layer.left_member]
            right, right_member = arguments[at + _gradients_layer.right], arguments[at + _gradients_layer.right_member]
            product(
                *(left + 4 * (k * left_member + first), 1, rows),
                *(right + 4 * k * right_member, columns, 1, zeros, 0),
                *(arguments[at + _gradients_layer.of_weights] + 4 * (k * rows + first) * columns,),
                *(min(PART, rows - first), batch, columns),
            )
