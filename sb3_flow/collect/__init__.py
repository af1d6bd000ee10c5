"""Collection that runs beside learning, in a process of its own."""

from sb3_flow.collect.collector import CollectorError

__all__ = ["CollectorError"]
