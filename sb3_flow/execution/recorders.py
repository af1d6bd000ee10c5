"""The seam between an update and CUDA's graphs; tests put a recorder of their own in the place of ``CudaGraphs``."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

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
    Recorder of CUDA graphs, whose tensors share a pool of memory.

    :param device: a CUDA device
    """

    def __init__(self, device: th.device) -> None:
        self._device = device
        with th.cuda.device(device):
            self._stream = th.cuda.Stream()
            self._pool = th.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], Any]) -> Any:
        with th.cuda.device(self._device):
            self._stream.wait_stream(th.cuda.current_stream())
            with th.cuda.stream(self._stream):
                result = function()
            th.cuda.current_stream().wait_stream(self._stream)
        return result

    def record(self, function: Callable[[], Any], generators: Iterable[th.Generator]) -> tuple[Callable[[], None], Any]:
        with th.cuda.device(self._device):
            graph = th.cuda.CUDAGraph()
            for generator in generators:
                graph.register_generator_state(generator)  # type: ignore[attr-defined]
            # other threads (a progress bar, a writer of logs) may go on while this thread records
            with th.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = function()
        return graph.replay, result
