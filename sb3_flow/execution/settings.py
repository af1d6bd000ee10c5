"""What a recorded update holds as numbers: the plain attributes of a model and its policy."""

from typing import Any

import numpy as np
import torch as th

PLAIN = frozenset({bool, int, float, str, type(None)})
COUNTERS = frozenset(
    {
        *("num_timesteps", "start_time", "offline_updates", "anchored_at"),
        *("_n_updates", "_n_calls", "_episode_num", "_current_progress_remaining"),
        *("_total_timesteps", "_num_timesteps_at_start", "_stopped_offline", "_had_dataset"),
        *("_last_obs", "_last_original_obs", "_last_episode_starts"),
    }
)
"""Attributes of SB3 and of this package that change as training goes on, and that no update reads."""


def plain(value: Any) -> Any:
    """
    Give what a recording holds of an attribute.

    :return: a number, flag or text itself, the place of a tensor, a tuple of these, and ``None`` for anything else
    """
    if type(value) in PLAIN or isinstance(value, (int, float, str, np.generic)):
        return value
    if isinstance(value, th.Tensor) and value.layout == th.strided:
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    return tuple(map(plain, value)) if type(value) is tuple else None


def settings_of(model: Any, policy: Any) -> tuple[tuple[str, Any], ...]:
    """
    List the attributes that an update may read as numbers, so that a recording of it is not used after one has changed.

    :param model: an algorithm
    :param policy: its policy, perhaps inside the wrapper that ``torch.compile`` returns
    :return: names and values, see :func:`plain`
    """
    policy = getattr(policy, "_orig_mod", policy)
    found = [(name, value) for name, value in vars(model).items() if name not in COUNTERS]
    found += [(f"policy.{name}", value) for name, value in vars(policy).items()]
    return tuple((name, value if type(value) in PLAIN else plain(value)) for name, value in found)
