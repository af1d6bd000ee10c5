"""Search for better actions at inference: best-of-n and Q-guided beam search of FMQ (arXiv 2605.12416, Algorithm 2)."""

from typing import Literal

import torch as th

from sb3_flow.compiled.choices import check_choice
from sb3_flow.flow.flow_map import AverageVelocity, flow_map_sample, jump
from sb3_flow.flow.guidance import Aggregation, Critic, action_gradient, aggregate_q, q_guided_projection
from sb3_flow.flow.noise import NoiseSource


def best_of_n(candidates: th.Tensor, q_values: th.Tensor, aggregation: Aggregation = "min") -> th.Tensor:
    """
    Choose the candidate with the largest value.

    :param candidates: shape ``(B, n, A)``
    :param q_values: values of the members, shape ``(n_critics, B, n)``
    :param aggregation: aggregation of the members, see :func:`~sb3_flow.flow.guidance.aggregate_q`
    :return: of each sample the candidate with the largest value, shape ``(B, A)``
    """
    best = aggregate_q(q_values, aggregation).argmax(dim=1, keepdim=True)
    return _select(candidates, best).squeeze(1)


def _select(candidates: th.Tensor, indices: th.Tensor) -> th.Tensor:
    """Select the candidates of each sample at ``(B, m)`` indices, by an operator that exporters know."""
    return candidates.gather(1, indices.unsqueeze(-1).expand(-1, -1, candidates.shape[-1]))


@th.no_grad()
def beam_search(
    velocity: AverageVelocity,
    critic: Critic,
    noise: NoiseSource,
    *,
    beam_width: int = 4,
    branches: int = 4,
    iterations: int = 1,
    eta: float = 0.3,
    rho: float = 1.5,
    completion: Literal["diagonal", "average"] = "diagonal",
    aggregation: Aggregation = "min",
) -> th.Tensor:
    """
    Search by Q-guided beams (QGBS). M one-step samples are the first particles; an iteration renoises each of them
    ``branches`` times to t' = rho / (1 + rho) (Eq. 14), completes the branches again, keeps the M best by Q (parents are
    dropped) and moves them by eta along the normalised grad_a Q. The best particle is returned. Without iterations the samples
    are moved once, as in the released implementation; with eta = 0 that is best-of-M.

    Actions are clipped to [-1, 1] after every sample, completion and move. Per observation the actor is evaluated
    on M (1 + K B) actions, the critic on M (1 + K B + K), of which M K with gradients. All shapes are static. The
    result carries no gradient.

    :param velocity: average velocity, ``velocity(a, r, t)`` for a of shape ``(E, n, A)``, r and t of shape ``(E, n, 1)``
    :param critic: ``critic(a)``, for a of shape ``(E, n, A)`` values of the members of shape ``(n_critics, E, n)``
    :param noise: ``noise(n)`` draws n points for each of E observations, shape ``(E, n, A)``: the starting points, then the
        noise of each iteration's branches
    :param beam_width: M
    :param branches: B, completions of each particle
    :param iterations: K
    :param eta: radius of a move, in action space
    :param rho: ratio of signal to noise of the branches
    :param completion: ``"diagonal"``, as released: one Euler step with u_{t',t'}; ``"average"``, as published: the jump
        with u_{t',1}. FMQ's online phase trains jumps to t = 1 and leaves the diagonal as it was offline
    :param aggregation: aggregation of the members that ranks and guides, see :func:`~sb3_flow.flow.guidance.aggregate_q`
    :return: actions, shape ``(E, A)``
    """
    check_choice(("diagonal", "average"), completion=completion)
    noise_level = 1.0 / (1.0 + rho)

    def branch(particles: th.Tensor) -> th.Tensor:
        """Renoise and complete the particles; return shape ``(E, M * B, A)``."""
        parents = particles.repeat_interleave(branches, dim=1)
        a = (1.0 - noise_level) * parents + noise_level * noise(parents.shape[1])
        t, end = th.full_like(a[..., :1], 1.0 - noise_level), th.ones_like(a[..., :1])
        if completion == "average":
            return jump(velocity, a, t, end).clamp(-1, 1)
        return th.add(a, velocity(a, t, t), alpha=noise_level).clamp(-1, 1)

    def keep_best(children: th.Tensor) -> th.Tensor:
        scores = aggregate_q(critic(children), aggregation)
        return _select(children, scores.topk(beam_width, dim=1).indices)

    def guide(particles: th.Tensor) -> th.Tensor:
        if eta == 0.0:
            return particles
        _, gradient = action_gradient(critic, particles, aggregation)
        return q_guided_projection(particles, gradient, eta).clamp(-1, 1)

    particles = flow_map_sample(velocity, noise(beam_width)).clamp(-1, 1)
    if iterations == 0:
        particles = guide(particles)
    for _ in range(iterations):
        particles = guide(keep_best(branch(particles)))
    return best_of_n(particles, critic(particles), aggregation)
