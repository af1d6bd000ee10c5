"""PPO, MaskablePPO and RecurrentPPO with interchangeable advantage estimators and policy losses."""

from sb3_flow.ppo.maskable import MaskablePPO
from sb3_flow.ppo.ppo import PPO
from sb3_flow.ppo.recurrent import RecurrentPPO

__all__ = ["PPO", "MaskablePPO", "RecurrentPPO"]
