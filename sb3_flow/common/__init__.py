"""What several algorithms share and SB3 sees."""

from sb3_flow.common.checkpoints import latest_checkpoint
from sb3_flow.common.environments import SparseReward
from sb3_flow.common.grouped import GroupedStart, group_starts, has_grouped_starts
from sb3_flow.common.offline_env import SuccessInfo
from sb3_flow.common.offline_to_online import OfflineToOnlineAlgorithm
from sb3_flow.common.robomimic import RobomimicTask

__all__ = [
    "GroupedStart",
    "OfflineToOnlineAlgorithm",
    "RobomimicTask",
    "SparseReward",
    "SuccessInfo",
    "group_starts",
    "has_grouped_starts",
    "latest_checkpoint",
]
