"""
GRPO learns CartPole in 25,000 steps, which variants with a broken credit do not.

Mean return of 20 episodes of the deterministic policy, seeds 0 onwards:

- returns-to-go                                          446, 500, 470, 474, 427
- outcome                                                464, 377, 243
- advantages of one environment go to another one        9, 9, 254, 9, 40
- sign flipped                                           9, 9, 9
- absolute values (peers are not compared)               9, 42, 9

The threshold lies in the middle between the worst of the first and the best of the broken ones.
"""

from typing import Any

import numpy as np
import pytest
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_flow import GRPO, GroupedStart
from sb3_flow.on_policy.grouping import Groups

THRESHOLD = 340.0


def shuffled(advantages: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The numbers of one environment go to another one: peers are compared, but the wrong ones are praised."""
    return advantages[:, generator.permutation(advantages.shape[1])]


def mean_return(seed: int, broken: Any = None, **kwargs: Any) -> float:
    """:return: of the deterministic policy after 25,000 steps"""
    env = make_vec_env("CartPole-v1", n_envs=16, wrapper_class=GroupedStart)
    model = GRPO("MlpPolicy", env, n_steps=500, batch_size=256, seed=seed, device="cpu", **kwargs)
    if broken is not None:
        generator = np.random.default_rng(seed)

        class Broken(Groups):
            def advantages(self, *args: Any) -> Any:
                advantages, *rest = super().advantages(*args)
                return broken(advantages, generator), *rest

        model.rollout_buffer.estimator.groups = Broken(**vars(model.groups))
    model.learn(25_000)
    return evaluate_policy(model, make_vec_env("CartPole-v1", n_envs=10, seed=100), n_eval_episodes=20)[0]


def test_returns_to_go_learn() -> None:
    assert mean_return(seed=0) > THRESHOLD


@pytest.mark.parametrize("seed", [0, 1])
def test_shuffled_advantages_do_not(seed: int) -> None:
    assert mean_return(seed, shuffled) < THRESHOLD
