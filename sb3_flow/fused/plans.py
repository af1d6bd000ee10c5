"""
The argument blocks of the compiled networks. A plan is made once for a set of sizes and serves each call of these sizes, which
gives the addresses.
"""

from functools import lru_cache
from typing import NamedTuple

from sb3_flow.fused import argument_blocks
from sb3_flow.fused.argument_blocks import NOTHING, Address, Part, entry_places
from sb3_flow.fused.launch import Launch, Memory, kernels

PLANS = 512
"""Plans that are kept."""


class LayerAddresses(NamedTuple):
    """Parameters of a layer; nothing for a missing scale or shift."""

    weight: Address
    bias: Address
    scale: Address
    shift: Address


class HiddenAddresses(NamedTuple):
    """Arrays of a hidden layer that the forward pass leaves."""

    product: Address
    output: Address
    statistics: Address


class ResultAddresses(NamedTuple):
    """Gradients of the parameters of a layer."""

    of_weight: Address
    of_others: Address


def layer_addresses(part: type[Part], first: int, layer: int) -> Part:
    """
    Number the addresses of a layer, by name, in the list of addresses that a call gives.

    :param part: a class above
    :param first: number of the first layer's first address
    :param layer: number of the layer
    """
    return entry_places(part, first + layer * len(part.__annotations__))


class Shape(NamedTuple):
    """The properties of a network that a plan depends on; ``columns`` are of the input and of each layer's product."""

    is_batched: bool  # weights have shape (K, in, out), not (out, in)
    members: int
    columns: tuple[int, ...]
    distances: tuple[tuple[int, int, int], ...]  # of a weight's members, inputs and outputs
    normed: tuple[bool, ...]  # whether a LayerNorm follows

    def parts(self, layer: int) -> int:
        """Count the gradients of a layer without the gradient of the weight."""
        return 3 if self.normed[layer] else 1

    @property
    def parameters(self) -> int:
        """Number of addresses of parameters."""
        return len(LayerAddresses._fields) * len(self.normed)


class ForwardPlan:
    """
    The argument blocks of a forward pass. A call gives these addresses: nothing, the inputs, the result, the start
    that the first layer's product is added to instead of the bias, the parameters, the arrays of ``memory``, and x, time and
    step if the plan integrates.

    :param shape: of the network
    :param batch: rows of the inputs
    :param keeps_z: keep the products of all layers for the backward pass; otherwise layers share their memory
    :param keeps_out: keep all layers' outputs, for the gradients of the weights; otherwise layers share their memory
    :param started: the first layer's product is added to rows of its own
    :param threads: number of threads that the plan runs on
    """

    INPUT, RESULT, START, PARAMETERS = Address(1), Address(2), Address(3), 4

    def __init__(self, shape: Shape, batch: int, keeps_z: bool, keeps_out: bool, started: bool, threads: int) -> None:
        members, columns = shape.members, shape.columns
        # Layers share memory only if they are of one width: threads are at different layers at a time
        widths = columns[1:-1]
        number: dict[tuple[str, int], int] = {}
        sizes: list[int] = []
        self.hidden: list[list[int]] = []
        for i, width in enumerate(widths):
            elements = members * batch * width
            arrays = ("z", keeps_z, elements), ("out", keeps_out, elements), ("statistics", keeps_z, 2 * members * batch)
            of_layer = [(name, i if kept else width) for name, kept, _ in arrays]
            for key, (_, _, size) in zip(of_layer, arrays, strict=True):
                if key not in number:
                    number[key] = len(sizes)
                    sizes.append(size)
            self.hidden.append([number[key] for key in of_layer])
        self.memory = Memory(sizes)

        first = self.PARAMETERS + shape.parameters
        rows = kernels().fewer_rows(members, batch, threads)
        head = argument_blocks.ForwardHead(members=members, batch=batch, block=rows, layers=len(shape.normed))
        layers, x, x_member = [], self.INPUT, 0
        for i, (of_member, of_row, of_column) in enumerate(shape.distances):
            size, from_bias = columns[i + 1], i > 0 or not started
            parameters = layer_addresses(LayerAddresses, self.PARAMETERS, i)
            z, out, statistics = self.RESULT, NOTHING, NOTHING
            if i < len(widths):
                z, out, statistics = (Address(first + array) for array in self.hidden[i])
            part = argument_blocks.ForwardLayer(
                input=x,
                input_member=x_member,
                depth=columns[i],
                weights=parameters.weight,
                weights_member=of_member,
                weights_row=of_row,
                weights_column=of_column,
                start=parameters.bias if from_bias else self.START,
                start_member=size if from_bias else 0,
                start_row=0 if from_bias else size,
                size=size,
                product=z,
                output=out,
                scale=parameters.scale if shape.normed[i] else NOTHING,
                shift=parameters.shift if shape.normed[i] else NOTHING,
                statistics=statistics,
            )
            layers.append(part)
            x, x_member = out, batch * size
        self._parts = members * batch * max(widths, default=0), head, layers
        self._size, self._last = columns[-1], first + len(sizes)
        self.launch = Launch(kernels().forward, *self._parts)
        self._integrations: dict[int, Launch] = {}

    def integration(self, steps: int) -> Launch:
        """Make the launch of so many Euler steps."""
        if steps not in self._integrations:
            x, time, step = (Address(self._last + i) for i in range(3))
            end = argument_blocks.Integration(steps=steps, size=self._size, x=x, time=time, step=step)
            self._integrations[steps] = Launch(kernels().integrate, *self._parts, end)
        return self._integrations[steps]


class BackwardPlan:
    """
    The argument blocks of a backward pass. A call gives these addresses: nothing, zeros, the gradient of the result, the
    gradient of the inputs, the inputs, the parameters, ``HiddenAddresses`` of each hidden layer, the arrays of ``memory``, and
    ``ResultAddresses`` of each layer.

    :param shape: of the network
    :param batch: rows of the inputs
    :param of_inputs: work out the gradient of the inputs
    :param learns: work out the gradients of the parameters
    """

    ZEROS, GRAD, TO_INPUTS, INPUT, PARAMETERS = Address(1), Address(2), Address(3), Address(4), 5

    def __init__(self, shape: Shape, batch: int, of_inputs: bool, learns: bool) -> None:
        members, columns, n_layers = shape.members, shape.columns, len(shape.normed)
        widths = columns[:-1]  # of the layers' inputs
        lowest = 0 if of_inputs else 1  # layer whose input needs a gradient
        rows = kernels().block_rows(members)
        blocks = -(-batch // rows)

        # Gradients of the layers' inputs, of which the kernel makes the gradients of the products below; and shares of the
        # parameters' gradients. Without gradients of weights layers of one width share their memory in turn.
        number: dict[tuple[str, int, int], int] = {}
        sizes: list[int] = []
        keys = [("grad", i, 0) if learns else ("grad", i % 2, width) for i, width in enumerate(widths)]
        wanted = [(keys[i], members * batch * widths[i]) for i in range(1, n_layers)]
        wanted += [(("shares", i, 0), shape.parts(i - 1) * members * blocks * widths[i]) for i in range(1, n_layers)]
        for key, size in wanted:
            if key not in number:
                number[key] = len(sizes)
                sizes.append(size)
        self.memory = Memory(sizes)

        hidden = self.PARAMETERS + shape.parameters
        arrays = hidden + len(HiddenAddresses._fields) * (n_layers - 1)
        results = arrays + len(sizes)
        grads = [self.TO_INPUTS, *(Address(arrays + number[key]) for key in keys[1:])]
        backward, above = [], self.GRAD
        for i in reversed(range(lowest, n_layers)):
            of_member, of_row, of_column = shape.distances[i]
            below = layer_addresses(HiddenAddresses, hidden, i - 1)
            scale = layer_addresses(LayerAddresses, self.PARAMETERS, i - 1).scale
            part = argument_blocks.BackwardLayer(
                grad=above,
                size=columns[i + 1],
                weights=layer_addresses(LayerAddresses, self.PARAMETERS, i).weight,
                weights_member=of_member,
                weights_row=of_column,
                weights_column=of_row,
                grad_below=grads[i],
                size_below=widths[i],
                product_below=below.product if i else NOTHING,
                scale_below=scale if i and shape.normed[i - 1] else NOTHING,
                statistics_below=below.statistics if i else NOTHING,
                shares=Address(arrays + number["shares", i, 0]) if i else NOTHING,
            )
            backward.append(part)
            above = grads[i]
        elements = members * batch * max(widths)
        head = argument_blocks.BackwardHead(members=members, batch=batch, block=rows, layers=len(backward), zeros=self.ZEROS)
        self.launch = Launch(kernels().backward, elements, head, backward)
        self.gradients: Launch | None = None
        if not learns:
            return

        gradients = []
        for i in range(n_layers):
            size, is_last = columns[i + 1], i == n_layers - 1
            x, x_member = (layer_addresses(HiddenAddresses, hidden, i - 1).output, batch * widths[i]) if i else (self.INPUT, 0)
            of_product, product_member = self.GRAD if is_last else grads[i + 1], batch * size
            by_input = shape.is_batched  # rows are inputs; otherwise outputs, as nn.Linear has it
            part_of_gradients = argument_blocks.GradientsLayer(
                of_weights=layer_addresses(ResultAddresses, results, i).of_weight,
                rows=widths[i] if by_input else size,
                columns=size if by_input else widths[i],
                left=x if by_input else of_product,
                left_member=x_member if by_input else product_member,
                right=of_product if by_input else x,
                right_member=product_member if by_input else x_member,
                shares=self.GRAD if is_last else Address(arrays + number["shares", i + 1, 0]),
                share_rows=members if is_last else shape.parts(i) * members,
                share_blocks=batch if is_last else blocks,
                share_size=size,
                of_others=layer_addresses(ResultAddresses, results, i).of_others,
            )
            gradients.append(part_of_gradients)
        of_parameters = argument_blocks.GradientsHead(members=members, batch=batch, layers=n_layers, zeros=self.ZEROS)
        self.gradients = Launch(kernels().parameter_gradients, elements, of_parameters, gradients)


plan_forward = lru_cache(PLANS)(ForwardPlan)
plan_backward = lru_cache(PLANS)(BackwardPlan)
