"""Observations of vectorised environments."""

from collections.abc import Sequence

import numpy as np
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs


def joined(parts: Sequence[VecEnvObs]) -> VecEnvObs:
    """Put the observations of several vectorised environments together in new arrays."""
    first = parts[0]
    if isinstance(first, dict):
        return {key: np.concatenate([part[key] for part in parts]) for key in first}  # type: ignore[call-overload]
    if isinstance(first, tuple):
        return tuple(np.concatenate(column) for column in zip(*parts, strict=True))
    return np.concatenate(parts)  # type: ignore[arg-type]
