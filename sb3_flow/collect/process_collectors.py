"""Collectors that are processes of this machine: they share the memory of weights and rollouts with the learner."""

import os
import sys
import time
from typing import Any

from sb3_flow.collect.collector import Collector
from sb3_flow.collect.collector_process import GRACE, SIGNALS
from sb3_flow.collect.collectors import CollectedRollout, Collection, Collectors
from sb3_flow.collect.fork_server import START_TIMEOUT, environment
from sb3_flow.collect.memory import attach, reserve
from sb3_flow.collect.shares import of_share


class ProcessCollectors(Collectors):
    """
    Start collector processes, and ask and wait for rollouts.

    :param collection: what is collected
    """

    def __init__(self, collection: Collection):
        spec, n_slots = collection.spec, collection.n_slots
        layout = collection.layout(spec, n_slots)
        setup = collection.setup(layout, spec, n_slots) | {"learner": os.getpid()}
        setup["place"] = {"variables": environment(), "modules": sys.path}
        memory = reserve(layout.size)
        self._collectors: list[Collector] = []
        try:
            block = attach(os.dup(memory), layout.size)
            heartbeats, self._cancelled = (layout.view(block, signal_name) for signal_name in SIGNALS)
            for number in range(spec.n_collectors):
                self._collectors.append(Collector(memory, heartbeats[number : number + 1]))
        finally:
            os.close(memory)
        super().__init__(collection, layout, block)
        try:
            self._send(*({**setup, "number": number} for number in range(spec.n_collectors)))
            self._receive(max(START_TIMEOUT, self.timeout), "ready")
        except BaseException:
            self.stop()
            raise

    @property
    def pids(self) -> list[int]:
        """Return the process ids."""
        return [collector.pid for collector in self._collectors]

    def begin(self, reset: bool, coming_reset: Any, statistics: list[dict[str, Any]], random: list[Any]) -> list[Any]:
        self._send(*(("begin", reset, of_share(coming_reset, n), statistics, random[n]) for n in range(len(self._collectors))))
        return [statistics for (statistics,) in self._receive(self.timeout, "begun")]

    def _request(self, number: int, state: Any, statistics: list[dict[str, Any]] | None) -> None:
        self._send(*[("collect", number, state, statistics)] * len(self._collectors))

    def receive(self) -> CollectedRollout:
        since = time.perf_counter()
        numbers, news = zip(*self._receive(self.timeout, "rollout"), strict=True)
        assert set(numbers) == {self.outstanding[0]}
        return CollectedRollout(self.rollouts[numbers[0]], list(news), time.perf_counter() - since)

    def cancel(self) -> None:
        self._cancelled[:] = 1
        while self.outstanding:
            self._receive(self.timeout, "rollout", "cancelled")
            self.release()
        self._cancelled[:] = 0

    def stop(self, grace: float = GRACE) -> None:
        """End the processes and all their children, after ``grace`` seconds in which they may end by themselves."""
        self._cancelled[:] = 1
        for collector in self._collectors:
            collector.ask_to_end()
        for collector in self._collectors:
            collector.stop(grace)

    def _send(self, *messages: Any) -> None:
        """Send each collector its message."""
        for collector, message in zip(self._collectors, messages, strict=True):
            collector.send(message, self.timeout)

    def _receive(self, timeout: float, *expected: str) -> list[list[Any]]:
        """Wait for the next message of each collector."""
        return [collector.receive(timeout, *expected) for collector in self._collectors]
