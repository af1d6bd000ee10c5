"""SB3's DummyVecEnv in a collector: what a step returns is what it returns there, and nobody can change it afterwards."""

from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_flow.collect.lean_vec_env import LeanDummyVecEnv, lean

SPACES = {
    "box": spaces.Box(-1, 1, (3,), np.float32),
    "dict": spaces.Dict({"one": spaces.Box(-1, 1, (2,), np.float64), "other": spaces.Discrete(5)}),
    "discrete": spaces.Discrete(7),
}


class Careless(gym.Env):
    """Hands out its own state, which it changes in the next step, and infos of all kinds."""

    def __init__(self, kind: str):
        self.observation_space, self.action_space = deepcopy(SPACES[kind]), spaces.Discrete(4)
        self.state, self.log, self.steps = np.zeros(3), [], 0
        self.info: dict[str, Any] = {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {"kept": self.state}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.state += 1
        self.log.append(self.steps)
        info = {
            "state": self.state,
            "log": self.log,
            "number": np.float32(self.steps),
            "text": "a",
            "nested": {"log": self.log},
        }
        self.info.update(info, none=None, flag=np.bool_(self.steps > 2), whole=self.steps)
        return self.observation_space.sample(), float(action), self.steps % 4 == 3, self.steps % 5 == 4, self.info


def same(one: Any, other: Any) -> None:
    """Compare nested objects with their types."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for each, its in zip(one, other, strict=True):
            same(each, its)
    else:
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", SPACES)
def test_steps_are_those_of_sb3_and_stay_as_they_were(kind: str) -> None:
    theirs, ours = (DummyVecEnv([lambda: Careless(kind)] * 3) for _ in range(2))
    lean(ours)
    assert type(ours) is LeanDummyVecEnv
    kept = []
    for env in (theirs, ours):
        env.seed(5)
        steps = [env.reset()]
        for number in range(12):
            steps.append(env.step(np.full(3, number % 4)))
            steps.append(env.reset_infos)
        kept.append(steps)
    same(kept[1], kept[0])  # compared at the end, when the environments have changed what they handed out


def test_other_classes_keep_their_step() -> None:
    class Own(DummyVecEnv):
        pass

    env = Own([lambda: Careless("box")])
    lean(env)
    assert type(env) is Own
