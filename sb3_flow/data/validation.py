"""
Checks that data can be trained on: every error names the argument, the given value and the expected value.

Every source's arrays pass :func:`checked`, a block of rows at a time, also those that stay in files.
"""

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from sb3_flow.data.columns import Parts, entries, row_slices

# Actions may lie outside their bounds by this share of the range (rounding); they are clipped then.
ACTION_TOLERANCE = 1e-4


def check_action_space(space: Any) -> None:
    """
    Refuse action spaces that are no bounded Box of floats.

    :param space: an action space, or text that names its substitute
    :raises ValueError: unless it is a Box of floats with finite bounds
    """
    if not isinstance(space, spaces.Box) or space.dtype is None or np.dtype(space.dtype).kind != "f":
        raise ValueError(
            f"flow policies need continuous actions (a Box action space of floats), got {space}; for discrete actions use "
            "DQN or PPO of Stable-Baselines3 or QR-DQN of sb3-contrib"
        )
    if not space.low.size:
        raise ValueError(f"action_space must have a component, got {space}")
    with np.errstate(over="ignore"):
        low, high = space.low.astype(np.float32), space.high.astype(np.float32)
        width = high - low
    if not (np.isfinite([low, high, width]).all() and (width > 0).all()):
        raise ValueError(
            f"action_space must have finite bounds with low < high (all and their distance as float32), got low {space.low} "
            f"and high {space.high}"
        )


def check_space(name: str, space: Any) -> None:
    """
    Refuse arguments that are no spaces.

    :raises TypeError: unless it is a Gymnasium space or None
    """
    if space is not None and not isinstance(space, spaces.Space):
        raise TypeError(f"{name} must be a Gymnasium space, got {type(space).__name__}")


def check_observation_space(space: Any) -> None:
    """
    Refuse observation spaces whose observations are neither arrays nor flat dictionaries of arrays.

    :raises ValueError: unless it is a Box, Discrete, MultiDiscrete or MultiBinary space or a flat Dict of these
    """
    kinds = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    subs = list(space.spaces.values()) if isinstance(space, spaces.Dict) else [space]
    if not subs or not all(isinstance(sub, kinds) for sub in subs):
        raise ValueError(
            "observation_space must be a Box, Discrete, MultiDiscrete or MultiBinary space or a flat Dict of these, got "
            f"{space}"
        )


def check_observations(observations: np.ndarray | dict[str, np.ndarray], space: spaces.Space[Any], whose: str) -> None:
    """
    Check keys, shapes and kind (images as uint8 or not) of observations against a space, and that values belong to Discrete,
    MultiDiscrete and MultiBinary spaces. The bounds of a Box are not compared: many environments state others than they keep.

    :param observations: (N, \\*shape) or a dict
    :param space: the space
    :param whose: whose space it is, for the message
    :raises ValueError: naming the difference
    """
    given = sorted(observations) if isinstance(observations, dict) else "one array"
    wanted = sorted(space.spaces) if isinstance(space, spaces.Dict) else "one array"
    if given != wanted:
        raise ValueError(f"observations are {given}, {whose} wants {wanted}")
    for key, sub in entries(space).items():
        array = entries(observations)[key]
        name = _label("observations", key)
        if array.shape[1:] != sub.shape:
            hint = ""
            if sub.shape and sorted(sub.shape) == sorted(array.shape[1:]) and len(sub.shape) == 3:
                hint = "; SB3 puts the channels of images first (VecTransposeImage): move that axis with numpy.moveaxis"
            raise ValueError(f"{name} have shape {array.shape[1:]} per row, {whose} wants {sub.shape}{hint}")
        image = isinstance(sub, spaces.Box) and sub.dtype == np.uint8
        if isinstance(sub, spaces.Box) and (array.dtype == np.uint8) != image:
            raise ValueError(f"{name} have dtype {array.dtype}, {whose} wants {sub.dtype} (uint8 means an image)")
        _check_members(name, array, sub, whose)


def _check_members(name: str, array: np.ndarray, space: spaces.Space[Any], whose: str) -> None:
    """Check that observations are whole numbers in the range of a Discrete, MultiDiscrete or MultiBinary space."""
    if isinstance(space, spaces.Discrete):
        low, high, kind = space.start, space.start + space.n, "one of"
    elif isinstance(space, spaces.MultiDiscrete):
        low, high, kind = space.start, space.start + space.nvec, "one of"
    elif isinstance(space, spaces.MultiBinary):
        low, high, kind = 0, 2, "0 or 1"
    else:
        return
    for rows in row_slices(array):
        block = array[rows]
        wrong = (block < low) | (block >= high) | (block != np.floor(block))
        if wrong.any():
            row = _first_row(wrong)
            if kind == "one of":
                bounds = zip(np.ravel(low).tolist(), np.ravel(high).tolist(), strict=True)
                kind += " " + " and ".join(f"{least}, ..., {end - 1}" for least, end in bounds)
            raise ValueError(f"{name} must be {kind} ({whose} {space}), got {block[row]} in row {rows.start + row}")


def checked(
    parts: Parts,
    observation_space: spaces.Space[Any] | None = None,
    action_space: spaces.Space[Any] | None = None,
    in_place: bool = True,
) -> Parts:
    """
    Validate the values of a dataset, fill in its spaces where unknown, clip actions that are out of bounds by rounding.

    :param parts: the arrays
    :param observation_space: replaces the space of ``parts``
    :param action_space: replaces the space of ``parts``
    :param in_place: whether ``parts.actions`` may be written to
    :return: the same object
    """
    parts.observation_space = parts.observation_space if observation_space is None else observation_space
    parts.action_space = parts.action_space if action_space is None else action_space
    _check_layout(parts)
    parts.observation_space = _check_observation_arrays(parts)
    actions = parts.actions
    _check_finite("actions", actions)
    if parts.action_space is None:
        parts.action_space = _infer_action_space(actions)
    check_action_space(parts.action_space)
    if actions.shape[1:] != parts.action_space.shape:
        raise ValueError(f"actions have shape {actions.shape}, action_space wants {parts.action_space.shape} per row")
    _check_finite("rewards", parts.rewards)
    assert isinstance(parts.action_space, spaces.Box)
    parts.actions = _bounded(actions, parts.action_space, in_place)
    return parts


def _check_layout(parts: Parts) -> None:
    """Check keys, lengths, dtypes and numbers of dimensions."""
    observations, finals = entries(parts.observations), entries(parts.final_observations)
    if observations.keys() != finals.keys():
        raise ValueError(f"final_observations have the keys {sorted(finals)}, observations {sorted(observations)}")
    n_rows = (*next(iter(observations.values())).shape, 0)[0]
    for key, array in observations.items():
        _check_array(_label("observations", key), array, n_rows)
    for name in ("actions", "rewards", "terminated", "trajectory_ends"):
        _check_array(name, getattr(parts, name), n_rows)
    if not parts.trajectory_ends[-1]:
        raise ValueError("the last row of trajectory_ends must be True")
    n_ends = int(np.count_nonzero(parts.trajectory_ends))
    for key, array in finals.items():
        name, dtype, shape = _label("final_observations", key), observations[key].dtype, observations[key].shape[1:]
        if not array.ndim or array.dtype != dtype or array.shape[1:] != shape:
            raise ValueError(
                f"{name} are {array.dtype} of shape {array.shape[1:]} per row, observations have {dtype} of shape {shape}"
            )
        if len(array) != n_ends:
            raise ValueError(f"{name} has {len(array)} rows, but {n_ends} rows end a trajectory")


def _first_row(marked: np.ndarray) -> int:
    """Number the first row with a True value."""
    return int(np.flatnonzero(marked.reshape(len(marked), -1).any(axis=1))[0])


def _label(name: str, key: str) -> str:
    """Name an array of observations, which may be an entry of a dictionary, for messages."""
    return f"{name}[{key!r}]" if key else name


def _check_array(name: str, array: np.ndarray, n_rows: int) -> None:
    """Check that an array has rows, as many as observations have, and is stored in its type."""
    is_flag, is_observation = name in ("terminated", "trajectory_ends"), name.startswith("observations")
    if not array.ndim:
        raise ValueError(f"{name} must be an array with rows, got a single value")
    if not n_rows:
        raise ValueError("the dataset is empty")
    if array.dtype != (np.bool_ if is_flag else np.float32) and not (is_observation and array.dtype.kind in "iu"):
        expected = "bool" if is_flag else "float32 or integers" if is_observation else "float32"
        raise ValueError(f"{name} must be stored as {expected}, got {array.dtype}")
    if len(array) != n_rows:
        raise ValueError(f"{name} has {len(array)} rows but observations has {n_rows}: every array needs a row per transition")
    if math.prod(array.shape[1:]) == 0:
        raise ValueError(f"{name} have shape {array.shape[1:]} per row: a row holds no value")
    if (is_flag or name == "rewards") and array.ndim != 1:
        raise ValueError(f"{name} must have shape {(n_rows,)}, got {array.shape}")
    if is_flag and any((array[rows].view(np.uint8) > 1).any() for rows in row_slices(array)):
        raise ValueError(f"{name} must be stored as bool, got bytes other than 0 and 1")


def _check_finite(name: str, array: np.ndarray) -> None:
    """Refuse NaN and infinities."""
    count, first_row = 0, -1
    for rows in row_slices(array) if array.dtype.kind == "f" else ():
        bad = ~np.isfinite(array[rows])
        if bad.any():
            if count == 0:
                first_row = rows.start + _first_row(bad)
            count += int(bad.sum())
    if count:
        raise ValueError(f"{name} must be finite, {count} values are NaN or infinite (as float32), first in row {first_row}")


def _check_observation_arrays(parts: Parts) -> spaces.Space[Any]:
    """Check observations and final observations; return their space."""
    space = parts.observation_space
    inferred: dict[str, spaces.Space[Any]] = {}
    for name, value in (("observations", parts.observations), ("final_observations", parts.final_observations)):
        for key, array in entries(value).items():
            if space is None and array.ndim < 2:
                raise ValueError(
                    f"{_label(name, key)} must have shape (N, ...) with at least 2 dimensions, got "
                    f"{array.shape}; for a single feature use shape ({len(array)}, 1)"
                )
            _check_finite(_label(name, key), array)
            if space is None:
                if array.dtype.kind == "f":
                    inferred[key] = spaces.Box(-np.inf, np.inf, array.shape[1:], np.float32)
                else:
                    limits = np.iinfo(array.dtype)
                    inferred[key] = spaces.Box(limits.min, limits.max, array.shape[1:], array.dtype.type)
    if space is None:
        return spaces.Dict(inferred) if isinstance(parts.observations, dict) else inferred[""]
    check_observation_space(space)
    check_observations(parts.observations, space, "observation_space")
    for key, sub in entries(space).items():
        _check_members(_label("final_observations", key), entries(parts.final_observations)[key], sub, "observation_space")
    return space


def _infer_action_space(actions: np.ndarray) -> spaces.Box:
    """Box(-1, 1) if that holds all actions."""
    if actions.ndim < 2:
        raise ValueError(
            f"actions must have shape (N, *action_shape), got {actions.shape}; for one component use shape ({len(actions)}, 1)"
        )
    for rows in row_slices(actions):
        beyond = np.abs(actions[rows]) > 1.0
        if beyond.any():
            row = rows.start + _first_row(beyond)
            raise ValueError(
                f"action_space is needed: actions are not all in [-1, 1] (row {row} is {actions[row]}), so their bounds are "
                "unknown; pass action_space=gymnasium.spaces.Box(low, high) as the environment has it"
            )
    return spaces.Box(-1.0, 1.0, actions.shape[1:], np.float32)


def _bounded(actions: np.ndarray, space: spaces.Box, in_place: bool) -> np.ndarray:
    """Check the bounds of actions; clip those that rounding put outside."""
    low, high = space.low.astype(np.float32), space.high.astype(np.float32)
    tolerance = ACTION_TOLERANCE * (high - low)
    worst: tuple[float, tuple[int, ...]] = (0.0, ())
    outside, to_clip = 0, False
    for rows in row_slices(actions):
        excess = np.maximum(low - actions[rows], actions[rows] - high)
        to_clip = to_clip or bool((excess > 0).any())
        too_far = excess > tolerance
        if too_far.any():
            outside += int(too_far.sum())
            at = tuple(int(i) for i in np.unravel_index(np.argmax(np.where(too_far, excess, 0)), excess.shape))
            worst = max(worst, (float(excess[at]), (rows.start + at[0], *at[1:])))
    if outside:
        at = worst[1]
        raise ValueError(
            f"actions must lie in the action space (low {space.low}, high {space.high}): {outside} values are outside, the "
            f"worst is {actions[at]:g} in row {at[0]}, component {at[1] if len(at) == 2 else at[1:]}"
        )
    if not to_clip:
        return actions
    out = actions if in_place else actions.copy()
    for rows in row_slices(out):
        np.clip(out[rows], low, high, out=out[rows])
    return out
