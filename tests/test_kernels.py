"""The fused networks against the same networks in torch's own operators."""

import pytest
import torch as th
from torch.nn import functional as F

from sb3_flow.flow import EnsembleMLP, TanhGELU, VelocityNetwork, euler_forward, euler_reverse, fused, networks
from sb3_flow.kernels import activations as kernels

FEATURES, ACTIONS = 3, 4


@pytest.fixture(autouse=True)
def seed():
    th.manual_seed(0)


def close(actual, expected, size=1.0):
    """Relative to the largest entry and to the inputs' size: single entries are sums of such terms that may cancel."""
    scale = max(expected.abs().max().item(), size)
    th.testing.assert_close(actual, expected, rtol=1e-5, atol=3e-5 * scale)


def without_fusion(monkeypatch, function):
    with monkeypatch.context() as context:
        context.setattr(networks, "can_fuse", lambda *tensors: False)
        return function()


def randomised(network):
    with th.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * th.randn_like(parameter))
    return network


def gradients(network, inputs, output):
    """Output, and the gradients of a random projection of it with respect to inputs and parameters."""
    network.zero_grad(set_to_none=True)
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = output(*inputs)
    weights = th.randn(out.shape, generator=th.Generator().manual_seed(1))
    (out * weights).sum().backward()
    return [out.detach(), *(x.grad for x in inputs)], {name: p.grad for name, p in network.named_parameters()}


def inputs_of(kind, batch, dim):
    x = th.randn(batch, dim, generator=th.Generator().manual_seed(2))
    return {
        "normal": x,
        "extreme": 50 * th.sign(x),
        "zero": th.zeros_like(x),
        "non-contiguous": th.randn(dim, batch, generator=th.Generator().manual_seed(2)).t(),
    }[kind]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["normal", "extreme", "zero", "non-contiguous"])
@pytest.mark.parametrize(("members", "batch", "net_arch"), [(3, 7, [16, 9]), (1, 1, [8]), (2, 64, [32, 32, 32]), (2, 5, [])])
def test_ensemble(monkeypatch, members, batch, net_arch, kind, frozen):
    ensemble = randomised(EnsembleMLP(members, 6, net_arch))
    x = inputs_of(kind, batch, 6)

    def run():
        with th.no_grad():
            value = ensemble(x)
        return value, *gradients(ensemble, [x], lambda x: ensemble(x, frozen))

    value, outputs, parameters = run()
    plain_value, plain_outputs, plain_parameters = without_fusion(monkeypatch, run)
    size = x.abs().max().item()
    for actual, expected in zip([value, *outputs], [plain_value, *plain_outputs], strict=True):
        close(actual, expected, size)
    for name, expected in plain_parameters.items():
        if frozen:
            assert parameters[name] is None and expected is None
        else:
            assert parameters[name].is_contiguous()
            close(parameters[name], expected, size)


@pytest.mark.parametrize("kind", ["normal", "extreme", "zero", "non-contiguous"])
@pytest.mark.parametrize(("batch", "net_arch"), [(7, [16, 9]), (1, [8]), (64, [32, 32, 32]), (5, [])])
def test_velocity(monkeypatch, batch, net_arch, kind):
    network = randomised(VelocityNetwork(FEATURES, ACTIONS, net_arch))
    inputs = [inputs_of(kind, batch, dim) for dim in (FEATURES, ACTIONS, 1)]

    def run():
        velocity = network.bind(inputs[0])
        with th.no_grad():
            integrated = [euler_forward(velocity, inputs[1], 3), euler_reverse(velocity, inputs[1], inputs[2].sigmoid(), 3)[0]]
        outputs, parameters = gradients(network, inputs, network)
        return [*integrated, *outputs], parameters

    outputs, parameters = run()
    plain_outputs, plain_parameters = without_fusion(monkeypatch, run)
    size = inputs[0].abs().max().item()
    for actual, expected in zip(outputs, plain_outputs, strict=True):
        close(actual, expected, size)
    for name, expected in plain_parameters.items():
        close(parameters[name], expected, size)


def test_bound_velocity_results_are_not_overwritten():
    velocity = randomised(VelocityNetwork(FEATURES, ACTIONS, [8])).bind(th.randn(5, FEATURES))
    with th.no_grad():
        first = velocity(th.zeros(5, ACTIONS), th.zeros(5, 1))
        copy = first.clone()
        velocity(th.ones(5, ACTIONS), th.ones(5, 1))
    assert th.equal(first, copy)


def test_backward_twice_with_a_retained_graph():
    ensemble = randomised(EnsembleMLP(2, 6, [8, 8]))
    loss = ensemble(th.randn(5, 6)).square().sum()
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in ensemble.parameters()]
    loss.backward()
    for parameter, grad in zip(ensemble.parameters(), once, strict=True):
        close(parameter.grad, 2 * grad)


def test_only_some_parameters_learn(monkeypatch):
    ensemble = randomised(EnsembleMLP(2, 6, [8, 8]))
    ensemble.biases.requires_grad_(False)
    x = th.randn(5, 6)

    def run():
        return gradients(ensemble, [x], ensemble)[1]

    actual, expected = run(), without_fusion(monkeypatch, run)
    for name, grad in expected.items():
        assert actual[name] is None if grad is None else close(actual[name], grad) is None


def test_gelu_kernel():
    x = th.cat([th.linspace(-50, 50, 4001), th.zeros(1), -th.zeros(1)])
    out = th.empty_like(x)
    fused._launcher(kernels.gelu_forward, x.view(1, 1, -1), th.zeros_like(x), out)()
    expected = F.gelu(x, approximate="tanh")
    assert ((out - expected).abs() <= 1e-6 + 2e-7 * x.abs()).all()  # far out the last bit of tanh is multiplied by x


def test_gelu_backward_kernel():
    x = th.cat([th.linspace(-500, 500, 4001), th.linspace(-8, 8, 4001)]).requires_grad_()
    F.gelu(x, approximate="tanh").sum().backward()
    grad, grad_bias, z = th.ones(1, 1, len(x)), th.empty(len(x)), x.detach().view(1, 1, -1)
    fused._launcher(kernels.gelu_backward, z, th.zeros(len(x)), grad, grad_bias)()
    th.testing.assert_close(grad[0, 0], x.grad, rtol=1e-5, atol=1e-5)
    assert th.equal(grad[0, 0], grad_bias)


@pytest.fixture
def counted(monkeypatch):
    """Counts the calls of the fused code."""
    calls = []

    def count(name):
        original = getattr(fused, name)
        monkeypatch.setattr(networks, name, lambda *args: (calls.append(name), original(*args))[1])

    count("fused_mlp")
    count("fused_velocity")
    return calls


def test_fused_code_is_used(counted):
    EnsembleMLP(2, 4, [8])(th.randn(5, 4))
    network = VelocityNetwork(FEATURES, ACTIONS, [8])
    arguments = th.randn(5, FEATURES), th.randn(5, ACTIONS), th.randn(5, 1)
    network(*arguments)
    with th.no_grad():
        network(*arguments)
    assert counted == ["fused_mlp", "fused_mlp", "fused_velocity"]


def test_fallback_for_transforms(counted):
    ensemble, network = EnsembleMLP(2, 4, [8]), VelocityNetwork(FEATURES, ACTIONS, [8])
    x, s, a, t = th.randn(5, 4), th.randn(5, FEATURES), th.randn(5, ACTIONS), th.randn(5, 1)
    velocity = network.bind(s)
    _, tangent = th.func.jvp(ensemble, (x,), (th.ones_like(x),))
    small = 1e-2
    with th.no_grad():
        difference = (ensemble(x + small) - ensemble(x - small)) / (2 * small)
    th.testing.assert_close(tangent, difference, rtol=1e-2, atol=1e-2)
    counted.clear()
    assert th.func.jvp(velocity, (a, t), (a, t))[1].shape == a.shape
    assert th.func.vmap(th.func.grad(lambda x: ensemble(x[None]).sum()))(x).shape == x.shape
    with th.autograd.forward_ad.dual_level():
        dual = ensemble(th.autograd.forward_ad.make_dual(x, th.ones_like(x)))
        th.testing.assert_close(th.autograd.forward_ad.unpack_dual(dual).tangent, tangent)
    with th.autocast("cpu", dtype=th.bfloat16):
        ensemble(x)
    assert counted == []


def test_fallback_for_other_types_and_activations(counted):
    x, arguments = th.randn(5, 4), (th.randn(5, FEATURES), th.randn(5, ACTIONS), th.randn(5, 1))
    assert EnsembleMLP(2, 4, [8]).double()(x.double()).dtype == th.float64
    assert VelocityNetwork(FEATURES, ACTIONS, [8]).double()(*(a.double() for a in arguments)).dtype == th.float64
    EnsembleMLP(2, 4, [8], activation_fn=th.nn.ReLU)(x)
    VelocityNetwork(FEATURES, ACTIONS, [8], activation_fn=th.nn.ReLU)(*arguments)
    assert counted == []
    x = x.requires_grad_()
    assert th.equal(TanhGELU()(x), F.gelu(x, approximate="tanh"))


@pytest.mark.skipif(fused._parallel is None, reason="torch brings no GNU OpenMP here")
@pytest.mark.parametrize("batch", [1, 63, 64, 200])
def test_threads_do_not_change_the_kernels(monkeypatch, batch):
    monkeypatch.setattr(fused, "SERIAL_BELOW", 0)
    z, grad, bias = th.randn(3, batch, 32), th.randn(3, batch, 32), th.randn(3, 32)
    before, results = th.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            th.set_num_threads(threads)
            outs, statistics = th.empty(2, *z.shape), th.empty(2, 3, batch)
            shares, grads = th.empty(4, 3, kernels.n_blocks(batch), 32), grad.expand(2, -1, -1, -1).clone()
            fused._launcher(kernels.gelu_forward, z, bias, outs[0])()
            fused._launcher(kernels.gelu_layer_norm_forward, z, bias, bias, bias, outs[1], statistics)()
            fused._launcher(kernels.gelu_backward, z, bias, grads[0], shares[3])()
            fused._launcher(kernels.gelu_layer_norm_backward, z, bias, bias, statistics, grads[1], shares[:3])()
            results.append((outs, statistics, shares, grads))
    finally:
        th.set_num_threads(before)
    for result in results[1:]:
        assert all(th.equal(a, b) for a, b in zip(results[0], result, strict=True))


@pytest.mark.parametrize("size", [8, 16, 17, 40])
def test_places_in_memory_do_not_change_the_kernels(size):
    """A loop that asks at run time whether its arrays are apart sums in another order where they lie close together."""
    members, batch, generator = 2, 5, th.Generator().manual_seed(3)
    z, bias, grad = (members, batch, size), (members, size), (members, batch, size)
    shares, statistics = (members, kernels.n_blocks(batch), size), (2, members, batch)
    cases = {
        kernels.gelu_forward: [z, bias, grad],
        kernels.gelu_backward: [z, bias, grad, (1, *shares)],
        kernels.gelu_layer_norm_forward: [z, bias, bias, bias, grad, statistics],
        kernels.gelu_layer_norm_backward: [z, bias, bias, statistics, grad, (3, *shares)],
    }
    for kernel, shapes in cases.items():
        contents = [th.rand(shape, generator=generator) for shape in shapes]
        fused._launcher(kernel, *(apart := [array.clone() for array in contents]))()
        for _ in range(40):
            memory, start, arrays = th.zeros(4096), 0, list(contents)
            for i in th.randperm(len(arrays), generator=generator).tolist():
                arrays[i] = memory[start : start + contents[i].numel()].view(shapes[i]).copy_(contents[i])
                start += -(-contents[i].numel() // 16) * 16  # cache lines, as torch allocates
            fused._launcher(kernel, *arrays)()
            assert all(th.equal(a, b) for a, b in zip(arrays, apart, strict=True)), kernel.__doc__
