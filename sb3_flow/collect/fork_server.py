"""
A process that has imported what collectors need, and that makes collectors by forking itself.

Importing torch, SB3 and numba takes seconds; a fork takes milliseconds and shares the memory of what is imported. The first
collector starts the server, which stays for the next collectors, of this model and of others, until the program ends. Python's
own fork server would need ``if __name__ == "__main__":`` in every script that trains.
"""

import contextlib
import gc
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from multiprocessing.connection import wait

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_flow.collect.collector_process import GRACE, replica, run_collector, wake_with_parent
from sb3_flow.compiled import unavailable

COMMAND = "from sb3_flow.collect.fork_server import serve; serve({channel})"
START_TIMEOUT = 120.0  # importing torch on a busy machine takes its time
REQUEST = b"r"
NUMBER = struct.Struct("i")
"""The server answers a request with the process id, and with the wait status when the process has ended."""


class CollectorError(RuntimeError):
    """Tell that the collector process failed, died or hangs."""


class ForkedProcess:
    """
    Hold a process that a :class:`ForkServer` made.

    :param pid: process id
    :param end: socket from which the server tells the process's end
    """

    def __init__(self, pid: int, end: socket.socket):
        self.pid, self.ended = pid, False
        self._end: socket.socket | None = end
        self.returncode: int | None = None
        """Exit code, negative for a signal; None while the process runs, and ever after if the server died first."""

    def wait(self, timeout: float = 0.0) -> bool:
        """Wait some seconds for the end of the process, and return whether it has ended."""
        until = time.monotonic() + timeout
        if self._end is not None and wait([self._end], timeout):
            told = self._end.recv(NUMBER.size)
            self._end.close()
            self._end = None
            if told:
                self.ended, self.returncode = True, os.waitstatus_to_exitcode(*NUMBER.unpack(told))
        while self._end is None and not self.ended:  # the server died, and the process may live on
            self.ended = not _exists(self.pid)
            if time.monotonic() >= until:
                break
            time.sleep(0.05)
        return self.ended


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class ForkServer:
    """Start a server, which takes no time here, and ask it for processes."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._owner = os.getpid()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", COMMAND.format(channel=theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment(),
                start_new_session=True,  # Ctrl-C reaches the learner alone, which ends the collectors
            )
        # at exit after the end of the collectors, which are younger
        self._finalizer = weakref.finalize(self, _end, self._owner, self._process, self._channel)

    @property
    def pid(self) -> int:
        """Return the server's process id."""
        return self._process.pid

    def lives(self) -> bool:
        """Return whether the server runs, and this process, not another that forked this one, started it."""
        return self._owner == os.getpid() and self._process.poll() is None

    def fork(self, pipe: int, memory: int) -> ForkedProcess:
        """
        Make a collector process.

        :param pipe: descriptor of the pipe to the learner
        :param memory: descriptor of the shared memory
        :return: the process
        :raises CollectorError: if the server died or does not answer
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs, _places() as places, contextlib.suppress(BrokenPipeError):  # then no answer comes
                socket.send_fds(self._channel, [REQUEST], [theirs.fileno(), pipe, memory, *places])
            ours.settimeout(START_TIMEOUT)
            told = ours.recv(NUMBER.size)
            if not told:
                raise CollectorError(f"The process (pid {self.pid}) that starts collectors died.")
        except TimeoutError:
            ours.close()
            self._process.kill()
            raise CollectorError(f"The process (pid {self.pid}) that starts collectors hung, and was killed.") from None
        except BaseException:
            ours.close()
            raise
        (pid,) = NUMBER.unpack(told)
        return ForkedProcess(pid, ours)


@contextlib.contextmanager
def _places() -> Iterator[list[int]]:
    """Open the working folder, the output and the error output that this process has now."""

    def opened(descriptor: int) -> int:
        try:
            return os.dup(descriptor)
        except OSError:  # closed
            return os.open(os.devnull, os.O_WRONLY)

    descriptors = [os.open(".", os.O_RDONLY), opened(1), opened(2)]
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def environment() -> dict[str, str]:
    """Return the environment variables of collectors, which can import every module that this process can."""
    # libraries read their threads when they are loaded
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


def _end(owner: int, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    """Ask the server to end by closing the channel, and kill it after the grace."""
    channel.close()
    if os.getpid() != owner:
        return
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_lock = threading.Lock()
_server: ForkServer | None = None


def fork_server() -> ForkServer:
    """Return the server of this process, after starting it if there is none."""
    global _server
    with _lock:
        if _server is None or not _server.lives():
            _server = ForkServer()
        return _server


def preload() -> None:
    """Act once, since torch, SB3 and numba load much of themselves with the first policy."""
    th.set_num_threads(1)
    policy = replica(ActorCriticPolicy, (spaces.Box(-1.0, 1.0, (1,)), spaces.Discrete(2)), {})
    with th.no_grad():
        policy(th.zeros(1, 1))
    if not unavailable():
        from sb3_flow.on_policy.native_learner import NativeLoops  # only where numba can be used

        NativeLoops(policy).act(np.zeros((1, 1), np.float32), np.random.default_rng(0))


def serve(channel: int) -> None:
    """
    Fork a collector for each request, and tell the ends of the collectors, until the learner is gone.

    :param channel: descriptor of the socket to the learner
    """
    wake_with_parent()
    descriptors = _serve(socket.socket(fileno=channel))
    if descriptors is None:
        os._exit(0)  # the interpreter's end would take its time
    run_collector(*descriptors)


def _serve(channel: socket.socket) -> tuple[int, int] | None:
    """Serve; return None at the end, and in each collector the descriptors of its pipe and memory."""
    parent = os.getppid()
    preload()
    gc.collect()
    gc.freeze()  # a collection would write to pages that forks share
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    for number in (signal.SIGCHLD, signal.SIGCONT):
        signal.signal(number, lambda *_: None)  # interrupts `select`
    ends: dict[int, socket.socket] = {}
    while os.getppid() == parent:
        ready = wait([channel, woken])
        if woken in ready:
            woken.recv(1024)
        _tell_ends(ends)
        if channel not in ready:
            continue
        request, descriptors, *_ = socket.recv_fds(channel, len(REQUEST), 6)
        if not request:
            return None
        end, pipe, memory, folder, out, err = descriptors
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGCONT):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            os.fchdir(folder)
            os.dup2(out, 1)
            os.dup2(err, 2)
            for opened in (channel, woken, wakes, *ends.values()):
                opened.close()
            for descriptor in (end, folder, out, err):
                os.close(descriptor)
            return pipe, memory
        for descriptor in (pipe, memory, folder, out, err):
            os.close(descriptor)
        ends[pid] = socket.socket(fileno=end)
        with contextlib.suppress(OSError):  # the learner was interrupted while it waited
            ends[pid].send(NUMBER.pack(pid))
    return None


def _tell_ends(ends: dict[int, socket.socket]) -> None:
    """Tell the learner the wait status of each collector that has ended."""
    for pid in list(ends):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with contextlib.suppress(OSError), ends.pop(pid) as end:
                end.send(NUMBER.pack(status))
