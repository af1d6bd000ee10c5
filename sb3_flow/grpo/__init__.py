"""GRPO and GSPO: peers instead of a critic."""

from sb3_flow.common.grouped import GroupedStart
from sb3_flow.grpo.grpo import GRPO
from sb3_flow.grpo.gspo import GSPO

__all__ = ["GRPO", "GSPO", "GroupedStart"]
