"""Q-learning with Adjoint Matching: a flow fine-tuned by the critic's gradient, with or without edits of its actions."""

from sb3_flow.qam.policies import CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_flow.qam.qam import QAM

__all__ = ["QAM", "CnnPolicy", "MlpPolicy", "MultiInputPolicy"]
