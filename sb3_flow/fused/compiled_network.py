"""Networks of the flow, and the choice between compiled kernels and torch's own operators for each call."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch as th
from torch import nn

from sb3_flow.compiled import unavailable
from sb3_flow.fused import launch
from sb3_flow.fused.fusable import is_untouched
from sb3_flow.fused.fused_mlp import FusedMLP
from sb3_flow.fused.plain_mlp import TanhGELU


def threads_without_kernels() -> str | None:
    """
    Say why compiled networks, which then have one thread, should not stand in for torch's operators.

    :return: the reason; None if they may
    """
    if launch._parallel is None and th.get_num_threads() > 1:
        return f"torch runs {th.get_num_threads()} threads here, which compiled networks cannot share: torch has no GNU OpenMP"
    return None


def not_covered(policy: nn.Module) -> str | None:
    """
    Say why compiled kernels would not compute the networks of a policy.

    :param policy: module with networks of the flow
    :return: why compiled kernels would not compute them, a sentence without its full stop; None if they would
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

    ``native`` says whether they may; by default they may wherever machine code can be made.
    """

    native: bool = True
    n_weights: int

    def repays_call(self, rows: int) -> bool:
        """
        Say whether kernels are faster than torch's operators at one call. Without gradients that is a fixed rule in the sizes,
        so that a run can be repeated; it is fitted to ``tests/benchmarks/backend_choice_flow.py``.

        :param rows: of the input
        """
        return th.is_grad_enabled() or (rows >= FEW_ROWS and rows * self.n_weights >= LITTLE_WORK)

    def repays_integration(self, rows: int) -> bool:
        """
        Say as :meth:`repays_call` whether kernels are faster at an integration, all steps of which are one launch.

        :param rows: points
        """
        return th.is_grad_enabled() or rows >= FEW_POINTS or self.n_weights <= MANY_WEIGHTS

    def fused(self, layers: Sequence[Sequence[th.Tensor]], activation: nn.Module) -> FusedMLP | None:
        """
        Compile the network.

        :param layers: parameters of each layer
        :param activation: of the hidden layers
        :return: the compiled network; None if kernels may not be used or do not compute this
        """
        can_run = unavailable() is None and threads_without_kernels() is None
        return FusedMLP(layers) if self.native and can_run and is_untouched(activation, TanhGELU) else None

    def fused_linear(self, layers: Iterable[nn.Module]) -> FusedMLP | None:
        """Make :meth:`fused` of ``nn.Linear`` layers; None where a layer has hooks or parametrizations, or was exchanged."""
        linear: list[Any] = list(layers)
        if not all(is_untouched(layer, nn.Linear) and layer.bias is not None for layer in linear):
            return None
        return self.fused([(layer.weight, layer.bias) for layer in linear], self.activation)  # type: ignore[arg-type]
