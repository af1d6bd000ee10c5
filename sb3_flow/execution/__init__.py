"""How a gradient update is executed: operator by operator, or recorded once as a CUDA graph and replayed."""

from sb3_flow.execution.settings import settings_of
from sb3_flow.execution.update_runner import Execution, UpdateRunner
from sb3_flow.execution.watched_networks import networks_of

__all__ = ["Execution", "UpdateRunner", "networks_of", "settings_of"]
