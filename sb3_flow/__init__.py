"""Generative flow policies and modern offline-to-online RL behind the Stable-Baselines3 API."""

from sb3_flow.data import OfflineDataset
from sb3_flow.fmq import FMQ, FlowMapPolicy
from sb3_flow.rql import RQL
from sb3_flow.version import __version__

__all__ = ["FMQ", "RQL", "FlowMapPolicy", "OfflineDataset", "__version__"]
