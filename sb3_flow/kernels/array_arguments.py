"""
Checks of the kernels' arguments, whose ``name`` is the argument's name in a message. An array that already is as the loops
want it costs a few comparisons of attributes. The arguments are searched for NaN only if a result is not finite.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from sb3_flow.compiled.choices import shown

Shape = tuple[int, ...]

NDARRAY = np.ndarray
FLOAT32, FLOAT64, BOOL, INT64 = (np.dtype(kind) for kind in (np.float32, np.float64, np.bool_, np.int64))


def number(name: str, given: Any) -> float:
    """
    Convert a number of Python, NumPy or torch to a float.

    :raises ValueError: if the argument is not a real number
    """
    kind = getattr(getattr(given, "dtype", None), "kind", "f")
    if not isinstance(given, (str, bytes)) and kind in "fiub" and not getattr(given, "ndim", 0):
        try:
            return float(given)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
    raise ValueError(f"`{name}` must be a number that fits float64, but {shown(given)} was given.")


def check_range(name: str, given: Any, low: float, high: float) -> float:
    """
    Convert a number to a float, if it is in [low, high].

    :raises ValueError: if the argument is not a number, or not in this range
    """
    value = number(name, given)
    if not low <= value <= high:
        raise ValueError(f"`{name}` must be in [{low:g}, {high:g}], but {shown(given)} was given.")
    return value


def check_positive(**arguments: Any) -> None:
    """
    Refuse numbers that are not positive and finite.

    :param arguments: numbers by argument name
    :raises ValueError: if a number is not positive and finite
    """
    for name, given in arguments.items():
        if not 0.0 < number(name, given) < np.inf:
            raise ValueError(f"`{name}` must be positive and finite, but {shown(given)} was given.")


def whole(name: str, given: Any, low: int, high: int = 2**53) -> int:
    """
    Convert a whole number to an int, if it is in [low, high].

    :raises ValueError: if the argument is not a whole number, or not in this range
    """
    value = number(name, given)
    if not low <= value <= high or value != int(value):
        expected = f"at least {low}" if high == 2**53 else f"in [{low}, {high}]"
        raise ValueError(f"`{name}` must be a whole number {expected}, but {shown(given)} was given.")
    return int(value)


def check_unmasked(name: str, array: Any) -> None:
    """
    Refuse masked entries, since NumPy drops the mask when it makes a plain array, and masked numbers would be used.

    :raises ValueError: if entries are masked
    """
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise ValueError(f"`{name}` must have no masked entries, but {np.ma.count_masked(array)} are.")


def float_array(name: str, array: np.ndarray, shape: Shape | None = None, dtype: np.dtype | None = None) -> np.ndarray:
    """
    Check an array of floats.

    :param shape: expected shape; None for any
    :param dtype: expected dtype; None for float32 or float64
    :return: the array itself, or a copy that is C-contiguous, writable and in native byte order
    :raises ValueError: if the argument is not an array of this shape and dtype
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
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"`{name}` must be a NumPy array of {expected}, but {kind} was given.")
    check_shape(name, array.shape, shape)
    check_unmasked(name, array)
    return plain(array, array.dtype.newbyteorder("="))


def flag_array(name: str, flags: np.ndarray, shape: Shape) -> np.ndarray:
    """
    Check an array of flags.

    :param flags: bool, or numbers that are 0 or 1
    :param shape: expected shape
    :return: the array itself, or a copy that is bool, C-contiguous and writable
    :raises ValueError: if the argument is not an array of flags of this shape
    """
    if type(flags) is NDARRAY and flags.dtype is BOOL and flags.shape == shape and flags.flags.carray:
        return flags
    if not isinstance(flags, np.ndarray):
        raise ValueError(f"`{name}` must be a NumPy array of bool, but {type(flags).__name__} was given.")
    check_shape(name, flags.shape, shape)
    check_unmasked(name, flags)
    if flags.dtype.kind not in "biufO":
        raise ValueError(f"`{name}` must be of bool, or numbers that are 0 or 1, but {flags.dtype} was given.")
    if flags.dtype != BOOL and not ((flags == 0) | (flags == 1)).all():
        raise ValueError(f"`{name}` must hold only 0 and 1, but {flags.dtype} with other entries was given.")
    return plain(flags, BOOL)


def check_shape(name: str, given: Shape, expected: Shape | None) -> None:
    """Raise a ValueError if a shape is not the expected shape, where None stands for any."""
    if expected is not None and given != expected:
        raise ValueError(f"`{name}` must have shape {expected}, but {given} was given.")


def plain(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Copy an array unless it is plain, C-contiguous and writable: the loops are compiled for such arrays alone."""
    return np.require(np.asarray(array), dtype=dtype, requirements=["C", "A", "W"])


def numeric(name: str, array: ArrayLike, kinds: str = "fiu") -> np.ndarray:
    """
    Convert numbers, which may be in a list, to an array.

    :param kinds: NumPy's letters of the allowed kinds of numbers
    :raises ValueError: if the numbers are of another kind or cannot form an array, or if entries are masked
    """
    try:
        given = np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:  # rows of different lengths; tensors on a GPU or with gradients
        raise ValueError(f"`{name}` must hold numbers, but {shown(array)} was given: {error}") from error
    check_unmasked(name, array)
    if given.dtype.kind not in kinds:
        raise ValueError(f"`{name}` must hold numbers, but {given.dtype} was given.")
    return given


def numbers(name: str, array: ArrayLike, ndim: tuple[int, ...] = (1,)) -> np.ndarray:
    """
    Convert finite numbers, which may be in a list, to a C-contiguous array: floats keep their dtype, integers become float64.

    :param ndim: allowed numbers of dimensions
    :raises ValueError: if the argument is not numeric, has another number of dimensions, or holds NaN or infinity
    """
    given = numeric(name, array)
    if given.ndim not in ndim:
        expected = " or ".join(map(str, ndim))
        raise ValueError(f"`{name}` must have {expected} dimension(s), but shape {given.shape} was given.")
    dtype = FLOAT32 if given.dtype.newbyteorder("=") == FLOAT32 else FLOAT64
    result = given if given.dtype is dtype and given.flags.carray else plain(given, dtype)
    check_finite(**{name: result})
    return result


def check_sizes(name: str, given: Shape, expected: tuple[int | None, ...]) -> None:
    """
    Check a shape, some sizes of which may be free.

    :param expected: sizes; None for any
    :raises ValueError: if the shapes differ
    """
    if len(given) != len(expected) or any(e not in (None, g) for e, g in zip(expected, given, strict=True)):
        sizes = ", ".join("any" if size is None else str(size) for size in expected)
        raise ValueError(f"`{name}` must have shape ({sizes}{',' * (len(expected) == 1)}), but {given} was given.")


def float_rows(name: str, array: ArrayLike, shape: tuple[int | None, ...], dtype: np.dtype) -> np.ndarray:
    """
    Convert numbers, among which may be NaN and infinity, to floats.

    :param shape: expected sizes; None for any
    :param dtype: float32 or float64
    :return: the array itself, or a copy of this dtype, C-contiguous and writable
    :raises ValueError: if the argument does not hold numbers or bool, or has another shape
    """
    if type(array) is NDARRAY and array.dtype is dtype and array.flags.carray and array.ndim == len(shape):
        given = array.shape
        if all(e is None or e == g for e, g in zip(shape, given, strict=True)):
            return array
    found = numeric(name, array, "fiub")
    check_sizes(name, found.shape, shape)
    return plain(found, dtype)


def integers(name: str, array: ArrayLike, shape: tuple[int | None, ...]) -> np.ndarray:
    """
    Convert integers to a C-contiguous array of int64.

    :param shape: expected sizes; None for any
    :raises ValueError: if the argument does not hold integers, has another shape, or does not fit int64
    """
    given = numeric(name, array)
    if given.dtype.kind == "f" and given.size:  # an empty list is of floats
        raise ValueError(f"`{name}` must hold integers, but {given.dtype} was given.")
    check_sizes(name, given.shape, shape)
    if given.dtype.kind == "u" and given.size and given.max() > np.iinfo(np.int64).max:
        raise ValueError(f"`{name}` must fit int64, but {given.max()} was given.")
    return plain(given, INT64)


def check_finite(**arrays: Any) -> None:
    """
    Refuse arrays, given by argument name, that are not finite.

    :raises ValueError: if an entry is NaN or infinite; the message names the first such entry
    """
    for name, given in arrays.items():
        array = np.asarray(given)
        finite = np.isfinite(array)
        if not finite.all():
            place = tuple(int(i) for i in np.argwhere(~finite)[0])
            raise ValueError(f"`{name}` must be finite, but {array[place]} was given at {place}.")


def explain_result(dtype: np.dtype, **arrays: Any) -> None:
    """
    Explain why a result that was computed from these arrays is not finite.

    :raises ValueError: always; the message names the argument that is not finite, or says that the numbers are too large
    """
    check_finite(**arrays)
    raise ValueError(f"The numbers in `{'`, `'.join(arrays)}` are too large: the result does not fit {dtype}.")


def finite_result(result: np.ndarray, **arrays: Any) -> np.ndarray:
    """
    Return a result that was computed from these arrays, if it is finite.

    :raises ValueError: if the result is not finite
    """
    if not np.isfinite(result).all():
        explain_result(result.dtype, **arrays)
    return result
