"""Collection that runs beside learning, in a process of its own."""

from sb3_flow.collect.fork_server import CollectorError

__all__ = ["CollectorError"]
