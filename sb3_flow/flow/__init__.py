"""The generative model: networks of velocities and flow maps, integration in both directions, guidance (torch only)."""

from sb3_flow.flow.beam_search import beam_search, best_of_n
from sb3_flow.flow.flow_map import AverageVelocity, FlowMapNetwork, flow_map_jvp, flow_map_sample, jump, sample_r_t
from sb3_flow.flow.guidance import Critic, action_gradient, aggregate_q, effective_radius, guided_euler, q_guided_projection
from sb3_flow.flow.networks import EnsembleMLP, GaussianNetwork, OneStepNetwork, VelocityNetwork
from sb3_flow.flow.noise import NoiseSource, fresh_noise, keyed_noise, multipliers
from sb3_flow.flow.ode import Velocity, euler_forward, euler_reverse
from sb3_flow.flow.sampling import sample_depths
from sb3_flow.fused.plain_mlp import TanhGELU, gelu

__all__ = [
    "AverageVelocity",
    "Critic",
    "EnsembleMLP",
    "FlowMapNetwork",
    "GaussianNetwork",
    "NoiseSource",
    "OneStepNetwork",
    "TanhGELU",
    "Velocity",
    "VelocityNetwork",
    "action_gradient",
    "aggregate_q",
    "beam_search",
    "best_of_n",
    "effective_radius",
    "euler_forward",
    "euler_reverse",
    "flow_map_jvp",
    "flow_map_sample",
    "fresh_noise",
    "gelu",
    "guided_euler",
    "jump",
    "keyed_noise",
    "multipliers",
    "q_guided_projection",
    "sample_depths",
    "sample_r_t",
]
