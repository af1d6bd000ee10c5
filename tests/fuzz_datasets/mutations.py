"""What is done to an array of any kind of file: other guises of the same numbers, and what is wrong."""

from typing import Any

import numpy as np

from tests.fuzz_datasets.files import Field, File, pick

GUISES = ("float64", "float16", "big endian", "other order", "column", "whole")
MISTAKES = (
    "left out",
    "renamed",
    "one row less",
    "one row more",
    "a single row",
    "no row",
    "another dimension",
    "no values",
    "one value",
    "a number",
    "text",
    "complex",
    "dates",
    "records",
    "nan",
    "infinite",
    "too large",
    "out of bounds",
    "rounded out of bounds",
    "no member",
    "not 0 or 1",
)


def disguise(file: File, name: str, of: Field, rng: np.random.Generator) -> None:
    """The same numbers as another type or in another layout, where the kind of file allows for it."""
    array, guise = file.arrays[name], pick(rng, GUISES)
    if of.stored and guise != "other order":
        return
    if guise == "other order":
        array = np.asfortranarray(array)
    elif guise == "column":
        if not of.column or array.ndim != 1:
            return
        array = array[:, None]
    elif guise == "big endian":
        array = array.astype(array.dtype.newbyteorder(">"))
    elif guise == "whole":
        if of.role not in ("flags", "rewards") and not (of.role == "actions" and of.whole):
            return
        array = (array if of.role == "flags" else np.round(array)).astype(
            pick(rng, (np.int8, np.int64, np.uint8)[: 2 + (of.role == "flags")])
        )
    elif array.dtype.kind == "f" or of.role == "flags":
        array = array.astype(guise)
    else:
        return
    file.arrays[name] = array
    file.notes.append(f"{name} as {guise}")


def spoil(file: File, name: str, of: Field, rng: np.random.Generator) -> bool | None:
    """:return: whether the file is right then; None if the mistake does not apply"""
    array, mistake = file.arrays[name], pick(rng, MISTAKES)
    changed, right = _mistaken(array, mistake, of, rng)
    if changed is None and mistake not in ("left out", "renamed"):
        return None
    if mistake == "renamed":
        file.arrays[f"{name}s"] = array
    file.arrays[name] = changed
    file.notes.append(f"{name}: {mistake}")
    return right


def _mistaken(array: np.ndarray, mistake: str, of: Field, rng: np.random.Generator) -> tuple[Any, bool]:
    """The array with a mistake, None if it does not apply, and whether it is right."""
    n, numbers = len(array), array.astype(np.float64)
    if mistake in ("left out", "renamed"):
        return None, of.optional
    if mistake == "one row less":
        return (array[:-1], False) if n > 1 and not of.alone else (None, False)
    if mistake == "one row more":
        return (np.concatenate([array, array[:1]]), False) if not of.alone else (None, False)
    if mistake == "a single row":
        return (array[:1], False) if n > 1 and not of.alone else (None, False)
    if mistake == "no row":
        return array[:0], False
    if mistake == "another dimension":
        if array.ndim == 1 and of.column:
            return array[:, None, None], False
        return array[..., None], not of.fixed
    if mistake in ("no values", "one value"):
        if array.ndim < 2 or array.shape[-1] < 2:
            return None, False
        return (array[..., :0], False) if mistake == "no values" else (array[..., :1], not of.fixed)
    if mistake == "a number":
        return np.array(numbers.reshape(-1)[0]), False
    if mistake == "text":
        return array.astype("U5"), False
    if mistake == "complex":
        return array.astype(np.complex64), False
    if mistake == "dates":
        return np.zeros(array.shape, "S8"), False
    if mistake == "records":
        return np.zeros(array.shape, [("a", "f4"), ("b", "i4")]), False
    return _with_value(numbers, mistake, of, rng)


def _with_value(numbers: np.ndarray, mistake: str, of: Field, rng: np.random.Generator) -> tuple[Any, bool]:
    """The array with one other value."""
    value: float | None = None
    right = False
    if mistake == "nan":
        value = np.nan
    elif mistake == "infinite":
        value = pick(rng, (np.inf, -np.inf))
    elif mistake == "too large" and of.role in ("observations", "actions", "rewards"):
        value = pick(rng, (1e300, -1e39))
    elif mistake == "out of bounds" and of.role == "actions":
        value = pick(rng, (50.0, -2.02, 3.0))
    elif mistake == "rounded out of bounds" and of.role == "actions":
        value, right = pick(rng, (1.00005, -1.00005)), of.tolerant
    elif mistake == "no member" and of.members is not None:
        value = pick(rng, (of.members, -1.0, 0.5, 1e9))
    elif mistake == "not 0 or 1" and of.role == "flags":
        value = pick(rng, (2.0, -1.0, 0.5, 255.0))
    if value is None:
        return None, False
    if of.stored:  # the type of the file is kept where it is prescribed
        if of.role == "flags":
            return None, False
        with np.errstate(over="ignore"):
            numbers = numbers.astype(np.float32)
            numbers[(of.row, *(int(rng.integers(size)) for size in numbers.shape[1:]))] = np.float32(value)
        return numbers, right
    numbers[(of.row, *(int(rng.integers(size)) for size in numbers.shape[1:]))] = value
    return numbers, right
