"""What several algorithms share and SB3 sees."""

from sb3_flow.common.checkpoints import CheckpointCallback, latest_checkpoint
from sb3_flow.common.compare import compare_acting
from sb3_flow.common.environments import SparseReward
from sb3_flow.common.evaluate import bootstrap_interval, interquartile_mean
from sb3_flow.common.grouped import GroupedStart, group_starts, has_grouped_starts
from sb3_flow.common.offline_env import SuccessInfo
from sb3_flow.common.offline_to_online import OfflineToOnlineAlgorithm
from sb3_flow.common.plot_callback import FlowVisualisationCallback
from sb3_flow.common.plots import importance_ratios, learning_curves
from sb3_flow.common.robomimic import RobomimicTask
from sb3_flow.common.visualisation import action_flow, flow_values

__all__ = [
    "CheckpointCallback",
    "FlowVisualisationCallback",
    "GroupedStart",
    "OfflineToOnlineAlgorithm",
    "RobomimicTask",
    "SparseReward",
    "SuccessInfo",
    "action_flow",
    "bootstrap_interval",
    "compare_acting",
    "flow_values",
    "group_starts",
    "has_grouped_starts",
    "importance_ratios",
    "interquartile_mean",
    "latest_checkpoint",
    "learning_curves",
]
