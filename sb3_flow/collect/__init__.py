"""Collection that runs beside learning, in a process of its own, and environments from elsewhere."""

from sb3_flow.collect.async_ppo import AsyncPPO
from sb3_flow.collect.collector import CollectorError
from sb3_flow.collect.envpool import EnvPoolVecEnv

__all__ = ["AsyncPPO", "CollectorError", "EnvPoolVecEnv"]
