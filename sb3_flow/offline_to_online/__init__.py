"""What RQL and FMQ share: the base class, its phases, action chunks, generative policies, what is saved."""

from sb3_flow.offline_to_online.acting_comparison import compare_acting
from sb3_flow.offline_to_online.algorithm import OfflineToOnlineAlgorithm

__all__ = ["OfflineToOnlineAlgorithm", "compare_acting"]
