"""
FMQ's formulas once more, in NumPy float64 and loops, and the flow map of Gaussian data in closed form: what the tests of
flow maps, their losses and guidance compare with.
"""

import math

import numpy as np
import torch as th
from network_references import ensemble_np, mlp_np

# ------------------------------------------------------------- flow map network


def embed_np(x, dx, fourier_dim):
    """Embedding of a time of shape (B, 1) and its derivative along dx."""
    if fourier_dim == 0:
        return x, dx
    half = fourier_dim // 2
    w = np.array([10000.0 ** (-k / (half - 1)) for k in range(half)])
    value = np.concatenate([np.cos(w * x), np.sin(w * x)], axis=1)
    slope = np.concatenate([-w * np.sin(w * x) * dx, w * np.cos(w * x) * dx], axis=1)
    return value, slope


def _forward_np(weights, s, a, r, t, da, dr, dt, fourier_dim):
    (e_r, de_r), (e_t, de_t) = embed_np(r, dr, fourier_dim), embed_np(t, dt, fourier_dim)
    inputs, tangents = np.concatenate([s, a, e_r, e_t], axis=1), np.concatenate([0 * s, da, de_r, de_t], axis=1)
    return mlp_np(weights, inputs, tangents)


def average_velocity_np(weights, s, a, r, t, fourier_dim=64):
    return _forward_np(weights, s, a, r, t, 0 * a, 0 * r, 0 * t, fourier_dim)[0]


def average_velocity_jvp_np(weights, s, a, r, t, da, dr, dt, fourier_dim=64):
    return _forward_np(weights, s, a, r, t, da, dr, dt, fourier_dim)[1]


def sample_r_t_np(t1, t2, step, warm, end):
    p = 0.0 if step < warm else min(max((step - warm) / max(end - warm, 1), 0.0), 1.0)
    m, w = (t1 + t2) / 2, np.abs(t1 - t2)
    return m - p * w / 2, m + p * w / 2


# -------------------------------------------------------------------- losses


def loss_np(name, student, teacher, draws, broken=None, fourier_dim=16):
    """
    :param student: weights that the loss trains
    :param teacher: weights under a stop-gradient
    :param broken: a mistake to make
    """
    s, a, noise, r, t, gamma, mask = (draws[key] for key in ("s", "actions", "noise", "r", "t", "gamma", "mask"))

    def u(weights, x, r, t):
        return average_velocity_np(weights, s, x, r, t, fourier_dim)

    def du(weights, x, r, t, dx, dr, dt):
        return average_velocity_jvp_np(weights, s, x, r, t, dx, dr, dt, fourier_dim)

    v = noise - a if broken == "reversed velocity" else a - noise
    zero, one = np.zeros_like(t), np.ones_like(t)
    if name == "diagonal":
        x = (1 - t) * noise + t * a
        prediction, target = u(student, x, r if broken == "not on the diagonal" else t, t), v
    elif name == "eulerian":
        x = (1 - r) * noise + r * a
        direction = (v, zero, one) if broken == "derivative in t" else (v, one, zero)
        if broken == "partial derivative":
            direction = (0 * v, one, zero)
        sign = -1 if broken == "sign" else 1
        prediction, target = u(student, x, r, t), v + sign * (t - r) * du(teacher, x, r, t, *direction)
    elif name == "progressive":
        x = (1 - r) * noise + r * a
        w = r + gamma * (t - r)
        first = u(teacher, x, r, w)
        second = u(teacher, x if broken == "no first jump" else x + (w - r) * first, w, t)
        share = 1 - gamma if broken == "swapped weights" else gamma
        prediction, target = u(student, x, r, t), share * first + (1 - share) * second
    else:
        x = (1 - r) * noise + r * a

        def jump(weights):
            return x + (t - r) * u(weights, x, r, t)

        def speed(weights):
            without = 0 if broken == "no product rule" else u(weights, x, r, t)
            return without + (t - r) * du(weights, x, r, t, 0 * x, zero, one)

        time = r if broken == "diagonal at r" else t
        if name == "lagrangian-jump":
            prediction, target = speed(student), u(teacher, jump(teacher), time, time)
        else:
            prediction, target = u(student, jump(teacher), time, time), speed(teacher)
    if broken == "renormalised":
        return (mask * (prediction - target) ** 2).sum() / mask.sum()
    return (mask * (prediction - target) ** 2).sum() / a.size


# ------------------------------------------------------------------- guidance


def radius_np(q1, q2, beta, numerator):
    delta = [abs(a - b) / math.sqrt(2) for a, b in zip(q1, q2, strict=True)]
    mean = sum(delta) / len(delta)
    return [numerator / (1 + beta * d / (mean + 1e-8)) for d in delta]


def beam_search_np(actor, critic, features, noise, draws, iterations, eta, rho, completion, guide=min, fourier_dim=16):
    """One observation and one particle at a time; ``draws`` of shape (iterations, E, M * branches, A)."""
    result, branches = [], draws.shape[2] // noise.shape[1] if iterations else 0
    for e in range(len(noise)):
        s = features[e : e + 1]

        def u(a, r, t, s=s):
            return average_velocity_np(actor, s, a[None], np.array([[r]]), np.array([[t]]), fourier_dim)[0]

        def q(a, s=s, aggregate=min):
            return aggregate(ensemble_np(critic, np.concatenate([s, a[None]], axis=1))[:, 0])

        def move(a, q=q):
            gradient, h = np.zeros(len(a)), 1e-5
            for i in range(len(a)):
                step = h * np.eye(len(a))[i]
                gradient[i] = (q(a + step, aggregate=guide) - q(a - step, aggregate=guide)) / (2 * h)
            return np.clip(a + eta * gradient / (np.linalg.norm(gradient) + 1e-8), -1, 1)

        particles = [np.clip(a0 + u(a0, 0.0, 1.0), -1, 1) for a0 in noise[e]]
        time = rho / (1 + rho)
        if iterations == 0 and eta > 0:
            particles = [move(a) for a in particles]
        for k in range(iterations):
            children = []
            for m, parent in enumerate(particles):
                for b in range(branches):
                    a = time * parent + (1 - time) * draws[k, e, m * branches + b]
                    a = a + (1 - time) * u(a, time, time if completion == "diagonal" else 1.0)
                    children.append(np.clip(a, -1, 1))
            children.sort(key=q, reverse=True)
            particles = [move(a) for a in children[: len(particles)]]
        result.append(max(particles, key=q))
    return np.stack(result)


# ------------------------------------------------------- Gaussian data, exactly


class ExactGaussian:
    """Flow map and velocity between N(0, 1) noise and independent N(mean, std^2) data, per coordinate."""

    def __init__(self, mean, std):
        self.mean, self.variance = mean, std**2

    def scale(self, t):
        return ((1 - t) ** 2 + t**2 * self.variance) ** 0.5

    def v(self, x, t):
        """Instantaneous (marginal) velocity."""
        slope = (t * self.variance - (1 - t)) / self.scale(t) ** 2
        return self.mean + slope * (x - t * self.mean)

    def flow_map(self, a, r, t):
        return t * self.mean + self.scale(t) / self.scale(r) * (a - r * self.mean)

    def u(self, a, r, t):
        """(flow_map(a, r, t) - a) / (t - r) with the factor t - r cancelled, so that it holds for r = t too."""
        slope = ((r + t) * (1 + self.variance) - 2) / (self.scale(r) * (self.scale(r) + self.scale(t)))
        return self.mean + slope * (a - r * self.mean)

    def sample(self, n, dim, generator):
        """Data and two independent noises, shape (n, dim), float64."""
        data, noise, more_noise = th.randn(3, n, dim, generator=generator, dtype=th.float64)
        return self.mean + self.variance**0.5 * data, noise, more_noise
