"""The generative model: velocity networks, ensembles, integration of the flow in both directions (torch only)."""

from sb3_flow.flow.activations import TanhGELU, gelu
from sb3_flow.flow.networks import EnsembleMLP, VelocityNetwork
from sb3_flow.flow.ode import Velocity, euler_forward, euler_reverse
from sb3_flow.flow.sampling import sample_depths

__all__ = [
    "EnsembleMLP",
    "TanhGELU",
    "Velocity",
    "VelocityNetwork",
    "euler_forward",
    "euler_reverse",
    "gelu",
    "sample_depths",
]
