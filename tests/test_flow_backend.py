"""``backend`` of RQL, FMQ, FQL, RLPD, DSRL, QAM and their policies: what it chooses, says, saves and refuses."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch as th
from tasks import PointEnv, collect

from sb3_flow import DSRL, FMQ, FQL, QAM, RLPD, RQL
from sb3_flow.common import backends
from sb3_flow.dsrl.policies import DSRLPolicy
from sb3_flow.flow import EnsembleMLP, FlowMapNetwork, GaussianNetwork, OneStepNetwork, VelocityNetwork, euler_forward
from sb3_flow.fmq import FlowMapPolicy
from sb3_flow.fql.policies import FQLPolicy
from sb3_flow.fused import compiled_network as flow_backend
from sb3_flow.fused import launch
from sb3_flow.fused.compiled_network import compiled_networks
from sb3_flow.qam.policies import QAMPolicy
from sb3_flow.rlpd.policies import RLPDPolicy
from sb3_flow.rql.policies import RQLPolicy

SMALL = {"policy_kwargs": {"net_arch": [16, 16]}, "seed": 0, "device": "cpu"}
REASON = "numba cannot be used (ImportError: no such module)"


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("SB3_FLOW_BACKEND", raising=False)
    for name in ("LITTLE_WORK", "FEW_ROWS", "FEW_POINTS"):  # nothing is too little for kernels
        monkeypatch.setattr(flow_backend, name, 0)


@pytest.fixture(params=[RQL, FMQ, FQL, RLPD, DSRL, QAM])
def algorithm(request):
    return request.param


@pytest.fixture
def launches(monkeypatch):
    calls, launched = [], launch.Launch.__call__
    monkeypatch.setattr(launch.Launch, "__call__", lambda *args: (calls.append(1), launched(*args))[1])
    return calls


def build(algorithm, **kwargs):
    return algorithm("MlpPolicy", PointEnv(), **{**SMALL, **kwargs})


def without_machine_code(monkeypatch):
    for module in (flow_backend, backends):
        monkeypatch.setattr(module, "unavailable", lambda: REASON)


def trained(model):
    return model.learn_offline(collect(PointEnv(), episodes=2), 2)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_backend_computes_all_networks(algorithm, backend, launches):
    model = trained(build(algorithm, backend=backend, batch_size=8))
    model.predict(np.zeros((3, 2), np.float32))
    assert bool(launches) == (backend == "native")
    n_networks = 3 if algorithm is RLPD else 4
    networks = compiled_networks(model.policy)
    assert [network.native for network in networks] == [backend == "native"] * (
        (6 if algorithm is DSRL else n_networks) + (algorithm is QAM)
    )


def test_both_backends_agree(algorithm):
    models = [trained(build(algorithm, backend=backend, batch_size=8)) for backend in ("torch", "native")]
    one, other = (model.policy.state_dict() for model in models)
    for name, value in one.items():
        th.testing.assert_close(value, other[name], rtol=1e-3, atol=1e-5)


def test_the_choice_is_saved_and_can_be_changed(algorithm, tmp_path, launches):
    for backend in ("torch", "native"):
        build(algorithm, backend=backend).save(tmp_path / "model")
        loaded = algorithm.load(tmp_path / "model")
        assert (loaded.backend, loaded.policy.backend, loaded.policy.chosen_backend) == (backend,) * 3
        other = "native" if backend == "torch" else "torch"
        assert algorithm.load(tmp_path / "model", backend=other).policy.chosen_backend == other
    launches.clear()
    algorithm.load(tmp_path / "model", backend="torch").predict(np.zeros(2, np.float32))
    assert not launches


def test_auto_stays_what_it_was(algorithm, tmp_path, monkeypatch):
    """A machine that can do more than the one on which the model was built does not change the model's numbers."""
    with monkeypatch.context() as context:
        without_machine_code(context)
        with pytest.warns(UserWarning, match="ImportError"):
            build(algorithm).save(tmp_path / "model")
    loaded = algorithm.load(tmp_path / "model")
    assert (loaded.backend, loaded.policy.chosen_backend) == ("auto", "torch")
    assert algorithm.load(tmp_path / "model", backend="native").policy.chosen_backend == "native"
    monkeypatch.setenv("SB3_FLOW_BACKEND", "native")
    assert algorithm.load(tmp_path / "model").policy.chosen_backend == "native"


def test_the_variable_replaces_auto_only(algorithm, monkeypatch):
    monkeypatch.setenv("SB3_FLOW_BACKEND", "torch")
    assert build(algorithm).policy.chosen_backend == "torch"
    assert build(algorithm, backend="native").policy.chosen_backend == "native"
    monkeypatch.setenv("SB3_FLOW_BACKEND", "fast")
    with pytest.raises(ValueError, match="SB3_FLOW_BACKEND must be one of"):
        build(algorithm)
    with pytest.raises(ValueError, match="`backend` must be one of"):
        build(algorithm, backend="fast")


def test_verbose_says_which(algorithm, capsys):
    build(algorithm, verbose=1)
    assert "Using the native backend" in capsys.readouterr().out
    build(algorithm, verbose=1, policy_kwargs={"activation_fn": th.nn.ReLU, "net_arch": [8]})
    assert "Using the torch backend, which is slower: the activation is ReLU, not TanhGELU" in capsys.readouterr().out


def test_without_compiled_code_auto_is_torch_and_says_so(algorithm, monkeypatch, launches, recwarn):
    without_machine_code(monkeypatch)
    trained(build(algorithm, batch_size=8))
    assert any("slower: numba cannot be used" in str(warning.message) for warning in recwarn.list)
    assert not launches
    with pytest.raises(ValueError, match=r'`backend` is "native", but numba cannot be used'):
        build(algorithm, backend="native")


def test_without_torchs_threads_auto_is_torch_where_torch_has_several(monkeypatch, launches, capsys):
    monkeypatch.setattr(launch, "_parallel", None)
    model, threads = build(RQL), th.get_num_threads()
    try:
        th.set_num_threads(2)
        assert build(RQL, verbose=1).policy.chosen_backend == "torch"
        assert "slower: torch runs 2 threads here" in capsys.readouterr().out
        launches.clear()
        model.predict(np.zeros(2, np.float32))  # a model that was built before does not become slower than torch either
        assert not launches
        th.set_num_threads(1)
        assert build(RQL).policy.chosen_backend == "native"
    finally:
        th.set_num_threads(threads)


def test_native_is_refused_where_no_network_is_covered(algorithm):
    with pytest.raises(ValueError, match="the activation is ReLU"):
        build(algorithm, backend="native", policy_kwargs={"activation_fn": th.nn.ReLU})


@pytest.mark.parametrize("policy_class", [RQLPolicy, FlowMapPolicy, FQLPolicy, RLPDPolicy, DSRLPolicy, QAMPolicy])
def test_a_policy_alone(policy_class, tmp_path, launches):
    env = PointEnv()
    spaces = env.observation_space, env.action_space, lambda progress: 1e-3
    assert policy_class(*spaces, net_arch=[8]).chosen_backend == "native"
    policy = policy_class(*spaces, net_arch=[8], backend="torch")
    policy.save(tmp_path / "policy")
    loaded = policy_class.load(tmp_path / "policy")
    for one in (policy, loaded):
        one.predict(np.zeros(2, np.float32))
        assert one.chosen_backend == "torch"
    assert not launches
    policy.set_backend("native")
    policy.predict(np.zeros(2, np.float32))
    assert launches


def test_a_fixed_rule_leaves_what_is_too_little_to_torch(monkeypatch, launches):
    monkeypatch.undo()
    launched = launch.Launch.__call__
    monkeypatch.setattr(launch.Launch, "__call__", lambda *args: (launches.append(1), launched(*args))[1])
    ensemble, field = EnsembleMLP(2, 10, [100, 100]), VelocityNetwork(5, 5, [100])
    wide, flow_map = VelocityNetwork(5, 5, [800, 800]), FlowMapNetwork(5, 5, [300, 300])
    one_step, gaussian = OneStepNetwork(5, 5, [300, 300]), GaussianNetwork(5, 5, [300, 300])
    with th.no_grad():
        for network, rows, expected in ((ensemble, 1, 1), (EnsembleMLP(2, 10, [500, 500]), 7, 0), (ensemble, 64, 1)):
            launches.clear()
            network(th.randn(rows, 10))
            assert len(launches) == expected
        for rows, expected in ((15, 0), (16, 1)):
            launches.clear()
            one_step(th.randn(rows, 5), th.randn(rows, 5))
            gaussian(th.randn(rows, 5))
            assert len(launches) == 2 * expected
            for n_candidates in (None, 1):
                launches.clear()
                velocity = flow_map.bind(th.randn(rows, 5), n_candidates)
                velocity(th.randn(rows, 5), th.zeros(rows, 1), th.ones(rows, 1))
                assert len(launches) == expected
        for network, rows, expected in ((field, 1, 1), (wide, 7, 0), (wide, 8, 1)):
            launches.clear()
            euler_forward(network.bind(th.randn(rows, 5)), th.randn(rows, 5), 3)
            assert len(launches) == expected
    launches.clear()
    ensemble(th.randn(1, 10))  # with gradients kernels always repay
    assert len(launches) == 1


WITHOUT_NUMBA = """
import sys, warnings
sys.path[:0] = {path!r}
sys.modules["numba"] = sys.modules["llvmlite"] = None
import numpy as np
from tasks import PointEnv, collect
from sb3_flow import DSRL, FMQ, FQL, RLPD, QAM, RQL
data = collect(PointEnv(), episodes=2)
for algorithm in (RQL, FMQ, FQL, RLPD, DSRL, QAM):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        model = algorithm("MlpPolicy", PointEnv(), batch_size=8, policy_kwargs={{"net_arch": [8]}}, device="cpu", verbose=1)
    print([str(one.message) for one in caught if "slower" in str(one.message)])
    model.learn_offline(data, 2)
    model.learn(30)
    print(model.predict(np.zeros(2, np.float32))[0].shape)
    try:
        algorithm("MlpPolicy", PointEnv(), device="cpu", backend="native")
    except ValueError as error:
        print(error)
"""


def test_without_numba():
    script = WITHOUT_NUMBA.format(path=[os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))])
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("Using the torch backend, which is slower: numba cannot be used") >= 1
    assert run.stdout.count('`backend` is "native", but numba cannot be used') == 6
    assert run.stdout.count("(2,)") == 6
