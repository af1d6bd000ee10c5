"""Collection that runs beside learning, in a process of its own."""

from sb3_flow.collect.async_ppo import AsyncPPO
from sb3_flow.collect.collector import CollectorError

__all__ = ["AsyncPPO", "CollectorError"]
