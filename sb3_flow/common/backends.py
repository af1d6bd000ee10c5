"""The choice between two backends of a model's networks: torch, or compiled loops where they cover the model."""

import os
import warnings
from typing import Literal, get_args

from sb3_flow.common.checks import check_choice
from sb3_flow.compiled import unavailable

Backend = Literal["auto", "torch", "native"]
BACKENDS: tuple[str, ...] = get_args(Backend)
VARIABLE = "SB3_FLOW_BACKEND"
"""Environment variable that replaces "auto" in every model that is built."""


def requested_backend(backend: str) -> str:
    """
    Put the environment variable ``SB3_FLOW_BACKEND``, where it is set, in the place of "auto".

    :param backend: a model's argument
    :raises ValueError: if the argument or the variable is not "auto", "torch" or "native"
    """
    check_choice(BACKENDS, backend=backend)
    wanted = os.environ.get(VARIABLE) or "auto"
    if wanted not in BACKENDS:
        raise ValueError(
            f"The environment variable {VARIABLE} must be one of {', '.join(BACKENDS)}, but {wanted!r} was given."
        )
    return wanted if backend == "auto" else backend


def choose_backend(
    backend: str, earlier: str | None, uncovered: str | None, slower: str | None, verbose: int, device: str = "cpu"
) -> str:
    """
    Choose the backend of a model, once for all of its life, and say why.

    :param backend: the model's argument
    :param earlier: the backend that was chosen when a model that is now loaded was built
    :param uncovered: why compiled loops do not cover the model, a sentence without its full stop; None if they do
    :param slower: why torch is faster, likewise; None if it is not
    :param verbose: 1 to print the choice for "auto"
    :param device: type of the model's device; other devices than the CPU have torch alone, which is not called slower there
    :return: "torch" or "native"
    :raises ValueError: if "native" is asked for and cannot be had
    """
    requested, missing = requested_backend(backend), unavailable()
    if requested == "native" and (missing or uncovered):
        given = '`backend` is "native"' if backend == "native" else f'The environment variable {VARIABLE} is "native"'
        raise ValueError(f"{given}, but {missing or f'the compiled loops do not cover this model: {uncovered}'}.")
    if requested != "auto":
        return requested
    if missing and device == "cpu":
        warnings.warn(f"Using the torch backend, which is slower: {missing}.", stacklevel=2)
        return "torch"
    if uncovered:
        chosen, reason = "torch", f", which is slower: {uncovered}" if device == "cpu" else f": {uncovered}"
    elif earlier is not None:
        chosen, reason = earlier, ", which was chosen when the model was built"
    elif slower:
        chosen, reason = "torch", f", which is faster here: {slower}"
    else:
        chosen, reason = "native", ", which is faster here"
    if verbose >= 1:
        print(f"Using the {chosen} backend{reason}.")
    return chosen
