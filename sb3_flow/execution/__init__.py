"""How a gradient update is executed: operator by operator, or recorded once as a CUDA graph and replayed."""

from sb3_flow.execution.update_runner import Execution, UpdateRunner

__all__ = ["Execution", "UpdateRunner"]
