"""The networks once more, in NumPy float64: what the tests of RQL, FMQ, FQL, RLPD and of flow maps compare with."""

import numpy as np
import torch as th
from gymnasium import spaces

from sb3_flow import OfflineDataset
from sb3_flow.data import ChunkSamples


def as_float64(module):
    """:return: the parameters of a module by name"""
    return {name: value.double().numpy() for name, value in module.state_dict().items()}


def gelu_np(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu_slope_np(x):
    tanh = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)


def mlp_np(weights, inputs, tangents, prefix=""):
    """
    A perceptron with GELU and its derivative along a direction.

    :param weights: parameters by name
    :param inputs: shape (B, in)
    :param tangents: the direction, same shape
    :param prefix: of the names
    :return: outputs and derivatives, shape (B, out)
    """
    n_layers = len([name for name in weights if name.startswith(f"{prefix}layers.") and name.endswith(".weight")])
    hidden, slope = inputs, tangents
    for i in range(n_layers):
        hidden = hidden @ weights[f"{prefix}layers.{i}.weight"].T + weights[f"{prefix}layers.{i}.bias"]
        slope = slope @ weights[f"{prefix}layers.{i}.weight"].T
        if i < n_layers - 1:
            hidden, slope = gelu_np(hidden), gelu_slope_np(hidden) * slope
    return hidden, slope


def ensemble_np(weights, inputs, prefix=""):
    """
    The members of :class:`EnsembleMLP`.

    :param weights: parameters by name
    :param inputs: shape (B, in)
    :param prefix: of the names
    :return: shape (K, B)
    """
    members = []
    n_layers = len([name for name in weights if name.startswith(f"{prefix}weights.")])
    for k in range(weights[f"{prefix}weights.0"].shape[0]):
        hidden = inputs
        for i in range(n_layers):
            hidden = hidden @ weights[f"{prefix}weights.{i}"][k] + weights[f"{prefix}biases.{i}"][k]
            if i < n_layers - 1:
                hidden = gelu_np(hidden)
                hidden = (hidden - hidden.mean(1, keepdims=True)) / np.sqrt(hidden.var(1, keepdims=True) + 1e-6)
                hidden = hidden * weights[f"{prefix}scales.{i}"][k] + weights[f"{prefix}shifts.{i}"][k]
        members.append(hidden[:, 0])
    return np.stack(members)


def velocity_np(weights, s, x, t):
    """:return: u(s, x, t) of :class:`VelocityNetwork`, shape (B, A)"""
    inputs = np.concatenate([s, x, t], axis=1)
    return mlp_np(weights, inputs, 0 * inputs, "velocity_net.")[0]


def q_np(weights, s, a):
    """:return: Q_k(s, a) of :class:`ActionValue`, shape (K, B)"""
    return ensemble_np(weights, np.concatenate([s, a], axis=1), "ensemble.")


def gaussian_np(weights, s):
    """:return: mean and log_std of :class:`GaussianActor`, shape (B, A)"""
    mean, log_std = np.split(mlp_np(weights, s, 0 * s, "network.")[0], 2, axis=1)
    return mean, np.clip(log_std, -20, 2)


def log_density_np(mean, log_std, u):
    """:return: log-probabilities of the actions tanh(u), shape (B,)"""
    normal = -0.5 * ((u - mean) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)
    # 1 - tanh(u)^2 = 4 / (e^u + e^-u)^2
    return (normal - np.log(4) + 2 * np.logaddexp(u, -u)).sum(axis=1)


def two_trajectories(action_dim):
    """:return: a dataset of 40 steps with 4 numbers to observe"""
    rng = np.random.default_rng(0)
    ends = np.zeros(40, dtype=bool)
    ends[[19, 39]] = True
    return OfflineDataset.from_arrays(
        rng.normal(size=(40, 4)).astype(np.float32),
        rng.uniform(-1, 1, size=(40, action_dim)).astype(np.float32),
        rng.normal(size=40).astype(np.float32),
        ends,
        ends,
        action_space=spaces.Box(-1, 1, (action_dim,)),
    )


def disturb(model):
    """Change all weights: biases, scales and shifts must matter, and targets must differ from the networks they follow."""
    generator = th.Generator().manual_seed(1)
    for parameter in model.policy.parameters():
        parameter.data += 0.3 * th.randn(parameter.shape, generator=generator)
    return model


def windows(size, action_dim, horizon, gamma):
    """:return: a batch of windows, with a terminal in number 2, while number 6 sticks out of its trajectory by one step"""
    generator = th.Generator().manual_seed(2)

    def randn(*shape):
        return th.randn(*shape, generator=generator)

    mask = th.ones(size, action_dim * horizon)
    mask[6, (horizon - 1) * action_dim :] = 0
    valid = th.ones(size, 1)
    valid[6] = 0
    discounts = th.full((size, 1), gamma**horizon)
    discounts[2] = 0
    actions = randn(size, action_dim * horizon).clamp(-1, 1)
    return ChunkSamples(randn(size, 4), actions, randn(size, 4), 10 * randn(size, 1), discounts, valid, mask)
