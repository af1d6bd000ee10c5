"""SB3's protected methods that sb3_flow overrides or calls, each by name, so that a change in SB3 is noticed here first."""

import inspect

import pytest
import torch as th
from sb3_contrib import MaskablePPO, RecurrentPPO
from sb3_contrib.common.maskable.buffers import MaskableRolloutBuffer
from sb3_contrib.common.maskable.evaluation import evaluate_policy
from sb3_contrib.common.recurrent.buffers import RecurrentRolloutBuffer
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import CheckpointCallback, EvalCallback
from stable_baselines3.common.envs import IdentityEnv
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_flow.offline_to_online.offline_labels import EVALUATION, TIMESTEPS
from sb3_flow.on_policy.minibatches import FLATTENED, RECURRENT_STATES

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


ON_POLICY = {
    "_setup_model": [],
    "_setup_learn": ["total_timesteps", "callback", "reset_num_timesteps", "tb_log_name", "progress_bar"],
    "_update_info_buffer": ["infos", "dones"],
    "_update_learning_rate": ["optimizers"],
    "_excluded_save_params": [],
    "_get_torch_save_params": [],
    "_update_current_progress_remaining": ["num_timesteps", "total_timesteps"],
    "collect_rollouts": ["env", "callback", "rollout_buffer", "n_rollout_steps"],
}
BUFFERS = {
    RolloutBuffer: ["obs", "action", "reward", "episode_start", "value", "log_prob"],
    MaskableRolloutBuffer: ["args", "action_masks", "kwargs"],
    RecurrentRolloutBuffer: ["args", "lstm_states", "kwargs"],
}


@pytest.mark.parametrize("name", ON_POLICY)
@pytest.mark.parametrize("algorithm", [PPO, MaskablePPO, RecurrentPPO])
def test_method_of_on_policy_algorithms(algorithm, name):
    parameters = [one for one in inspect.signature(getattr(algorithm, name)).parameters if one != "self"]
    extra = ["use_masking"] if name == "collect_rollouts" and algorithm is MaskablePPO else []
    assert parameters == ON_POLICY[name] + extra


def test_attributes_of_on_policy_algorithms():
    source = "".join(inspect.getsource(one) for one in OnPolicyAlgorithm.__mro__[:2])
    for name in (
        "_last_obs",
        "_last_episode_starts",
        "_n_updates",
        "_current_progress_remaining",
        "_total_timesteps",
        "use_sde",
        "ep_info_buffer",
    ):
        assert f"self.{name}" in source, name
    assert "self._last_lstm_states" in inspect.getsource(RecurrentPPO)


def test_checkpoint_callback():
    for name, expected in (("_on_step", []), ("_checkpoint_path", ["checkpoint_type", "extension"])):
        assert [one for one in inspect.signature(getattr(CheckpointCallback, name)).parameters if one != "self"] == expected


def test_words_that_are_exchanged_offline():
    assert EVALUATION[0] in inspect.getsource(EvalCallback._on_step)
    for source in (EvalCallback._on_step, OffPolicyAlgorithm.dump_logs):
        assert f'logger.record("{TIMESTEPS}"' in inspect.getsource(source)


@pytest.mark.parametrize("buffer", BUFFERS)
def test_rollout_buffers(buffer):
    assert [one for one in inspect.signature(buffer.add).parameters if one != "self"] == BUFFERS[buffer]
    get = inspect.getsource(buffer.get)
    flattened = {name for name in (*FLATTENED, *RECURRENT_STATES, "episode_starts") if f'"{name}"' in get}
    expected = {"actions", "values", "log_probs", "advantages", "returns"} | ({"observations"} & flattened)
    if buffer is MaskableRolloutBuffer:
        expected.add("action_masks")
    if buffer is RecurrentRolloutBuffer:
        expected |= {*RECURRENT_STATES, "episode_starts", "observations"}
    assert flattened == expected
    assert "self.generator_ready" in get and "swap_and_flatten" in get
    assert hasattr(buffer, "_get_samples")


def test_recurrent_buffer_leaves_its_padding():
    source = inspect.getsource(RecurrentRolloutBuffer._get_samples)
    assert "self.seq_start_indices, self.pad, self.pad_and_flatten = create_sequencers(" in source
    assert list(inspect.signature(RecurrentRolloutBuffer._get_samples).parameters)[1:3] == ["batch_inds", "env_change"]


def test_recurrent_policies_make_their_distributions_in_one_place():
    for name in ("forward", "get_distribution", "evaluate_actions"):
        source = inspect.getsource(getattr(RecurrentActorCriticPolicy, name))
        assert source.count("self._get_action_dist_from_latent(latent_pi)") == 1
    assert "self.get_distribution(" in inspect.getsource(RecurrentActorCriticPolicy._predict)


def test_evaluation_with_masks_loses_the_states():
    """When sb3-contrib's `evaluate_policy` (2.9.2) no longer does, `state_of_evaluation` and its calls can go."""
    lost = "`evaluate_policy` may keep the states: delete sb3_flow.ppo.masked_policies.state_of_evaluation"
    assert "actions, state = model.predict(" in inspect.getsource(evaluate_policy), lost
    assert evaluate_policy.__module__ == "sb3_contrib.common.maskable.evaluation"


def test_methods_of_actor_critic_policies():
    assert list(inspect.signature(ActorCriticPolicy._build).parameters) == ["self", "lr_schedule"]
    assert list(inspect.signature(ActorCriticPolicy._build_mlp_extractor).parameters) == ["self"]


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


def test_methods_of_dummy_vec_env():
    for name, arguments in {"_save_obs": ["env_idx", "obs"], "_obs_from_buf": []}.items():
        assert list(inspect.signature(getattr(DummyVecEnv, name)).parameters)[1:] == arguments


def test_torch_internals():
    assert th._C._functorch.peek_interpreter_stack() is None
    assert th.autograd.forward_ad._current_level == -1
    averages = [th.zeros(2)]
    th._foreach_lerp_(averages, [th.ones(2)], 0.25)
    assert averages[0].tolist() == [0.25, 0.25]
