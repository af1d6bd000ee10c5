"""The collectors of a learner, wherever they run: each steps its share of the environments."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_flow.collect.collector_process import SIGNALS
from sb3_flow.collect.infos import Infos, unpack_infos
from sb3_flow.collect.memory import Layout
from sb3_flow.collect.slots import Rollout, RolloutSpec
from sb3_flow.collect.weights import PublishedWeights


class CollectedRollout(NamedTuple):
    """
    Hold a rollout that has arrived.

    :param rollout: the slot that holds it
    :param news: what the collector of each share tells: infos, statistics of the normalisers, states of random generators
    :param waited: seconds for which the learner waited
    """

    rollout: Rollout
    news: list[dict[str, Any]]
    waited: float

    def infos(self) -> Infos:
        """Return the infos of all environments for each step."""
        of_collectors = [unpack_infos(news["infos"]) for news in self.news]
        return [[info for part in parts for info in part] for parts in zip(*of_collectors, strict=True)]


@dataclass(frozen=True)
class Collection:
    """
    Describe what is collected.

    :param policy: the learner's policy, whose weights the collectors' replicas copy
    :param policy_arguments: class, positional and keyword arguments of the replicas, except the learning rate
    :param env: environments of one collector, packed by ``environment_transfer.pack``
    :param spec: shapes of the rollouts, and the number of collectors
    :param n_slots: number of rollouts that the learner has room for
    :param native: act in compiled loops
    :param fresh: take the freshest weights at each step
    :param recording: collectors tell what came to the statistics of normalisers, not the statistics as they are
    :param sde_sample_freq: steps between draws of gSDE's noise, -1 for none within a rollout
    :param timeout: seconds without a step after which a collector is killed
    """

    policy: ActorCriticPolicy
    policy_arguments: tuple[type, tuple[Any, ...], dict[str, Any]]
    env: bytes
    spec: RolloutSpec
    n_slots: int
    native: bool
    fresh: bool
    recording: bool
    sde_sample_freq: int
    timeout: float

    def layout(self, spec: RolloutSpec, n_slots: int) -> Layout:
        """Lay signals, weights and slots out in a block of memory."""
        layout = Layout()
        for signal_name in SIGNALS:
            layout.add(signal_name, (spec.n_collectors,), np.int64)
        PublishedWeights.reserve(self.policy, layout)
        for number in range(n_slots):
            Rollout.reserve(spec, layout, number)
        return layout

    def setup(self, layout: Layout, spec: RolloutSpec, n_slots: int) -> dict[str, Any]:
        """Describe the same for a worker whose memory has this layout, but for its number."""
        setup = {"layout": layout, "spec": spec, "n_slots": n_slots, "env": self.env, "recording": self.recording}
        setup |= {"native": self.native, "fresh": self.fresh, "sde_sample_freq": self.sde_sample_freq}
        return setup | {"policy": cloudpickle.dumps(self.policy_arguments)}


class Collectors(ABC):
    """
    Ask collectors for rollouts, and wait for these.

    :param collection: what is collected
    :param layout: layout of the learner's block of memory
    :param block: this block
    """

    lost = 0
    """Number of collectors that were lost and made anew."""

    def __init__(self, collection: Collection, layout: Layout, block: Any):
        self.timeout = collection.timeout
        self.outstanding: list[int] = []  # slots to be filled, in order
        self.weights = PublishedWeights(collection.policy, layout, block)
        self.rollouts = [Rollout(collection.spec, layout, block, number) for number in range(collection.n_slots)]

    def __reduce__(self) -> Any:
        # a copy that is forgotten would close its descriptors' numbers, which may belong to other files by then
        raise TypeError("Collectors belong to the process that started them, and can be neither copied nor pickled.")

    @abstractmethod
    def begin(self, reset: bool, coming_reset: Any, statistics: list[dict[str, Any]], random: list[Any]) -> list[Any]:
        """
        Prepare the first rollout of ``learn``, see ``Worker.begin``.

        :param coming_reset: seeds and options of the first share's reset
        :param random: seed or states of the random generators of each collector
        :return: of each collector the normalisers' statistics after the reset
        """

    def publish(self, version: int) -> None:
        """Publish the policy's weights under the number of their version."""
        self.weights.write(version)

    def request(self, state: Any = None, statistics: list[dict[str, Any]] | None = None) -> None:
        """
        Ask the collectors to fill a free slot by the weights that are published when they begin.

        :param state: state of the random generators to begin with, None to leave them
        :param statistics: statistics of the normalisers to begin with, None to leave them
        """
        number = next(number for number in range(len(self.rollouts)) if number not in self.outstanding)
        self.outstanding.append(number)
        self._request(number, state, statistics)

    @abstractmethod
    def _request(self, number: int, state: Any, statistics: list[dict[str, Any]] | None) -> None:
        """Ask the collectors to fill the slot of this number."""

    @abstractmethod
    def receive(self) -> CollectedRollout:
        """Wait for the oldest requested rollout, whose slot is taken until :meth:`release`."""

    def release(self) -> None:
        """Give the slot of the oldest rollout back."""
        self.outstanding.pop(0)

    @abstractmethod
    def cancel(self) -> None:
        """Take all requests back."""

    @abstractmethod
    def stop(self) -> None:
        """End the collectors and all their processes."""
