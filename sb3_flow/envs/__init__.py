"""
Environments from elsewhere. Importing this package registers OGBench's single tasks under the names of their datasets;
``gymnasium.make("sb3_flow.envs:<name>")`` imports it.
"""

from sb3_flow.common.torch_vec_env import TensorStep, TorchVecEnv
from sb3_flow.envs import registration as registration  # registers the ids
from sb3_flow.envs.envpool import EnvPoolVecEnv
from sb3_flow.envs.jax_vec_env import JaxVecEnv
from sb3_flow.envs.ray_vec_env import RayVecEnv
from sb3_flow.envs.robomimic_task import RobomimicTask
from sb3_flow.envs.torch_env_adapter import TorchEnvAdapter
from sb3_flow.envs.wrappers import ActionMasksFromInfo, SparseReward, SuccessInfo

__all__ = [
    "ActionMasksFromInfo",
    "EnvPoolVecEnv",
    "JaxVecEnv",
    "RayVecEnv",
    "RobomimicTask",
    "SparseReward",
    "SuccessInfo",
    "TensorStep",
    "TorchEnvAdapter",
    "TorchVecEnv",
]
