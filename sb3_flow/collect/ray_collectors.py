"""Collectors that are actors of a Ray cluster: weights go to them once a rollout, and rollouts come back as arrays."""

import mmap
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from sb3_flow.collect.collectors import CollectedRollout, Collection, Collectors
from sb3_flow.collect.ray_pool import Order, RayPool
from sb3_flow.collect.shares import of_share
from sb3_flow.collect.slots import Rollout


class RayCollectors(Collectors):
    """
    Start Ray actors, and ask and wait for rollouts.

    :param collection: what is collected
    :param min_collectors: least number of collectors to go on with
    :param options: options of each actor
    """

    def __init__(self, collection: Collection, min_collectors: int, options: dict[str, Any]):
        spec, n_slots = collection.spec, collection.n_slots
        layout = collection.layout(spec, n_slots)
        block = mmap.mmap(-1, layout.size)
        super().__init__(collection, layout, block)
        own = replace(spec, n_envs=spec.share, n_collectors=1)  # what an actor has room for
        setup = collection.setup(collection.layout(own, 1), own, 1)
        self._pool = RayPool(spec.n_collectors, setup, min_collectors, options, collection.timeout)
        self._shares = [[Rollout(spec, layout, block, slot, n) for n in range(spec.n_collectors)] for slot in range(n_slots)]
        self._spec, self._fresh = spec, collection.fresh
        self._publications, self._published = 0, None
        self._orders: dict[int, list[Order]] = {}  # by slot
        self._news: dict[int, list[Any]] = {}

    @property
    def lost(self) -> int:  # type: ignore[override]
        """Return the number of collectors that were lost and made anew."""
        return self._pool.lost

    def begin(self, reset: bool, coming_reset: Any, statistics: list[dict[str, Any]], random: list[Any]) -> list[Any]:
        seed = random[0] if isinstance(random[0], int) else int(np.random.SeedSequence().generate_state(1)[0] // 2)

        def first(place: int) -> tuple[Any, ...]:
            return reset, of_share(coming_reset, place), statistics, random[place]

        def anew(place: int) -> tuple[Any, ...]:
            other = (seed + self.lost * self._spec.n_collectors + place) % 2**31  # no collector's so far
            return True, ([other + number for number in range(self._spec.share)], None), statistics, other

        return self._pool.begin(first, anew)

    def publish(self, version: int) -> None:
        super().publish(version)
        self._publications += 1
        self._published = self._pool.put((self._publications, *self.weights.written()))
        if self._fresh:
            self._pool.tell("publish", self._published)

    def _request(self, number: int, state: Any, statistics: list[dict[str, Any]] | None) -> None:
        self._news[number] = [None] * self._spec.n_collectors
        request = self._published, "collect", 0, state, statistics
        self._orders[number] = [
            self._pool.order(share, partial(self._take, number, share), *request) for share in range(self._spec.n_collectors)
        ]

    def _take(self, number: int, share: int, _: int, news: dict[str, Any], columns: dict[str, np.ndarray]) -> None:
        """Copy a share of a rollout into its slot."""
        self._shares[number][share].take(columns)
        self._news[number][share] = news

    def receive(self) -> CollectedRollout:
        since, number = time.perf_counter(), self.outstanding[0]
        self._pool.wait_for(self._orders[number])
        return CollectedRollout(self.rollouts[number], self._news.pop(number), time.perf_counter() - since)

    def cancel(self) -> None:
        self._pool.cancel()
        self.outstanding.clear()

    def stop(self) -> None:
        self._pool.stop()
