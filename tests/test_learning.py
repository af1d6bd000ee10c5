"""
RQL learns what a broken version of it does not.

A one-step bandit with four equally frequent action modes, of which only one pays. Thresholds come from measurements, two
seeds each, share of 1000 sampled actions within 0.4 of the paying mode: RQL 0.90, 0.90; the reversed points replaced by
noise-data interpolation 0.74, 0.74; behaviour cloning 0.08, 0.08; value trained at pure noise 0.08, 0.08; sign of the
value term flipped 0.00, 0.00. (The rest of behaviour cloning's actions lie between the modes after so few steps.)
"""

import numpy as np
import pytest
import torch as th
from gymnasium import spaces

import sb3_flow.rql.rql as rql_module
from sb3_flow import RQL, OfflineDataset
from sb3_flow.flow import best_of_n

MODES = np.array([[0.6, 0.6], [-0.6, 0.6], [0.6, -0.6], [-0.6, -0.6]])
THRESHOLD = 0.82


def bandit(n=4000, seed=0):
    rng = np.random.default_rng(seed)
    which = rng.integers(4, size=n)
    actions = (MODES[which] + 0.1 * rng.normal(size=(n, 2))).clip(-1, 1).astype(np.float32)
    ends = np.ones(n, dtype=bool)
    return OfflineDataset.from_arrays(
        np.zeros((n, 1)), actions, (which == 0).astype(np.float32), ends, ends, action_space=spaces.Box(-1, 1, (2,))
    )


def share_of_the_paying_mode(monkeypatch, version, seed):
    dataset = bandit()
    model = RQL(
        "MlpPolicy",
        None,
        learning_rate=1e-3,
        tau=0.02,
        flow_steps=5,
        alpha=0.1,
        n_critics=2,
        ema_decay=0.99,
        objective="bc" if version == "behaviour cloning" else "rql",
        acting_mode="sample",
        policy_kwargs={"net_arch": [64, 64]},
        offline_dataset=dataset,
        seed=seed,
    )
    if version == "flipped sign":
        policy_loss = model.policy_loss
        monkeypatch.setattr(
            model,
            "policy_loss",
            lambda value, *rest: policy_loss(lambda x, t, frozen: -value(x, t, frozen=frozen), *rest),
        )
    elif version == "pure noise":
        monkeypatch.setattr(rql_module, "euler_reverse", lambda v, x, d, steps: (th.randn_like(x), 1 - d))
    elif version == "interpolation":
        monkeypatch.setattr(rql_module, "euler_reverse", lambda v, x, d, steps: ((1 - d) * x + d * th.randn_like(x), 1 - d))
    model.learn_offline(dataset, 600, log_interval=None)
    actions, _ = model.predict(np.zeros((1000, 1), dtype=np.float32), deterministic=False)
    return (np.linalg.norm(actions - MODES[0], axis=1) < 0.4).mean()


def test_learns_which_mode_pays(monkeypatch):
    assert share_of_the_paying_mode(monkeypatch, "whole", seed=0) > THRESHOLD


@pytest.mark.parametrize("version", ["behaviour cloning", "flipped sign", "pure noise", "interpolation"])
def test_broken_versions_do_not(monkeypatch, version):
    assert share_of_the_paying_mode(monkeypatch, version, seed=0) < THRESHOLD


def test_best_of_n_picks_what_the_value_prefers():
    """After behaviour cloning alone the value is untrained; given one that prefers a mode, the choice must follow it."""
    dataset = bandit()
    model = RQL("MlpPolicy", None, n_critics=2, policy_kwargs={"net_arch": [32, 32]}, offline_dataset=dataset, seed=0)
    candidates = th.rand(7, 5, 2) * 2 - 1
    observation = th.zeros(7, 1)
    chosen = best_of_n(candidates, model.policy._bound_critic(observation)(candidates), "mean")
    for b in range(7):
        q = th.stack(model.critic(observation[[b]].expand(5, 1), candidates[b])).mean(dim=0)
        th.testing.assert_close(chosen[b], candidates[b, q.argmax()])
