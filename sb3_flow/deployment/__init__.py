"""Policies as programs that run without this package: ONNX files and programs of ``torch.export``."""

from sb3_flow.deployment.export import export

__all__ = ["export"]
