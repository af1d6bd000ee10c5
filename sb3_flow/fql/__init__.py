"""Flow Q-Learning: a cloned flow, and a one-step actor distilled from it, or the best of several samples of the flow."""

from sb3_flow.fql.fql import FQL
from sb3_flow.fql.policies import CnnPolicy, MlpPolicy, MultiInputPolicy

__all__ = ["FQL", "CnnPolicy", "MlpPolicy", "MultiInputPolicy"]
