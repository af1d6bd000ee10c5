"""Flow Map Q-Guidance: a flow map that acts in one evaluation of its network, and imitation with the same policy."""

from sb3_flow.fmq.fmq import FMQ
from sb3_flow.fmq.policies import CnnPolicy, FlowMapPolicy, MlpPolicy, MultiInputPolicy

__all__ = ["FMQ", "CnnPolicy", "FlowMapPolicy", "MlpPolicy", "MultiInputPolicy"]
