"""The version of this package, and a check of the one it builds on, before anything else is imported."""

import re
from importlib import metadata

__version__ = "0.1.0"
MINIMUM = "2.9.2"


def check_stable_baselines3() -> None:
    """
    Refuse a Stable-Baselines3 that is too old.

    :raises ImportError: if Stable-Baselines3 is older than ``MINIMUM``, whose protected methods are overridden here
    """
    installed = metadata.version("stable_baselines3")
    if numbers(installed) < numbers(MINIMUM):
        raise ImportError(
            f"sb3_flow needs stable-baselines3 {MINIMUM} or newer, but {installed} is installed: "
            f"pip install --upgrade 'stable-baselines3>={MINIMUM},<3' 'sb3-contrib>={MINIMUM},<3'"
        )


def numbers(version: str) -> tuple[int, ...]:
    """Split a version into its first three numbers, which can be compared."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


check_stable_baselines3()
