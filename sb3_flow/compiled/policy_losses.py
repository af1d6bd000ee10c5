"""Names of the policy losses, which torch's losses and the compiled update share."""

from typing import Literal

PolicyLoss = Literal["clip", "dual_clip", "gspo", "gspo_token", "decoupled"]
