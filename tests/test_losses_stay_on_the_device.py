"""No on-policy loss looks at its data: all run on tensors that have none, keep the dtype, and compute what they computed."""

from types import SimpleNamespace

import pytest
import torch as th
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributions import Bernoulli, Categorical, Normal

from sb3_flow import losses

T, K, G = 6, 2, 3
N = B = K * G
given = SimpleNamespace(dtype=th.float32)


def normal(*shape):
    return th.randn(*shape, dtype=given.dtype)


def flags(*shape):
    return th.rand(*shape) < 0.3


def segments():
    return th.arange(B) % 3


def rollout():
    return normal(T, N), normal(T, N), normal(N), flags(T, N), flags(T, N), normal(T, N)


def categorical():
    return Categorical(logits=normal(B, 3), validate_args=False)


def gaussian():
    return Normal(normal(B, 2), normal(B, 2).exp(), validate_args=False)


def bernoulli():
    return Bernoulli(logits=normal(B, 2), validate_args=False)


CALLS = {
    "clipped_surrogate": lambda: losses.clipped_surrogate(normal(B).exp(), normal(B), 0.2, 0.3, 3.0),
    "decoupled_surrogate": lambda: losses.decoupled_surrogate(*normal(4, B), 0.2, 0.3, 2.0),
    "segment_mean": lambda: losses.segment_mean(normal(B), segments(), 4),
    "sequence_log_ratio": lambda: losses.sequence_log_ratio(*normal(2, B), segments(), 4),
    "gspo_loss": lambda: losses.gspo_loss(*normal(3, B), segments(), 4, 0.2),
    "gspo_token_loss": lambda: losses.gspo_token_loss(*normal(3, B), segments(), 4, 0.2),
    "value_loss": lambda: losses.value_loss(*normal(3, B), 0.2, "max"),
    "exact_kl, Categorical": lambda: losses.exact_kl(categorical(), categorical()),
    "exact_kl, Normal": lambda: losses.exact_kl(gaussian(), gaussian()),
    "exact_kl, Bernoulli": lambda: losses.exact_kl(bernoulli(), bernoulli()),
    "exact_kl, list": lambda: losses.exact_kl([categorical(), categorical()], [categorical(), categorical()]),
    "kl_k1": lambda: losses.kl_k1(*normal(2, B)),
    "kl_k2": lambda: losses.kl_k2(*normal(2, B)),
    "kl_k3": lambda: losses.kl_k3(*normal(2, B)),
    **{
        f"group_advantages, {baseline}, {scale}": lambda b=baseline, s=scale: losses.group_advantages(normal(K, G), b, s)
        for baseline in ("mean", "loo", "median", "min")
        for scale in ("group", "batch", "none")
    },
    **{
        f"group_returns_to_go, {b}, {s}": lambda b=b, s=s: losses.group_returns_to_go(
            normal(T, K, G), flags(T, K, G), 0.9, b, s
        )
        for b in ("loo", "median")
        for s in ("group", "batch")
    },
    "gae_scan": lambda: losses.gae_scan(*rollout(), 0.99, 0.95),
    "vtrace_scan": lambda: losses.vtrace_scan(normal(T, N), *rollout(), 0.99, 0.95, 2.0, 1.5),
}


@pytest.fixture(params=[th.float32, th.float64])
def dtype(request):
    # torch's default stays float32: a constant made without thought would show
    given.dtype = request.param
    yield request.param
    given.dtype = th.float32


def outputs(call):
    result = call()
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("name", CALLS)
def test_runs_without_data(name, dtype):
    expected = outputs(CALLS[name])
    with FakeTensorMode():
        actual = outputs(CALLS[name])
    with th.device("meta"):
        assert {x.device.type for x in outputs(CALLS[name])} == {"meta"}
    assert [x.shape for x in actual] == [x.shape for x in expected]
    assert {x.dtype for x in (*actual, *expected)} == {dtype}


def test_a_look_at_the_data_would_be_noticed():
    for look in (th.Tensor.item, bool):
        with FakeTensorMode(), pytest.raises(DataDependentOutputException):
            look(normal(1))


@pytest.mark.parametrize(
    "name", ["gspo_token_loss", "exact_kl, Categorical", "kl_k3", "group_returns_to_go, median, group", "vtrace_scan"]
)
def test_traces_as_one_graph(name):
    th._dynamo.reset()
    th.manual_seed(0)
    expected = outputs(CALLS[name])
    th.manual_seed(0)
    th.testing.assert_close(outputs(th.compile(CALLS[name], fullgraph=True, backend="eager")), expected)
