"""PPO, its variants with action masks and memory, and AsyncPPO, with a choice of advantage estimators and policy losses."""

from sb3_flow.ppo.async_ppo import AsyncPPO
from sb3_flow.ppo.maskable import MaskablePPO
from sb3_flow.ppo.maskable_recurrent import MaskableRecurrentPPO
from sb3_flow.ppo.ppo import PPO
from sb3_flow.ppo.recurrent import RecurrentPPO

__all__ = ["PPO", "AsyncPPO", "MaskablePPO", "MaskableRecurrentPPO", "RecurrentPPO"]
