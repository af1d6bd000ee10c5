"""
Whole MLPs with tanh-GELU as single autograd functions, computed by compiled kernels.

In networks of the size that RL uses, torch spends more time outside matrix products (autograd's bookkeeping, copies of biases,
reductions of their gradients, activations) than inside. The kernels run on the CPU in float32, where
:mod:`sb3_flow.fused.fusable` allows; :func:`sb3_flow.fused.plain_mlp.mlp` computes the same in torch's own operators.
"""

from collections.abc import Sequence
from itertools import chain
from threading import Lock
from typing import Any

import torch as th

from sb3_flow.fused.fusable import can_fuse, is_plain
from sb3_flow.fused.launch import address_of, check, describe
from sb3_flow.fused.plain_mlp import Layer, mlp
from sb3_flow.fused.plans import Shape, plan_backward, plan_forward

WIDEST = 16_384
"""Largest number of columns; kernels keep a few rows on a thread's stack."""


class NotCovered(ValueError):
    """Parameters that the kernels cannot read, or that do not fit each other; torch's operators compute or refuse them."""


def read(layers: Sequence[Layer]) -> tuple[Shape, list[int]]:
    """
    Read the shape of a network and the addresses of its parameters, 0 for a missing scale or shift.

    :raises NotCovered: if the kernels cannot read a parameter, or a parameter does not fit the others
    """
    first = layers[0].weight
    batched = first.dim() == 3
    members, depth = (first.shape[0], first.shape[1]) if batched else (1, first.shape[-1] if first.dim() else 0)
    columns, distances, normed, addresses = [depth], [], [], []
    row: tuple[int, ...]
    for i, layer in enumerate(layers):
        weight, bias, scale, shift = layer
        if not is_plain(weight) or weight.dim() != (3 if batched else 2):
            raise _not_covered(layers, i)
        if batched:
            size, row = weight.shape[2], (members, 1, weight.shape[2])
            fits, of_weight = weight.shape == (members, depth, size), weight.stride()
        else:
            size = weight.shape[0]
            (of_column, of_row), row, fits = weight.stride(), (size,), weight.shape[1] == depth
            of_weight = 0, of_row, of_column
        has_norm = scale is not None
        for other in (bias, scale, shift) if has_norm else (bias,):
            fits = fits and is_plain(other) and other.shape == row and other.is_contiguous()
        if not fits or (shift is not None) != has_norm or (has_norm and i == len(layers) - 1):
            raise _not_covered(layers, i)
        if not (0 < depth <= WIDEST and 0 < size <= WIDEST and members):
            given = tuple(weight.shape)
            raise NotCovered(f"Members must be at least 1 and columns from 1 to {WIDEST}, but {given} was given.")
        depth = size
        columns.append(size)
        distances.append(of_weight)
        normed.append(has_norm)
        addresses += [0 if parameter is None else address_of(parameter) for parameter in layer]
    return Shape(batched, members, tuple(columns), tuple(distances), tuple(normed)), addresses  # type: ignore[arg-type]


def _not_covered(layers: Sequence[Layer], i: int) -> NotCovered:
    return NotCovered(
        f"The parameters of layer {i} (weight, bias, scale, shift) must be float32, on the CPU and fit the layer below, but "
        f"{'; '.join(map(describe, layers[i]))} was given."
    )


class FusedMLP:
    """
    MLP of K members: linear, GELU and, where scale and shift are given, LayerNorm; the last layer is linear.

    Parameters are checked at each call, for they can be exchanged (``parameter.data = ...``).

    :param layers: of each layer the parameters, see :class:`sb3_flow.fused.plain_mlp.Layer`
    """

    def __init__(self, layers: Sequence[Sequence[th.Tensor]]) -> None:
        self.parameters = list(chain.from_iterable(layers))
        self.layers = [Layer(*layer) for layer in layers]

    def __call__(self, inputs: th.Tensor, frozen: bool = False) -> th.Tensor:
        """
        Compute the network.

        :param inputs: shape ``(B, in)``, shared by all members
        :param frozen: treat the weights as constants: gradients flow to ``inputs`` only
        :return: shape ``(K, B, out)``
        :raises NotCovered: if the kernels cannot read the parameters
        :raises ValueError: if the kernels cannot read the inputs
        """
        if not th.is_grad_enabled():
            return _Forward(*read(self.layers), self.layers, _rows("inputs", inputs))(inputs)
        parameters = [parameter.detach() for parameter in self.parameters] if frozen else self.parameters
        return _FusedMLPFunction.apply(self, inputs, *parameters)

    def bind(self, features: th.Tensor) -> "_Forward":
        """
        Close a network of one member, with its present weights, over the first of its inputs, without gradients: calls of the
        result share their memory and the first layer's product with the features.

        :param features: shape ``(B, features_dim)``
        :return: the network as a function of the other inputs
        :raises NotCovered: if the kernels cannot read the parameters
        :raises ValueError: if the kernels cannot read the features
        """
        batch, (shape, _) = _rows("features", features), read(self.layers)
        if shape.is_batched or not 0 < features.shape[1] < shape.columns[0]:
            raise ValueError(
                f"`features` must be some of the {shape.columns[0]} inputs of one network, but {features.shape[1]} of"
                f" {tuple(self.layers[0].weight.shape)} was given."
            )
        weights, biases = [layer.weight.detach().t() for layer in self.layers], [layer.bias.detach() for layer in self.layers]
        start = th.addmm(biases[0], features.detach(), weights[0][: features.shape[1]])
        weights[0] = weights[0][features.shape[1] :]
        # Contiguous copies need no further copy in each call, and nobody exchanges or frees them
        weights = [weight.clone(memory_format=th.contiguous_format) for weight in weights]
        biases = [bias.clone() for bias in biases]
        columns = shape.columns[0] - features.shape[1], *shape.columns[1:]
        distances = tuple((0, size, 1) for size in columns[1:])
        addresses: list[int] = []
        for weight, bias in zip(weights, biases, strict=True):
            addresses += address_of(weight), address_of(bias), 0, 0
        copies = Shape(True, 1, columns, distances, shape.normed)
        return _Forward(copies, addresses, (weights, biases), batch, start=start)


def _rows(name: str, inputs: th.Tensor) -> int:
    if not is_plain(inputs) or inputs.dim() != 2 or not inputs.numel():
        raise ValueError(f"`{name}` must be float32 rows on the CPU, at least one of them, but {describe(inputs)} was given.")
    return inputs.shape[0]


class _Forward:
    """
    Forward pass of a network, any number of times in the same memory, one after the other; for ``shape``, ``batch``,
    ``keeps_z`` and ``keeps_out`` see :class:`sb3_flow.fused.plans.ForwardPlan`.

    :param parameters: addresses of the parameters, see :func:`read`
    :param owned: the tensors at these addresses, kept as long as this object
    :param start: rows that the first layer's product is added to instead of the bias, shape ``(B, out)``
    """

    def __init__(
        self,
        shape: Shape,
        parameters: Sequence[int],
        owned: Any,
        batch: int,
        keeps_z: bool = False,
        keeps_out: bool = False,
        start: th.Tensor | None = None,
    ) -> None:
        self.shape, columns = shape, shape.columns
        self.input_shape, self.result_shape = (batch, columns[0]), (shape.members, batch, columns[-1])
        if start is not None:
            check("start", start, (batch, columns[1]))
        self._plan = plan_forward(shape, batch, keeps_z, keeps_out, start is not None, th.get_num_threads())
        memory, self._arrays = self._plan.memory.allocate()
        self._rest = [0 if start is None else address_of(start), *parameters, *self._arrays]
        self._kept, self._lock = (owned, start, memory), Lock()  # the kernels know addresses only

    @property
    def hidden(self) -> list[int]:
        """Addresses of product, output and statistics of each hidden layer."""
        return [self._arrays[number] for numbers in self._plan.hidden for number in numbers]

    def __call__(self, inputs: th.Tensor) -> th.Tensor:
        """Compute the network, shape ``(K, B, out)``, of inputs of shape ``(B, in)``."""
        check("inputs", inputs, self.input_shape)  # the kernels would read beyond smaller inputs
        inputs, result = inputs.contiguous(), inputs.new_empty(self.result_shape)
        with self._lock:
            self._plan.launch([0, address_of(inputs), address_of(result), *self._rest])
        return result

    def integrate(self, x: th.Tensor, time: th.Tensor, step: th.Tensor, steps: int) -> th.Tensor:
        """Do the Euler steps of :func:`sb3_flow.flow.ode.euler`, where this network of one member is the velocity."""
        (batch, n_inputs), (members, _, size) = self.input_shape, self.result_shape
        if members != 1 or n_inputs != size + 1:
            raise ValueError(f"A network of 1 member and {size + 1} inputs is integrated, not {self.shape}.")
        check("x", x, (batch, size))
        check("time", time, (batch, 1))
        check("step", step, (batch, 1))
        x, time, step = x.clone(memory_format=th.contiguous_format), time.contiguous(), step.contiguous()
        inputs, velocity = x.new_empty(self.input_shape), th.empty_like(x)
        addresses = [0, address_of(inputs), address_of(velocity), *self._rest, *map(address_of, (x, time, step))]
        with self._lock:
            self._plan.integration(steps)(addresses)
        return x


class _FusedMLPFunction(th.autograd.Function):
    @staticmethod
    def forward(ctx: Any, network: FusedMLP, inputs: th.Tensor, *parameters: th.Tensor) -> th.Tensor:
        learns = any(ctx.needs_input_grad[2:])
        batch = _rows("inputs", inputs)
        ctx.pass_ = _Forward(*read(network.layers), network.layers, batch, keeps_z=True, keeps_out=learns)
        ctx.save_for_backward(inputs, *parameters)
        ctx.parts, ctx.learns = [2 if layer.scale is None else 4 for layer in network.layers], learns
        return ctx.pass_(inputs)

    @staticmethod
    def backward(ctx: Any, grad: th.Tensor) -> tuple[th.Tensor | None, ...]:
        inputs, *parameters = ctx.saved_tensors
        rest = iter(parameters)
        layers = [Layer(*(next(rest) for _ in range(parts))) for parts in ctx.parts]
        if th.is_grad_enabled() or not can_fuse(grad, inputs):  # for gradients of gradients, and where torch looks in
            return None, *_gradients_by_torch(layers, inputs, parameters, ctx.needs_input_grad[1:], grad)
        return None, *_gradients(ctx.pass_, layers, inputs, grad, ctx.needs_input_grad[1], ctx.learns)


def _gradients_by_torch(
    layers: Sequence[Layer], inputs: th.Tensor, parameters: Sequence[th.Tensor], needed: Sequence[bool], grad: th.Tensor
) -> list[th.Tensor | None]:
    """Compute the needed gradients of inputs and parameters by autograd through torch's operators."""
    create_graph = th.is_grad_enabled()
    with th.enable_grad():
        if not create_graph:
            aliases = {id(tensor): tensor.detach().requires_grad_() for tensor in (inputs, *parameters)}
            inputs, parameters = aliases[id(inputs)], [aliases[id(tensor)] for tensor in parameters]
            layers = [Layer(*(None if tensor is None else aliases[id(tensor)] for tensor in layer)) for layer in layers]  # type: ignore[arg-type]
        wanted = [tensor for tensor, needs in zip((inputs, *parameters), needed, strict=True) if needs]
        found = iter(th.autograd.grad(mlp(layers, inputs), wanted, grad, create_graph=create_graph))
    return [next(found) if needs else None for needs in needed]


def _gradients(
    pass_: _Forward, layers: Sequence[Layer], inputs: th.Tensor, grad: th.Tensor, of_inputs: bool, learns: bool
) -> list[th.Tensor | None]:
    """
    Compute the gradients of the inputs and of each parameter by the kernels.

    :param pass_: the forward pass, with the arrays that it left
    :param layers: parameters of the network
    :param inputs: inputs of the network
    :param grad: gradient of the result
    :param of_inputs: work out the gradient of the inputs, which otherwise is None
    :param learns: work out the gradients of the parameters, which otherwise are None
    """
    shape, parameters = read(layers)
    if shape[:3] != pass_.shape[:3]:
        raise ValueError(f"Parameters had the shape {pass_.shape} in the forward pass, but have {shape} in the backward pass.")
    check("inputs", inputs, pass_.input_shape)
    check("grad", grad, pass_.result_shape)
    plan = plan_backward(shape, inputs.shape[0], of_inputs, learns)
    _memory, arrays = plan.memory.allocate()  # kept until the kernels have run
    to_inputs = grad.new_empty(shape.members, *inputs.shape) if of_inputs else None
    inputs, grad, zeros = inputs.contiguous(), grad.contiguous(), grad.new_zeros(max(shape.columns))
    into = 0 if to_inputs is None else address_of(to_inputs)
    addresses = [0, address_of(zeros), address_of(grad), into, address_of(inputs), *parameters, *pass_.hidden, *arrays]
    plan.launch(addresses)
    results: list[th.Tensor | None] = [None if to_inputs is None else to_inputs.sum(0)]
    if plan.gradients is None:
        return [*results, *([None] * sum(2 if layer.scale is None else 4 for layer in layers))]
    for i, layer in enumerate(layers):
        weight = th.empty_like(layer.weight, memory_format=th.contiguous_format)
        others = layer.bias.new_empty(shape.parts(i), *layer.bias.shape)
        addresses += [address_of(weight), address_of(others)]
        results += [weight, *others]
    plan.gradients(addresses)
    return results
