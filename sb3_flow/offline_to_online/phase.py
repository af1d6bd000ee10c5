"""The phase of training that a model is in."""

from typing import Literal, NamedTuple


class Phase(NamedTuple):
    """
    Offline or online phase. SB3's ``num_timesteps`` counts gradient steps offline and environment steps online.

    :param name: of the phase
    :param environment_steps: environment steps that were made before an offline phase
    """

    name: Literal["online", "offline"]
    environment_steps: int | None = None


ONLINE = Phase("online")
