"""RLPD: SAC with an ensemble of critics, whose batches are half a dataset and half online steps."""

from sb3_flow.rlpd.policies import CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_flow.rlpd.rlpd import RLPD

__all__ = ["RLPD", "CnnPolicy", "MlpPolicy", "MultiInputPolicy"]
