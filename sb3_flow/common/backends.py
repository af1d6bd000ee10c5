"""Which of two backends computes a model's networks: torch, or compiled loops where they cover the model."""

import os

from sb3_flow.common.checks import check_choice

BACKENDS = ("auto", "torch", "native")
VARIABLE = "SB3_FLOW_BACKEND"
"""Environment variable that replaces "auto" in every model that is built."""


def requested_backend(backend: str) -> str:
    """
    Put the environment variable ``SB3_FLOW_BACKEND``, where it is set, in the place of "auto".

    :param backend: a model's argument
    :return: "auto", "torch" or "native"
    :raises ValueError: if the argument or the variable is something else
    """
    check_choice(BACKENDS, backend=backend)
    wanted = os.environ.get(VARIABLE) or "auto"
    if wanted not in BACKENDS:
        raise ValueError(
            f"The environment variable {VARIABLE} must be one of {', '.join(BACKENDS)}, but {wanted!r} was given."
        )
    return wanted if backend == "auto" else backend
