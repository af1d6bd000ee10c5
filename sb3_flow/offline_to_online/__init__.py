"""The base class of RQL, FMQ, FQL, DSRL and RLPD: two phases of training, action chunks, generative policies, saving."""

from sb3_flow.offline_to_online.acting_comparison import compare_acting
from sb3_flow.offline_to_online.algorithm import OfflineToOnlineAlgorithm

__all__ = ["OfflineToOnlineAlgorithm", "compare_acting"]
