"""Diffusion Steering via RL: soft actor-critic on the noise of a flow that clones the data, whose weights RL leaves alone."""

from sb3_flow.dsrl.dsrl import DSRL
from sb3_flow.dsrl.policies import CnnPolicy, MlpPolicy, MultiInputPolicy

__all__ = ["DSRL", "CnnPolicy", "MlpPolicy", "MultiInputPolicy"]
