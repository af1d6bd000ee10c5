"""
Whole MLPs with tanh-GELU as single autograd functions, computed by compiled kernels.

For networks of the size RL uses, the time outside matrix products (autograd's bookkeeping, copies of biases, reductions of
their gradients, activations) otherwise exceeds that inside. CPU and float32 only, see :func:`can_fuse`.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch as th

from sb3_flow.flow.launch import Launch, address_of, allocate
from sb3_flow.kernels import rowwise as kernels


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
    """Parameters of one layer; its weight as ``(K, in, out)``, or as an ``nn.Linear`` has it."""

    weight: th.Tensor
    bias: th.Tensor
    scale: th.Tensor | None = None
    shift: th.Tensor | None = None


def _batched(weight: th.Tensor) -> th.Tensor:
    return weight if weight.dim() == 3 else weight.detach().t().unsqueeze(0)


class FusedMLP:
    """
    MLP of K members: linear, GELU and, where scale and shift are given, LayerNorm; the last layer is linear.

    :param layers: of each layer the weight, shape ``(K, in, out)``, or ``(out, in)`` as ``nn.Linear`` has it; the bias,
        shape ``(K, 1, out)`` or ``(out,)``; and of hidden layers with LayerNorm scale and shift, shape ``(K, 1, out)``
    """

    def __init__(self, layers: Sequence[Sequence[th.Tensor]]) -> None:
        self.parameters = list(chain.from_iterable(layers))
        self.layers = [_Layer(*layer) for layer in layers]
        self.weights = [_batched(layer.weight) for layer in self.layers]

    def __call__(self, inputs: th.Tensor, frozen: bool = False) -> th.Tensor:
        """
        :param inputs: shape ``(B, in)``, shared by all members
        :param frozen: treat the weights as constants: gradients flow to ``inputs`` only
        :return: shape ``(K, B, out)``
        """
        if not th.is_grad_enabled():
            return _Forward(self.layers, self.weights, len(inputs))(inputs)
        parameters = [parameter.detach() for parameter in self.parameters] if frozen else self.parameters
        return _FusedMLP.apply(self, inputs, *parameters)  # type: ignore[no-any-return]

    def bind(self, features: th.Tensor) -> "_Forward":
        """
        Close the network over the first of its inputs, without gradients: calls of the result share their memory and the
        first layer's product with the features.

        :param features: shape ``(B, features_dim)``
        :return: the network as a function of the other inputs
        """
        features_dim = features.shape[1]
        first, *others = self.weights
        start = th.addmm(self.layers[0].bias, features.detach(), first[0, :features_dim])
        weights = [weight.contiguous() for weight in (first[:, features_dim:], *others)]  # rather than in every call
        return _Forward(self.layers, weights, len(features), start=start)


class _Hidden(NamedTuple):
    """Addresses of what a hidden layer leaves for the backward pass: product, what became of it, statistics of LayerNorm."""

    z: int
    out: int
    statistics: int


class _Forward:
    """
    Forward pass of a network, any number of times in the same memory.

    :param layers: of the network
    :param weights: of each layer, shape ``(K, in, out)``; those of its inputs that ``start`` stands for are left out
    :param batch: rows of the inputs
    :param keeps_z: keep the products of all layers for the backward pass; otherwise layers share their memory
    :param keeps_out: keep all layers' inputs, for the gradients of the weights; otherwise they do so
    :param start: what the first layer's product is added to instead of the bias, shape ``(B, out)``
    """

    def __init__(
        self,
        layers: Sequence[_Layer],
        weights: Sequence[th.Tensor],
        batch: int,
        keeps_z: bool = False,
        keeps_out: bool = False,
        start: th.Tensor | None = None,
    ) -> None:
        members, _, size = weights[-1].shape
        self._input_shape, self._result_shape = (batch, weights[0].shape[1]), (members, batch, size)
        self._result = kernels.INPUT + kernels.FORWARD * (len(layers) - 1) + kernels.PRODUCT

        # Layers share memory only if they are of one width: threads are at different layers at a time
        widths = [weight.shape[2] for weight in weights[:-1]]
        keys = [
            [(name, i if kept else width) for name, kept in (("z", keeps_z), ("out", keeps_out), ("statistics", keeps_z))]
            for i, width in enumerate(widths)
        ]
        sizes = {}
        for (z, out, statistics), width in zip(keys, widths, strict=True):
            sizes[z] = sizes[out] = members * batch * width
            sizes[statistics] = 2 * members * batch
        memory, places = allocate(weights[0], sizes)
        self._kept = layers, weights, start, memory  # the kernels know addresses only
        self.hidden = [_Hidden(*(places[key] for key in of_layer)) for of_layer in keys]

        rows = kernels.fewer_rows(members, batch, th.get_num_threads())
        arguments, x = [members, batch, rows, len(layers)], 0
        for i, (layer, weight) in enumerate(zip(layers, weights, strict=True)):
            _, depth, size = weight.shape
            arguments += [x, batch * depth if i else 0, depth, weight.data_ptr(), *weight.stride()]
            arguments += [layer.bias.data_ptr(), size, 0] if i or start is None else [start.data_ptr(), 0, size]
            of_z, x, of_statistics = self.hidden[i] if i < len(widths) else (0, 0, 0)
            arguments += [size, of_z, x, address_of(layer.scale), address_of(layer.shift), of_statistics]
        self._elements, self._arguments = members * batch * max(widths, default=0), arguments
        self._launch = Launch(kernels.forward, self._elements, arguments)

    def __call__(self, inputs: th.Tensor) -> th.Tensor:
        """
        :param inputs: shape ``(B, in)``
        :return: shape ``(K, B, out)``
        """
        self._check_shape("inputs", inputs, self._input_shape)  # the kernels would read what is not theirs
        inputs, result = inputs.contiguous(), inputs.new_empty(self._result_shape)
        arguments = self._launch.arguments
        arguments[kernels.INPUT], arguments[self._result] = inputs.data_ptr(), result.data_ptr()
        self._launch()
        return result

    @staticmethod
    def _check_shape(name: str, tensor: th.Tensor, shape: tuple[int, ...]) -> None:
        if tensor.shape != shape:
            raise ValueError(f"`{name}` must be of shape {shape}, but {tuple(tensor.shape)} was given.")

    def integrate(self, x: th.Tensor, time: th.Tensor, step: th.Tensor, steps: int) -> th.Tensor:
        """
        Euler steps x <- x + step u(x, t), t <- t + step, where u is this network of one member.

        :param x: shape ``(B, A)``
        :param time: t at the start, shape ``(B, 1)``
        :param step: shape ``(B, 1)``
        :param steps: number of steps
        :return: shape ``(B, A)``
        """
        (batch, n_inputs), size = self._input_shape, x.shape[-1]
        self._check_shape("x", x, (batch, n_inputs - 1))
        self._check_shape("time", time, (batch, 1))
        self._check_shape("step", step, (batch, 1))
        x, time, step = x.clone(memory_format=th.contiguous_format), time.contiguous(), step.contiguous()
        inputs, velocity = x.new_empty(self._input_shape), th.empty_like(x)
        addresses = [tensor.data_ptr() for tensor in (x, time, step)]
        launch = Launch(kernels.integrate, self._elements, [*self._arguments, steps, size, *addresses])
        launch.arguments[kernels.INPUT], launch.arguments[self._result] = inputs.data_ptr(), velocity.data_ptr()
        launch()
        return x


class _FusedMLP(th.autograd.Function):
    @staticmethod
    def forward(ctx: Any, network: FusedMLP, inputs: th.Tensor, *parameters: th.Tensor) -> th.Tensor:
        learns = any(ctx.needs_input_grad[2:])
        ctx.save_for_backward(inputs, *parameters)
        ctx.network, ctx.learns = network, learns
        ctx.pass_ = _Forward(network.layers, network.weights, len(inputs), keeps_z=True, keeps_out=learns)
        return ctx.pass_(inputs)  # type: ignore[no-any-return]

    @staticmethod
    @th.autograd.function.once_differentiable
    def backward(ctx: Any, grad: th.Tensor) -> tuple[th.Tensor | None, ...]:  # type: ignore[override]
        inputs, *parameters = ctx.saved_tensors
        network, layers, (members, batch, _) = ctx.network, ctx.network.layers, grad.shape
        lowest = 0 if ctx.needs_input_grad[1] else 1  # layer whose input needs a gradient
        widths = [weight.shape[1] for weight in network.weights]  # of the layers' inputs
        parts = [1 if layer.scale is None else 3 for layer in layers]
        rows = kernels.block_rows(members)
        shares_shapes = [(parts[i - 1], members, -(-batch // rows), width) for i, width in enumerate(widths)]

        # Gradients of the layers' inputs, of which the kernel makes those of the products below; shares of the parameters'.
        # Without gradients of weights every other layer shares its memory if it is of the same width.
        keys = [("grad", i, 0) if ctx.learns else ("grad", i % 2, width) for i, width in enumerate(widths)]
        sizes = {key: members * batch * width for key, width in zip(keys[1:], widths[1:], strict=True)}
        sizes |= {("shares", i, 0): math.prod(shares_shapes[i]) for i in range(1, len(layers))}
        _memory, places = allocate(grad, sizes)  # kept until the kernels have run
        of_inputs = None if lowest else grad.new_empty(members, batch, widths[0])
        grads = [address_of(of_inputs), *(places[key] for key in keys[1:])]
        grad, zeros = grad.contiguous(), grad.new_zeros(max(*widths, grad.shape[2]))
        arguments, above = [members, batch, rows, len(layers) - lowest, zeros.data_ptr()], grad.data_ptr()
        for i in reversed(range(lowest, len(layers))):
            weight = network.weights[i].mT
            arguments += [above, weight.shape[1], weight.data_ptr(), *weight.stride(), grads[i], widths[i]]
            if i:
                hidden = ctx.pass_.hidden[i - 1]
                arguments += [hidden.z, address_of(layers[i - 1].scale), hidden.statistics, places["shares", i, 0]]
            else:
                arguments += [0, 0, 0, 0]
            above = grads[i]
        Launch(kernels.backward, members * batch * max(widths), arguments)()

        grad_inputs = None if of_inputs is None else of_inputs.sum(0)
        if not ctx.learns:
            return None, grad_inputs, *([None] * len(parameters))

        inputs = inputs.contiguous()
        results: list[th.Tensor] = []
        arguments = [members, batch, len(layers), zeros.data_ptr()]
        for i, layer in enumerate(layers):
            size = network.weights[i].shape[2]
            x = [ctx.pass_.hidden[i - 1].out, batch * widths[i]] if i else [inputs.data_ptr(), 0]
            if i == len(layers) - 1:
                of_product, shares = grad.data_ptr(), [grad.data_ptr(), members, batch, size]
            else:
                n_parts, _, n_shares, _ = shares_shapes[i + 1]
                of_product, shares = grads[i + 1], [places["shares", i + 1, 0], n_parts * members, n_shares, size]
            weight = th.empty_like(layer.weight, memory_format=th.contiguous_format)
            others = layer.bias.new_empty(parts[i], *layer.bias.shape)
            arguments.append(weight.data_ptr())
            if weight.dim() == 3:
                arguments += [widths[i], size, *x, of_product, batch * size]
            else:
                arguments += [size, widths[i], of_product, batch * size, *x]
            arguments += [*shares, others.data_ptr()]
            results += [weight, *others]
        Launch(kernels.parameter_gradients, members * batch * max(widths), arguments)()
        return None, grad_inputs, *results
