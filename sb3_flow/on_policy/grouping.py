"""Group-relative advantages of a rollout, by the choice of peers, credit, baseline and scale."""

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
    How the members of a group are compared.

    :param size: members of a group, neighbours among the environments; None for all environments
    :param credit: "return_to_go": discounted return from each step against the peers alive at the same step;
        "pooled": the same against all environments; "outcome": the undiscounted episode return against the group's (GRPO,
        arXiv 2402.03300); "process": step rewards by the group's mean and deviation, summed over the later steps (its process
        form, which has no other baseline or scale)
    :param baseline: "mean", "loo" (mean of the others, unbiased), "median", "min", or "critic": the value function's error
        is compared, with "loo"
    :param scale: "none" (Dr. GRPO, arXiv 2503.20783), "group" (GRPO) or "batch": divide by the standard deviation
    :param ddof: delta degrees of freedom of the deviation
    :param aggregation: "step": every step weighs the same (DAPO, arXiv 2503.14476); "episode": every episode does (GRPO);
        "constant": as "step", divided by a constant length, so that the loss grows with the episodes (Dr. GRPO)
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

        :param rewards: time-major, shape ``(n_steps, n_envs)``, as are the others
        :param alive: steps of the episodes that are compared
        :param values: of the critic, for ``baseline="critic"``
        :param gamma: discount factor
        :param max_steps: the constant of ``aggregation="constant"``; None for ``n_steps``
        :return: advantages, returns-to-go, statistics to log, and the steps to learn from: alive ones of groups whose
            members differ
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
        # the update takes the mean over steps: times their mean number it is a mean over episodes
        mean_length = lengths[differ].mean() if differ.any() else 0.0
        if self.aggregation == "episode":
            advantages = advantages * (mean_length / np.maximum(lengths, 1)[None])
        elif self.aggregation == "constant":
            advantages = advantages * (mean_length / (max_steps or n_steps))
        counts = np.broadcast_to(differ[None, :, None], grouped)
        flat = (n_steps, n_envs)
        return advantages.astype(rewards.dtype).reshape(flat), returns.reshape(flat), statistics, counts.reshape(flat)
