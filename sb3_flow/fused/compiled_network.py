"""Networks of the flow, and the choice between compiled kernels and torch's own operators for each call."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch as th
from torch import nn

from sb3_flow.compiled import unavailable
from sb3_flow.fused import launch
from sb3_flow.fused.fusable import are_filled, is_untouched, nothing_looks_in, sizes_are_numbers
from sb3_flow.fused.fused_mlp import FusedMLP, NotCovered
from sb3_flow.fused.plain_mlp import TanhGELU


def threads_without_kernels() -> str | None:
    """Say why compiled networks would have one thread where torch has several; None if they would not."""
    if launch._parallel is None and th.get_num_threads() > 1:
        return f"torch runs {th.get_num_threads()} threads here, which compiled networks cannot share: torch has no GNU OpenMP"
    return None


def not_covered(policy: nn.Module) -> str | None:
    """
    Say why compiled kernels would not compute the networks of a policy.

    :param policy: module with networks of the flow
    :return: a sentence without its full stop; None if the kernels would compute them
    """
    for network in compiled_networks(policy):
        parameter = next(network.parameters())
        if parameter.device.type != "cpu":
            return f"the networks are on {parameter.device}, and the compiled kernels run on the CPU"
        if parameter.dtype != th.float32:
            return f"the parameters are {parameter.dtype}, not float32"
        if not is_untouched(network.activation, TanhGELU):  # type: ignore[arg-type]
            return f"the activation is {type(network.activation).__name__}, not TanhGELU"
    return threads_without_kernels()


FEW_ROWS, LITTLE_WORK = 16, 1_100_000
"""Rows, and rows times weights, of a call that does not repay its kernel."""
FEW_POINTS, MANY_WEIGHTS = 8, 600_000
"""Points whose integration does not repay bringing so many weights into another order."""


def compiled_networks(module: nn.Module) -> "list[CompiledNetwork]":
    """List the networks in a module that have compiled twins."""
    return [part for part in module.modules() if isinstance(part, CompiledNetwork)]


class CompiledNetwork(nn.Module):
    """
    A network that compiled kernels compute where they can; elsewhere torch's own operators give the same numbers.

    """

    native: bool = True
    """False keeps to torch's operators."""
    n_weights: int

    def repays_call(self, rows: int) -> bool:
        """
        Say whether kernels are faster than torch's operators at one call. Without gradients a fixed rule in the sizes decides,
        so that a run can be repeated; the rule is fitted to ``tests/benchmarks/backend_choice_flow.py``.

        :param rows: rows of the input
        """
        return th.is_grad_enabled() or (rows >= FEW_ROWS and rows * self.n_weights >= LITTLE_WORK)

    def repays_integration(self, rows: int) -> bool:
        """Say as :meth:`repays_call` whether kernels are faster at an integration of ``rows`` points, which is one launch."""
        return th.is_grad_enabled() or rows >= FEW_POINTS or self.n_weights <= MANY_WEIGHTS

    def fused(self, layers: Sequence[Sequence[th.Tensor]], activation: nn.Module) -> FusedMLP | None:
        """
        Compile the network.

        :param layers: parameters of each layer
        :param activation: activation of the hidden layers
        :return: the compiled network; None if kernels may not be used or do not compute this network
        """
        can_run = unavailable() is None and threads_without_kernels() is None
        return FusedMLP(layers) if self.native and can_run and is_untouched(activation, TanhGELU) else None


class LinearNetwork(CompiledNetwork):
    """
    An MLP of ``nn.Linear`` layers whose first inputs are the features of an observation. Glorot-uniform weights and zero
    biases everywhere, no normalisation layer and no squashing of the output.

    :param features_dim: dimension of the observation features
    :param sizes: number of inputs, sizes of the hidden layers, number of outputs
    :param activation_fn: activation after every hidden layer
    """

    def __init__(self, features_dim: int, sizes: Sequence[int], activation_fn: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.features_dim = features_dim
        self.n_weights = sum(n_in * n_out for n_in, n_out in pairwise(sizes))
        self.layers = nn.ModuleList(nn.Linear(n_in, n_out) for n_in, n_out in pairwise(sizes))
        for layer in self.layers:
            nn.init.xavier_uniform_(layer.weight)  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        self.activation = activation_fn()

    def fused_linear(self) -> FusedMLP | None:
        """Make :meth:`fused` of the layers; None where a layer has hooks or parametrizations, or was exchanged."""
        layers: list[Any] = list(self.layers)
        if not all(is_untouched(layer, nn.Linear) and layer.bias is not None for layer in layers):
            return None
        return self.fused([(layer.weight, layer.bias) for layer in layers], self.activation)

    def evaluate(self, inputs: th.Tensor) -> th.Tensor:
        """
        Evaluate all layers, in a kernel where kernels are faster.

        :param inputs: shape ``(B, n_in)``
        :return: shape ``(B, n_out)``
        """
        if self.native and sizes_are_numbers() and self.repays_call(inputs.shape[0]):
            network = self.fused_linear() if nothing_looks_in() and are_filled(inputs) else None
            if network is not None:
                with suppress(NotCovered):
                    return network(inputs)[0]
        first, *others = self.layers
        hidden: th.Tensor = first(inputs)
        for layer in others:
            hidden = layer(self.activation(hidden))
        return hidden
