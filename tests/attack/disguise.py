"""Ways to give an argument: the same numbers in another guise, and arguments that are wrong."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch as th

from tests.attack.memory import guarded_array

FLOATS = (np.float32, np.float64)
OTHER_DTYPES = ("i1", "i4", "i8", "u1", "u8", "f2", "f4", "f8", "g", "c8", "c16", "?", "O", "U8", "S8", "M8[s]", "m8[s]")


def _unaligned(array: np.ndarray) -> np.ndarray:
    memory = np.zeros(array.nbytes + 1, np.uint8)
    copy: np.ndarray = np.ndarray(array.shape, array.dtype, memory, 1)
    copy[...] = array
    return copy


def _reversed(array: np.ndarray) -> np.ndarray:
    turned = (slice(None, None, -1),) * array.ndim
    return np.ascontiguousarray(array[turned])[turned] if array.ndim else array


def _sliced(array: np.ndarray) -> np.ndarray:
    if not array.ndim:
        return array
    wide = np.empty((*array.shape[:-1], 2 * array.shape[-1] + 1), array.dtype)
    wide.view(np.uint8)[...] = 0x5A  # nothing that passes for a number of the array
    wide[..., 1::2] = array
    return wide[..., 1::2]


def _read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


GUISES: dict[str, Callable[[np.ndarray], Any]] = {
    "Fortran order": np.asfortranarray,
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "reversed": _reversed,
    "sliced": _sliced,
    "read-only": _read_only,
    "byte-swapped": lambda x: x.astype(x.dtype.newbyteorder("S")),
    "unaligned": _unaligned,
    "aligned and guarded": np.array,
}
"""Arrays with the same numbers, which every function must take."""

RARE_GUISES: dict[str, Callable[[np.ndarray], Any]] = {
    "list": lambda x: x.tolist(),
    "tuple": lambda x: tuple(x.tolist()) if x.ndim else x,
    "matrix": lambda x: np.asmatrix(x) if x.ndim == 2 else x,
    "masked array without mask": lambda x: np.ma.masked_array(x),
    "object array": lambda x: x.astype(object),
    "tensor": lambda x: th.tensor(np.array(x)),
}
"""The same numbers in something that a function may refuse, but must not misunderstand."""


def guard(value: Any, rng: np.random.Generator) -> Any:
    """:return: a plain NumPy array moved beside a forbidden page, strides as they are; anything else as it is"""
    if type(value) is not np.ndarray or value.dtype.hasobject:
        return value
    if not value.flags.aligned:
        return value
    copy = guarded_array(value, bool(rng.integers(2)))
    copy.flags.writeable = value.flags.writeable
    return copy


def broadcast(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """:return: the first entry along one axis for all of that axis, without memory of its own"""
    if not array.size or not array.ndim:
        return array
    axis = int(rng.integers(array.ndim))
    return np.broadcast_to(array.take([0], axis), array.shape)


def wrong_shape(array: np.ndarray, rng: np.random.Generator) -> Any:
    """:return: other numbers or another arrangement"""
    axis = int(rng.integers(array.ndim)) if array.ndim else None
    ways: list[Callable[[], Any]] = [
        lambda: array.reshape(-1),
        lambda: array[None],
        lambda: array[..., None],
        lambda: array.T,
        lambda: np.zeros((), array.dtype),
        lambda: np.zeros((0,), array.dtype),
        lambda: np.zeros((3, 0, 2), array.dtype),
        lambda: np.zeros((1,) * 5, array.dtype),
        lambda: np.broadcast_to(np.ones((), array.dtype), (300, 200)),
    ]
    if axis is not None:
        length = array.shape[axis]
        ways += [
            lambda: np.concatenate([array, array], axis),
            lambda: np.delete(array, 0, axis) if length else array,
            lambda: array.take(range(max(length - 1, 0)), axis),
            lambda: np.concatenate([array, array.take([-1], axis)], axis) if length else array,
            lambda: array.take([], axis),
        ]
    return ways[rng.integers(len(ways))]()


def wrong_numbers(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """:return: the array with an entry, or all of them, that is NaN, infinite, huge, tiny, negative or out of range"""
    if array.dtype.kind == "b":
        return ~array
    if array.dtype.kind in "iu":
        values: list[Any] = [-1, -(2**63), 2**63 - 1, 2**62, array.size, array.size + 1, 1 - array.size, 2**32]
    else:
        values = [np.nan, np.inf, -np.inf, 1e38, -1e38, 3e38, 1e19, 1e-45, 1e308, -1e308, 5e-324, -0.0, -1.0, 0.5]
    value = values[rng.integers(len(values))]
    if array.dtype.kind in "iu":
        value = int(np.clip(value, np.iinfo(array.dtype).min, np.iinfo(array.dtype).max))
    with np.errstate(over="ignore"):
        value = array.dtype.type(value)
    result = array.copy()
    if rng.random() < 0.2:
        result[...] = value
    elif result.size:
        result.reshape(-1)[rng.integers(result.size)] = value
    return result


def wrong_dtype(array: np.ndarray, rng: np.random.Generator) -> Any:
    """:return: the array as another dtype"""
    dtype = OTHER_DTYPES[rng.integers(len(OTHER_DTYPES))]
    with np.errstate(all="ignore"):
        if dtype.startswith(("M8", "m8")):
            return array.astype("i8").astype(dtype)
        return array.astype(dtype)


def wrong_object(array: Any, rng: np.random.Generator) -> Any:
    """:return: something that is no array, or not quite"""
    size = len(array) if isinstance(array, (list, tuple)) else np.size(array)
    things: list[Callable[[], Any]] = [
        lambda: None,
        lambda: "text",
        lambda: b"bytes",
        lambda: 3,
        lambda: -1.5,
        lambda: float("nan"),
        lambda: [[1.0, 2.0], [3.0]],
        lambda: [],
        lambda: {},
        object,
        lambda: [None] * max(size, 1),
        lambda: ["x"] * max(size, 1),
        lambda: np.array([None, "x", [1]], dtype=object),
        lambda: np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        lambda: np.ma.masked_array(array, mask=True) if size and isinstance(array, np.ndarray) else None,
        lambda: np.random.default_rng,
        lambda: 10**400,
    ]
    return things[rng.integers(len(things))]()


def wrong_scalar(value: Any, rng: np.random.Generator) -> Any:
    """:return: instead of a number or a name"""
    things = [
        *(float("nan"), float("inf"), -float("inf"), -1, 0, 1, 2, 0.5, -0.5, 1.0000001, 1e300),
        *(10**400, -(10**30), 2**63, 2**31),
        *(None, "text", "", True, 1j, [], [0.5], {}, object()),
        *(np.array([0.5, 0.5]), np.array(0.5), np.float32(0.5), np.float64("nan"), np.int8(1), np.array([]), np.array("x")),
    ]
    return things[rng.integers(len(things))]
