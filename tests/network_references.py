"""The networks once more, in NumPy float64: what the tests of RQL, FMQ, FQL, QAM and of flow maps compare with."""

import numpy as np


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
