"""
Flow maps: a network u(s, a_r, r, t) of the average velocity from flow time r to t, which jumps there in one evaluation.

Equation numbers are those of FMQ (arXiv 2605.12416).
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch as th
from torch import nn
from torch.nn import functional as F

from sb3_flow.fused.compiled_network import LinearNetwork
from sb3_flow.fused.fusable import are_filled, is_untouched, nothing_looks_in, sizes_are_numbers
from sb3_flow.fused.fused_mlp import NotCovered
from sb3_flow.fused.plain_mlp import TanhGELU

AverageVelocity = Callable[[th.Tensor, th.Tensor, th.Tensor], th.Tensor]
"""``velocity(a_r, r, t) -> u`` with a_r and u of shape ``(..., A)``, r and t ``(..., 1)``; closed over the observation."""

LARGEST_PERIOD = 10_000.0


class FlowMapNetwork(LinearNetwork):
    """
    Average velocity u(s, a_r, r, t) from flow time r to t >= r: an MLP on concat[s, a_r, e(r), e(t)].

    e embeds a time as cosines and sines of fixed frequencies from 1 down to 1 / 10000, or leaves the time a raw scalar.

    :param features_dim: dimension of the observation features s
    :param action_dim: dimension A of the (flattened chunk) action a
    :param net_arch: hidden layer sizes
    :param activation_fn: activation after every hidden layer
    :param fourier_dim: dimension of e, even; 0 for raw times
    """

    frequencies: th.Tensor

    def __init__(
        self,
        features_dim: int,
        action_dim: int,
        net_arch: Sequence[int],
        activation_fn: Callable[[], nn.Module] = TanhGELU,
        fourier_dim: int = 64,
    ) -> None:
        if fourier_dim < 0 or fourier_dim % 2:
            raise ValueError(f"`fourier_dim` must be even and not negative, but {fourier_dim} was given.")
        n_inputs = features_dim + action_dim + 2 * (fourier_dim or 1)
        super().__init__(features_dim, [n_inputs, *net_arch, action_dim], activation_fn)
        exponents = th.arange(fourier_dim // 2, dtype=th.float64) / max(fourier_dim // 2 - 1, 1)
        self.register_buffer("frequencies", (LARGEST_PERIOD**-exponents).to(th.get_default_dtype()), persistent=False)

    def embed(self, r: th.Tensor, t: th.Tensor) -> th.Tensor:
        """
        Embed two times.

        :param r: shape ``(..., 1)``
        :param t: shape ``(..., 1)``
        :return: concat[e(r), e(t)], shape ``(..., 2 * fourier_dim)``, or concat[r, t] if ``fourier_dim`` is 0
        """
        times = th.cat([r, t], dim=-1)
        if not len(self.frequencies):
            return times
        angles = times.unsqueeze(-1) * self.frequencies
        return th.cat([angles.cos(), angles.sin()], dim=-1).flatten(-2)

    def bind(self, features: th.Tensor, n_candidates: int | None = None) -> AverageVelocity:
        """
        Close the network over the observation, whose share of the first layer is computed once.

        :param features: observation features, shape ``(B, features_dim)``; or ``(B, 1, features_dim)`` for several
            candidates per observation, a of shape ``(B, n, A)``: the leading dimensions of features and a broadcast
        :param n_candidates: n of all calls, if it is known: then the choice of kernels for few rows is made once
        :return: ``velocity(a, r, t)`` for a of shape ``(B, A)``, r and t of shape ``(B, 1)``
        """
        if not (self.native and sizes_are_numbers()):
            return self._bind_plain(features)
        if n_candidates is not None and not self.repays_call(features.shape[0] * n_candidates):
            return self._bind_few(features)

        def velocity(a: th.Tensor, r: th.Tensor, t: th.Tensor) -> th.Tensor:
            if nothing_looks_in():
                if not self.repays_call(math.prod(a.shape[:-1])):
                    return self._bind_few(features)(a, r, t)
                found = self._fused(features, a, r, t) if are_filled(features, a, r, t) else None
                if found is not None:
                    return found
            return self._bind_plain(features)(a, r, t)

        return velocity

    def _bind_few(self, features: th.Tensor) -> AverageVelocity:
        """Use torch's own operators for one call of few rows; the first layer stays whole, because each operator costs."""
        first, *others = self.layers

        def velocity(a: th.Tensor, r: th.Tensor, t: th.Tensor) -> th.Tensor:
            rows = a.shape[:-1]
            try:
                inputs = [features.expand(*rows, -1), a, self.embed(r, t).expand(*rows, -1)]
            except RuntimeError:  # torch's operators may also broadcast a against more features
                return self._bind_plain(features)(a, r, t)
            hidden = first(th.cat(inputs, dim=-1))
            for layer in others:
                hidden = layer(self.activation(hidden))
            return hidden  # type: ignore[no-any-return]

        return velocity

    def _fused(self, features: th.Tensor, a: th.Tensor, r: th.Tensor, t: th.Tensor) -> th.Tensor | None:
        """Compute u by compiled kernels; return None if the kernels do not cover this call."""
        rows, given = a.shape[:-1], features.shape[:-1]
        # Torch's operators may also broadcast a against more features
        fits = len(given) <= len(rows) and all(n in (1, m) for n, m in zip(reversed(given), reversed(rows), strict=False))
        network = self.fused_linear() if fits else None
        if network is not None:
            inputs = th.cat([features.expand(*rows, -1), a, self.embed(r, t).expand(*rows, -1)], dim=-1)
            with suppress(NotCovered):
                u: th.Tensor = network(inputs.flatten(0, -2))[0].unflatten(0, rows)
                return u
        return None

    def _bind_plain(self, features: th.Tensor) -> AverageVelocity:
        """Use torch's own operators, which have forward-mode derivatives."""
        first, *others = list[Any](self.layers)
        if is_untouched(first, nn.Linear):
            from_features = F.linear(features, first.weight[:, : self.features_dim], first.bias)
            flow_weight = first.weight[:, self.features_dim :]

        def velocity(a: th.Tensor, r: th.Tensor, t: th.Tensor) -> th.Tensor:
            rows = a.shape[:-1]
            inputs = th.cat([a, self.embed(r, t).expand(*rows, -1)], dim=-1)
            if is_untouched(first, nn.Linear):
                hidden = from_features + F.linear(inputs, flow_weight)
            else:
                hidden = first(th.cat([features.expand(*rows, -1), inputs], dim=-1))
            for layer in others:
                hidden = layer(self.activation(hidden))
            return hidden

        return velocity

    def forward(self, features: th.Tensor, a: th.Tensor, r: th.Tensor, t: th.Tensor) -> th.Tensor:
        return self.bind(features)(a, r, t)


def jump(velocity: AverageVelocity, a_r: th.Tensor, r: th.Tensor, t: th.Tensor) -> th.Tensor:
    """
    Compute the flow map X_{r,t}(a_r) = a_r + (t - r) u_{r,t}(a_r) (Eq. 2).

    :param velocity: average velocity, ``velocity(a_r, r, t)``
    :param a_r: points at flow time r, shape ``(B, A)``
    :param r: flow times, shape ``(B, 1)``, as of t
    :param t: flow times of the results
    :return: a_t, shape ``(B, A)``
    """
    return th.addcmul(a_r, t - r, velocity(a_r, r, t))


def flow_map_sample(velocity: AverageVelocity, noise: th.Tensor, steps: int = 1) -> th.Tensor:
    """
    Go from noise at t = 0 to actions at t = 1 in ``steps`` equal jumps (one jump: Eq. 7). The result is not clipped.

    :param velocity: average velocity, ``velocity(a_r, r, t)``
    :param noise: a_0, shape ``(..., A)``
    :param steps: number of jumps, evaluations of the network
    :return: a_1, shape ``(..., A)``
    """
    a = noise
    for i in range(steps):
        r, t = (a.new_full((*a.shape[:-1], 1), time / steps) for time in (i, i + 1))
        a = jump(velocity, a, r, t)
    return a


def flow_map_jvp(
    velocity: AverageVelocity, a_r: th.Tensor, r: th.Tensor, t: th.Tensor, tangents: tuple[th.Tensor, th.Tensor, th.Tensor]
) -> tuple[th.Tensor, th.Tensor]:
    """
    Compute u_{r,t}(a_r) and its derivative along a direction, exactly, in one forward pass (``torch.func.jvp``).

    Under ``no_grad`` nothing is recorded; otherwise the derivative can itself be differentiated by the weights.

    :param velocity: average velocity, ``velocity(a_r, r, t)``
    :param a_r: shape ``(B, A)``
    :param r: shape ``(B, 1)``
    :param t: shape ``(B, 1)``
    :param tangents: the direction in a_r, r and t, of their shapes
    :return: u and (d_a u) tangents[0] + (d_r u) tangents[1] + (d_t u) tangents[2], shapes ``(B, A)``
    """
    return th.func.jvp(velocity, (a_r, r, t), tangents)[:2]


def sample_r_t(
    batch_size: int,
    step: int | th.Tensor,
    warmup_steps: int,
    anneal_end_step: int,
    generator: th.Generator | None,
    device: th.device | None = None,
) -> tuple[th.Tensor, th.Tensor]:
    """
    Draw pairs of flow times r <= t of the self-distillation losses. During warm-up, when the losses have weight zero, r = t =
    (U1 + U2) / 2; from then to ``anneal_end_step`` (released: 5,000 and 50,000) the pair is spread linearly to two sorted
    U[0, 1). Even then P(t - r > 0.9) is only 0.01: the one jump of inference is seldom trained directly.

    :param batch_size: B
    :param step: gradient steps made, an int or a tensor without dimensions (on ``device``, no synchronisation)
    :param warmup_steps: until then r = t
    :param anneal_end_step: from then on r and t are independent up to their order
    :param generator: generator on ``device``
    :param device: device of the result, by default of the generator
    :return: r and t, shapes ``(B, 1)``
    """
    if device is None:
        device = th.device("cpu") if generator is None else generator.device
    progress = (step - warmup_steps) / max(anneal_end_step - warmup_steps, 1)
    spread = progress.clamp(0.0, 1.0) if isinstance(progress, th.Tensor) else min(max(progress, 0.0), 1.0)
    first, second = th.rand(2, batch_size, 1, generator=generator, device=device)
    middle, half_width = (first + second) / 2, spread * (first - second).abs() / 2
    return middle - half_width, middle + half_width
