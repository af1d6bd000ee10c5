"""
Checks of the kernels' arguments. An array that is already as the loops want it costs a few attribute comparisons; finiteness
is judged by the result, and the arguments are searched only where that is not finite.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

Shape = tuple[int, ...]

NDARRAY = np.ndarray
FLOAT32, FLOAT64, BOOL = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.bool_)


def check_range(name: str, given: float, low: float, high: float) -> None:
    """
    :raises ValueError: if ``given`` is not in [low, high], or not a number
    """
    if not low <= given <= high:
        raise ValueError(f"`{name}` must be in [{low:g}, {high:g}], but {given} was given.")


def check_positive(**arguments: float) -> None:
    """
    :param arguments: numbers by argument name
    :raises ValueError: if one is not positive and finite
    """
    for name, given in arguments.items():
        if not 0.0 < given < np.inf:
            raise ValueError(f"`{name}` must be positive and finite, but {given} was given.")


def check_choice(name: str, given: str, choices: tuple[str, ...]) -> None:
    """
    :raises ValueError: if ``given`` is not one of the choices
    """
    if given not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, but {given!r} was given.")


def float_array(name: str, array: np.ndarray, shape: Shape | None = None, dtype: np.dtype | None = None) -> np.ndarray:
    """
    :param name: the argument's name
    :param array: the argument
    :param shape: expected shape; None for any
    :param dtype: expected dtype; None for float32 or float64
    :return: the array itself, or a copy that is C-contiguous, writable and in native byte order
    :raises ValueError: if it is not an array of that shape and dtype
    """
    if type(array) is NDARRAY:
        given = array.dtype
        known = given is dtype if dtype is not None else given is FLOAT32 or given is FLOAT64
        if known and (shape is None or array.shape == shape) and array.flags.carray:
            return array
    expected = "float32 or float64" if dtype is None else str(dtype)
    if not isinstance(array, np.ndarray) or array.dtype.newbyteorder("=") not in (
        (FLOAT32, FLOAT64) if dtype is None else (dtype,)
    ):
        what = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"`{name}` must be a NumPy array of {expected}, but {what} was given.")
    check_shape(name, array.shape, shape)
    return plain(array, array.dtype.newbyteorder("="))


def flag_array(name: str, flags: np.ndarray, shape: Shape) -> np.ndarray:
    """
    :param name: the argument's name
    :param flags: bool, or numbers that are 0 or 1
    :param shape: expected shape
    :return: the array itself, or a copy: bool, C-contiguous and writable
    :raises ValueError: if it is not an array of flags of that shape
    """
    if type(flags) is NDARRAY and flags.dtype is BOOL and flags.shape == shape and flags.flags.carray:
        return flags
    if not isinstance(flags, np.ndarray):
        raise ValueError(f"`{name}` must be a NumPy array of bool, but {type(flags).__name__} was given.")
    check_shape(name, flags.shape, shape)
    if flags.dtype != BOOL and not ((flags == 0) | (flags == 1)).all():
        raise ValueError(f"`{name}` must hold only 0 and 1, but {flags.dtype} with other entries was given.")
    return plain(flags, BOOL)


def check_shape(name: str, given: Shape, expected: Shape | None) -> None:
    """
    :raises ValueError: if the shapes differ
    """
    if expected is not None and given != expected:
        raise ValueError(f"`{name}` must have shape {expected}, but {given} was given.")


def plain(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """:return: the array, copied if need be: base class, C-contiguous, writable (the loops are compiled for nothing else)"""
    return np.require(np.asarray(array), dtype=dtype, requirements=["C", "A", "W"])


def numbers(name: str, array: ArrayLike, ndim: tuple[int, ...] = (1,)) -> np.ndarray:
    """
    For functions that also take lists: floats keep their dtype, integers become float64.

    :param name: the argument's name
    :param array: numbers
    :param ndim: allowed numbers of dimensions
    :return: float32 or float64, C-contiguous
    :raises ValueError: if it is not numeric, has another number of dimensions, or holds NaN or infinity
    """
    given = np.asarray(array)
    if given.dtype.kind not in "fiu":
        raise ValueError(f"`{name}` must hold numbers, but {given.dtype} was given.")
    if given.ndim not in ndim:
        expected = " or ".join(map(str, ndim))
        raise ValueError(f"`{name}` must have {expected} dimension(s), but shape {given.shape} was given.")
    dtype = FLOAT32 if given.dtype.newbyteorder("=") == FLOAT32 else FLOAT64
    result = given if given.dtype is dtype and given.flags.carray else plain(given, dtype)
    check_finite(**{name: result})
    return result


def check_finite(**arrays: Any) -> None:
    """
    :param arrays: arrays by argument name
    :raises ValueError: naming the first entry that is NaN or infinite
    """
    for name, array in arrays.items():
        finite = np.isfinite(array)
        if not finite.all():
            place = tuple(int(i) for i in np.argwhere(~finite)[0])
            raise ValueError(f"`{name}` must be finite, but {array[place]} was given at {place}.")


def explain_result(dtype: np.dtype, **arrays: Any) -> None:
    """
    For results that are not finite.

    :raises ValueError: always: the argument that is not finite, or that the numbers are too large
    """
    check_finite(**arrays)
    raise ValueError(f"The numbers in `{'`, `'.join(arrays)}` are too large: the result does not fit {dtype}.")
