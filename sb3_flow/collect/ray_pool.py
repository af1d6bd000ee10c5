"""The actors of a Ray cluster that collect: they are watched, and made anew when they are lost."""

import contextlib
import gc
import pickle
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sb3_flow.collect.collector_process import GRACE
from sb3_flow.collect.fork_server import START_TIMEOUT, CollectorError
from sb3_flow.collect.ray_worker import SIGNALS_GROUP, RayWorker
from sb3_flow.common.ray_runtime import connected, head_address, head_answers

TICK = 0.5  # seconds between looks at what may have happened
LOOK = 2.0  # seconds between looks at the head of the cluster
BEAT = 1.0  # seconds between questions whether a collector makes steps
HEAD_TIMEOUT = 20.0  # seconds without an answer of the cluster's head; after 60, Ray itself ends the program
MAX_FAILURES = 3  # losses of a collector with no rollout in between


@dataclass(eq=False)
class Order:
    """
    Hold a request for a share of a rollout.

    :param number: number of the request, which grows
    :param share: number of the share
    :param arguments: arguments of ``RayWorker.answer`` that follow the number
    :param take: takes what the collector brings
    """

    number: int
    share: int
    arguments: tuple[Any, ...]
    take: Callable[..., None]
    collector: "RayCollector | None" = None


class RayCollector:
    """
    Hold an actor.

    :param pool: the pool that the actor belongs to
    :param place: number among the pool's collectors
    :param failures: number of collectors of this place that were lost in turn without having brought a rollout
    """

    def __init__(self, pool: "RayPool", place: int, failures: int):
        self.actor = pool.actor_class.options(**pool.options).remote()
        self.place, self.failures, self.name = place, failures, f"collector {place}"
        self.prepared = self.works = False  # it works once it has begun
        self.statistics: list[dict[str, Any]] = []  # of the normalisers after the reset
        self.beats, self.since = 0, time.monotonic()

    def signal(self, method: str, *arguments: Any) -> Any:
        """Call a method that runs beside the others."""
        return getattr(self.actor, method).options(concurrency_group=SIGNALS_GROUP).remote(*arguments)


class RayPool:
    """
    Keep actors at work. A collector that is lost is made anew; until the new one works, others do its share beside theirs.

    :param n_collectors: number of actors
    :param setup: what :meth:`RayWorker.prepare` needs
    :param min_collectors: least number of collectors to go on with
    :param options: options of the actors
    :param timeout: seconds without a step after which a collector is killed
    :raises CollectorError: if the collectors do not start
    """

    def __init__(self, n_collectors: int, setup: dict[str, Any], min_collectors: int, options: dict[str, Any], timeout: float):
        self.ray = connected('`collectors="ray"`')
        self.options, self.min_collectors, self.timeout = options, min_collectors, timeout
        self.lost = 0
        # once, since Ray sends the class to the cluster again after each `ray.remote`
        self.actor_class = self.ray.remote(concurrency_groups={SIGNALS_GROUP: 1})(RayWorker)
        self._setup = self.ray.put(setup)
        self._head, self._looked = head_address(self.ray), 0.0
        self._patience = max(START_TIMEOUT, timeout)  # seconds in which a collector must start
        self._enough_since = 0.0
        self._causes: list[str] = []
        self._calls: dict[Any, tuple[RayCollector, Order | None]] = {}
        self._beats: dict[RayCollector, tuple[Any, float]] = {}
        self._orders: list[Order] = []
        self._numbers = 0
        self._cancelling = False
        self._begin: Callable[[int], tuple[Any, ...]] | None = None
        self.collectors: list[RayCollector] = []
        gc.collect()  # models that nobody refers to any more keep CPUs of the cluster until then
        try:
            for place in range(n_collectors):
                self.collectors.append(self._make(place, failures=0))
            self.wait_until(lambda: all(collector.prepared for collector in self.collectors), self._patience)
        except BaseException:
            self.stop()
            raise

    def begin(self, first: Callable[[int], tuple[Any, ...]], anew: Callable[[int], tuple[Any, ...]]) -> list[Any]:
        """
        Have all collectors begin.

        :param first: gives the arguments of ``Worker.begin`` for the collector of a place
        :param anew: the same for a collector that is made in place of a lost one
        :return: of each collector the normalisers' statistics after the reset
        """
        self._begin = anew
        for collector in self.collectors:
            collector.works = False
            if collector.prepared:
                self._call(collector, "begin", *first(collector.place))
        # a collector that was lost before begins when it is there
        self.wait_until(lambda: all(one.works for one in self.collectors if one.prepared) and self._enough())
        return [collector.statistics for collector in self.collectors if collector.works]

    def _enough(self) -> bool:
        return sum(collector.works for collector in self.collectors) >= self.min_collectors

    def order(self, share: int, take: Callable[..., None], *arguments: Any) -> Order:
        """Ask for a share of a rollout, see :class:`Order`."""
        self._numbers += 1
        order = Order(self._numbers, share, arguments, take)
        self._orders.append(order)
        self._assign()
        return order

    def put(self, value: Any) -> Any:
        """Give the collectors something, by a reference to it."""
        self._need_head()  # where the program runs beside the head, Ray's store goes with it, and ends the program
        return self.ray.put(value)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method of all collectors, beside what they do."""
        for collector in self.collectors:
            if collector.prepared:
                collector.signal(method, *arguments)

    def wait_for(self, orders: list[Order]) -> None:
        """Wait until what was ordered has arrived."""
        self.wait_until(lambda: not any(order in self._orders for order in orders))

    def cancel(self) -> None:
        """Take all orders back."""
        self._cancelling = True
        self._orders = [order for order in self._orders if order.collector is not None]
        self.tell("cancel", self._numbers)
        self.wait_until(lambda: not self._orders)
        self._cancelling = False

    def stop(self) -> None:
        """End all actors, after some seconds in which their environments may close."""
        if not self.ray.is_initialized() or not head_answers(self._head, timeout=2.0):
            return
        with contextlib.suppress(self.ray.exceptions.RayError):
            self.tell("cancel", self._numbers)
            closing = [collector.actor.close.remote() for collector in self.collectors if collector.prepared]
            if closing:
                self.ray.wait(closing, num_returns=len(closing), timeout=GRACE)
            for collector in self.collectors:
                self.ray.kill(collector.actor)

    def _make(self, place: int, failures: int) -> RayCollector:
        collector = RayCollector(self, place, failures)
        self._calls[collector.actor.prepare.remote(self._setup)] = collector, None
        return collector

    def _call(self, collector: RayCollector, kind: str, *arguments: Any) -> None:
        self._calls[collector.actor.answer.remote(self._numbers + 1, None, kind, *arguments)] = collector, None
        collector.since = time.monotonic()

    def _assign(self) -> None:
        """Give each order that nobody has to the collector of its share, or else to the one with the least to do."""
        working = [collector for collector in self.collectors if collector.works]
        if not self._enough():
            return
        for order in self._orders:
            if order.collector is None:
                own, busy = self.collectors[order.share], [collector for collector, _ in self._calls.values()]
                order.collector = own if own.works else min(working, key=busy.count)
                self._calls[order.collector.actor.answer.remote(order.number, *order.arguments)] = order.collector, order
                if order.collector not in busy:
                    order.collector.since = time.monotonic()

    def wait_until(self, done: Callable[[], bool], patience: float | None = None) -> None:
        """
        Wait, and mend what breaks meanwhile.

        :param done: what is waited for
        :param patience: seconds to wait at most
        :raises CollectorError: if too few collectors are left, one fails, or the cluster's head is gone
        """
        began = self._enough_since = time.monotonic()
        for collector in self.collectors:
            collector.since = began
        while not done():
            assert self._calls  # who does not work is starting
            arrived, _ = self.ray.wait(list(self._calls), num_returns=1, timeout=TICK)
            for reference in arrived:
                self._arrived(reference, *self._calls.pop(reference))
            now = time.monotonic()
            if now - self._looked > LOOK:
                self._need_head()
            self._check_steps(now)
            if self._enough():
                self._enough_since = now
            if now - (self._enough_since if patience is None else began) > self._patience:
                raise CollectorError(self._shortage())

    def _arrived(self, reference: Any, collector: RayCollector, order: Order | None) -> None:
        """Take an answer of a collector, or notice that the collector is lost."""
        try:
            kind, *content = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            raise CollectorError(f"{collector.name} failed: {error}") from error
        except self.ray.exceptions.RayError as error:
            self._replace(collector, " ".join(str(error).split()))
            return
        collector.since = time.monotonic()
        if kind == "error":
            original, told = content
            raise CollectorError(f"{collector.name} failed:\n\n{told}") from (original and pickle.loads(original))
        if kind == "ready":
            collector.name, collector.prepared = f"collector {collector.place} ({content[0]})", True
            if self._begin is not None:
                self._call(collector, "begin", *self._begin(collector.place))
        elif kind == "begun":
            (collector.statistics,) = content
            collector.works = True
            self._assign()
        else:
            assert order is not None
            self._orders.remove(order)
            if kind == "rollout":
                collector.failures = 0
                order.take(*content)

    def _check_steps(self, now: float) -> None:
        """Ask busy collectors from time to time for the number of their steps, and replace a collector that makes none."""
        for collector in {collector for collector, _ in self._calls.values() if collector.prepared}:
            reference, asked = self._beats.get(collector, (None, 0.0))
            if reference is None and now - asked > BEAT:
                self._beats[collector] = collector.signal("beats"), now
            elif reference is not None and self.ray.wait([reference], timeout=0)[0]:
                self._beats[collector] = None, asked
                with contextlib.suppress(self.ray.exceptions.RayError):  # its calls tell of its death
                    beats = self.ray.get(reference)
                    if beats != collector.beats:
                        collector.beats, collector.since = beats, now
            if now - collector.since > self.timeout:
                self._replace(
                    collector,
                    f"its environments made no step for {self.timeout:g} seconds. If a step or a reset may take that long, "
                    "raise `collector_timeout`",
                )

    def _replace(self, collector: RayCollector, cause: str) -> None:
        """Make a collector anew that is lost, and give its orders to others."""
        self.lost += 1
        self._causes.append(f"{collector.name} was lost: {cause}")
        self._need_head()  # what follows waits for it
        self._calls = {reference: call for reference, call in self._calls.items() if call[0] is not collector}
        self._beats.pop(collector, None)
        self.ray.kill(collector.actor)
        if collector.failures + 1 >= MAX_FAILURES:
            raise CollectorError(
                f"{self._causes[-1]}. {MAX_FAILURES} collectors were lost in this place, one after the other."
            )
        warnings.warn(f"{self._causes[-1]}. It is made anew; others do its work until then.", stacklevel=2)
        self.collectors[collector.place] = self._make(collector.place, collector.failures + 1)
        for order in self._orders:
            if order.collector is collector:
                order.collector = None
        if self._cancelling:
            self._orders = [order for order in self._orders if order.collector is not None]
        self._assign()

    def _need_head(self) -> None:
        """Wait for some seconds, if the head of the cluster does not answer."""
        since = self._looked = time.monotonic()
        while not head_answers(self._head, timeout=2.0):
            if time.monotonic() - since > HEAD_TIMEOUT:
                self.ray.shutdown()  # or else Ray ends this program
                raise CollectorError(
                    f"The head of Ray's cluster at {self._head} has not answered for {HEAD_TIMEOUT:g} seconds. This program "
                    "has left the cluster."
                )
            time.sleep(TICK)

    def _shortage(self) -> str:
        begun = self._begin is not None
        missing = [one.name for one in self.collectors if not (one.works if begun else one.prepared)]
        there, free = self.ray.cluster_resources(), self.ray.available_resources()
        return (
            f"{len(self.collectors) - len(missing)} of {len(self.collectors)} collectors are there, `min_collectors` is "
            f"{self.min_collectors}; for {self._patience:g} seconds these did not start: {', '.join(missing)}. A collector "
            f"needs {self.options}; the cluster has {there.get('CPU', 0):g} CPUs, {free.get('CPU', 0):g} of them free. "
            + "; ".join(self._causes[-len(missing) :])
        )
