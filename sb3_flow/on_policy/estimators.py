"""Advantage estimators over a rollout: the kernel of each estimator, and the arrays that the kernel reads."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from sb3_flow.common.ranks import of_all_ranks, rank
from sb3_flow.on_policy.grouping import Groups

Advantage = Literal["gae", "vtrace", "group"]


class Estimate(NamedTuple):
    """
    Hold advantages, and the targets of the value function.

    :param advantages: time-major, shape ``(n_steps, n_envs)``
    :param returns: targets of the value function, same shape
    :param statistics: numbers to log, by key
    :param counts: steps to learn from, bool of the same shape; None for all
    """

    advantages: np.ndarray
    returns: np.ndarray
    statistics: dict[str, float]
    counts: np.ndarray | None = None


class Rollout(Protocol):
    """List the attributes of a rollout buffer that estimators read; arrays are time-major."""

    rewards: np.ndarray
    raw_rewards: np.ndarray
    values: np.ndarray
    final_values: np.ndarray
    last_values: np.ndarray
    last_dones: np.ndarray
    episode_starts: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    alive: np.ndarray
    gamma: float
    gae_lambda: float
    capacity: int


@dataclass
class Estimator:
    """
    Estimate advantages.

    :param kind: "gae" (arXiv 1506.02438), "vtrace" (arXiv 1802.01561, with a lambda that makes it GAE on-policy) or
        "group" (peers instead of a critic)
    :param rho_bar: cap of the importance ratio of V-trace's TD errors; it decides which value function is learned
    :param c_bar: cap of the ratio in V-trace's traces, at most ``rho_bar``
    :param groups: comparison of peers, for "group"
    """

    kind: Advantage = "gae"
    rho_bar: float = 1.0
    c_bar: float = 1.0
    groups: Groups = field(default_factory=Groups)

    def of_rollout(self, rollout: Rollout) -> Estimate:
        """Estimate at collection, when the policy has not moved since it acted, so that every ratio is 1."""
        from sb3_flow.kernels import compute_gae_sb3  # brings numba

        if self.kind == "gae":
            ends = rollout.episode_starts, rollout.last_values, rollout.last_dones
            advantages, returns = compute_gae_sb3(rollout.rewards, rollout.values, *ends, rollout.gamma, rollout.gae_lambda)
            return Estimate(advantages, returns, {})
        if self.kind == "vtrace":
            return self.of_values(rollout, rollout.values, rollout.last_values, np.zeros_like(rollout.values))
        rollouts = of_all_ranks((rollout.raw_rewards, rollout.alive, rollout.values))
        n_steps, n_envs = max(len(alive) for _, alive, _ in rollouts), rollout.alive.shape[1]
        # after the end of a rank's rollout none of its episodes is alive
        rewards, alive, values = (
            np.concatenate([np.pad(column, ((0, n_steps - len(column)), (0, 0))) for column in columns], axis=1)
            for columns in zip(*rollouts, strict=True)
        )
        *found, statistics, counts = self.groups.advantages(rewards, alive, values, rollout.gamma, rollout.capacity)
        own = np.s_[: len(rollout.alive), rank() * n_envs : (rank() + 1) * n_envs]
        advantages, returns, counts = (np.ascontiguousarray(column[own]) for column in (*found, counts))
        return Estimate(advantages, returns, statistics, counts)

    def of_values(self, rollout: Rollout, values: np.ndarray, last_values: np.ndarray, log_rhos: np.ndarray) -> Estimate:
        """
        Estimate with values and importance ratios of another policy than the policy that acted.

        :param rollout: rewards and ends of episodes
        :param values: values of the other policy, time-major
        :param last_values: value after the last step, shape ``(n_envs,)``
        :param log_rhos: log of present over behaviour probability, time-major
        """
        from sb3_flow.kernels import compute_gae, compute_vtrace  # brings numba

        shared = ("terminated", "truncated", "final_values", "gamma", "gae_lambda")
        settings: dict[str, Any] = {name: getattr(rollout, name) for name in shared} | {"last_values": last_values}
        if self.kind == "gae":
            return Estimate(*compute_gae(rollout.raw_rewards, values, **settings), {})
        # a surrogate multiplies by the ratio itself, so it takes q - V, not rho (q - V)
        settings |= {"rho_bar": self.rho_bar, "c_bar": self.c_bar}
        returns, advantages, _ = compute_vtrace(log_rhos, rollout.raw_rewards, values, **settings)
        clipped = float(np.mean(log_rhos > np.log(self.rho_bar)))
        return Estimate(advantages, returns, {"train/rho_clipped_share": clipped})
