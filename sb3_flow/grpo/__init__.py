"""GRPO and GSPO, which compare a trajectory with its peers and need no critic; environments that start in groups."""

from sb3_flow.grpo.grouped_starts import GroupedStart, group_starts, has_grouped_starts
from sb3_flow.grpo.grpo import GRPO
from sb3_flow.grpo.gspo import GSPO

__all__ = ["GRPO", "GSPO", "GroupedStart", "group_starts", "has_grouped_starts"]
