"""Older names of the modes of acting, which only the loading of older files reads."""

from typing import Any

OLD_NAMES = ("evaluation_mode", "sampler")
OLD_SAMPLERS = {"one_step": "sample", "n_step": "sample"}


def translate(arguments: dict[str, Any], old: str | None = None) -> str | None:
    """
    Put today's names in the place of older names, so that actions are found as before.

    :param arguments: saved arguments of a policy or attributes of a model; they are changed
    :param old: the older mode, if it is not among the arguments
    :return: the older mode, or None
    """
    for name in OLD_NAMES:
        if name in arguments:
            old = arguments.pop(name)
            arguments["acting_mode"] = OLD_SAMPLERS.get(old, old)
    if old not in (None, "n_step") and "n_sampling_steps" in arguments:
        arguments["n_sampling_steps"] = 1  # no other sampler took more steps
    return old
