"""
FMQ learns online what a flipped sign of the guidance and imitation alone do not.

A bandit pays for actions near (0.6, 0), the data scatter around 0 (deviation 0.25). Reported is the mean distance of single
one-step samples from the best action after 150 updates offline and 300 online: the choice among candidates, which would cover
up a wrong actor, has no part in it. Measured over seeds 0 to 3: .25 to .39;
with the sign of the guidance flipped 1.34 and 1.44 (seeds 0 and 2); with imitation alone .58 to .70.
"""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from sb3_flow import FMQ, OfflineDataset
from sb3_flow.fmq import fmq as module

BEST = np.float32([0.6, 0.0])
THRESHOLD = 0.48


class Bandit(gym.Env):
    observation_space = spaces.Box(-1, 1, (1,))
    action_space = spaces.Box(-1, 1, (2,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, dtype=np.float32), {}

    def step(self, action):
        return np.zeros(1, dtype=np.float32), -float(np.square(action - BEST).sum()), True, False, {}


def distance(monkeypatch, version, seed):
    if version == "flipped sign":
        original = module.q_guided_projection
        monkeypatch.setattr(module, "q_guided_projection", lambda u, g, eta: original(u, -g, eta))
    rng = np.random.default_rng(seed)
    actions = np.clip(0.25 * rng.normal(size=(2000, 2)), -1, 1).astype(np.float32)
    every = np.ones(2000, dtype=bool)
    rewards = -np.square(actions - BEST).sum(axis=1)
    box = Bandit.observation_space
    data = OfflineDataset.from_arrays(
        np.zeros((2000, 1), np.float32),
        actions,
        rewards,
        every,
        every,
        observation_space=box,
        action_space=Bandit.action_space,
    )
    model = FMQ(
        *("MlpPolicy", Bandit()),
        learning_rate=3e-3,
        learning_starts=0,
        batch_size=64,
        n_candidates=4,
        warmup_steps=20,
        anneal_end_step=100,
        online_rule="bc" if version == "imitation" else "fmq",
        policy_kwargs={"net_arch": [32, 32]},
        seed=seed,
    )
    model.learn_offline(data, 150, log_interval=None)
    model.learn(300, log_interval=None)
    model.set_acting_mode("sample")
    samples, _ = model.predict(np.zeros((500, 1), dtype=np.float32), deterministic=False)
    return np.linalg.norm(samples - BEST, axis=1).mean()


@pytest.mark.parametrize("seed", [0, 1])
def test_guidance_finds_the_better_actions(monkeypatch, seed):
    assert distance(monkeypatch, "whole", seed) < THRESHOLD


@pytest.mark.parametrize("version", ["flipped sign", "imitation"])
def test_broken_versions_do_not(monkeypatch, version):
    assert distance(monkeypatch, version, seed=0) > THRESHOLD
