"""What the cases share: a logger that keeps values, and actions in fixed observations."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.logger import Logger

Cases = dict[str, Callable[[], Any]]
"""Each case runs something and returns what is digested: models, arrays, numbers, or a nesting of these."""


class Values(Logger):
    """A logger that keeps what is recorded, but for times."""

    def __init__(self) -> None:
        super().__init__(folder=None, output_formats=[])
        self.kept: list[Any] = []

    def dump(self, step: int = 0) -> None:
        names = (name for name in self.name_to_value if not re.match(r"time/|async/wait", name))
        self.kept.append((step, {name: self.name_to_value[name] for name in names}))
        super().dump(step)


def logged(model: Any) -> Values:
    """:return: the model's logger from now on"""
    values = Values()
    model.set_logger(values)
    return values


def sample(space: spaces.Space, rng: np.random.Generator) -> Any:
    """:return: five observations, the same in every version of Gymnasium"""
    if isinstance(space, spaces.Dict):
        return {key: sample(part, rng) for key, part in space.items()}
    if isinstance(space, spaces.Discrete):
        return rng.integers(space.n, size=5)
    if space.dtype == np.uint8:
        return rng.integers(0, 256, (5, *space.shape), dtype=np.uint8)
    return rng.uniform(-1, 1, (5, *space.shape)).astype(np.float32)


def predictions(model: Any, **options: Any) -> list[Any]:
    observation = sample(model.observation_space, np.random.default_rng(1))
    return [model.predict(observation, deterministic=flag, **options)[0] for flag in (True, False, False)]
