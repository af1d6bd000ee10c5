"""
Networks of the flow: a velocity field, actors of one step and batched ensembles, initialised as in the reference
implementations.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import Any

import torch as th
from torch import nn
from torch.nn import functional as F

from sb3_flow.flow.ode import Velocity
from sb3_flow.fused.compiled_network import CompiledNetwork, LinearNetwork
from sb3_flow.fused.fusable import are_filled, can_fuse, is_untouched, nothing_looks_in, sizes_are_numbers
from sb3_flow.fused.fused_mlp import FusedMLP, NotCovered
from sb3_flow.fused.plain_mlp import Layer, TanhGELU, mlp

FEW_ENSEMBLE_ROWS, FEW_WEIGHTS = 8, 300_000
"""Rows of an ensemble that do not repay the kernel, unless the weights are few."""


class VelocityNetwork(LinearNetwork):
    """
    Velocity field u(s, x, t) in unit time: an MLP on concat[s, x, t] with t one raw scalar.

    :param features_dim: dimension of the observation features s
    :param action_dim: dimension A of the (flattened chunk) action x
    :param net_arch: hidden layer sizes
    :param activation_fn: activation after every hidden layer
    """

    def __init__(
        self, features_dim: int, action_dim: int, net_arch: Sequence[int], activation_fn: Callable[[], nn.Module] = TanhGELU
    ) -> None:
        super().__init__(features_dim, [features_dim + action_dim + 1, *net_arch, action_dim], activation_fn)

    def bind(self, features: th.Tensor) -> Velocity:
        """
        Close the field over the observation. The share of the first layer that depends on s alone is computed once and
        serves every step of an integration.

        :param features: observation features, shape ``(B, features_dim)``
        :return: ``velocity(x, t)`` for x of shape ``(B, A)`` and t of shape ``(B, 1)``
        """
        if self.native and nothing_looks_in():
            if not self.repays_integration(features.shape[0]):
                return self._bind_few(features)
            network = self.fused_linear() if are_filled(features) else None
            if network is not None:
                return _FusedVelocity(features, network, self._bind_plain)
        return self._bind_plain(features)

    def _bind_few(self, features: th.Tensor) -> Velocity:
        """Use torch's own operators for an integration of few rows: the parameters are looked up once for all steps."""
        layers: list[Any] = list(self.layers)
        if not all(is_untouched(layer, nn.Linear) for layer in layers):
            return self._bind_plain(features)
        (weight, bias), *others = [(layer.weight, layer.bias) for layer in layers]
        from_features = F.linear(features, weight[:, : self.features_dim], bias)
        flow_weight = weight[:, self.features_dim :].t()

        def velocity(x: th.Tensor, t: th.Tensor) -> th.Tensor:
            hidden = th.addmm(from_features, th.cat([x, t], dim=-1), flow_weight)
            for weight, bias in others:
                hidden = F.linear(self.activation(hidden), weight, bias)
            return hidden

        return velocity

    def _bind_plain(self, features: th.Tensor) -> Velocity:
        first, *others = list[Any](self.layers)
        if is_untouched(first, nn.Linear):
            from_features = F.linear(features, first.weight[:, : self.features_dim], first.bias)
            flow_weight = first.weight[:, self.features_dim :].t()

        def velocity(x: th.Tensor, t: th.Tensor) -> th.Tensor:
            if is_untouched(first, nn.Linear):
                hidden = th.addmm(from_features, th.cat([x, t], dim=-1), flow_weight)
            else:
                hidden = first(th.cat([features, x, t], dim=-1))
            for layer in others:
                hidden = layer(self.activation(hidden))
            return hidden

        return velocity

    def forward(self, features: th.Tensor, x: th.Tensor, t: th.Tensor) -> th.Tensor:
        return self.bind(features)(x, t)


class _FusedVelocity:
    """
    A velocity field closed over a batch of observations, by compiled kernels where they can be used.

    :param features: observation features, shape ``(B, features_dim)``
    :param network: the compiled field
    :param bind_plain: closes the same field over features by torch's own operators
    """

    def __init__(self, features: th.Tensor, network: FusedMLP, bind_plain: Callable[[th.Tensor], Velocity]) -> None:
        self._features, self._network, self._bind_plain = features, network, bind_plain

    @cached_property
    def _integrand(self) -> Any:
        return self._network.bind(self._features)

    def __call__(self, x: th.Tensor, t: th.Tensor) -> th.Tensor:
        if can_fuse(x, t):
            with suppress(NotCovered):
                if th.is_grad_enabled() and x.shape[:-1] == self._features.shape[:-1]:  # torch's operators may broadcast
                    return self._network(th.cat([self._features, x, t], dim=-1))[0]
                if not th.is_grad_enabled():
                    return self._integrand(th.cat([x, t], dim=-1))[0]  # type: ignore[no-any-return]
        return self._bind_plain(self._features)(x, t)

    def euler(self, x: th.Tensor, time: th.Tensor, step: th.Tensor, steps: int) -> th.Tensor | None:
        """Do :func:`sb3_flow.flow.ode.euler` in one kernel; return None if the kernels do not cover this call."""
        if not th.is_grad_enabled() and can_fuse(x, time, step):
            with suppress(NotCovered):
                return self._integrand.integrate(x, time, step, steps)  # type: ignore[no-any-return]
        return None


class OneStepNetwork(LinearNetwork):
    """
    Map mu(s, z) from noise to an action in one evaluation: an MLP on concat[s, z].

    :param features_dim: dimension of the observation features s
    :param action_dim: dimension A of the (flattened chunk) action and of the noise z
    :param net_arch: hidden layer sizes
    :param activation_fn: activation after every hidden layer
    """

    def __init__(
        self, features_dim: int, action_dim: int, net_arch: Sequence[int], activation_fn: Callable[[], nn.Module] = TanhGELU
    ) -> None:
        super().__init__(features_dim, [features_dim + action_dim, *net_arch, action_dim], activation_fn)

    def forward(self, features: th.Tensor, noise: th.Tensor) -> th.Tensor:
        """
        Compute mu(s, z).

        :param features: observation features, shape ``(B, features_dim)``
        :param noise: z, shape ``(B, A)``
        :return: shape ``(B, A)``, not clipped
        """
        return self.evaluate(th.cat([features, noise], dim=-1))


class GaussianNetwork(LinearNetwork):
    """
    Mean and logarithm of the standard deviation of Gaussian action chunks, by an MLP.

    :param input_dim: dimension of the observation features and of what else the Gaussian depends on
    :param action_dim: dimension A of the (flattened chunk) action
    :param net_arch: hidden layer sizes
    :param activation_fn: activation after every hidden layer
    """

    def __init__(
        self, input_dim: int, action_dim: int, net_arch: Sequence[int], activation_fn: Callable[[], nn.Module] = TanhGELU
    ) -> None:
        super().__init__(input_dim, [input_dim, *net_arch, 2 * action_dim], activation_fn)

    def forward(self, inputs: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """
        Compute mean and logarithm of the standard deviation.

        :param inputs: shape ``(B, input_dim)``
        :return: each of the shape ``(B, A)``
        """
        mean, log_std = self.evaluate(inputs).chunk(2, dim=-1)
        return mean, log_std


class EnsembleMLP(CompiledNetwork):
    """
    K independent scalar MLPs as one batched computation, weights of shape ``(K, in, out)``.

    Every hidden layer is Linear, activation, LayerNorm in this order (eps 1e-6, scale and shift per member); the output layer
    is linear. Glorot-uniform weights, zero biases.

    :param n_members: ensemble size K
    :param input_dim: dimension of the (concatenated) input
    :param net_arch: hidden layer sizes
    :param activation_fn: activation of the hidden layers
    """

    def __init__(
        self, n_members: int, input_dim: int, net_arch: Sequence[int], activation_fn: Callable[[], nn.Module] = TanhGELU
    ) -> None:
        super().__init__()
        self.n_members = n_members
        self.activation = activation_fn()
        sizes = [input_dim, *net_arch, 1]
        self.n_weights = n_members * sum(n_in * n_out for n_in, n_out in pairwise(sizes))
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for n_in, n_out in pairwise(sizes):
            bound = (6.0 / (n_in + n_out)) ** 0.5
            self.weights.append(nn.Parameter(th.empty(n_members, n_in, n_out).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(th.zeros(n_members, 1, n_out)))
        self.scales = nn.ParameterList(nn.Parameter(th.ones(n_members, 1, n)) for n in net_arch)
        self.shifts = nn.ParameterList(nn.Parameter(th.zeros(n_members, 1, n)) for n in net_arch)

    def repays_call(self, rows: int) -> bool:
        # torch needs a dozen operators a layer; only few rows with many weights do not repay reading these in another order
        return th.is_grad_enabled() or rows >= FEW_ENSEMBLE_ROWS or self.n_weights <= FEW_WEIGHTS

    def bind(self) -> Callable[[th.Tensor, bool], th.Tensor]:
        """Close :meth:`forward` over the present weights, which makes several calls cheaper."""
        groups = [_parameters(group) for group in (self.weights, self.biases, self.scales, self.shifts)]
        *hidden_layers, last = zip_longest(*groups)
        layers: list[Any] = [*hidden_layers, last[:2]]

        def ensemble(inputs: th.Tensor, frozen: bool = False) -> th.Tensor:
            if self.native and sizes_are_numbers() and self.repays_call(inputs.shape[0]):
                network = self.fused(layers, self.activation) if nothing_looks_in() and are_filled(inputs) else None
                if network is not None:
                    with suppress(NotCovered):
                        return network(inputs, frozen)
            used = [[parameter.detach() for parameter in layer] for layer in layers] if frozen else layers
            return mlp([Layer(*layer) for layer in used], inputs, self.activation)

        return ensemble

    def forward(self, inputs: th.Tensor, frozen: bool = False) -> th.Tensor:
        """
        Compute the members.

        :param inputs: shape ``(B, input_dim)``, shared by all members
        :param frozen: treat the weights as constants: gradients flow to ``inputs`` only
        :return: shape ``(K, B, 1)``
        """
        return self.bind()(inputs, frozen)


def _parameters(group: nn.ParameterList) -> list[Any]:
    # Iterating over a ParameterList costs more than a small matrix product; a parametrized list is of another class
    return list(group._parameters.values()) if type(group) is nn.ParameterList else list(group)
