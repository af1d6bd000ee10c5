"""What CUDA alone asks of optimizers and recordings, with tensors on a GPU in name only and a stand-in for the driver."""

import contextlib
import gc
from unittest import mock

import pytest
import torch as th
from torch._subclasses.fake_tensor import FakeTensorMode

from sb3_flow.execution import UpdateRunner
from sb3_flow.execution.recordable_optimizer import RecordableOptimizer, set_options
from sb3_flow.execution.recorders import CudaGraphs

CUDA = th.device("cuda")
OPTIMIZERS = {
    "Adam": lambda parameters: th.optim.Adam(parameters, lr=0.1, foreach=True),
    "Adam, fused": lambda parameters: th.optim.Adam(parameters, lr=0.1, fused=True),
    "NAdam": lambda parameters: th.optim.NAdam(parameters, lr=0.1, foreach=True),
    "RMSprop": lambda parameters: th.optim.RMSprop(parameters, lr=0.1, foreach=True),
}


@pytest.fixture
def gpu_in_name():
    """Tensors have a device and no numbers."""
    checked = mock.patch("torch.optim.adam._device_dtype_check_for_fused", lambda *given: None)
    with FakeTensorMode(), checked, mock.patch.object(th, "_fused_adam_"):  # which knows no such tensors
        yield


def step(optimizer, capturing=False):
    stream = mock.Mock(is_capturing=lambda: capturing)
    on_gpu = mock.patch.object(th.accelerator, "current_accelerator", lambda check_available=True: CUDA)
    with on_gpu, mock.patch.object(th.accelerator, "current_stream", lambda: stream):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = th.ones_like(parameter)
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("error")
def test_an_optimizer_can_be_recorded_from_any_step_on(name, gpu_in_name):
    parameters = [th.nn.Parameter(th.zeros(3, device=CUDA)) for _ in range(2)]
    optimizer = OPTIMIZERS[name](parameters)
    step(optimizer)
    with pytest.raises(RuntimeError, match="capturable is False"):
        step(optimizer, capturing=True)
    before = optimizer.state_dict()["param_groups"]
    recordable = RecordableOptimizer(optimizer)
    assert recordable.hindrance is None
    for _ in range(2):
        recordable.prepare()
        step(optimizer)  # a warm-up; torch's warning would be an error here
        step(optimizer, capturing=True)
    for state in optimizer.state.values():
        assert {value.device.type for value in state.values()} == {"cuda"}
    assert optimizer.param_groups[0]["lr"].device.type == "cuda" and optimizer.param_groups[0]["capturable"]
    assert recordable.plain_state()["param_groups"] == before, "files do not tell of recordings"
    optimizer.param_groups[0]["lr"] = 0.25  # SB3 does this before each update
    assert recordable.plain_state()["param_groups"] == [{**group, "lr": 0.25} for group in before]
    set_options(optimizer.param_groups, recordable.plain_options())
    assert not optimizer.param_groups[0]["capturable"]


def test_a_group_may_come_later(gpu_in_name):
    one, other = (th.nn.Parameter(th.zeros(3, device=CUDA)) for _ in range(2))
    optimizer = th.optim.Adam([one], lr=0.5)
    recordable = RecordableOptimizer(optimizer)
    recordable.prepare()
    optimizer.add_param_group({"params": [other], "lr": 0.25})
    recordable.prepare()
    step(optimizer, capturing=True)
    assert [group["lr"] for group in recordable.plain_state()["param_groups"]] == [0.5, 0.25]
    assert not any(group["capturable"] for group in recordable.plain_state()["param_groups"])


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
def test_an_optimizer_that_is_left_is_as_before(gpu_in_name):
    runner = UpdateRunner("graph", CUDA, recorder=mock.Mock(warm_up=lambda function: function()))
    optimizers = [th.optim.Adam([th.nn.Parameter(th.zeros(3, device=CUDA))], lr=0.5) for _ in range(2)]
    runner(lambda: None, (), {}, optimizers)
    assert all(optimizer.param_groups[0]["capturable"] for optimizer in optimizers)
    runner(lambda: None, (), {}, optimizers[:1])
    left = optimizers[1].param_groups[0]
    assert left["lr"] == 0.5 and type(left["lr"]) is float and not left["capturable"]
    assert runner.state_of(optimizers[0])["param_groups"][0]["capturable"] is False


class Driver:
    """A stand-in for ``th.cuda`` that fails as CUDA and torch do: a recording that fails leaves its stream and its pool."""

    def __init__(self):
        self.present, self.pools, self.recording, self.log = "user's", 0, None, []
        self.generator = mock.Mock(get_state=lambda: "state", device=CUDA)
        self.default_generators = [self.generator]
        self.memory = mock.Mock(_cuda_endAllocateToPool=self.end, _cuda_releasePool=lambda *given: self.log.append("released"))

    def Stream(self):
        return mock.Mock(wait_stream=lambda other: self.log.append("side waits"), is_side=True)

    def CUDAGraph(self):
        return mock.NonCallableMagicMock()

    def device(self, device):
        return contextlib.nullcontext()

    def current_device(self):
        return 0

    def current_stream(self):
        return mock.Mock(wait_stream=lambda other: self.log.append("user waits"), now=self.present)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.present = self.present, getattr(stream, "now", "side")
        try:
            yield
        finally:
            self.present = before

    def graph_pool_handle(self):
        self.pools += 1
        return self.pools

    def end(self, device, pool):
        if self.recording != pool:
            raise RuntimeError("not recording to this pool")
        self.recording = None

    def graph(self, graph, pool, stream, capture_error_mode):
        driver = self

        class Recording:
            def __enter__(self):
                driver.present, driver.recording = "side", pool

            def __exit__(self, kind, error, trace):
                if isinstance(error, RuntimeError):
                    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
                driver.present, driver.recording = "user's", None

        return Recording()


@pytest.fixture
def driver():
    with mock.patch.object(th, "cuda", Driver()) as found:
        yield found


def fail(error=RuntimeError):
    assert not gc.isenabled() or error is ValueError
    raise error("a reason")


def test_a_recording_that_fails_leaves_nothing_behind(driver):
    graphs = CudaGraphs(CUDA)
    random = mock.patch.object(th, "rand", side_effect=RuntimeError("Offset increment outside graph capture"))
    with random, mock.patch.object(th, "Generator"), pytest.raises(RuntimeError, match="previous error during capture"):
        graphs.record(fail, [])
    assert driver.present == "user's" and driver.recording is None and driver.log == ["released"]
    driver.generator.graphsafe_set_state.assert_called_once()
    driver.generator.set_state.assert_called_once_with("state")
    assert gc.isenabled()
    with mock.patch.object(th, "rand"), pytest.raises(KeyboardInterrupt):
        graphs.record(lambda: fail(KeyboardInterrupt), [])
    assert driver.present == "user's" and driver.recording is None and driver.log == ["released"]
    driver.generator.graphsafe_set_state.assert_called_once()


def test_a_pool_serves_graphs_that_are_alive(driver):
    """Torch refuses a pool whose graphs are all gone while a tensor of the pool, e.g. a gradient, is not."""
    graphs = CudaGraphs(CUDA)
    one, two = graphs.record(int, []), graphs.record(int, [])
    assert driver.pools == 1
    del one, two
    gc.collect()
    graphs.record(int, [])
    assert driver.pools == 2


def test_an_update_that_breaks_is_over_before_anything_else_begins(driver):
    graphs = CudaGraphs(CUDA)
    with pytest.raises(ValueError, match="a reason"):
        graphs.warm_up(lambda: fail(ValueError))
    assert driver.log == ["side waits", "user waits"] and driver.present == "user's"
