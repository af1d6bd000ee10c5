"""A collector that is a Ray actor: the worker of a process, with memory of its own, whose rollouts Ray carries."""

import mmap
import os
import socket
import threading
import time
from typing import Any

import numpy as np
import torch as th

from sb3_flow.collect.collector_process import Worker, failure

SIGNALS_GROUP = "signals"
"""Ray's name for the thread of the actor that answers while another steps the environments."""
PublishedCopy = tuple[int, int, bytes, np.ndarray]
"""Number of the publication, version of the weights, digest of their names and shapes, and the weights as bytes."""


class LastAnswer:
    """Keep the last answer of a worker, which Ray takes to the learner as the result of a call."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.message: tuple[Any, ...] = ()

    def send(self, *message: Any) -> None:
        """Keep a message."""
        self.message = message


class RayWorker:
    """
    Answer a learner's calls. Messages are those of a collector process; a rollout comes with its arrays.

    ``cancel``, ``publish`` and ``beats`` are called in the group :data:`SIGNALS_GROUP`, while ``answer`` runs.
    """

    def __init__(self) -> None:
        self._answers = LastAnswer()
        self._worker: Worker | None = None
        self._lock = threading.Lock()
        self._taken = self._cancelled = self._number = 0
        self._since = time.perf_counter()

    def prepare(self, setup: dict[str, Any]) -> tuple[Any, ...]:
        """Make policy and environments; ``setup`` is that of :class:`Worker`."""
        th.set_num_threads(1)
        try:
            self._worker = Worker(self._answers, mmap.mmap(-1, setup["layout"].size), setup | {"number": 0})
        except BaseException as error:
            return failure(error)
        return "ready", f"pid {os.getpid()} on {socket.gethostname()}"

    def answer(self, number: int, published: PublishedCopy | None, *request: Any) -> tuple[Any, ...]:
        """
        Answer a request.

        :param number: number of the request
        :param published: weights to collect with; newer weights that are there already stay
        :param request: kind and arguments, see ``Worker.answer``
        """
        worker = self._worker
        assert worker is not None
        with self._lock:
            self._number = number
            worker.cancelled[0] = number <= self._cancelled
        try:
            if published is not None:
                self.publish(published)
            worker.answer(time.perf_counter() - self._since, *request)
        except BaseException as error:
            return failure(error)
        self._since = time.perf_counter()
        message = self._answers.message
        return (*message, worker.rollouts[0].columns()) if message[0] == "rollout" else message

    def publish(self, published: PublishedCopy) -> None:
        """Take the learner's weights, unless they are older than those that are there."""
        number, version, digest, weights = published
        with self._lock:
            if self._worker is not None and number > self._taken:
                self._taken = number
                self._worker.weights.take(version, digest, weights)

    def cancel(self, until: int) -> None:
        """Take all requests up to this number back."""
        with self._lock:
            self._cancelled = until
            if self._worker is not None and self._number <= until:
                self._worker.cancelled[0] = 1

    def beats(self) -> int:
        """Return the number of steps so far."""
        return 0 if self._worker is None else int(self._worker.heartbeat[0])

    def close(self) -> None:
        """Close the environments."""
        if self._worker is not None:
            self._worker.env.close()
