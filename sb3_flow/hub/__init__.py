"""Models on the Hugging Face Hub: pushed with an evaluation, a model card and how they were made, and loaded from there."""

from sb3_flow.hub.download import load_from_hub
from sb3_flow.hub.upload import push_to_hub

__all__ = ["load_from_hub", "push_to_hub"]
