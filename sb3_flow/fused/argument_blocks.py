"""
The arguments that Python hands to the kernels of :mod:`sb3_flow.fused.rowwise`, declared here once, by name and type.

An argument block is a row of 64-bit integers: a counter that starts at 0, a head, a part for each layer and, for some kernels,
an end. Python fills each part by keyword; a kernel finds an entry at the part's start plus :func:`entry_places` of the class.
Activations have shape ``(K, B, size)`` for K members and B rows, shares ``(parts, K, blocks, size)``. Distances count numbers.
"""

from functools import cache
from typing import Any, NamedTuple, NewType, TypeVar, get_type_hints

Address = NewType("Address", int)
"""
Address of a float32 number in memory. Python fills parts with numbers of addresses in the list that each call gives, see
:class:`sb3_flow.fused.launch.Launch`: the same sizes make the same block, wherever the arrays are in memory.
"""

NOTHING = Address(0)

COUNTER = 0
"""Place of the counter; the head follows it."""

LAYER_NORM_EPS = 1e-6

Part = TypeVar("Part", bound=tuple[int, ...])


def entry_places(part: type[Part], start: int = 0) -> Part:
    """
    Number the entries of a part.

    :param part: a class below
    :param start: place of the first entry
    :return: the place of each entry, under the entry's name
    """
    return part(*range(start, start + len(part.__annotations__)))


@cache
def addresses_in(part: Any) -> tuple[int, ...]:
    """Find the places of a part's addresses."""
    hints = get_type_hints(part)
    return tuple(i for i, name in enumerate(part._fields) if hints[name] is Address)


class ForwardHead(NamedTuple):
    """Head of ``forward`` and ``integrate``."""

    members: int
    batch: int
    block: int  # rows that are taken through all layers at a time
    layers: int


class ForwardLayer(NamedTuple):
    """Layer: product = start + input @ weights; output = GELU(product) of hidden layers, which a LayerNorm may follow."""

    input: Address
    input_member: int  # distance of members; 0 if they share the input
    depth: int  # columns of the input
    weights: Address
    weights_member: int
    weights_row: int
    weights_column: int
    start: Address
    start_member: int
    start_row: int  # 0 for a bias
    size: int  # columns of the product
    product: Address
    output: Address  # nothing for the last layer
    scale: Address  # nothing without LayerNorm
    shift: Address
    statistics: Address  # means and reciprocal standard deviations, shape (2, K, B)


class Integration(NamedTuple):
    """End of ``integrate``: Euler steps of x and t, which are the network's inputs."""

    steps: int
    size: int  # columns of x
    x: Address  # shape (B, size), changed in place
    time: Address  # shape (B,)
    step: Address  # shape (B,)


class BackwardHead(NamedTuple):
    """Head of ``backward``."""

    members: int
    batch: int
    block: int
    layers: int
    zeros: Address  # as many as the widest layer has


class BackwardLayer(NamedTuple):
    """Step from the gradient of a layer's product to the gradient of the product of the layer below."""

    grad: Address
    size: int  # columns of the gradient
    weights: Address  # transposed
    weights_member: int
    weights_row: int
    weights_column: int
    grad_below: Address  # gradient of the layer's input, turned into the gradient of the product below
    size_below: int
    product_below: Address  # nothing if no layer is below; so are the next three
    scale_below: Address  # nothing without LayerNorm
    statistics_below: Address
    shares: Address  # of the gradients of bias (and of scale and shift), to be summed over blocks


class GradientsHead(NamedTuple):
    """Head of ``parameter_gradients``."""

    members: int
    batch: int
    layers: int
    zeros: Address


class GradientsLayer(NamedTuple):
    """Gradients of a layer: of_weights = left^T @ right over the minibatch; of_others are the shares summed over blocks."""

    of_weights: Address  # shape (K, rows, columns)
    rows: int
    columns: int
    left: Address  # shape (K, B, rows)
    left_member: int
    right: Address  # shape (K, B, columns)
    right_member: int
    shares: Address
    share_rows: int  # parts times members
    share_blocks: int
    share_size: int
    of_others: Address
