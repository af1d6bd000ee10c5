"""
Trains an agent of a published JAX implementation for ``references.py``, which starts this file with a Python that has JAX.

It imports the checkout that is named by its only argument, NumPy and JAX, and nothing of this package. Questions come as lines
of JSON on the standard input, each a mapping with the method's name under ``ask``, and are answered by lines on the standard
output. What the checkout prints goes to the standard error.
"""

import importlib
import json
import os
import sys
import time
from typing import Any

import numpy as np


class Worker:
    """
    An agent of the checkout and its data.

    :param checkout: folder of the published implementation
    """

    def __init__(self, checkout: str) -> None:
        sys.path.insert(0, checkout)
        self.jax: Any = importlib.import_module("jax")
        self.datasets: Any = importlib.import_module("utils.datasets")

    def start(self, agent: str, config: dict[str, Any], data: str, seed: int) -> dict[str, Any]:
        """
        Make an agent.

        :param agent: module and class, as ``fql.FQLAgent``
        :param config: what differs from the module's ``get_config()``; every name must be there
        :param data: npz file with the transitions
        """
        module_name, class_name = agent.split(".")
        module = importlib.import_module(f"agents.{module_name}")
        self.config = module.get_config()
        for name, value in config.items():
            if name not in self.config:
                raise ValueError(f"{agent} has no setting {name}")
            self.config[name] = tuple(value) if isinstance(value, list) else value
        np.random.seed(seed)  # samplers draw from NumPy's global generator
        with np.load(data) as arrays:
            self.data = self.datasets.Dataset.create(**dict(arrays))
        self.key = self.jax.random.PRNGKey(seed)
        if "h" in self.config:  # RQL: its sampler reads the chunk's length from here
            self.data.config, self.chunk = self.config, self.config["h"]
            example = {name: array[0] for name, array in self.data.sample(1).items()}
        else:
            self.chunk, example = self.config["horizon_length"], self.data.sample(())
        self.online: Any = None
        self.agent = getattr(module, class_name).create(seed, example["observations"], example["actions"], self.config)
        # what create() has set is kept there: the sampler needs plain numbers
        self.batch_size, self.discount = self.config["batch_size"], self.config["discount"]
        kept = self.agent
        self.update(1)  # compiles
        self.agent = kept
        return {}

    def update(self, n: int) -> dict[str, Any]:
        """Make updates, each with a batch of the checkout's own sampler, and give the seconds of all together."""
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(n):
            self.agent, _info = self.agent.update(self._batch())
        self.jax.block_until_ready(self.agent.network.params)
        return {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - began_cpu}

    def act(self, observations: list[list[float]]) -> dict[str, Any]:
        """Decide a chunk for each observation as the checkout's evaluation does, with fresh noise: shape ``(n, h, d)``."""
        seen = np.asarray(observations, np.float32)
        self.key, key = self.jax.random.split(self.key)
        if "h" in self.config:  # RQL decides for one observation at a time; temperature 0 takes the actor's average
            keys = self.jax.random.split(key, len(seen))
            chunks = np.stack([self.agent.sample_actions(row, seed=one) for row, one in zip(seen, keys, strict=True)])
        else:
            chunks = np.asarray(self.agent.sample_actions(seen, rng=key))
        return {"chunks": np.clip(chunks.reshape(len(seen), self.chunk, -1), -1, 1).tolist()}

    def add(self, transition: dict[str, Any], size: int, update: bool) -> dict[str, Any]:
        """
        Store a transition of the online phase, and make an update of which half the batch is online (balanced sampling).

        :param size: of the replay buffer, made with the first transition
        :param update: store only, if False
        """
        arrays = {name: np.asarray(value, np.float32) for name, value in transition.items()}
        if self.online is None:
            self.online = self.datasets.ReplayBuffer.create(arrays, size=size)
        self.online.add_transition(arrays)
        if update:
            half = self.batch_size // 2
            parts = [part.sample_sequence(half, self.chunk, discount=self.discount) for part in (self.data, self.online)]
            batch = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            self.agent, _info = self.agent.update(batch)
        return {}

    def _batch(self) -> Any:
        if "h" in self.config:
            return self.data.sample(self.batch_size)
        return self.data.sample_sequence(self.batch_size, sequence_length=self.chunk, discount=self.discount)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(sys.argv[1])
    for line in sys.stdin:
        question = json.loads(line)
        answer = getattr(worker, question.pop("ask"))(**question)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
