"""Policy networks of PPO in compiled loops: acting, evaluating, and a whole epoch of updates."""

from typing import TYPE_CHECKING, Any

from sb3_flow.compiled import unavailable
from sb3_flow.native.network_layout import BERNOULLI, CATEGORICAL, GAUSSIAN, RELU, TANH, Network, describe_network
from sb3_flow.native.objectives import Adam, Objective, describe_objective

if TYPE_CHECKING or unavailable() is None:
    from sb3_flow.native.policy_forward import policy_forward, policy_outputs, policy_values
    from sb3_flow.native.policy_update import METRICS, policy_evaluate, ppo_epoch

__all__ = [
    "BERNOULLI",
    "CATEGORICAL",
    "GAUSSIAN",
    "METRICS",
    "RELU",
    "TANH",
    "Adam",
    "Network",
    "Objective",
    "describe_network",
    "describe_objective",
    "policy_evaluate",
    "policy_forward",
    "policy_outputs",
    "policy_values",
    "ppo_epoch",
]


def __getattr__(name: str) -> Any:
    if name in __all__:  # the loops need numba; the descriptions do not
        raise ImportError(f"`{name}` needs compiled code, but {unavailable()}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
