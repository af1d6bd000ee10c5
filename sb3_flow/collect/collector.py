"""The learner's side of the collector process: it starts and ends the process, and asks and waits for rollouts."""

import contextlib
import os
import pickle
import signal
import sys
import time
import weakref
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_flow.collect.collector_process import GRACE, SIGNALS
from sb3_flow.collect.fork_server import START_TIMEOUT, CollectorError, ForkedProcess, environment, fork_server
from sb3_flow.collect.memory import Layout, attach, reserve
from sb3_flow.collect.slots import Rollout, RolloutSpec
from sb3_flow.collect.weights import PublishedWeights


class CollectedRollout(NamedTuple):
    """
    Hold a rollout that has arrived.

    :param rollout: the slot that holds it
    :param news: infos, statistics of the normalisers and states of the random generators
    :param waited: seconds for which the learner waited
    """

    rollout: Rollout
    news: dict[str, Any]
    waited: float


def _end(owner: int, process: ForkedProcess, connection: Connection, grace: float) -> None:
    """Ask the process to end by closing the pipe; kill the process after the grace, and its children in any case."""
    connection.close()
    if os.getpid() != owner:  # a fork of the learner forgets its copy of the model
        return
    process.wait(grace)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # a group of its own
    process.wait(grace)


class Collector:
    """
    Start a collector process, and talk to it.

    :param policy: the learner's policy, whose weights the collector's replica copies
    :param policy_arguments: class, positional and keyword arguments of the replica, except the learning rate
    :param env: environments packed by :func:`pack`
    :param spec: shapes of the rollouts
    :param n_slots: number of rollouts in shared memory
    :param native: act in compiled loops
    :param fresh: take the freshest weights at each step
    :param sde_sample_freq: steps between draws of gSDE's noise, -1 for none within a rollout
    :param timeout: seconds without a step after which the collector is killed
    """

    def __init__(
        self,
        policy: ActorCriticPolicy,
        policy_arguments: tuple[type, tuple[Any, ...], dict[str, Any]],
        env: bytes,
        spec: RolloutSpec,
        n_slots: int,
        native: bool,
        fresh: bool,
        sde_sample_freq: int,
        timeout: float,
    ):
        self.timeout = timeout
        self.outstanding: list[int] = []  # slots to be filled, in order
        layout = Layout()
        for signal_name in SIGNALS:
            layout.add(signal_name, (1,), np.int64)
        PublishedWeights.reserve(policy, layout)
        for number in range(n_slots):
            Rollout.reserve(spec, layout, number)
        setup = {"layout": layout, "spec": spec, "n_slots": n_slots, "env": env, "policy": cloudpickle.dumps(policy_arguments)}
        setup |= {"native": native, "fresh": fresh, "sde_sample_freq": sde_sample_freq}
        setup["place"] = {"variables": environment(), "modules": sys.path}
        memory = reserve(layout.size)
        try:
            self._connection, theirs = Pipe()
            with theirs:
                self._process = fork_server().fork(theirs.fileno(), memory)
            # ends the process when the model is forgotten, and at exit
            self._finalizer = weakref.finalize(self, _end, os.getpid(), self._process, self._connection, GRACE)
        except BaseException:
            os.close(memory)
            raise
        block = attach(memory, layout.size)
        self._heartbeat, self._cancelled = (layout.view(block, signal_name) for signal_name in SIGNALS)
        self.weights = PublishedWeights(policy, layout, block)
        self.rollouts = [Rollout(spec, layout, block, number) for number in range(n_slots)]
        try:
            self._send(setup)
            self._receive(max(START_TIMEOUT, timeout), "ready")
        except BaseException:
            self.stop()
            raise

    def __reduce__(self) -> Any:
        # a copy that is forgotten would close its descriptors' numbers, which may belong to other files by then
        raise TypeError("A collector belongs to the process that started it, and can be neither copied nor pickled.")

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def begin(self, reset: bool, coming_reset: Any, statistics: list[dict[str, Any]], random: Any) -> list[dict[str, Any]]:
        """Prepare the first rollout of ``learn``, see ``Worker.begin``; return the normalisers' statistics after the reset."""
        self._send(("begin", reset, coming_reset, statistics, random))
        statistics_after: list[dict[str, Any]] = self._receive(self.timeout, "begun")[0]
        return statistics_after

    def request(self, state: Any = None) -> None:
        """
        Ask the collector to fill a free slot by the weights that are published when it begins.

        :param state: state of the random generators to begin with, None to leave them
        """
        number = next(number for number in range(len(self.rollouts)) if number not in self.outstanding)
        self.outstanding.append(number)
        self._send(("collect", number, state))

    def receive(self) -> CollectedRollout:
        """Wait for the oldest requested rollout, whose slot is taken until :meth:`release`."""
        since = time.perf_counter()
        number, news = self._receive(self.timeout, "rollout")
        assert number == self.outstanding[0]
        return CollectedRollout(self.rollouts[number], news, time.perf_counter() - since)

    def release(self) -> None:
        """Give the slot of the oldest rollout back."""
        self.outstanding.pop(0)

    def cancel(self) -> None:
        """Take all requests back."""
        self._cancelled[0] = 1
        while self.outstanding:
            self._receive(self.timeout, "rollout", "cancelled")
            self.release()
        self._cancelled[0] = 0

    def stop(self, grace: float = GRACE) -> None:
        """End the process and all its children, after ``grace`` seconds in which the process may end by itself."""
        self._cancelled[0] = 1
        if self._finalizer.detach() is not None:
            _end(os.getpid(), self._process, self._connection, grace)

    def _send(self, message: Any) -> None:
        try:
            # not `send`, whose pickles hold descriptors of shared memory in place of tensors
            self._connection.send_bytes(pickle.dumps(message))
        except OSError:
            self._receive(self.timeout)  # raises the cause

    def _receive(self, timeout: float, *expected: str) -> list[Any]:
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

    def _obituary(self) -> str:
        self._process.wait(GRACE)
        code = self._process.returncode
        how = f"ended with exit code {code}" if code is None or code >= 0 else f"was killed by {signal.Signals(-code).name}"
        return f"The collector process (pid {self.pid}) died: it {how}."
