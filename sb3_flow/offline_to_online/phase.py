"""The phase of training that a model is in."""

from typing import Literal, NamedTuple


class Phase(NamedTuple):
    """
    Offline or online, with the clock that stands still meanwhile.

    :param name: offline SB3's ``num_timesteps`` counts gradient steps, online environment steps
    :param environment_steps: environment steps made before an offline phase; online ``num_timesteps`` has them
    """

    name: Literal["online", "offline"]
    environment_steps: int | None = None


ONLINE = Phase("online")
