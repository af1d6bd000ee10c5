"""Offline datasets in, and the replay buffer that mixes them with online steps."""

from sb3_flow.data.dataset import OfflineDataset
from sb3_flow.data.hindsight import HerReplayBuffer
from sb3_flow.data.replay import TrajectoryReplayBuffer
from sb3_flow.data.samples import ChunkSamples

__all__ = ["ChunkSamples", "HerReplayBuffer", "OfflineDataset", "TrajectoryReplayBuffer"]
