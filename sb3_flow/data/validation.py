"""What makes data trainable: every error names the argument, what was given and what is expected."""

from typing import Any

import numpy as np
from gymnasium import spaces

from sb3_flow.data.columns import Parts, entries, row_slices

# Actions may lie outside their bounds by this share of the range (rounding); they are clipped then.
ACTION_TOLERANCE = 1e-4


def check_action_space(space: Any) -> None:
    """
    :param space: an action space, or text that says what there is instead
    :raises ValueError: unless it is a Box of floats with finite bounds
    """
    if not isinstance(space, spaces.Box) or space.dtype is None or np.dtype(space.dtype).kind != "f":
        raise ValueError(
            f"flow policies need continuous actions (a Box action space of floats), got {space}; for discrete actions use "
            "DQN or PPO of Stable-Baselines3 or QR-DQN of sb3-contrib"
        )
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all() and (space.low < space.high).all()):
        raise ValueError(f"action_space must have finite bounds with low < high, got low {space.low} and high {space.high}")


def check_observations(observations: np.ndarray | dict[str, np.ndarray], space: spaces.Space, whose: str) -> None:
    """
    Check keys, shapes and kind (images as uint8 or not) of observations against a space; bounds are not compared.

    :param observations: (N, \\*shape) or a dict
    :param space: the space
    :param whose: whose space it is, for the message
    :raises ValueError: saying what differs
    """
    if isinstance(observations, dict) or isinstance(space, spaces.Dict):
        given = sorted(observations) if isinstance(observations, dict) else "one array"
        wanted = sorted(space.spaces) if isinstance(space, spaces.Dict) else "one array"
        if given != wanted:
            raise ValueError(f"observations are {given}, {whose} wants {wanted}")
    for key, sub in entries(space).items():
        array = entries(observations)[key]
        name = f"observations[{key!r}]" if key else "observations"
        if array.shape[1:] != sub.shape:
            hint = ""
            if sub.shape and sorted(sub.shape) == sorted(array.shape[1:]) and len(sub.shape) == 3:
                hint = "; SB3 puts the channels of images first (VecTransposeImage): move that axis with numpy.moveaxis"
            raise ValueError(f"{name} have shape {array.shape[1:]} per row, {whose} wants {sub.shape}{hint}")
        image = isinstance(sub, spaces.Box) and sub.dtype == np.uint8
        if isinstance(sub, spaces.Box) and (array.dtype == np.uint8) != image:
            raise ValueError(f"{name} have dtype {array.dtype}, {whose} wants {sub.dtype} (uint8 means an image)")


def checked(parts: Parts, in_place: bool = True) -> Parts:
    """
    Validate the values of a dataset, fill in its spaces where unknown, clip actions that are out of bounds by rounding.

    :param parts: the arrays
    :param in_place: whether ``parts.actions`` may be written to
    :return: the same object
    """
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


def _check_finite(name: str, array: np.ndarray) -> None:
    """NaN and infinities are refused."""
    count, first_row = 0, -1
    for rows in row_slices(array) if array.dtype.kind == "f" else ():
        bad = ~np.isfinite(array[rows])
        if bad.any():
            if count == 0:
                first_row = rows.start + int(np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))[0])
            count += int(bad.sum())
    if count:
        raise ValueError(
            f"{name} must be finite, {count} values are NaN or infinite (as float32), the first in row {first_row}"
        )


def _check_observation_arrays(parts: Parts) -> spaces.Space:
    """Check observations and final observations; return their space."""
    space = parts.observation_space
    inferred: dict[str, spaces.Space] = {}
    for name, value in (("observations", parts.observations), ("final_observations", parts.final_observations)):
        for key, array in entries(value).items():
            if space is None and array.ndim < 2:
                raise ValueError(
                    f"{name}{f'[{key!r}]' if key else ''} must have shape (N, ...) with at least 2 dimensions, got "
                    f"{array.shape}; for a single feature use shape ({len(array)}, 1)"
                )
            _check_finite(f"{name}[{key!r}]" if key else name, array)
            if space is None:
                if array.dtype.kind == "f":
                    inferred[key] = spaces.Box(-np.inf, np.inf, array.shape[1:], np.float32)
                else:
                    limits = np.iinfo(array.dtype)
                    inferred[key] = spaces.Box(limits.min, limits.max, array.shape[1:], array.dtype.type)
    if space is None:
        return spaces.Dict(inferred) if isinstance(parts.observations, dict) else inferred[""]
    check_observations(parts.observations, space, "observation_space")
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
            row = rows.start + int(np.flatnonzero(beyond.reshape(len(beyond), -1).any(axis=1))[0])
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
