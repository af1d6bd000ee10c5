"""A task that needs both memory and masks."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Recall(gym.Env):
    """
    One of three cues is shown, and after a step without it a key of the cue's kind must be found among 30. Only three keys,
    one of each kind, fit in an episode. What fits is told by masks alone: without masks a tenth of the keys of the right kind
    fit, without memory a third of the keys that fit are right.

    :param masked: tell which keys fit
    """

    kinds = 3
    observation_space = spaces.Box(0, 1, (kinds + 1,), np.float32)
    action_space = spaces.Discrete(30)

    def __init__(self, masked: bool = True) -> None:
        self.masked = masked

    def _observe(self) -> np.ndarray:
        seen = np.zeros(self.kinds + 1, np.float32)
        seen[self.cue if self.time == 0 else self.kinds] = 1.0
        return seen

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.time, self.cue = 0, int(self.np_random.integers(self.kinds))
        self.fits = np.arange(self.kinds) + self.kinds * self.np_random.integers(10, size=self.kinds)
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        right = self.time == 2 and action in self.fits and action % self.kinds == self.cue
        self.time += 1
        return self._observe(), float(right), self.time == 3, False, {}

    def action_masks(self) -> np.ndarray:
        return np.isin(np.arange(30), self.fits) | (not self.masked)
