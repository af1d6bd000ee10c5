"""The collectors of a learner: they share the memory of weights and rollouts, and each steps its share of the environments."""

import os
import sys
import time
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_flow.collect.collector import Collector
from sb3_flow.collect.collector_process import GRACE, SIGNALS
from sb3_flow.collect.fork_server import START_TIMEOUT, environment
from sb3_flow.collect.infos import Infos, unpack_infos
from sb3_flow.collect.memory import Layout, attach, reserve
from sb3_flow.collect.shares import of_share
from sb3_flow.collect.slots import Rollout, RolloutSpec
from sb3_flow.collect.weights import PublishedWeights


class CollectedRollout(NamedTuple):
    """
    Hold a rollout that has arrived.

    :param rollout: the slot that holds it
    :param news: what each collector tells: infos, statistics of the normalisers, states of the random generators
    :param waited: seconds for which the learner waited
    """

    rollout: Rollout
    news: list[dict[str, Any]]
    waited: float

    def infos(self) -> Infos:
        """Return the infos of all environments for each step."""
        of_collectors = [unpack_infos(news["infos"]) for news in self.news]
        return [[info for part in parts for info in part] for parts in zip(*of_collectors, strict=True)]


class Collectors:
    """
    Start collector processes, and ask and wait for rollouts.

    :param policy: the learner's policy, whose weights the collectors' replicas copy
    :param policy_arguments: class, positional and keyword arguments of the replicas, except the learning rate
    :param env: environments of one collector, packed by :func:`pack`
    :param spec: shapes of the rollouts, and the number of collectors
    :param n_slots: number of rollouts in shared memory
    :param native: act in compiled loops
    :param fresh: take the freshest weights at each step
    :param sde_sample_freq: steps between draws of gSDE's noise, -1 for none within a rollout
    :param timeout: seconds without a step after which a collector is killed
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
            layout.add(signal_name, (spec.n_collectors,), np.int64)
        PublishedWeights.reserve(policy, layout)
        for number in range(n_slots):
            Rollout.reserve(spec, layout, number)
        setup = {"layout": layout, "spec": spec, "n_slots": n_slots, "env": env, "policy": cloudpickle.dumps(policy_arguments)}
        setup |= {"native": native, "fresh": fresh, "sde_sample_freq": sde_sample_freq}
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
        self.weights = PublishedWeights(policy, layout, block)
        self.rollouts = [Rollout(spec, layout, block, number) for number in range(n_slots)]
        try:
            self._send(*({**setup, "number": number} for number in range(spec.n_collectors)))
            self._receive(max(START_TIMEOUT, timeout), "ready")
        except BaseException:
            self.stop()
            raise

    def __reduce__(self) -> Any:
        # a copy that is forgotten would close its descriptors' numbers, which may belong to other files by then
        raise TypeError("Collectors belong to the process that started them, and can be neither copied nor pickled.")

    @property
    def pids(self) -> list[int]:
        """Return the process ids."""
        return [collector.pid for collector in self._collectors]

    def begin(self, reset: bool, coming_reset: Any, statistics: list[dict[str, Any]], random: list[Any]) -> list[Any]:
        """
        Prepare the first rollout of ``learn``, see ``Worker.begin``.

        :param coming_reset: seeds and options of the first collector's reset
        :param random: seed or states of the random generators of each collector
        :return: of each collector the normalisers' statistics after the reset
        """
        self._send(*(("begin", reset, of_share(coming_reset, n), statistics, random[n]) for n in range(len(self._collectors))))
        return [statistics for (statistics,) in self._receive(self.timeout, "begun")]

    def request(self, state: Any = None, statistics: list[dict[str, Any]] | None = None) -> None:
        """
        Ask the collectors to fill a free slot by the weights that are published when they begin.

        :param state: state of the random generators to begin with, None to leave them
        :param statistics: statistics of the normalisers to begin with, None to leave them
        """
        number = next(number for number in range(len(self.rollouts)) if number not in self.outstanding)
        self.outstanding.append(number)
        self._send(*[("collect", number, state, statistics)] * len(self._collectors))

    def receive(self) -> CollectedRollout:
        """Wait for the oldest requested rollout, whose slot is taken until :meth:`release`."""
        since = time.perf_counter()
        numbers, news = zip(*self._receive(self.timeout, "rollout"), strict=True)
        assert set(numbers) == {self.outstanding[0]}
        return CollectedRollout(self.rollouts[numbers[0]], list(news), time.perf_counter() - since)

    def release(self) -> None:
        """Give the slot of the oldest rollout back."""
        self.outstanding.pop(0)

    def cancel(self) -> None:
        """Take all requests back."""
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
