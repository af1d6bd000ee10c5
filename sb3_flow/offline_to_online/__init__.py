"""What RQL and FMQ share: the base class, its phases, action chunks, generative policies, what is saved."""

from sb3_flow.offline_to_online.algorithm import OfflineToOnlineAlgorithm
from sb3_flow.offline_to_online.compare_acting import compare_acting

__all__ = ["OfflineToOnlineAlgorithm", "compare_acting"]
