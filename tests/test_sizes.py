"""Sizes of nothing, or less than nothing: a ValueError, or what SB3 does."""

import numpy as np
import pytest
import torch as th

from sb3_flow import GRPO, PPO, MaskablePPO, MaskableRecurrentPPO, RecurrentPPO

POLICIES = {PPO: "MlpPolicy", GRPO: "MlpPolicy", RecurrentPPO: "MlpLstmPolicy", MaskablePPO: "MlpPolicy"}
POLICIES[MaskableRecurrentPPO] = "MlpGruPolicy"
SMALL = {"n_steps": 8, "batch_size": 4, "seed": 0, "device": "cpu"}


@pytest.mark.parametrize("algorithm", POLICIES)
@pytest.mark.parametrize("size", [{"batch_size": 0}, {"batch_size": -1}, {"n_steps": 0}, {"n_steps": -3}], ids=str)
def test_sizes_below_one_are_refused(algorithm, size):
    """SB3 checks them only where advantages are normalised; a rollout of no steps never ends."""
    (name, given), *_ = size.items()
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, but {given} was given"):
        algorithm(POLICIES[algorithm], "CartPole-v1", **SMALL | size, normalize_advantage=False)


@pytest.mark.parametrize("given", [0, -1])
@pytest.mark.parametrize(
    ("algorithm", "options"), [(PPO, {"backend": "native"}), (PPO, {"backend": "torch"}), (RecurrentPPO, {})]
)
def test_minibatches_of_no_rows_are_refused_later(algorithm, options, given):
    """Minibatches of 0 rows were the whole rollout, and there were none of -1."""
    model = algorithm(POLICIES[algorithm], "CartPole-v1", **SMALL, **options)
    model.batch_size = given
    with pytest.raises(ValueError, match=f"`batch_size` must be at least 1, but {given} was given"):
        model.learn(8)


@pytest.mark.parametrize("net_arch", [[], {"pi": [], "vf": [3]}, {"pi": [3], "vf": []}], ids=str)
def test_networks_without_hidden_layers_are_computed_as_in_torch(net_arch):
    model = PPO("MlpPolicy", "CartPole-v1", **SMALL, policy_kwargs={"net_arch": net_arch}, backend="native")
    model.learn(32)
    observations = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
    actions, values, log_probs = model.native.act(observations, np.random.default_rng(1))
    with th.no_grad():
        wanted = model.policy.evaluate_actions(th.as_tensor(observations), actions)
    th.testing.assert_close(values, wanted[0], rtol=1e-4, atol=1e-5)
    th.testing.assert_close(log_probs, wanted[1], rtol=1e-4, atol=1e-5)
