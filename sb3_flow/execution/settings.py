"""What a recorded update holds as numbers: the plain attributes of a model and its policy."""

from typing import Any

PLAIN = (bool, int, float, str)
COUNTERS = frozenset(
    {
        *("num_timesteps", "start_time", "offline_updates", "anchored_at"),
        *("_n_updates", "_n_calls", "_episode_num", "_current_progress_remaining"),
        *("_total_timesteps", "_num_timesteps_at_start", "_stopped_offline", "_had_dataset"),
    }
)
"""Attributes of SB3 and of this package that change as training goes on, and that no update reads."""


def settings_of(model: Any, policy: Any) -> tuple[tuple[str, Any], ...]:
    """
    List the attributes that an update may read as numbers, so that a recording of it is not used after one has changed.

    :param model: an algorithm
    :param policy: its policy
    :return: names and values, ``None`` for what is no number, flag or text
    """
    found = [(name, value) for name, value in vars(model).items() if name not in COUNTERS]
    found += [(f"policy.{name}", value) for name, value in vars(policy).items()]
    return tuple((name, value if isinstance(value, PLAIN) else None) for name, value in found)
