"""Published values of GAE, of V-trace and of group-relative advantages, for every implementation of these."""

import math

ROLLOUT = {
    "rewards": [1, 0.5, -1, 2, 0.25],
    "values": [0.5, 1, -0.5, 0.25, 2],
    "last_values": 1.5,
    "terminated": [False, True, False, False, False],
    "truncated": [False, False, False, True, False],
    "final_values": [math.nan, math.nan, math.nan, 3, math.nan],  # read only where an episode was truncated
    "gamma": 0.9,
}
"""Five steps of one environment."""

GAE_LAMBDA = 0.8
GAE, RETURNS = [1.04, -0.5, 2.929, 4.45, -0.4], [1.54, 0.5, 2.429, 4.7, 1.6]

W = [0.5, 2.0, 1.5, 0.8, 0.25]
VTRACE = {
    "on-policy": ([1.0] * 5, {"gae_lambda": 0.8}, RETURNS, GAE, GAE),
    "lambda 1": (W, {}, [0.975, 0.5, 2.429, 3.81, 1.9], [0.95, -0.5, 2.929, 4.45, -0.4], [0.475, -0.5, 2.929, 3.56, -0.1]),
    "lambda 0.8": (W, {"gae_lambda": 0.8}, [1.02, 0.5, 1.7882, 3.81, 1.9], None, [0.52, -0.5, 2.2882, 3.56, -0.1]),
    "rho 2": (
        W,
        {"rho_bar": 2.0, "rho_pg_bar": 2.0, "c_bar": 1.0},
        [0.75, 0, 2.2915, 3.81, 1.9],
        None,
        [0.25, -1, 4.3935, 3.56, -0.1],
    ),
}
"""Ratios, options, value targets, q - V (None where nothing was published) and advantages."""

GROUP = [1, 2, 3, 6]
GROUP_ADVANTAGES = [
    ({}, [-1.069045, -0.534522, 0, 1.603567]),
    ({"ddof": 1}, [-0.925820, -0.462910, 0, 1.388730]),
    ({"baseline": "loo", "scale": "none"}, [-8 / 3, -4 / 3, 0, 4]),
    ({"baseline": "median", "scale": "none"}, [-1.5, -0.5, 0.5, 3.5]),
    ({"baseline": "median"}, [-0.801784, -0.267261, 0.267261, 1.870829]),
    ({"baseline": "min"}, [0, 0.534522, 1.069045, 2.672612]),
    ({"baseline": "min", "scale": "none"}, [0, 1, 2, 5]),
    ({"baseline": "mean", "scale": "none"}, [-2, -1, 0, 3]),
]
"""Options, and the advantages of the group's members."""
