"""SB3's protected methods that sb3_flow overrides or calls, each by name, so that a change in SB3 is noticed here first."""

import inspect

import pytest
import torch as th
from stable_baselines3.common.envs import IdentityEnv
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv

SIGNATURES = {
    "_setup_model": [],
    "_setup_learn": ["total_timesteps", "callback", "reset_num_timesteps", "tb_log_name", "progress_bar"],
    "_sample_action": ["learning_starts", "action_noise", "n_envs"],
    "_store_transition": ["replay_buffer", "buffer_action", "new_obs", "reward", "dones", "infos"],
    "_init_callback": ["callback", "progress_bar"],
    "_wrap_env": ["env", "verbose", "monitor_wrapper"],
    "_update_learning_rate": ["optimizers"],
    "_update_current_progress_remaining": ["num_timesteps", "total_timesteps"],
    "_excluded_save_params": [],
    "_get_torch_save_params": [],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_method_is_there_with_its_arguments(name):
    parameters = list(inspect.signature(getattr(OffPolicyAlgorithm, name)).parameters)
    assert [parameter for parameter in parameters if parameter != "self"] == SIGNATURES[name]


def test_attributes_are_there():
    source = inspect.getsource(OffPolicyAlgorithm) + inspect.getsource(OffPolicyAlgorithm.__mro__[1])
    for name in ("_vec_normalize_env", "_last_obs", "_last_episode_starts", "_custom_logger", "_n_updates", "_logger"):
        assert f"self.{name}" in source, name


def test_seeds_of_the_next_reset_can_be_dropped():
    env = DummyVecEnv([IdentityEnv] * 2)
    env.seed(3)
    assert env._seeds == [3, 4]
    env._reset_seeds()
    assert env._seeds == [None, None]


def test_torch_internals():
    assert th._C._functorch.peek_interpreter_stack() is None
    assert th.autograd.forward_ad._current_level == -1
    averages = [th.zeros(2)]
    th._foreach_lerp_(averages, [th.ones(2)], 0.25)
    assert averages[0].tolist() == [0.25, 0.25]
