"""The check of options that all rooms share; it needs no numba."""

from typing import Any

import numpy as np


def shown(given: Any) -> str:
    """Show an argument in at most 60 characters, for an error message."""
    text = " ".join(repr(given).split())
    return text if len(text) <= 60 else f"{text[:56]} ..."


def check_choice(choices: tuple[object, ...], **arguments: object) -> None:
    """
    Refuse arguments that are not among the choices.

    :param choices: the allowed values
    :param arguments: values by argument name
    :raises ValueError: if a value is not among the choices
    """
    for name, given in arguments.items():
        if isinstance(given, np.ndarray) or given not in choices:  # an array is compared entry by entry
            raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, but {shown(given)} was given.")
