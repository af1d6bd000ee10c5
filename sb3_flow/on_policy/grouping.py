"""Group-relative advantages of a rollout, with a choice of peers, credit, baseline and scale."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Credit = Literal["return_to_go", "outcome", "pooled", "process"]
Baseline = Literal["mean", "loo", "median", "min", "critic"]
Scale = Literal["none", "group", "batch"]
Aggregation = Literal["step", "episode", "constant"]


@dataclass(frozen=True)
class Groups:
    """
    Compare the members of a group.

    :param size: number of a group's members, which are neighbours among the environments; None for all environments
    :param credit: "return_to_go": the discounted return from each step on is compared with the peers alive at the same step;
        "pooled": the same with all environments; "outcome": the undiscounted return of the episode (GRPO, arXiv 2402.03300);
        "process": step rewards are normalised by the group's mean and deviation, and summed over the later steps (GRPO's
        process form, which has no other baseline or scale)
    :param baseline: "mean", "loo" (mean of the other members, unbiased), "median", "min", or "critic": the value function's
        errors are compared, by "loo"
    :param scale: divide by the standard deviation of the "batch", of the "group" (GRPO), or by "none" (Dr. GRPO, arXiv
        2503.20783)
    :param ddof: delta degrees of freedom of the deviation
    :param aggregation: "step": every step has the same weight (DAPO, arXiv 2503.14476); "episode": every episode has the same
        weight (GRPO); "constant": the sum over steps is divided by a constant, so that long episodes weigh more (Dr. GRPO)
    """

    size: int | None = None
    credit: Credit = "return_to_go"
    baseline: Baseline = "loo"
    scale: Scale = "batch"
    ddof: int = 0
    aggregation: Aggregation = "step"

    def advantages(
        self, rewards: np.ndarray, alive: np.ndarray, values: np.ndarray, gamma: float, max_steps: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, dict[str, float], np.ndarray]:
        """
        Compare the members of each group.

        :param rewards: time-major like all arrays, shape ``(n_steps, n_envs)``
        :param alive: True for the steps of the episodes that are compared
        :param values: values of the critic, for ``baseline="critic"``
        :param gamma: discount factor
        :param max_steps: the constant of ``aggregation="constant"``; None for ``n_steps``
        :return: advantages, returns-to-go, statistics to log, and True for each step of a group whose members differ
        """
        from sb3_flow.kernels import (  # brings numba
            compute_group_advantages,
            compute_group_returns_to_go,
            compute_process_advantages,
        )

        n_steps, n_envs = rewards.shape
        size = self.size or n_envs
        grouped = (n_steps, n_envs // size, size)
        rewards, alive, values = (array.reshape(grouped) for array in (rewards, alive, values))
        rewards = np.where(alive, rewards, 0).astype(rewards.dtype)
        totals = rewards.sum(axis=0)
        critic = self.baseline == "critic"
        baseline = "loo" if critic else self.baseline
        settings: dict[str, Any] = {"baseline": baseline, "scale": self.scale, "ddof": self.ddof}
        compared = (n_steps, 1, n_envs) if self.credit == "pooled" else grouped
        advantages, returns = compute_group_returns_to_go(
            rewards.reshape(compared),
            alive.reshape(compared),
            gamma,
            values=values.reshape(compared) if critic else None,
            **settings,
        )
        if self.credit == "outcome":
            outcome = compute_group_advantages(returns.reshape(grouped)[0] - values[0] if critic else totals, **settings)
            advantages = np.where(alive, outcome[None], 0).astype(rewards.dtype)
        elif self.credit == "process":
            advantages = compute_process_advantages(rewards, alive, ddof=self.ddof)
        advantages = advantages.reshape(grouped)
        differ = (advantages != 0).any(axis=(0, 2))  # (n_groups,)
        lengths = alive.sum(axis=0)  # (n_groups, size)
        statistics = {
            "rollout/zero_variance_share": float(1 - differ.mean()),
            "rollout/alive_peers": float((alive.sum(axis=2) ** 2).sum() / max(alive.sum(), 1)),
            "rollout/group_return_spread": float(totals.std(axis=1).mean()),
            "rollout/alive_share": float(alive.mean()),
        }
        # the update takes the mean over steps; multiplied by the mean length, this is a mean over episodes
        mean_length = lengths[differ].mean() if differ.any() else 0.0
        if self.aggregation == "episode":
            advantages = advantages * (mean_length / np.maximum(lengths, 1)[None])
        elif self.aggregation == "constant":
            advantages = advantages * (mean_length / (max_steps or n_steps))
        counts = np.broadcast_to(differ[None, :, None], grouped)
        flat = (n_steps, n_envs)
        return advantages.astype(rewards.dtype).reshape(flat), returns.reshape(flat), statistics, counts.reshape(flat)
