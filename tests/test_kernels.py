"""The fused networks against the same networks in torch's own operators."""

import os
import subprocess
import sys

import numba
import pytest
import torch as th
from torch.nn import functional as F

from sb3_flow.flow import EnsembleMLP, TanhGELU, VelocityNetwork, euler_forward, euler_reverse
from sb3_flow.fused import activation_loops, compiled_network, fused_mlp, launch
from sb3_flow.fused.compiled_network import CompiledNetwork
from sb3_flow.fused.panels import CHUNK, LANES, PANEL, pointer, product

FEATURES, ACTIONS = 3, 4
LIMITS = "LITTLE_WORK", "FEW_ROWS", "FEW_POINTS"


@pytest.fixture(autouse=True)
def seed():
    th.manual_seed(0)


@pytest.fixture(autouse=True)
def however_little_work(monkeypatch):
    """Nothing is too little for kernels."""
    for name in LIMITS:
        monkeypatch.setattr(compiled_network, name, 0)


def close(actual, expected, size=1.0):
    """Relative to the largest entry and to the inputs' size: single entries are sums of such terms that may cancel."""
    scale = max(expected.abs().max().item(), size)
    th.testing.assert_close(actual, expected, rtol=1e-5, atol=3e-5 * scale)


def without_fusion(monkeypatch, function):
    with monkeypatch.context() as context:
        context.setattr(CompiledNetwork, "native", False)
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


def test_wrong_shapes_are_refused():
    """The kernels know addresses only: they would read what is not theirs."""
    velocity, ensemble = VelocityNetwork(FEATURES, ACTIONS, [8]).bind(th.randn(5, FEATURES)), EnsembleMLP(2, 6, [8])
    with pytest.raises(ValueError, match=r"`inputs` must be of shape \(5, 6\), but \(5, 7\)"):
        ensemble(th.randn(5, 7))
    with th.no_grad():
        with pytest.raises(ValueError, match=r"`inputs` must be of shape \(5, 5\), but \(4, 5\)"):
            velocity(th.zeros(4, ACTIONS), th.zeros(4, 1))
        with pytest.raises(ValueError, match=r"`x` must be of shape \(5, 4\), but \(4, 4\)"):
            euler_reverse(velocity, th.zeros(4, ACTIONS), th.zeros(5, 1), 3)
        with pytest.raises(ValueError, match=r"`time` must be of shape \(5, 1\), but \(5,\)"):
            euler_reverse(velocity, th.zeros(5, ACTIONS), th.zeros(5), 3)


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


@numba.njit
def call_gelu_forward(z, out, rows, size):
    activation_loops.gelu_forward(pointer(z), pointer(out), rows, size)


@numba.njit
def call_gelu_backward(z, grad, of_bias, rows, size):
    activation_loops.gelu_backward(pointer(z), pointer(grad), pointer(of_bias), rows, size)


@numba.njit
def call_layer_norm_forward(z, scale, shift, out, means, roots, rows, size):
    activation_loops.gelu_layer_norm_forward(
        *(pointer(z), pointer(scale), pointer(shift), pointer(out), pointer(means), pointer(roots), rows, size)
    )


@numba.njit
def call_layer_norm_backward(z, scale, means, roots, grad, of_bias, of_scale, of_shift, rows, size):
    activation_loops.gelu_layer_norm_backward(
        *(pointer(z), pointer(scale), pointer(means), pointer(roots), pointer(grad)),
        *(pointer(of_bias), pointer(of_scale), pointer(of_shift), rows, size),
    )


@numba.njit
def call_product(x, x_row, x_column, w, w_row, w_column, start, start_row, y, rows, depth, columns):
    product(x, x_row, x_column, w, w_row, w_column, start, start_row, y, rows, depth, columns)


def test_gelu_kernel():
    x = th.cat([th.linspace(-50, 50, 4001), th.zeros(1), -th.zeros(1)])
    out = th.empty_like(x)
    call_gelu_forward(x.data_ptr(), out.data_ptr(), 1, len(x))
    expected = F.gelu(x, approximate="tanh")
    assert ((out - expected).abs() <= 1e-6 + 2e-7 * x.abs()).all()  # far out the last bit of tanh is multiplied by x


def test_gelu_backward_kernel():
    x = th.cat([th.linspace(-500, 500, 4001), th.linspace(-8, 8, 4001)]).requires_grad_()
    F.gelu(x, approximate="tanh").sum().backward()
    z, grad, of_bias = x.detach(), th.ones(len(x)), th.empty(len(x))
    call_gelu_backward(z.data_ptr(), grad.data_ptr(), of_bias.data_ptr(), 1, len(x))
    th.testing.assert_close(grad, x.grad, rtol=1e-5, atol=1e-5)
    assert th.equal(grad, of_bias)


@pytest.mark.parametrize("transposed", [(), "x", "w"])
@pytest.mark.parametrize("columns", [1, LANES, LANES + 1, PANEL // 2, PANEL - 1, PANEL, 2 * PANEL + 3])
@pytest.mark.parametrize(("rows", "depth"), [(1, 5), (5, 1), (6, 0), (7, 9), (20, 33), (8, 2 * CHUNK + 1), (3, CHUNK)])
def test_product(rows, depth, columns, transposed):
    x, w, bias, start = th.randn(rows, depth), th.randn(depth, columns), th.randn(columns), th.randn(rows, columns)
    x, w = (array.t().contiguous().t() if name in transposed else array for name, array in (("x", x), ("w", w)))
    for added, distance in ((bias, 0), (start, columns)):
        y = th.full((rows + 1, columns), 7.0)
        arrays = [x.data_ptr(), *x.stride(), w.data_ptr(), *w.stride(), added.data_ptr(), distance, y.data_ptr()]
        call_product(*arrays, rows, depth, columns)
        th.testing.assert_close(y[:rows], (x.double() @ w.double() + added).float(), rtol=1e-5, atol=3e-5)
        assert (y[rows] == 7.0).all()  # nothing is written beyond the last row


@pytest.fixture
def counted(monkeypatch):
    """Counts the calls of the fused code."""
    calls = []

    def count(owner, name):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (calls.append(name), original(*args))[1])

    count(fused_mlp.FusedMLP, "__call__")
    count(fused_mlp.FusedMLP, "bind")
    count(fused_mlp._Forward, "integrate")
    return calls


def test_fused_code_is_used(counted):
    EnsembleMLP(2, 4, [8])(th.randn(5, 4))
    network = VelocityNetwork(FEATURES, ACTIONS, [8])
    arguments = th.randn(5, FEATURES), th.randn(5, ACTIONS), th.randn(5, 1)
    network(*arguments)
    with th.no_grad():
        network(*arguments)
        velocity = network.bind(arguments[0])
        euler_forward(velocity, arguments[1], 3)
        velocity(*arguments[1:])
    assert counted == ["__call__", "__call__", "bind", "bind", "integrate"]


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


def results_of_networks(batch):
    """Outputs and gradients of networks with and without LayerNorm, and an integration."""
    th.manual_seed(0)
    ensemble, field = randomised(EnsembleMLP(3, 6, [40, 33])), randomised(VelocityNetwork(FEATURES, ACTIONS, [40, 33]))
    inputs = th.randn(batch, 6), th.randn(batch, FEATURES), th.randn(batch, ACTIONS), th.rand(batch, 1)
    with th.no_grad():
        results = [ensemble(inputs[0]), field(*inputs[1:])]
        results.append(euler_reverse(field.bind(inputs[1]), inputs[2], inputs[3], 3)[0])
    for network, arguments in ((ensemble, inputs[:1]), (field, inputs[1:])):
        outputs, parameters = gradients(network, arguments, network)
        results += [*outputs, *parameters.values()]
    return results


@pytest.mark.skipif(launch._parallel is None, reason="torch brings no GNU OpenMP here")
@pytest.mark.parametrize("batch", [1, 63, 132, 300])
def test_threads_do_not_change_the_kernels(monkeypatch, batch):
    monkeypatch.setattr(launch, "SERIAL_BELOW", 0)
    monkeypatch.setattr(fused_mlp.th, "addmm", lambda bias, x, w: (bias + x.double() @ w.double()).float())
    before, results = th.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            th.set_num_threads(threads)
            results.append(results_of_networks(batch))
    finally:
        th.set_num_threads(before)
    for result in results[1:]:
        assert all(th.equal(a, b) for a, b in zip(results[0], result, strict=True))


@pytest.mark.parametrize("size", [16, 33])
def test_rows_do_not_depend_on_what_is_computed_beside_them(size):
    ensemble, field = randomised(EnsembleMLP(2, 6, [size, size])), randomised(VelocityNetwork(FEATURES, ACTIONS, [size, size]))
    x, s, a, t = th.randn(100, 6), th.randn(100, FEATURES), th.randn(100, ACTIONS), th.rand(100, 1)
    with th.no_grad():
        together = ensemble(x), euler_reverse(field.bind(s), a, t, 3)[0]
        for part in (slice(0, 1), slice(3, 8), slice(40, 60), slice(93, 100)):
            assert th.equal(ensemble(x[part]), together[0][:, part])
            own = field.bind(th.cat([s[part]] * 2))  # the product with the features is torch's, of any number of rows
            close(euler_reverse(own, th.cat([a[part]] * 2), th.cat([t[part]] * 2), 3)[0][: len(a[part])], together[1][part])


@pytest.mark.parametrize("size", [8, 16, 17, 40])
def test_places_in_memory_do_not_change_the_kernels(size):
    """A loop that asks at run time whether its arrays are apart sums in another order where they lie close together."""
    rows, generator = 7, th.Generator().manual_seed(3)
    z, parameter, row = (rows, size), (size,), (rows,)
    cases = {
        call_gelu_forward: [z, z],
        call_gelu_backward: [z, z, parameter],
        call_layer_norm_forward: [z, parameter, parameter, z, row, row],
        call_layer_norm_backward: [z, parameter, row, row, z, parameter, parameter, parameter],
    }
    for kernel, shapes in cases.items():
        contents = [th.rand(shape, generator=generator) for shape in shapes]
        apart = [array.clone() for array in contents]
        kernel(*[array.data_ptr() for array in apart], rows, size)
        for _ in range(40):
            memory, start, arrays = th.zeros(4096), 0, list(contents)
            for i in th.randperm(len(arrays), generator=generator).tolist():
                arrays[i] = memory[start : start + contents[i].numel()].view(shapes[i]).copy_(contents[i])
                start += -(-contents[i].numel() // 16) * 16  # cache lines, as torch allocates
            kernel(*[array.data_ptr() for array in arrays], rows, size)
            assert all(th.equal(a, b) for a, b in zip(arrays, apart, strict=True)), kernel


FROM_CACHE = """
import sys, torch as th
sys.path.insert(0, {tests!r})
from test_kernels import LIMITS, compiled_network, results_of_networks
th.set_num_threads(1)
for name in LIMITS:
    setattr(compiled_network, name, 0)
print(*[result.numpy().tobytes().hex() for result in results_of_networks(7)])
"""


def test_kernels_from_the_cache_are_those_that_were_compiled(tmp_path):
    """numba optimises code once more when it caches it; sums whose order is up to the compiler would come out differently."""
    script = FROM_CACHE.format(tests=os.path.dirname(__file__))
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True) for _ in range(2)]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    assert runs[0].stdout == runs[1].stdout != ""
