"""Group sequence policy optimisation (GSPO) for environments."""

from typing import Any

from stable_baselines3.common.type_aliases import Schedule

from sb3_flow.common.checks import check_choice, check_known
from sb3_flow.grpo.grpo import GRPO


class GSPO(GRPO):
    """
    GRPO with one importance ratio for a whole episode, ``s = exp(mean_t log w_t)`` (arXiv 2507.18071). Minibatches are
    whole episodes, together at least ``batch_size`` steps. Experimental in control: its gradient steps are few.

    **The clip ranges are scaled for control.** The published 3e-4 and 4e-4 belong to answers of thousands of tokens and stop
    all learning on control tasks. The mean of L independent log-ratios is smaller than one of them by sqrt(L), so
    ``clip_range`` and ``clip_range_high`` are given as for PPO and divided by the square root of the rollout's mean episode
    length; ``length_scaled_clip=False`` takes them as they are.

    Arguments that are not listed are those of :class:`sb3_flow.GRPO`.

    :param credit: "outcome" as published; step-wise credits are averaged over the episode by "gspo", and go well with
        ``policy_loss="gspo_token"``
    :param policy_loss: "gspo" or "gspo_token"
    :param length_scaled_clip: divide the clip ranges by the square root of the mean episode length
    """

    def __init__(
        self,
        *args: Any,
        credit: str = "outcome",
        policy_loss: str = "gspo",
        clip_range_high: float | Schedule | None = 0.28,
        length_scaled_clip: bool = True,
        **kwargs: Any,
    ):
        check_known(type(self), kwargs)
        check_choice(("gspo", "gspo_token"), policy_loss=policy_loss)
        self.length_scaled_clip = length_scaled_clip
        kwargs |= {"credit": credit, "policy_loss": policy_loss, "clip_range_high": clip_range_high}
        super().__init__(*args, **kwargs)
