"""The flow's networks: what the fused kernels compute, or refuse, beside the same networks in torch's own operators."""

import copy
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch as th
from torch import nn

from sb3_flow.flow import EnsembleMLP, FlowMapNetwork, VelocityNetwork, euler_forward, euler_reverse, flow_map
from sb3_flow.flow.noise import keyed_normal, mix
from sb3_flow.fused import compiled_network
from sb3_flow.fused.compiled_network import CompiledNetwork
from sb3_flow.fused.keyed_normal import keyed_normal_rows
from tests.attack.engine import EQUAL, REFUSED, Entry, Failure, seed_of
from tests.attack.memory import guard_module, guarded_allocations, guarded_tensor

BATCHES = (0, 1, 2, 7, 16, 17, 33, 64, 100)
Tensors = dict[str, Any]


@dataclass
class FlowEntry:
    """
    A network of the flow.

    :param name: of the entry
    :param make: of a generator, the network and its inputs
    :param call: of the network, its inputs and a number that chooses what is done, the results
    """

    name: str
    make: Callable[[np.random.Generator], tuple[nn.Module, Tensors]]
    call: Callable[..., Any]

    def attack(self, seed: int, case: int) -> str:
        """:return: ``EQUAL`` or ``REFUSED``, see ``engine.attack``"""
        rng = seed_of(self.name, seed, case)
        th.manual_seed(int(rng.integers(2**31)))
        network, inputs = self.make(rng)
        notes: list[str] = []
        for name in inputs:
            if rng.random() < 0.25:
                inputs[name] = _other(inputs[name], rng, notes, name)
        if not notes and rng.random() < 0.15:
            _spoil_parameters(network, rng, notes)
        # LayerNorm of one or two numbers multiplies rounding by up to 1000
        narrow = any(scale.shape[-1] < 3 for scale in getattr(network, "scales", ()))
        choice, at_end = int(rng.integers(100)), bool(rng.integers(2))
        shapes = {name: (x.dtype, tuple(x.shape), x.stride()) for name, x in inputs.items() if isinstance(x, th.Tensor)}
        text = (
            f"{network.__class__.__name__} {[tuple(p.shape) for p in network.parameters()]} {shapes} {notes} choice {choice}"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = self._plain(network, inputs, choice)
            for guarded in (False, True):
                ours = self._run(network, inputs, choice, at_end, guarded)
                outcome = _judge(ours, expected, bool(notes), narrow, text)
        return outcome

    def _plain(self, network: nn.Module, inputs: Tensors, choice: int) -> Any:
        with mock.patch.object(CompiledNetwork, "native", False):
            return self._attempt(copy.deepcopy(network), inputs, choice)

    def _run(self, network: nn.Module, inputs: Tensors, choice: int, at_end: bool, guarded: bool) -> Any:
        network = copy.deepcopy(network)
        guard_module(network, at_end)
        inputs = {name: guarded_tensor(x, at_end) if isinstance(x, th.Tensor) else x for name, x in inputs.items()}
        with ExitStack() as stack:
            for limit in ("LITTLE_WORK", "FEW_ROWS", "FEW_POINTS"):  # nothing is too little for kernels
                stack.enter_context(mock.patch.object(compiled_network, limit, 0))
            if guarded:
                stack.enter_context(guarded_allocations(at_end))
            return self._attempt(network, inputs, choice)

    def _attempt(self, network: nn.Module, inputs: Tensors, choice: int) -> Any:
        try:
            return [x.detach().clone() for x in self.call(network, choice, **inputs)]
        except Exception as error:
            return error


def _judge(ours: Any, expected: Any, unusual: bool, narrow: bool, text: str) -> str:
    if isinstance(ours, Exception):
        if isinstance(expected, Exception) or (unusual and isinstance(ours, ValueError)):
            return REFUSED
        raise Failure(f"refused what torch computes: {text} | {type(ours).__name__}: {ours}") from ours
    if isinstance(expected, Exception):
        raise Failure(f"taken, but torch refuses: {text} | {type(expected).__name__}: {expected}")
    if len(ours) != len(expected):
        raise Failure(f"{len(ours)} results instead of {len(expected)}: {text}")
    for i, (got, want) in enumerate(zip(ours, expected, strict=True)):
        if got.shape != want.shape or got.dtype != want.dtype:
            raise Failure(f"result {i} is {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}: {text}")
        if not got.numel():
            continue
        known = want.isfinite()
        scale = max(1.0, float(want[known].abs().max()) if known.any() else 1.0)
        if scale > 1e30 or "huge" in text or (unusual and not bool(known.all())):
            continue  # where it overflows depends on the order of the sums
        tolerance = (5e-2 if narrow else 3e-4) * scale
        if not th.allclose(got, want, rtol=0, atol=tolerance, equal_nan=True):
            raise Failure(f"result {i} differs by {float((got - want).abs().max()):g} of {scale:g}: {text}")
    return EQUAL


def _other(x: th.Tensor, rng: np.random.Generator, notes: list[str], name: str) -> Any:
    """:return: the tensor in another guise, or another one"""
    last = x.shape[-1] if x.dim() else 1
    ways: dict[str, Callable[[], Any]] = {
        "transposed": lambda: x.t().contiguous().t(),
        "sliced": lambda: th.stack([x, x + 9], -1).flatten(-2)[..., ::2],
        "every second row": lambda: th.stack([x, x + 9]).transpose(0, 1).flatten(0, 1)[::2],
        "offset": lambda: th.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
        "expanded rows": lambda: x[:1].expand(x.shape),
        "with gradient": lambda: x.detach().clone().requires_grad_(),
        "no rows": lambda: x[:0],
        "one row": lambda: x[:1],
        "a row more": lambda: th.cat([x, x[:1]]),
        "a column more": lambda: th.cat([x, x[:, :1]], 1) if last else x,
        "a column less": lambda: x[:, : max(last - 1, 0)],
        "flat": lambda: x.flatten(),
        "three dimensions": lambda: x[None],
        "scalar": lambda: th.tensor(0.5),
        "float64": lambda: x.double(),
        "float16": lambda: x.half(),
        "bfloat16": lambda: x.bfloat16(),
        "int64": lambda: x.long(),
        "complex": lambda: x.to(th.complex64),
        "NaN": lambda: x * float("nan"),
        "infinite": lambda: x * float("inf"),
        "huge": lambda: x * 1e30,
        "NumPy": lambda: x.numpy(),
        "list": lambda: x.tolist(),
        "None": lambda: None,
    }
    names = list(ways)
    way = names[rng.integers(6)] if rng.random() < 0.5 else names[rng.integers(len(names))]
    notes.append(f"{name}: {way}")
    return ways[way]()


def _spoil_parameters(network: nn.Module, rng: np.random.Generator, notes: list[str]) -> None:
    parameters = list(network.parameters())
    parameter = parameters[rng.integers(len(parameters))]
    x = parameter.data
    ways: dict[str, Callable[[], th.Tensor]] = {
        "transposed": lambda: x.mT.contiguous().mT if x.dim() > 1 else x,
        "sliced": lambda: th.stack([x, x + 9], -1).flatten(-2)[..., ::2],
        "expanded": lambda: x[..., :1].expand(x.shape) if x.numel() else x,
        "float64": x.double,
        "float16": x.half,
        "a column more": lambda: th.cat([x, x[..., :1]], -1),
        "a column less": lambda: x[..., : max(x.shape[-1] - 1, 0)],
        "NaN": lambda: x * float("nan"),
        "huge": lambda: x * 1e30,
    }
    way = list(ways)[rng.integers(len(ways))]
    parameter.data = ways[way]()
    notes.append(f"parameter {tuple(x.shape)}: {way}")
    if rng.random() < 0.3:
        parameters[rng.integers(len(parameters))].requires_grad_(False)
        notes.append("frozen parameter")


def _arch(rng: np.random.Generator) -> list[int]:
    return [int(x) for x in rng.choice((1, 2, 8, 15, 16, 17, 33, 64), rng.integers(0, 4))]


def _varied(network: nn.Module) -> nn.Module:
    with th.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * th.randn_like(parameter))
    return network


def _velocity(rng: np.random.Generator) -> tuple[nn.Module, Tensors]:
    features, actions, batch = int(rng.integers(0, 20)), int(rng.integers(1, 9)), int(rng.choice(BATCHES))
    inputs = {"features": th.randn(batch, features), "x": th.randn(batch, actions), "t": th.rand(batch, 1)}
    return _varied(VelocityNetwork(features, actions, _arch(rng))), inputs


def _with_gradients(network: nn.Module, inputs: list[Any], function: Callable[[], th.Tensor]) -> list[th.Tensor]:
    leaves = [x for x in (*inputs, *network.parameters()) if isinstance(x, th.Tensor) and x.requires_grad]
    out = function()
    weights = th.randn(out.shape, generator=th.Generator().manual_seed(1))
    grads = th.autograd.grad((out * weights).sum(), leaves, materialize_grads=True, allow_unused=True) if leaves else ()
    return [out, *grads]


def _call_velocity(network: Any, choice: int, features: Any, x: Any, t: Any) -> list[th.Tensor]:
    steps = choice // 5 % 5
    if choice % 5 == 0:
        return _with_gradients(network, [features, x, t], lambda: network(features, x, t))
    with th.no_grad():
        if choice % 5 == 1:
            return [network(features, x, t)]
        velocity = network.bind(features)
        if choice % 5 == 2:
            return [velocity(x, t), velocity(x, t)]
        if choice % 5 == 3:
            return [euler_forward(velocity, x, max(steps, 1))]
        return [*euler_reverse(velocity, x, t, max(steps, 1))]


def _ensemble(rng: np.random.Generator) -> tuple[nn.Module, Tensors]:
    members, size, batch = int(rng.integers(1, 5)), int(rng.integers(0, 30)), int(rng.choice(BATCHES))
    return _varied(EnsembleMLP(members, size, _arch(rng))), {"inputs": th.randn(batch, size)}


def _call_ensemble(network: Any, choice: int, inputs: Any) -> list[th.Tensor]:
    if choice % 3 == 0:
        with th.no_grad():
            return [network(inputs)]
    return _with_gradients(network, [inputs], lambda: network(inputs, choice % 3 == 1))


def _flow_map(rng: np.random.Generator) -> tuple[nn.Module, Tensors]:
    features, actions, batch = int(rng.integers(0, 20)), int(rng.integers(1, 9)), int(rng.choice(BATCHES))
    network = FlowMapNetwork(features, actions, _arch(rng), fourier_dim=int(rng.choice((0, 2, 8))))
    times = {"r": th.rand(batch, 1), "t": th.rand(batch, 1)}
    return _varied(network), {"features": th.randn(batch, features), "a": th.randn(batch, actions), **times}


def _call_flow_map(network: Any, choice: int, features: Any, a: Any, r: Any, t: Any) -> list[th.Tensor]:
    if choice % 3 == 0:
        return _with_gradients(network, [features, a, r, t], lambda: network(features, a, r, t))
    with th.no_grad():
        if choice % 3 == 1:
            return [flow_map.flow_map_sample(network.bind(features), a, 1 + choice // 3 % 3)]
        several = th.stack([a, a + 1], 1)  # candidates per observation
        return [network(features[:, None], several, r[:, None], t[:, None])]


def _keyed_rows(rng: np.random.Generator) -> dict[str, Any]:
    batch, columns = rng.integers(0, 20), rng.integers(0, 7)
    return {
        "rows": rng.standard_normal((batch, columns)).astype(np.float32),
        "odd": 2 * rng.integers(-4, 5, columns) + 1,  # small: tolerances grow with the arguments
        "seed": int(rng.integers(-(2**50), 2**50)),
        "first": int(rng.integers(50)),
        "n": int(rng.integers(10)),
    }


def _keyed_normal(rows: np.ndarray, odd: np.ndarray, seed: float, first: float, n: float) -> np.ndarray:
    mantissas, exponents = np.frexp(rows.astype(np.float32))
    integers = (mantissas * 2.0**24).astype(np.int64) * 1024 + exponents
    return keyed_normal(mix((integers * odd).sum(1) + int(seed)), int(first), int(n))


ENTRIES: list[Entry | FlowEntry] = [
    # other memory layouts are refused; a large `n` would fill the memory
    Entry("keyed_normal_rows", keyed_normal_rows, _keyed_rows, _keyed_normal, in_place=("rows", "odd"), constants=("n",)),
    FlowEntry("VelocityNetwork", _velocity, _call_velocity),
    FlowEntry("EnsembleMLP", _ensemble, _call_ensemble),
    FlowEntry("FlowMapNetwork", _flow_map, _call_flow_map),
]
