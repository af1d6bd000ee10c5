"""The learner's side of a collector process: it starts and ends the process, and exchanges messages with it."""

import contextlib
import os
import pickle
import signal
import time
import weakref
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from sb3_flow.collect.collector_process import GRACE
from sb3_flow.collect.fork_server import CollectorError, ForkedProcess, fork_server


def _end(owner: int, process: ForkedProcess, connection: Connection, grace: float) -> None:
    """Ask the process to end by closing the pipe; kill the process after the grace, and its children in any case."""
    connection.close()
    if os.getpid() != owner:  # a fork of the learner forgets its copy of the model
        return
    process.wait(grace)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # a group of its own
    process.wait(GRACE)


class Collector:
    """
    Start a collector process, and talk to it.

    :param memory: descriptor of the shared memory
    :param heartbeat: number of steps that the collector has made, in the shared memory, shape ``(1,)``
    """

    def __init__(self, memory: int, heartbeat: np.ndarray):
        self._heartbeat = heartbeat
        self._connection, theirs = Pipe()
        with theirs:
            self._process = fork_server().fork(theirs.fileno(), memory)
        # ends the process when the model is forgotten, and at exit
        self._finalizer = weakref.finalize(self, _end, os.getpid(), self._process, self._connection, GRACE)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def send(self, message: Any, timeout: float) -> None:
        """Send a message that pickles; for timeout and errors see :meth:`receive`."""
        try:
            # not `send`, whose pickles hold descriptors of shared memory in place of tensors
            self._connection.send_bytes(pickle.dumps(message))
        except OSError:
            self.receive(timeout)  # raises the cause

    def receive(self, timeout: float, *expected: str) -> list[Any]:
        """
        Wait for the next message.

        :param timeout: seconds without a step after which the process is killed
        :param expected: expected kinds of messages
        :return: the content of the message
        :raises CollectorError: if the process failed, died or hangs
        """
        beat, since = int(self._heartbeat[0]), time.monotonic()
        try:
            while not self._connection.poll(0.1):
                if self._process.wait() and not self._connection.poll(0.1):
                    raise EOFError
                now = int(self._heartbeat[0])
                if now != beat:
                    beat, since = now, time.monotonic()
                elif time.monotonic() - since > timeout:
                    self.stop(grace=0.0)
                    raise CollectorError(
                        f"The collector process (pid {self.pid}) hangs: the environments made no step for {timeout:g} "
                        "seconds. It was killed. If a step or a reset may take that long, raise `collector_timeout`."
                    )
            message: tuple[Any, ...] = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise CollectorError(self._obituary()) from None
        kind, *content = message
        if kind == "error":
            raise CollectorError(f"The collector process (pid {self.pid}) failed:\n\n{content[1]}") from (
                None if content[0] is None else pickle.loads(content[0])
            )
        assert kind in expected, kind
        return content

    def ask_to_end(self) -> None:
        """Close the pipe, so that the process ends by itself."""
        self._connection.close()

    def stop(self, grace: float = GRACE) -> None:
        """End the process and all its children, after ``grace`` seconds in which the process may end by itself."""
        if self._finalizer.detach() is not None:
            _end(os.getpid(), self._process, self._connection, grace)

    def _obituary(self) -> str:
        self._process.wait(GRACE)
        code = self._process.returncode
        how = f"ended with exit code {code}" if code is None or code >= 0 else f"was killed by {signal.Signals(-code).name}"
        return f"The collector process (pid {self.pid}) died: it {how}."
