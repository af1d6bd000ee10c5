"""
Whole MLPs with tanh-GELU as single autograd functions: torch's matrix products, compiled kernels in between.

For networks of the size RL uses, the time outside matrix products (autograd's bookkeeping, copies of biases, reductions of
their gradients, activations) otherwise exceeds that inside. CPU and float32 only, see :func:`can_fuse`.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch as th

from sb3_flow.kernels import activations as kernels

SERIAL_BELOW = 8192
"""Elements; waking a second thread for fewer takes longer than they do."""


def _openmp() -> Any:
    """
    :return: ``GOMP_parallel`` of the OpenMP library that torch has loaded, or None. The kernels must run on torch's own
        threads: between two matrix products those wait actively, and any others would compete with them
    """
    try:
        parallel = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return parallel


_parallel = _openmp()


def _launcher(kernel: kernels.Kernel, z: th.Tensor, *tensors: th.Tensor) -> Callable[[], None]:
    """:return: runs a kernel on these contiguous tensors, of which z has shape ``(K, B, D)``"""
    arrays = (z, *tensors)  # kept alive by what is returned
    arguments = (ctypes.c_int64 * (4 + len(arrays)))(0, *z.shape, *[array.data_ptr() for array in arrays])
    threads = th.get_num_threads() if _parallel is not None and z.numel() >= SERIAL_BELOW else 1
    compiled = kernel.compiled

    def launch(_: tuple[th.Tensor, ...] = arrays) -> None:
        arguments[0] = 0
        if threads == 1:
            compiled.ctypes(arguments)
        else:
            _parallel(compiled.address, arguments, threads, 0)

    return launch


def can_fuse(*tensors: th.Tensor) -> bool:
    """
    :param tensors: input and a parameter
    :return: whether all of them are float32 on the CPU, outside of torch.compile, torch.func and forward-mode derivatives
        (none of which can look into a kernel) and of autocast (which would change the matrix products' type)
    """
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.dtype != th.float32:
            return False
    return (
        not th.compiler.is_compiling()
        and not th.is_autocast_enabled("cpu")
        and th._C._functorch.peek_interpreter_stack() is None
        and th.autograd.forward_ad._current_level < 0
    )


class _Layer(NamedTuple):
    """Tensors of one layer; its weight as ``(K, in, out)``, where an ``nn.Linear`` has ``(out, in)``."""

    weight: th.Tensor
    bias: th.Tensor
    scale: th.Tensor | None = None
    shift: th.Tensor | None = None


def _layers(parameters: Sequence[th.Tensor], per_layer: int) -> list[_Layer]:
    return [_Layer(*parameters[i : i + per_layer]) for i in range(0, len(parameters), per_layer)]


def _batched(weight: th.Tensor) -> th.Tensor:
    return weight if weight.dim() == 3 else weight.t().unsqueeze(0)


class _Hidden(NamedTuple):
    """What a hidden layer leaves for the backward pass: its product, the LayerNorm's statistics."""

    z: th.Tensor
    statistics: th.Tensor | None


def _forward(layers: list[_Layer], inputs: th.Tensor, learns: bool) -> tuple[th.Tensor, list[th.Tensor], list[_Hidden]]:
    """
    :param learns: keep every layer's input, for the gradients of the weights
    :return: the output, the layers' inputs and what else the backward pass needs
    """
    members = layers[0].weight.shape[0] if layers[0].weight.dim() == 3 else 1
    out = inputs.expand(members, *inputs.shape)
    layer_inputs = [out]
    hidden: list[_Hidden] = []
    for layer in layers[:-1]:
        z = th.bmm(out, _batched(layer.weight))
        if learns or out.shape != z.shape or not hidden:
            out = th.empty_like(z)
        if layer.scale is None or layer.shift is None:
            statistics = None
            _launcher(kernels.gelu_forward, z, layer.bias, out)()
        else:
            statistics = z.new_empty(2, *z.shape[:2])
            _launcher(kernels.gelu_layer_norm_forward, z, layer.bias, layer.scale, layer.shift, out, statistics)()
        hidden.append(_Hidden(z, statistics))
        if learns:
            layer_inputs.append(out)
    last = layers[-1]
    return th.baddbmm(last.bias.view(members, 1, -1), out, _batched(last.weight)), layer_inputs, hidden


class _FusedMLP(th.autograd.Function):
    @staticmethod
    def forward(ctx: Any, per_layer: int, inputs: th.Tensor, *parameters: th.Tensor) -> th.Tensor:
        ctx.per_layer, ctx.learns = per_layer, any(ctx.needs_input_grad[2:])
        ctx.save_for_backward(*parameters)
        output, ctx.inputs, ctx.hidden = _forward(_layers(parameters, per_layer), inputs, ctx.learns)
        return output

    @staticmethod
    @th.autograd.function.once_differentiable
    def backward(ctx: Any, grad: th.Tensor) -> tuple[th.Tensor | None, ...]:  # type: ignore[override]
        parameters = ctx.saved_tensors
        grads: list[th.Tensor | None] = [None] * len(parameters)
        layers, members = _layers(parameters, ctx.per_layer), len(grad)
        if ctx.learns:
            grads[-1] = grad.sum(1).view_as(parameters[-1])
        for i in reversed(range(len(layers))):
            weight = layers[i].weight
            if ctx.learns and weight.dim() == 3:
                grads[i * ctx.per_layer] = th.bmm(ctx.inputs[i].mT, grad)
            elif ctx.learns:
                grads[i * ctx.per_layer] = th.mm(grad[0].t(), ctx.inputs[i][0])
            if i == 0:
                break
            grad = th.bmm(grad, _batched(weight).mT)
            z, statistics = ctx.hidden[i - 1]
            _, bias, scale, _ = layers[i - 1]
            shares = z.new_empty(1 if scale is None else 3, members, kernels.n_blocks(z.shape[1]), z.shape[2])
            if scale is None:
                _launcher(kernels.gelu_backward, z, bias, grad, shares)()
            else:
                _launcher(kernels.gelu_layer_norm_backward, z, bias, scale, statistics, grad, shares)()
            if ctx.learns:
                of_layer = shares.sum(2).unbind()
                for j, share in enumerate(of_layer, start=(i - 1) * ctx.per_layer + 1):
                    grads[j] = share.view_as(parameters[j])
        grad_inputs = th.bmm(grad, _batched(layers[0].weight).mT).sum(0) if ctx.needs_input_grad[1] else None
        return None, grad_inputs, *grads


def fused_mlp(inputs: th.Tensor, layers: Sequence[Sequence[th.Tensor]]) -> th.Tensor:
    """
    MLP of K members on a shared input: linear, GELU and, where scale and shift are given, LayerNorm; the last layer is
    linear.

    :param inputs: shape ``(B, in)``
    :param layers: of each layer the weight, shape ``(K, in, out)``, or ``(out, in)`` as ``nn.Linear`` has it; the bias,
        shape ``(K, 1, out)`` or ``(out,)``; and of hidden layers with LayerNorm scale and shift, shape ``(K, 1, out)``
    :return: shape ``(K, B, out)``
    """
    if not th.is_grad_enabled():
        return _forward([_Layer(*layer) for layer in layers], inputs, learns=False)[0]
    return _FusedMLP.apply(len(layers[0]), inputs, *chain.from_iterable(layers))  # type: ignore[no-any-return]


def fused_velocity(features: th.Tensor, layers: Sequence[Sequence[th.Tensor]]) -> Callable[[th.Tensor, th.Tensor], th.Tensor]:
    """
    The velocity field of one batch of observations, without gradients: the many evaluations of an integration share their
    buffers and the first layer's product with the features.

    :param features: shape ``(B, features_dim)``
    :param layers: weight and bias of each layer, shapes ``(out, in)`` and ``(out,)``
    :return: ``velocity(x, t)``
    """
    batch, features_dim = features.shape
    weights, biases = [weight.detach().t() for weight, _ in layers], [bias.detach() for _, bias in layers]
    # Of the first layer each sample has a bias of its own; to the kernel it is a member with a batch of one
    biases[0] = th.addmm(biases[0], features.detach(), weights[0][:features_dim])
    weights[0] = weights[0][features_dim:]
    scratch = {width: features.new_empty(2, batch, width) for width in {weight.shape[1] for weight in weights[:-1]}}
    steps = []
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        z, out = scratch[weight.shape[1]]
        axis = 0 if bias.dim() == 1 else 1
        steps.append((weight, z, out, _launcher(kernels.gelu_forward, z.unsqueeze(axis), bias, out)))

    def velocity(x: th.Tensor, t: th.Tensor) -> th.Tensor:
        hidden = th.cat([x, t], dim=-1)
        for weight, z, out, launch in steps:
            th.mm(hidden, weight, out=z)
            launch()
            hidden = out
        return th.addmm(biases[-1], hidden, weights[-1])

    return velocity
