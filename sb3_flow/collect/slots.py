"""Rollouts in shared memory, which the collector fills and the learner reads."""

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

from sb3_flow.collect.memory import Layout

Observation = np.ndarray | dict[str, np.ndarray]
PLAIN = ("actions", "rewards", "terminated", "truncated", "episode_starts", "versions", "values", "log_probs")
"""Arrays of a rollout with a number, or an action, for each step and environment."""


@dataclass
class RolloutSpec:
    """
    Hold the shapes and types of a rollout.

    :param n_steps: steps of each environment
    :param n_envs: number of environments of all collectors
    :param n_collectors: number of collectors, each with an equal share of the environments
    :param observations: shape and dtype of an observation, by key; the only key is "" if observations are not Dicts
    :param action: shape and dtype of an action as the policy samples it
    :param real: dtype of the policy's values and log-probabilities
    """

    n_steps: int
    n_envs: int
    n_collectors: int
    observations: dict[str, tuple[tuple[int, ...], str]]
    action: tuple[tuple[int, ...], str]
    real: str

    @property
    def share(self) -> int:
        """Return the number of environments of a collector."""
        return self.n_envs // self.n_collectors

    @staticmethod
    def parts(observation: Observation) -> dict[str, np.ndarray]:
        """Return an observation's parts by key."""
        return observation if isinstance(observation, dict) else {"": observation}

    def whole(self, parts: dict[str, np.ndarray]) -> Observation:
        """Put the parts of an observation together."""
        return parts[""] if list(self.observations) == [""] else parts


@dataclass
class Observed:
    """
    Hold the observations of a rollout.

    :param spec: shapes
    :param parts: by key, ``n_steps + 1``; the last observation follows the last step
    """

    spec: RolloutSpec
    parts: dict[str, np.ndarray]

    def at(self, step: int) -> Observation:
        """View the observation that a step follows; that of ``n_steps`` follows the last step."""
        return self.spec.whole({key: part[step] for key, part in self.parts.items()})

    def before_steps(self) -> Observation:
        """View all observations but the last."""
        return self.spec.whole({key: part[:-1] for key, part in self.parts.items()})


class Rollout:
    """
    Hold a rollout in a slot of shared memory: the learner's view of all environments, or a collector's view of its share of
    them. Arrays are time-major:

    - ``observations``: by key, ``n_steps + 1``; the last observation follows the last step
    - ``actions``, ``rewards`` (as the environments paid them), ``terminated``, ``truncated``, ``episode_starts``
    - ``log_probs``, ``values``: numbers of the policy that acted, both from the same forward pass
    - ``versions``: version of this policy
    - ``final_places``, ``final_observations``, for each collector: step and environment (of its share) of each episode's end,
      and the episode's last observation, which the next episode's first observation replaces in ``observations``; the first
      ``counts`` entries are in use

    :param spec: shapes
    :param layout: layout of the block, see :meth:`reserve`
    :param block: the shared memory
    :param number: number of the slot
    :param collector: number of the collector whose share is viewed; None for all environments
    """

    def __init__(self, spec: RolloutSpec, layout: Layout, block: mmap.mmap, number: int, collector: int | None = None):
        def view(name: str) -> np.ndarray:
            whole = layout.view(block, f"{number}/{name}")
            if collector is None:
                return whole
            if name in ("final_places", "counts") or name.startswith("final_observations"):
                return whole[collector : collector + 1]
            return whole[:, collector * spec.share : (collector + 1) * spec.share]

        self.spec, self.number = spec, number
        self.observations = {key: view(f"observations/{key}") for key in spec.observations}
        self.final_observations = {key: view(f"final_observations/{key}") for key in spec.observations}
        self.final_places, self.counts = view("final_places"), view("counts")
        self.actions, self.rewards = view("actions"), view("rewards")
        self.terminated, self.truncated = view("terminated"), view("truncated")
        self.episode_starts, self.versions = view("episode_starts"), view("versions")
        self.values, self.log_probs = view("values"), view("log_probs")

    @staticmethod
    def reserve(spec: RolloutSpec, layout: Layout, number: int) -> None:
        """Add the arrays of the slot of this number to the layout of a block."""
        rows = (spec.n_steps, spec.n_envs)
        fields: dict[str, tuple[tuple[int, ...], Any]] = {
            "final_places": ((spec.n_collectors, spec.n_steps * spec.share, 2), np.int64),
            "counts": ((spec.n_collectors,), np.int64),
            "actions": ((*rows, *spec.action[0]), spec.action[1]),
            "rewards": (rows, np.float64),  # SubprocVecEnv's are
            "terminated": (rows, bool),
            "truncated": (rows, bool),
            "episode_starts": (rows, bool),
            "versions": (rows, np.int64),
            "values": (rows, spec.real),
            "log_probs": (rows, spec.real),
        }
        for key, (shape, dtype) in spec.observations.items():
            fields[f"observations/{key}"] = ((spec.n_steps + 1, spec.n_envs, *shape), dtype)
            # each step may end an episode; room that is not used costs nothing
            fields[f"final_observations/{key}"] = ((spec.n_collectors, spec.n_steps * spec.share, *shape), dtype)
        for name, (shape, dtype) in fields.items():
            layout.add(f"{number}/{name}", shape, dtype)

    def columns(self) -> dict[str, np.ndarray]:
        """View all that a collector has filled in, by name, for :meth:`take` elsewhere."""
        count = int(self.counts[0])
        found = {name: getattr(self, name) for name in PLAIN} | {"final_places": self.final_places[:, :count]}
        found |= {f"observations/{key}": part for key, part in self.observations.items()}
        return found | {f"final_observations/{key}": part[:, :count] for key, part in self.final_observations.items()}

    def take(self, columns: dict[str, np.ndarray]) -> None:
        """Fill a collector's share in with what :meth:`columns` gave elsewhere."""
        count = columns["final_places"].shape[1]
        self.counts[0] = count
        self.final_places[:, :count] = columns["final_places"]
        for name in PLAIN:
            getattr(self, name)[:] = columns[name]
        for key in self.spec.observations:
            self.observations[key][:] = columns[f"observations/{key}"]
            self.final_observations[key][:, :count] = columns[f"final_observations/{key}"]

    def begin(self) -> None:
        """Forget the ends of the episodes of the previous rollout (a collector's)."""
        self.counts[0] = 0

    def put_observation(self, step: int, observation: Observation) -> None:
        """
        Write the observations of all environments.

        :param step: number of the step that follows the observation; ``n_steps`` for the observation after the last step
        :param observation: the environments' observations
        """
        for key, part in self.spec.parts(observation).items():
            self.observations[key][step] = part

    def put_step(self, step: int, rewards: np.ndarray, dones: np.ndarray, infos: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """
        Write the rewards, ends of episodes and final observations of a step (a collector's).

        :return: the infos without the terminal observations, which are in the slot now
        """
        self.rewards[step] = rewards
        self.terminated[step], self.truncated[step] = dones, False
        infos = list(infos)
        for env in np.flatnonzero(dones).tolist():
            if infos[env].get("TimeLimit.truncated", False):
                self.terminated[step, env], self.truncated[step, env] = False, True
            if infos[env].get("terminal_observation") is not None:
                infos[env] = dict(infos[env])
                place = int(self.counts[0])
                for key, part in self.spec.parts(infos[env].pop("terminal_observation")).items():
                    self.final_observations[key][0, place] = part
                self.final_places[0, place] = step, env
                self.counts[0] = place + 1
        return infos

    def first(self) -> Observation:
        """Copy the observation that the first step followed."""
        return self.spec.whole({key: part[0].copy() for key, part in self.observations.items()})

    def observed(self) -> "Observed":
        """Copy all observations."""
        return Observed(self.spec, {key: part.copy() for key, part in self.observations.items()})

    def finals(self) -> dict[int, dict[int, Observation]]:
        """Copy the final observations, by step and by environment."""
        found: dict[int, dict[int, Observation]] = {}
        for collector, count in enumerate(self.counts.tolist()):
            for place, (step, env) in enumerate(self.final_places[collector, :count].tolist()):
                final = {key: part[collector, place].copy() for key, part in self.final_observations.items()}
                found.setdefault(step, {})[collector * self.spec.share + env] = self.spec.whole(final)
        return found
