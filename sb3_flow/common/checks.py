"""Checks of arguments and of numbers; each error names what it is about, what was given and what was expected."""

import math
from typing import Any

import numpy as np


def check_minimum(minimum: float, **arguments: float) -> None:
    """
    :param minimum: the least allowed value
    :param arguments: values by argument name
    :raises ValueError: if one is smaller, or not a number
    """
    for name, given in arguments.items():
        if not given >= minimum:
            raise ValueError(f"`{name}` must be at least {minimum}, but {given} was given.")


def check_fraction(**arguments: float) -> None:
    """
    :param arguments: values by argument name
    :raises ValueError: if one is not in [0, 1]
    """
    for name, given in arguments.items():
        if not 0.0 <= given <= 1.0:
            raise ValueError(f"`{name}` must be in [0, 1], but {given} was given.")


def check_number(where: str = "", **arguments: Any) -> None:
    """
    :param where: end of the message, e.g. when a schedule returned this
    :param arguments: values by argument name; None and functions, whose values are not known yet, are passed over
    :raises ValueError: if one is not a finite number
    """
    for name, given in arguments.items():
        if given is not None and not callable(given) and not _is_finite(given):
            raise ValueError(f"`{name}` must be a finite number, but {given!r} was given{where}.")


def _is_finite(given: Any) -> bool:
    try:
        return math.isfinite(given)
    except (TypeError, ValueError, OverflowError):  # not a number, or an integer beyond all floats
        return False


def check_finite(where: str, **arrays: np.ndarray) -> None:
    """
    :param where: the beginning of the message, e.g. the step
    :param arrays: numbers by name
    :raises FloatingPointError: if one of them is not finite
    """
    broken = [name.replace("_", " ") for name, numbers in arrays.items() if not np.isfinite(numbers).all()]
    if broken:
        raise FloatingPointError(f"{where} numbers that are not finite: {', '.join(broken)}.")


def check_choice(choices: tuple[object, ...], **arguments: object) -> None:
    """
    :param choices: the allowed values
    :param arguments: values by argument name
    :raises ValueError: if one is not among the choices
    """
    for name, given in arguments.items():
        if given not in choices:
            expected = ", ".join(map(repr, choices))
            raise ValueError(f"`{name}` must be one of {expected}, but {given!r} was given.")
