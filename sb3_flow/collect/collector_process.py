"""The collector process: it steps the environments with a replica of the policy and fills rollouts in shared memory."""

import ctypes
import inspect
import mmap
import os
import pickle
import queue
import random
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any, Protocol

import numpy as np
import torch as th
from stable_baselines3.common.utils import obs_as_tensor, set_random_seed

from sb3_flow.collect.environment_transfer import set_coming_reset, unpack
from sb3_flow.collect.infos import pack_infos
from sb3_flow.collect.lean_vec_env import lean
from sb3_flow.collect.memory import attach
from sb3_flow.collect.slots import Rollout
from sb3_flow.collect.weights import PublishedWeights
from sb3_flow.common.normalisers import normalisers, record_normalisers, recorded_normalisers, set_normalisers
from sb3_flow.common.wrapper_chain import chain
from sb3_flow.on_policy.collection import bounded_actions
from sb3_flow.on_policy.finite import decide

SIGNALS = ("heartbeat", "cancelled")
"""Numbers of each collector in shared memory: steps that it has made; 1 while the learner takes its requests back."""
PR_SET_PDEATHSIG = 1  # from Linux's <sys/prctl.h>
LOOK = 2.0  # seconds between looks whether the learner lives
GRACE = 5.0  # seconds in which the collector may end by itself, after the learner is gone

RandomState = tuple[Any, Any, Any, Any]


def random_state(actions: np.random.Generator | None) -> RandomState:
    """Read the states of the global generators of torch, NumPy and Python, and of the generator of native actions."""
    of_actions = None if actions is None else actions.bit_generator.state
    return th.get_rng_state(), np.random.get_state(), random.getstate(), of_actions


def set_random_state(state: RandomState, actions: np.random.Generator | None) -> None:
    """Put the same generators into a state of :func:`random_state`."""
    th.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])
    if actions is not None and state[3] is not None:
        actions.bit_generator.state = state[3]


def replica(policy_class: type[Any], arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """
    Make a policy that only acts.

    :param policy_class: class of the policy
    :param arguments: observation space and action space
    :param kwargs: further arguments
    """
    if "optimizer_class" in inspect.signature(policy_class).parameters:
        kwargs = {**kwargs, "optimizer_class": NoOptimizer}
    return policy_class(*arguments, lambda _: 0.0, **kwargs)


class NoOptimizer:
    """Stand where a policy expects its optimizer. Torch's first optimizer imports its compiler, which takes a second."""

    def __init__(self, parameters: Iterable[th.Tensor], lr: float = 0.0, **_: Any):
        self.param_groups = [{"params": list(parameters), "lr": lr}]
        self.state: dict[th.Tensor, dict[str, Any]] = defaultdict(dict)


class Answers(Protocol):
    """What a worker needs of the way to its learner."""

    closed: threading.Event
    """Set when nobody waits for answers any more."""

    def send(self, *message: Any) -> None:
        """Send a message to the learner."""


class Channel:
    """
    Serve the collector's end of the pipe. A thread reads, so that the collector notices requests and the learner's death while
    the environments step; another thread writes, so that the environments step on while the learner does not read.
    """

    def __init__(self, connection: Connection):
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.closed = threading.Event()
        self.learner: int | None = None  # the learner's process id, once it is known
        self._connection = connection
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def _read(self) -> None:
        try:
            while True:
                while not self._connection.poll(LOOK):
                    if self.learner is not None:
                        os.kill(self.learner, 0)  # a fork of the learner may hold the pipe after the learner's death
                self._requests.put(self._connection.recv_bytes())
        except (EOFError, OSError):
            self.closed.set()
            self._requests.put(None)
        time.sleep(GRACE)
        # an environment hangs; its processes, if it has any, are in this process's own group
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)

    def _write(self) -> None:
        try:
            while (message := self._outgoing.get()) is not None:
                self._connection.send_bytes(message)
        except OSError:
            self.closed.set()

    def receive(self) -> Any:
        """Wait for the next message of the learner; None if the learner is gone."""
        message = self._requests.get()
        return None if message is None else pickle.loads(message)

    def send(self, *message: Any) -> None:
        """Send a message to the learner."""
        self._outgoing.put(pickle.dumps(message))

    def flush(self) -> None:
        """Wait until all messages are sent, or the learner is gone."""
        self._outgoing.put(None)
        self._writer.join(GRACE)


class Worker:
    """
    Step the environments as the learner asks.

    :param channel: takes the answers
    :param block: the memory that the learner, or what sends to it, reads
    :param setup: the learner's first message
    """

    def __init__(self, channel: Answers, block: mmap.mmap, setup: dict[str, Any]):
        self.channel = channel
        layout, number = setup["layout"], setup["number"]
        self.heartbeat, self.cancelled = (layout.view(block, name)[number : number + 1] for name in SIGNALS)
        policy_class, arguments, kwargs = pickle.loads(setup["policy"])
        self.policy = replica(policy_class, arguments, kwargs)
        self.policy.set_training_mode(False)
        self.native: Any = None
        if setup["native"]:
            from sb3_flow.on_policy.native_learner import NativeLoops  # only where numba can be used

            self.native = NativeLoops(self.policy)
        self.generator = np.random.default_rng(0) if setup["native"] else None
        self.weights = PublishedWeights(self.policy, layout, block)
        self.spec = setup["spec"]
        self.rollouts = [Rollout(self.spec, layout, block, slot, number) for slot in range(setup["n_slots"])]
        self.recording: bool = setup["recording"]  # keep apart what comes to the statistics of normalisers
        self.fresh: bool = setup["fresh"]  # take the freshest weights at each step, not the same for the whole rollout
        self.sde_sample_freq: int = setup["sde_sample_freq"]
        self.env = unpack(setup["env"])
        lean(chain(self.env)[-1])
        self.observation: Any = None
        self.episode_starts = np.ones(self.spec.share, dtype=bool)

    def answer(self, waited: float, kind: str, *arguments: Any) -> None:
        """
        Answer a request of the learner.

        :param waited: seconds for which the collector waited for this request
        :param kind: "begin" or "collect"
        :param arguments: see the method of this name
        """
        if kind == "begin":
            self.begin(*arguments)
        else:
            self.collect(waited, *arguments)

    def begin(self, reset: bool, coming_reset: Any, statistics: list[dict[str, Any]], random: int | RandomState) -> None:
        """
        Prepare the first rollout of ``learn``.

        :param reset: reset the environments
        :param coming_reset: seeds and options of this reset
        :param statistics: statistics of the normalisers
        :param random: seed or states of the random generators
        """
        if isinstance(random, int):
            set_random_seed(random)
            self.generator = self.generator and np.random.default_rng(random)
        else:
            set_random_state(random, self.generator)
        self._set_statistics(statistics)
        if reset or self.observation is None:
            set_coming_reset(self.env, coming_reset)
            self.observation = self.env.reset()
            self.episode_starts = np.ones(self.spec.share, dtype=bool)
        self.channel.send("begun", self._statistics())

    def _set_statistics(self, statistics: list[dict[str, Any]]) -> None:
        set_normalisers(self.env, statistics)
        if self.recording:
            record_normalisers(self.env)

    def _statistics(self) -> list[dict[str, Any]]:
        """Read the statistics of the normalisers, or, if that is kept apart, what came to them since they were set."""
        return recorded_normalisers(self.env) if self.recording else normalisers(self.env)

    def collect(self, waited: float, number: int, state: RandomState | None, statistics: list[dict[str, Any]] | None) -> None:
        """
        Fill a slot, unless the learner cancels the request.

        :param waited: seconds for which the collector waited for this request
        :param number: number of the slot
        :param state: state of the random generators, None to leave them
        :param statistics: statistics of the normalisers, None to leave them
        """
        if state is not None:
            set_random_state(state, self.generator)
        if statistics is not None:
            self._set_statistics(statistics)
        rollout, infos = self.rollouts[number], []
        rollout.begin()
        version = self.weights.read()
        if self.policy.use_sde:
            self.policy.reset_noise(self.spec.share)
        for step in range(self.spec.n_steps):
            if self.cancelled[0] or self.channel.closed.is_set():
                self.channel.send("cancelled", number)
                return
            if self.fresh and self.weights.changed:
                version = self.weights.read()
                if self.policy.use_sde:  # the noise is drawn from the weights
                    self.policy.reset_noise(self.spec.share)
            if self.policy.use_sde and self.sde_sample_freq > 0 and step % self.sde_sample_freq == 0:
                self.policy.reset_noise(self.spec.share)
            actions, values, log_probs = decide(self.act, self.policy, self.observation)
            rollout.put_observation(step, self.observation)
            rollout.episode_starts[step], rollout.versions[step] = self.episode_starts, version
            rollout.actions[step] = actions
            rollout.values[step], rollout.log_probs[step] = values.numpy().flatten(), log_probs.numpy()
            self.observation, rewards, dones, found = self.env.step(
                bounded_actions(self.policy, self.policy.action_space, actions)
            )
            infos.append(rollout.put_step(step, rewards, dones, found))
            self.episode_starts = dones
            self.heartbeat[0] += 1
        rollout.put_observation(self.spec.n_steps, self.observation)
        news = {
            "infos": pack_infos(infos),
            "normalisers": self._statistics(),
            "waited": waited,
            "reward_dtype": rewards.dtype.str,
            "random_state": None if state is None else random_state(self.generator),
        }
        self.channel.send("rollout", number, news)

    def act(self) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """Draw actions by the replica; return actions, values and log-probabilities."""
        decided: tuple[th.Tensor, th.Tensor, th.Tensor]
        if self.native is not None:
            assert self.generator is not None
            decided = self.native.act(self.observation, self.generator)
        else:
            with th.no_grad():
                decided = self.policy(obs_as_tensor(self.observation, self.policy.device))
        return decided


def failure(error: BaseException) -> tuple[str, bytes | None, str]:
    """Make the message that tells of an error which is being handled: the error, if it pickles, and the traceback."""
    try:
        original: bytes | None = pickle.dumps(error)
        pickle.loads(original)  # type: ignore[arg-type]
    except Exception:
        original = None
    return "error", original, traceback.format_exc()


def wake_with_parent() -> None:
    """Have Linux wake this process, if it is stopped, when its parent dies, so that this process notices that and ends."""
    if sys.platform == "linux":
        # SIGCONT does no harm when the parent's thread that started this process ends, which sends the signal, too; after
        # SIGKILL, the environments would not be closed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def _move_to(variables: dict[str, str], modules: list[str]) -> None:
    """Take the learner's environment variables and paths of modules, as they are now."""
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:] = modules


def run_collector(pipe: int, memory: int) -> None:
    """
    Run the collector.

    :param pipe: descriptor of the pipe to the learner
    :param memory: descriptor of the shared memory
    """
    wake_with_parent()
    th.set_num_threads(1)
    for descriptor in (pipe, memory):
        os.set_inheritable(descriptor, False)  # an environment's processes shall not keep these open
    channel = Channel(Connection(pipe))
    status, worker = 0, None
    try:
        setup = channel.receive()
        if setup is not None:
            channel.learner = setup.pop("learner")
            _move_to(**setup.pop("place"))
            worker = Worker(channel, attach(memory, setup["layout"].size), setup)
            channel.send("ready")
            since = time.perf_counter()
            while (request := channel.receive()) is not None:
                worker.answer(time.perf_counter() - since, *request)
                since = time.perf_counter()
    except BaseException as error:
        status = 1
        channel.send(*failure(error))
        channel.flush()
    try:
        if worker is not None:
            worker.env.close()
    except Exception:
        traceback.print_exc()
    os._exit(status)  # without waiting for threads
