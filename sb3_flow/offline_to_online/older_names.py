"""Files that were saved when the modes of acting had other names. Only loading reads these."""

from typing import Any

OLD_NAMES = ("evaluation_mode", "sampler")
OLD_SAMPLERS = {"one_step": "sample", "n_step": "sample"}


def translate(arguments: dict[str, Any], old: str | None = None) -> str | None:
    """
    Put today's names in the place of old ones, so that actions are found as before.

    :param arguments: of a policy, or a model's attributes, as they were saved; changed
    :param old: the old mode, if it is not one of the arguments
    :return: the old mode, if there is one
    """
    for name in OLD_NAMES:
        if name in arguments:
            old = arguments.pop(name)
            arguments["acting_mode"] = OLD_SAMPLERS.get(old, old)
    if old not in (None, "n_step") and "n_sampling_steps" in arguments:
        arguments["n_sampling_steps"] = 1  # whatever it was, no other sampler took more
    return old
