"""Generative flow policies, offline-to-online RL and on-policy RL beyond PPO, behind the Stable-Baselines3 API."""

from sb3_flow.version import __version__  # first, since it checks what the rest needs

# isort: split
from sb3_flow.data import HerReplayBuffer, OfflineDataset
from sb3_flow.deployment import export
from sb3_flow.dsrl import DSRL
from sb3_flow.fmq import FMQ, FlowMapPolicy
from sb3_flow.fql import FQL
from sb3_flow.grpo import GRPO, GSPO, GroupedStart
from sb3_flow.ppo import PPO, AsyncPPO, MaskablePPO, RecurrentPPO
from sb3_flow.qam import QAM
from sb3_flow.rlpd import RLPD
from sb3_flow.rql import RQL

__all__ = [
    "DSRL",
    "FMQ",
    "FQL",
    "GRPO",
    "GSPO",
    "PPO",
    "QAM",
    "RLPD",
    "RQL",
    "AsyncPPO",
    "FlowMapPolicy",
    "GroupedStart",
    "HerReplayBuffer",
    "MaskablePPO",
    "OfflineDataset",
    "RecurrentPPO",
    "__version__",
    "export",
]
