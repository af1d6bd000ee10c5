"""The seam between an update and CUDA's graphs; tests put a recorder of their own in the place of ``CudaGraphs``."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol
from weakref import WeakSet

import torch as th


class Recorder(Protocol):
    """Records what a function does to tensors, so that it can be done again without the function."""

    def warm_up(self, function: Callable[[], Any]) -> Any:
        """
        Call the function as :meth:`record` will call it, so that what happens at first calls alone is not recorded.

        :param function: works on tensors, in place or not
        :return: its result
        """

    def record(self, function: Callable[[], Any], generators: Iterable[th.Generator]) -> tuple[Callable[[], None], Any]:
        """
        Record the function, which does nothing to the tensors while it is recorded.

        :param function: works on tensors, in place or not, without reading a number out of one
        :param generators: that the function draws from; they advance with each replay as if the function had been called
        :return: the replay, and the function's result, tensors that each replay fills
        :raises RuntimeError: if the function cannot be recorded; generators may be unusable then
        """


class CudaGraphs:
    """
    Recorder of CUDA graphs, whose tensors share a pool of memory. The results of a graph are good until another is replayed.

    :param device: a CUDA device
    """

    def __init__(self, device: th.device) -> None:
        self._device = device
        self._graphs: WeakSet[Any] = WeakSet()
        with th.cuda.device(device):
            self._stream = th.cuda.Stream()

    def warm_up(self, function: Callable[[], Any]) -> Any:
        with th.cuda.device(self._device):
            self._stream.wait_stream(th.cuda.current_stream())
            try:
                with th.cuda.stream(self._stream):
                    return function()
            finally:  # also after an error: whoever undoes the update, or saves the weights, comes after its kernels
                th.cuda.current_stream().wait_stream(self._stream)

    def record(self, function: Callable[[], Any], generators: Iterable[th.Generator]) -> tuple[Callable[[], None], Any]:
        with th.cuda.device(self._device):
            if not self._graphs:  # torch refuses a pool whose graphs are gone while one of its tensors is not
                self._pool = th.cuda.graph_pool_handle()
            graph = th.cuda.CUDAGraph()
            for generator in generators:
                graph.register_generator_state(generator)  # type: ignore[attr-defined]
            # other threads (a progress bar, a writer of logs) may go on while this thread records
            recording = th.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
            with _without_collection(), _mended(self._pool), recording:
                result = function()
        self._graphs.add(graph)
        return graph.replay, result


@contextmanager
def _without_collection() -> Iterator[None]:
    """Collect no garbage within the context: a graph of a model that is gone must not be destroyed during a recording."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _mended(pool: Any) -> Iterator[None]:
    """
    Mend what ``th.cuda.graph`` (torch 2.11 to 2.13) leaves behind if a recording within the context fails: the stream of the
    recording, memory that goes to its pool, and torch's own generator, which can draw no more.

    :param pool: of the recording
    """
    index = th.cuda.current_device()
    own = th.cuda.default_generators[index]
    state = own.get_state()
    try:
        with th.cuda.stream(th.cuda.current_stream()):
            yield
    except BaseException:
        with suppress(RuntimeError, AttributeError):  # the recording had ended, and its error came from Python; older torch
            th.cuda.memory._cuda_endAllocateToPool(index, pool)  # type: ignore[attr-defined]
            th.cuda.memory._cuda_releasePool(index, pool)  # type: ignore[attr-defined]
        try:
            th.rand((), device=own.device)
        except RuntimeError:
            own.graphsafe_set_state(th.Generator(own.device))
        own.set_state(state)
        raise
