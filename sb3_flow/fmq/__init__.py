from sb3_flow.fmq.fmq import FMQ
from sb3_flow.fmq.policies import CnnPolicy, FlowMapPolicy, MlpPolicy, MultiInputPolicy

__all__ = ["FMQ", "CnnPolicy", "FlowMapPolicy", "MlpPolicy", "MultiInputPolicy"]
