"""
Compiled networks where something looks into them, and on tensors that the kernels cannot read: torch's own operators stand in,
with the same numbers, or a ValueError says why not. Nothing ends the process.
"""

import copy
import ctypes
import itertools

import numpy as np
import pytest
import torch as th
from tasks import PointEnv, collect
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.flop_counter import FlopCounterMode

from sb3_flow import DSRL, FMQ, FQL, PPO, QAM, RLPD, RQL
from sb3_flow.compiled import unavailable
from sb3_flow.flow import EnsembleMLP, FlowMapNetwork, TanhGELU, VelocityNetwork, euler_forward
from sb3_flow.fmq import FlowMapPolicy
from sb3_flow.fused import argument_blocks, fused_mlp, launch, rowwise
from sb3_flow.fused import compiled_network as flow_backend
from sb3_flow.fused.compiled_network import CompiledNetwork

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="no network is compiled")

SMALL = {"policy_kwargs": {"net_arch": [16, 16]}, "seed": 0, "device": "cpu"}
POLICIES = {
    "PPO": lambda: PPO("MlpPolicy", PointEnv(), n_steps=16, batch_size=16, **SMALL).policy,
    "RQL": lambda: RQL("MlpPolicy", PointEnv(), n_critics=2, flow_steps=3, **SMALL).policy,
    "RLPD": lambda: RLPD("MlpPolicy", PointEnv(), n_critics=2, **SMALL).policy,
    "RQL, best of n": lambda: RQL("MlpPolicy", PointEnv(), n_critics=2, acting_mode="best_of_n", **SMALL).policy,
    "FMQ, one step": lambda: FMQ("MlpPolicy", PointEnv(), acting_mode="sample", **SMALL).policy,
    "FMQ, best of n": lambda: FMQ("MlpPolicy", PointEnv(), **SMALL).policy,
    "FQL": lambda: FQL("MlpPolicy", PointEnv(), **SMALL).policy,
    "FQL, best of n": lambda: FQL("MlpPolicy", PointEnv(), actor_type="best_of_n", flow_steps=3, **SMALL).policy,
    "DSRL": lambda: DSRL("MlpPolicy", PointEnv(), n_critics=2, flow_steps=3, acting_mode="sample", **SMALL).policy,
    "QAM with edits": lambda: QAM("MlpPolicy", PointEnv(), n_critics=2, flow_steps=3, edit_scale=0.5, **SMALL).policy,
}


class Deterministic(nn.Module):
    """A policy's repeatable actions as a function of observations."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, observations):
        return self.policy._predict(observations, deterministic=True)


@pytest.fixture(scope="module", params=list(POLICIES))
def acting(request):
    policy = POLICIES[request.param]()
    policy.set_training_mode(False)
    return Deterministic(policy)


@pytest.fixture
def observations():
    return th.randn(5, 2, generator=th.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def however_little_work(monkeypatch):
    """Torch's operators are left nothing that is too little."""
    for name in ("LITTLE_WORK", "FEW_ROWS", "FEW_POINTS"):
        monkeypatch.setattr(flow_backend, name, 0)


@pytest.fixture
def counted(monkeypatch):
    """Counts launches of the kernels."""
    calls, launched = [], launch.Launch.__call__
    monkeypatch.setattr(launch.Launch, "__call__", lambda *args: (calls.append(1), launched(*args))[1])
    return calls


def close(actual, expected):
    th.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("batch", [5, 9])
@th.no_grad()
def test_tracing(acting, observations, batch):
    others = th.randn(batch, 2)
    close(th.jit.trace(acting, (observations,))(others), acting(others))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [False, True])
@th.no_grad()
def test_export(monkeypatch, acting, observations, dynamic):
    monkeypatch.setattr(th.distributions.Distribution, "_validate_args", False)  # PPO's asks the data, which exporters refuse
    shapes = ({0: th.export.Dim("batch", min=2)},) if dynamic else None
    exported = th.export.export(acting, (observations,), dynamic_shapes=shapes, strict=False).module()
    others = th.randn(9 if dynamic else 5, 2)
    close(exported(others), acting(others))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [False, True])
@th.no_grad()
def test_onnx(acting, observations, tmp_path, dynamo, monkeypatch):
    """Its exporters need onnx (and onnxscript); without them they say so. Keyed noise is refused with what to do instead."""
    monkeypatch.setattr(th.distributions.Distribution, "_validate_args", False)
    path = tmp_path / "policy.onnx"
    try:
        th.onnx.export(acting, (observations,), str(path), dynamo=dynamo, verbose=False)
    except (ImportError, th.onnx.errors.OnnxExporterError) as error:
        assert "onnx" in str(error)
    except RuntimeError as error:
        assert acting.policy.acting_mode != "zero" and "export the policy with acting_mode='zero'" in str(error)
    else:
        assert path.stat().st_size > 0


@pytest.mark.filterwarnings("ignore")
def test_scripting_is_refused(acting):
    with pytest.raises((RuntimeError, AssertionError, ValueError, NotImplementedError)):  # by torch: policies of SB3 cannot be
        th.jit.script(acting)


def test_transforms(acting, observations):
    with th.no_grad():
        close(th.func.vmap(lambda one: acting(one[None])[0])(observations), acting(observations))
    differentiable = observations.clone().requires_grad_()
    (expected,) = th.autograd.grad(acting(differentiable).sum(), differentiable)
    close(th.func.grad(lambda x: acting(x).sum())(observations), expected)
    tangents = th.ones_like(observations)
    _, tangent = th.func.jvp(acting, (observations,), (tangents,))
    with th.autograd.forward_ad.dual_level():
        dual = acting(th.autograd.forward_ad.make_dual(observations, tangents))
        close(th.autograd.forward_ad.unpack_dual(dual).tangent, tangent)


def test_autocast_and_modes(acting, observations):
    with th.no_grad():
        expected = acting(observations)
        with th.autocast("cpu", dtype=th.bfloat16):
            near = ((acting(observations).float() - expected).abs() <= 0.05 + 0.1 * expected.abs()).all(1)
        assert near.sum() >= 4  # of five: where two candidates are as good, rounding chooses
        with FlopCounterMode(display=False) as counter:
            close(acting(observations), expected)
    assert counter.get_total_flops() > 0  # a kernel would have shown none


def test_deepcopy(acting, observations):
    with th.no_grad():
        assert th.equal(copy.deepcopy(acting)(observations), acting(observations))


def test_hooks_see_every_layer(acting, observations):
    with th.no_grad():
        expected, seen = acting(observations), set()
        handles = [
            module.register_forward_hook(lambda module, *args: seen.add(module))
            for module in acting.modules()
            if isinstance(module, nn.Linear)
        ]
        found = acting(observations)
        for handle in handles:
            handle.remove()
    close(found, expected)
    assert len(seen) >= 3  # two hidden layers and the output


# ------------------------------------------------------------------------------------------------- networks

NETWORKS = {
    "ensemble": lambda: (EnsembleMLP(2, 6, [8, 8]), [th.randn(5, 6)]),
    "velocity": lambda: (VelocityNetwork(3, 4, [8, 8]), [th.randn(5, 3), th.randn(5, 4), th.rand(5, 1)]),
    "flow map": lambda: (
        FlowMapNetwork(3, 4, [8, 8], fourier_dim=4),
        [th.randn(5, 3), th.randn(5, 4), th.rand(5, 1), th.rand(5, 1)],
    ),
}


@pytest.fixture(params=list(NETWORKS))
def network(request):
    th.manual_seed(0)
    return NETWORKS[request.param]()


def by_torch(monkeypatch, run):
    with monkeypatch.context() as context:
        context.setattr(CompiledNetwork, "native", False)
        return run()


def test_gradient_of_a_gradient(monkeypatch, network, counted):
    network, inputs = network
    inputs = [x.requires_grad_() for x in inputs]
    leaves = [*inputs, *network.parameters()]

    def run():
        first = th.autograd.grad(network(*inputs).square().sum(), leaves, create_graph=True)
        return [*first, *th.autograd.grad(sum(g.square().sum() for g in first), leaves)]

    found = run()
    assert counted  # the forward pass
    for actual, expected in zip(found, by_torch(monkeypatch, run), strict=True):
        scale = max(1.0, expected.abs().max().item())
        th.testing.assert_close(actual / scale, expected / scale, rtol=1e-4, atol=1e-5)


def test_batched_gradients(monkeypatch, network):
    network, inputs = network
    inputs = [x.requires_grad_() for x in inputs]
    out = network(*inputs)
    grads = th.randn(3, *out.shape)
    batched = th.autograd.grad(out, inputs, grads, is_grads_batched=True, retain_graph=True)
    single = [th.autograd.grad(out, inputs, grad, retain_graph=True) for grad in grads]
    for actual, expected in zip(batched, zip(*single, strict=True), strict=True):
        close(actual, th.stack(expected))


def negated(module, *args):
    return -args[1]


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Negated(nn.Module):
    def forward(self, x):
        return -x


TOUCHES = {
    "hook": lambda layers, i: layers[i].register_forward_hook(negated),
    "pre-hook": lambda layers, i: layers[i].register_forward_pre_hook(lambda module, args: (2 * args[0],)),
    "backward hook": lambda layers, i: layers[i].register_full_backward_hook(lambda module, into, out: (2 * into[0],)),
    "parametrization": lambda layers, i: parametrize.register_parametrization(layers[i], "weight", Negated()),
    "spectral norm": lambda layers, i: parametrizations.spectral_norm(layers[i]),
    "older spectral norm": lambda layers, i: nn.utils.spectral_norm(layers[i]),
    "another class": lambda layers, i: layers.__setitem__(i, Doubled(layers[i].in_features, layers[i].out_features)),
    "another forward": lambda layers, i: setattr(layers[i], "forward", lambda x: 2 * nn.Linear.forward(layers[i], x)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("touch", list(TOUCHES))
@pytest.mark.parametrize("layer", [0, 1])
def test_what_is_done_to_a_layer_counts(touch, layer, counted):
    th.manual_seed(0)
    network = VelocityNetwork(3, 4, [8, 8])
    TOUCHES[touch](network.layers, layer)
    network.eval()  # power iterations change the weights
    inputs = [th.randn(5, size, requires_grad=True) for size in (3, 4, 1)]

    def plain(*inputs):
        hidden = th.cat(inputs, dim=-1)
        for i, one in enumerate(network.layers):
            hidden = one(hidden if i == 0 else TanhGELU()(hidden))
        return hidden

    for run in (network, lambda *inputs: network.bind(inputs[0])(*inputs[1:])):
        close(run(*inputs), plain(*inputs))
        found, expected = (th.autograd.grad(f(*inputs).sum(), inputs) for f in (run, plain))
        for actual, wanted in zip(found, expected, strict=True):
            close(actual, wanted)
    assert not counted


def test_hooks_of_all_modules_and_of_the_activation(network, counted):
    network, inputs = network
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *args: seen.append(module))
    try:
        network(*inputs)
    finally:
        handle.remove()
    assert seen and not counted
    network.activation.register_forward_hook(lambda module, *args: seen.append("activation"))
    network(*inputs)
    assert seen[-1] == "activation" and not counted


def test_parametrized_and_swapped_weights_of_an_ensemble():
    th.manual_seed(0)
    ensemble, x = EnsembleMLP(2, 6, [8]), th.randn(5, 6)
    parameters = {name: -value.detach() for name, value in ensemble.named_parameters()}
    swapped = th.func.functional_call(ensemble, parameters, (x,))
    with th.no_grad():
        for parameter in ensemble.parameters():
            parameter.neg_()
    close(swapped, ensemble(x))
    with th.no_grad():
        ensemble.weights[0].neg_()
    parametrize.register_parametrization(ensemble.weights, "0", Negated())
    close(ensemble(x), swapped)


# -------------------------------------------------------------------------------------------- wrong tensors

WRONG = {
    "dtype": lambda x: x.double(),
    "integers": lambda x: x.int(),
    "shape": lambda x: x[..., :-1],
    "rows": lambda x: x[:-1],
    "dimensions": lambda x: x[None, None],
    "device": lambda x: x.to("meta"),
    "empty": lambda x: x[:0],
    "no columns": lambda x: x[..., :0],
    "sparse": lambda x: x.to_sparse(),
    "oneDNN": lambda x: x.to_mkldnn(),
    "quantized": lambda x: th.quantize_per_tensor(x, 0.1, 0, th.qint8),
    "negative view": lambda x: th.complex(x, x).conj().imag,
    "None": lambda x: None,
    "array": lambda x: x.numpy(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrong", list(WRONG))
@th.no_grad()
def test_compiled_networks_refuse_what_they_cannot_read(wrong):
    x = WRONG[wrong]
    ensemble, network = EnsembleMLP(2, 6, [8, 8]), VelocityNetwork(3, 4, [8, 8])
    layers = [[layer.weight.detach(), layer.bias.detach()] for layer in network.layers]
    bound = fused_mlp.FusedMLP(layers).bind(th.randn(5, 3))
    inputs = th.randn(5, 4), th.rand(5, 1), th.rand(5, 1)
    with pytest.raises(ValueError, match="`inputs` must be"):
        bound(x(th.randn(5, 5)))
    for i, name in enumerate(("x", "time", "step")):
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            bound.integrate(*(x(one) if i == j else one for j, one in enumerate(inputs)), 3)
    if wrong not in ("rows", "shape"):  # other rows and other inputs are another network's
        with pytest.raises(ValueError, match="`features` must be"):
            fused_mlp.FusedMLP(layers).bind(x(th.randn(5, 3)))
        with pytest.raises(ValueError, match="`inputs` must be"):
            fused_mlp.FusedMLP(list(zip(ensemble.weights, ensemble.biases, strict=True)))(x(th.randn(5, 6)))
    for i, j in itertools.product(range(3), range(2)):
        if (wrong, i, j) == ("shape", 0, 0):
            continue
        changed = [list(layer) for layer in layers]
        changed[i][j] = x(changed[i][j])
        with pytest.raises((ValueError, AttributeError)):
            fused_mlp.FusedMLP(changed)(th.randn(5, 8))


@pytest.mark.parametrize("name", ["weight", "bias", "scale", "shift"])
def test_strides_are_read_or_refused(name):
    th.manual_seed(0)
    parts = {"weight": th.randn(2, 6, 8), "bias": th.randn(2, 1, 8), "scale": th.randn(2, 1, 8), "shift": th.randn(2, 1, 8)}
    last = [th.randn(2, 8, 3), th.randn(2, 1, 3)]
    spread = th.zeros(2, parts[name].shape[1], 16)[..., ::2].copy_(parts[name])
    expanded = parts[name][:1].expand(2, -1, -1)
    for given in (spread, expanded):
        layers = [list({**parts, name: given}.values()), last]
        copies = [list({**parts, name: given.contiguous()}.values()), last]
        x = th.randn(12, 5).t()[:, ::2]
        if name == "weight":
            assert th.equal(fused_mlp.FusedMLP(layers)(x), fused_mlp.FusedMLP(copies)(x.contiguous()))
        else:
            with pytest.raises(fused_mlp.NotCovered, match="parameters of layer 0"):
                fused_mlp.FusedMLP(layers)(x)


def test_expanded_inputs(monkeypatch, network):
    network, inputs = network
    inputs = [x[:1].expand(5, -1) for x in inputs]
    with th.no_grad():
        close(network(*inputs), by_torch(monkeypatch, lambda: network(*inputs)))
    out = network(*inputs)
    (found,) = th.autograd.grad(out.sum(), network.parameters().__next__())  # its gradient is expanded
    expected = by_torch(monkeypatch, lambda: th.autograd.grad(network(*inputs).sum(), next(network.parameters())))
    close(found, expected[0])


def test_views_whose_memory_says_something_else(network, counted):
    network, inputs = network
    with th.no_grad():
        expected, zero = network(*inputs), network(*(th.zeros_like(x) for x in inputs))
        counted.clear()
        close(network(*(th.complex(x, -x).conj().imag for x in inputs)), expected)  # holds -x, and a mark to negate it
        close(network(*(th._efficientzerotensor(x.shape) for x in inputs)), zero)  # holds nothing
    assert not counted


EXCHANGES = {
    "shape": lambda p: setattr(p, "data", th.randn(3, 3)),
    "dtype": lambda p: setattr(p, "data", p.data.double()),
    "empty": lambda p: setattr(p, "data", th.empty(0)),
}


@pytest.mark.parametrize("exchange", list(EXCHANGES))
def test_parameters_that_are_exchanged_after_binding(exchange, network):
    network, (first, *inputs) = network
    bound = network.bind(first) if inputs else network.bind()
    inputs = inputs or [first]
    EXCHANGES[exchange](list(network.parameters())[-1])
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        bound(*inputs)
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        network(*([first, *inputs] if inputs[0] is not first else [first]))


def test_a_bound_network_owns_its_weights():
    """An exchanged tensor is freed: its memory may be somebody else's by the next call."""
    th.manual_seed(0)
    network, inputs = VelocityNetwork(3, 4, [8, 8]), (th.randn(5, 4), th.rand(5, 1))
    with th.no_grad():
        velocity = network.bind(th.randn(5, 3))
        expected = velocity(*inputs)
        for parameter in network.parameters():
            parameter.data = th.full_like(parameter, th.nan)
        close(velocity(*inputs), expected)


def test_parameters_that_are_exchanged_before_the_backward_pass():
    ensemble = EnsembleMLP(2, 6, [8])
    out = ensemble(th.randn(5, 6)).sum()
    ensemble.weights[1].data = th.randn(2, 3, 1)
    with pytest.raises((ValueError, RuntimeError)):
        out.backward()


def test_networks_of_another_type():
    network, inputs = NETWORKS["velocity"]()
    bound = network.bind(inputs[0])
    network.double()
    assert network(*(x.double() for x in inputs)).dtype == th.float64
    assert network.to("meta")(*(x.to("meta", th.float64) for x in inputs)).device.type == "meta"
    with pytest.raises((ValueError, RuntimeError)):
        bound(*inputs[1:])


def test_memory_that_was_given_back():
    network, inputs = NETWORKS["ensemble"]()
    network.weights[0].data.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="has no memory"):
        network(*inputs)


@th.no_grad()
def test_too_wide_layers_are_left_to_torch(counted):
    """Kernels keep rows on a thread's stack, which such a row would fill."""
    EnsembleMLP(1, 2, [fused_mlp.WIDEST + 1])(th.randn(3, 2))
    assert not counted


# ---------------------------------------------------------------------------------------- the argument block


def test_parts_of_the_block_have_places_of_their_own():
    for kernel in (rowwise.forward, rowwise.integrate, rowwise.backward, rowwise.parameter_gradients):
        for part in filter(None, (kernel.head, kernel.layer, kernel.end)):
            assert list(argument_blocks.entry_places(part, 7)) == list(range(7, 7 + len(part._fields)))
    assert [argument_blocks.Integration._fields[i] for i in argument_blocks.addresses_in(argument_blocks.Integration)] == [
        "x",
        "time",
        "step",
    ]


def test_a_call_gives_the_addresses_of_a_block(monkeypatch):
    end = argument_blocks.Integration(steps=4, size=2, x=3, time=1, step=2)
    head = argument_blocks.ForwardHead(members=1, batch=1, block=6, layers=0)
    blocks = []

    class Code:
        def call(self, where):
            blocks.append(list((ctypes.c_int64 * 10).from_address(where)))

    kernel = rowwise.integrate._replace(code=Code())
    launch.Launch(kernel, 1, head, [], end)([0, 100, 200, 300])
    assert blocks == [[0, 1, 1, 6, 0, 4, 2, 300, 100, 200]]


def test_a_kernel_takes_its_own_parts_only():
    head = argument_blocks.ForwardHead(members=1, batch=1, block=6, layers=1)
    layer = argument_blocks.ForwardLayer(*range(len(argument_blocks.ForwardLayer._fields)))
    launch.Launch(rowwise.forward, 1, head, [layer])
    for wrong in (
        (rowwise.backward, 1, head, [layer]),
        (rowwise.forward, 1, head, []),
        (rowwise.forward, 1, head, [tuple(layer)]),
        (rowwise.integrate, 1, head, [layer]),
        (rowwise.forward, 1, (1, 1, 6, 1), [layer]),
    ):
        with pytest.raises((TypeError, AttributeError)):
            launch.Launch(*wrong)


# -------------------------------------------------------------------------------------------- empty and negative


@pytest.mark.parametrize(("members", "inputs", "batch"), [(0, 6, 5), (2, 0, 5), (2, 6, 0), (0, 0, 0)])
def test_empty_ensembles(monkeypatch, members, inputs, batch):
    ensemble, x = EnsembleMLP(members, inputs, [8]), th.randn(batch, inputs, requires_grad=True)

    def run():
        out = ensemble(x)
        return [out, *th.autograd.grad(out.sum(), [x, *ensemble.parameters()], allow_unused=True)]

    for actual, expected in zip(run(), by_torch(monkeypatch, run), strict=True):
        close(actual, expected)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize(("features", "actions", "batch"), [(0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0)])
def test_empty_flows(monkeypatch, features, actions, batch):
    network = VelocityNetwork(features, actions, [8])
    s, x, t = (th.randn(batch, size, requires_grad=True) for size in (features, actions, 1))

    def run():
        out = network(s, x, t)
        found = [out, *th.autograd.grad(out.sum(), [s, x, t, *network.parameters()])]
        with th.no_grad():
            return [*found, euler_forward(network.bind(s), x, 3)]

    for actual, expected in zip(run(), by_torch(monkeypatch, run), strict=True):
        close(actual, expected)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "PPO"])
def test_no_observations_no_actions(name):
    policy = POLICIES[name]()
    for deterministic in (True, False):
        assert policy.predict(np.zeros((0, 2), np.float32), deterministic=deterministic)[0].shape == (0, 2)


def test_no_observations_in_a_search():
    for model in (
        RQL("MlpPolicy", PointEnv(), acting_mode="qgbs", **SMALL),
        RQL("MlpPolicy", PointEnv(), acting_mode="guided", **SMALL),
        FMQ("MlpPolicy", PointEnv(), acting_mode="qgbs", **SMALL),
        FQL("MlpPolicy", PointEnv(), acting_mode="qgbs", actor_type="best_of_n", **SMALL),
    ):
        assert model.predict(np.zeros((0, 2), np.float32))[0].shape == (0, 2)


@pytest.mark.parametrize("size", [0, -1])
@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("horizon_length", lambda size: RQL("MlpPolicy", PointEnv(), horizon_length=size)),
        ("batch_size", lambda size: RQL("MlpPolicy", PointEnv(), batch_size=size)),
        ("flow_steps", lambda size: RQL("MlpPolicy", PointEnv(), flow_steps=size)),
        ("flow_steps", lambda size: RQL("MlpPolicy", PointEnv(), policy_kwargs={"flow_steps": size})),
        ("n_critics", lambda size: RQL("MlpPolicy", PointEnv(), n_critics=size)),
        ("n_critics", lambda size: FQL("MlpPolicy", PointEnv(), n_critics=size)),
        ("n_critics", lambda size: RLPD("MlpPolicy", PointEnv(), n_critics=size)),
        ("flow_steps", lambda size: FQL("MlpPolicy", PointEnv(), policy_kwargs={"flow_steps": size})),
        ("n_candidates", lambda size: DSRL("MlpPolicy", PointEnv(), n_candidates=size)),
        ("n_critics", lambda size: RQL("MlpPolicy", PointEnv(), policy_kwargs={"n_critics": size})),
        ("n_candidates", lambda size: RQL("MlpPolicy", PointEnv(), n_candidates=size)),
        ("n_candidates", lambda size: FMQ("MlpPolicy", PointEnv(), policy_kwargs={"n_candidates": size})),
        ("n_sampling_steps", lambda size: FMQ("MlpPolicy", PointEnv(), policy_kwargs={"n_sampling_steps": size})),
        ("beam_width", lambda size: FMQ("MlpPolicy", PointEnv(), search={"beam_width": size})),
        ("branches", lambda size: FMQ("MlpPolicy", PointEnv(), search={"branches": size})),
        ("batch_size", lambda size: RQL("MlpPolicy", PointEnv(), **SMALL).train(1, batch_size=size)),
        ("batch_size", lambda size: FlowMapPolicy(*spaces()).learn_behaviour(collect(PointEnv(), 1), 1, batch_size=size)),
    ],
)
def test_sizes_below_one_are_refused_by_name(name, build, size):
    with pytest.raises(ValueError, match=f"`{name}` must be at least [01], but {size} was given"):
        build(size)


def spaces():
    env = PointEnv()
    return env.observation_space, env.action_space, lambda progress: 1e-3
