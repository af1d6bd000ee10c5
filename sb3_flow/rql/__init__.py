"""Reversal Q-Learning: a flow policy of several steps, improved by going back along its flow."""

from sb3_flow.rql.policies import CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_flow.rql.rql import RQL

__all__ = ["RQL", "CnnPolicy", "MlpPolicy", "MultiInputPolicy"]
