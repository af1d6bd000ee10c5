"""One case: an entry's arguments, disguised or wrong; what the entry made of them; and whether that is right."""

import inspect
import re
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.attack import disguise
from tests.attack.memory import guarded_allocations

EQUAL, REFUSED = "equal", "refused"


class Failure(AssertionError):
    """What an entry did was wrong."""


@dataclass
class Entry:
    """
    A compiled entry and how it is attacked.

    :param name: of the entry
    :param function: takes arguments by name
    :param make: of a generator, arguments that are right
    :param reference: takes the arguments as plain arrays (float64, int64, bool) and returns what the function must
    :param finite: whether the function promises that its results are finite
    :param in_place: arguments that the function writes into, and may therefore refuse in another guise
    :param constants: arguments that are left alone
    :param ignored: of the arguments, names of those that the function does not look at
    :param errors: exceptions besides ValueError and TypeError, for numbers that are wrong
    """

    name: str
    function: Callable[..., Any]
    make: Callable[[np.random.Generator], dict[str, Any]]
    reference: Callable[..., Any]
    finite: bool = True
    in_place: Sequence[str] = ()
    constants: Sequence[str] = ()
    ignored: Callable[[dict[str, Any]], Sequence[str]] = lambda arguments: ()
    errors: tuple[type[Exception], ...] = ()
    parameters: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = frozenset(inspect.signature(self.function).parameters)

    def attack(self, seed: int, case: int) -> str:
        """:return: of one case, see :func:`attack`"""
        return attack(self, seed, case)


@dataclass
class Given:
    """Arguments, and what was done to them."""

    arguments: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    wrong: bool = False
    """Whether the arguments may be refused."""
    rough: bool = False
    """Whether numbers are so large or small that only finiteness is compared."""
    no_array: bool = False
    """Whether something is no array or no number, which may be a TypeError."""


def seed_of(entry: str, seed: int, case: int) -> np.random.Generator:
    """:return: the generator of one case, the same wherever it runs"""
    return np.random.default_rng([zlib.crc32(entry.encode()), seed, case])


def prepare(entry: Entry, rng: np.random.Generator) -> Given:
    """:return: arguments of one case"""
    given = Given(entry.make(rng))
    names = [name for name in given.arguments if name not in entry.constants]
    kind = rng.random()
    if kind < 0.6:
        for _ in range(1 if kind < 0.45 else 2):
            spoil(entry, given, names[rng.integers(len(names))], rng)
    for name in names:
        often = 0.04 if name in entry.in_place else min(0.4, 3 / len(names))
        if type(given.arguments[name]) is np.ndarray and rng.random() < often:
            _put_on(entry, given, name, rng)
    given.arguments = {name: disguise.guard(value, rng) for name, value in given.arguments.items()}
    return given


def spoil(entry: Entry, given: Given, name: str, rng: np.random.Generator) -> None:
    """Makes one argument wrong, or at least unusual."""
    value, given.wrong = given.arguments[name], True
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        way = disguise.wrong_object if isinstance(value, (list, tuple)) else disguise.wrong_scalar
        given.no_array = given.rough = True
    else:
        ways = (disguise.wrong_shape, disguise.wrong_numbers, disguise.wrong_dtype, disguise.wrong_object)
        way = ways[rng.choice(4, p=(0.3, 0.4, 0.15, 0.15))]
        given.no_array |= way is disguise.wrong_object or way is disguise.wrong_dtype
        given.rough |= way is disguise.wrong_numbers or way is disguise.wrong_dtype
    given.arguments[name] = way(value, rng)
    given.notes.append(f"{name}: {way.__name__}")


def _put_on(entry: Entry, given: Given, name: str, rng: np.random.Generator) -> None:
    value = given.arguments[name]
    if value.size > 2**20 or value.dtype.kind not in "fiub" or value.dtype.itemsize > 8:
        return
    chosen = rng.random()
    if chosen < 0.1:
        given.arguments[name], guise = disguise.broadcast(value, rng), "broadcast"
        # other numbers than before, which may be wrong where they are indices or flags
        given.wrong |= value.dtype.kind != "f" or name in entry.in_place or name == "actions"
    else:
        guises = disguise.GUISES if chosen < 0.7 else disguise.RARE_GUISES
        guise = list(guises)[rng.integers(len(guises))]
        given.arguments[name] = guises[guise](value)
        given.wrong |= guises is disguise.RARE_GUISES or name in entry.in_place
        given.no_array |= guises is disguise.RARE_GUISES
    given.notes.append(f"{name}: {guise}")


def attack(entry: Entry, seed: int, case: int) -> str:
    """
    Run one case, twice if the arguments are taken: the second time what Python allocates lies between forbidden pages, too.

    :return: ``EQUAL`` or ``REFUSED``
    :raises Failure: if the entry did anything else
    """
    rng = seed_of(entry.name, seed, case)
    given = prepare(entry, rng)
    results = []
    for at_end in (None, bool(rng.integers(2))):
        arguments = {name: _copy(entry, name, value) for name, value in given.arguments.items()}
        with warnings.catch_warnings(), nullcontext() if at_end is None else guarded_allocations(at_end):
            warnings.simplefilter("ignore")
            try:
                results.append(_arrays(entry.function(**arguments)))
            except Exception as error:
                if results:
                    raise Failure(f"taken once and refused then: {describe(given, error)}") from error
                _judge_refusal(entry, given, error)
                return REFUSED
        _unchanged(entry, given, arguments)
    for once, again in zip(*results, strict=True):
        if not np.array_equal(once, again, equal_nan=True):
            raise Failure(f"another result at the second call: {describe(given)}")
    _judge_result(entry, given, results[0])
    return EQUAL


def _copy(entry: Entry, name: str, value: Any) -> Any:
    """What is written into is given anew, with the same strides and beside a page again."""
    if name not in entry.in_place or type(value) is not np.ndarray or value.dtype.hasobject or value.size > 2**20:
        return value
    return disguise.guard(value, np.random.default_rng(value.size)) if value.flags.aligned else value.copy()


def _unchanged(entry: Entry, given: Given, arguments: dict[str, Any]) -> None:
    for name, value in arguments.items():
        original = given.arguments[name]
        if value is not original and name not in entry.in_place:
            raise Failure(f"`{name}` is another object")


def _arrays(result: Any) -> list[np.ndarray]:
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, (tuple, list)):
        return [array for part in result for array in _arrays(part)]
    return [np.array(result)]


def _judge_refusal(entry: Entry, given: Given, error: Exception) -> None:
    if not given.wrong:
        raise Failure(f"refused what is right: {describe(given, error)}") from error
    if isinstance(error, entry.errors):
        return
    if type(error) not in (ValueError, TypeError):
        raise Failure(f"{type(error).__name__} instead of ValueError: {describe(given, error)}") from error
    if type(error) is TypeError and not given.no_array:
        raise Failure(f"TypeError for an array: {describe(given, error)}") from error
    named = {re.split(r"[\[.]", name)[0] for name in re.findall(r"`([^`]+)`", str(error))}
    if not named & entry.parameters:
        raise Failure(f"the error names no argument: {describe(given, error)}") from error
    if len(str(error)) > 2000:
        raise Failure(f"the error is {len(str(error))} characters long: {describe(given)}") from error


def plain(value: Any) -> Any:
    """:return: what an argument means: float64, int64 or bool; lists of arrays remain lists"""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise ValueError("masked")
    if hasattr(value, "numpy"):
        value = value.numpy()
    if type(value) is list and value and isinstance(value[0], np.ndarray):
        return [plain(part) for part in value]
    if isinstance(value, int) and abs(value) > 2**1000:
        return value
    if isinstance(value, (bool, int, float, np.generic)) or (isinstance(value, np.ndarray) and not value.ndim):
        return float(value)
    if not isinstance(value, np.ndarray) and type(value) not in (list, tuple):
        return value
    array = np.asarray(value)
    if array.dtype.kind == "O":
        array = np.array(array.tolist()).reshape(array.shape)
    if array.dtype.kind not in "fiub":
        raise ValueError("no numbers")
    if array.dtype.kind == "b":
        return array
    if array.dtype.kind in "iu":
        return array.astype(np.float64 if array.dtype.kind == "u" and (array >= 2**63).any() else np.int64)
    return array.astype(np.float64)


def _judge_result(entry: Entry, given: Given, results: list[np.ndarray]) -> None:
    for result in results:
        if entry.finite and not np.isfinite(result).all():
            raise Failure(f"the result is not finite: {describe(given)}")
    if given.rough and entry.finite:
        floats = [np.asarray(value).dtype for value in given.arguments.values() if isinstance(value, np.ndarray)]
        extreme = any(dtype.kind not in "fbiuO" for dtype in floats)
        if extreme:
            raise Failure(f"taken, but expected to be refused: {describe(given)}")
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            ignored = entry.ignored(given.arguments)
            meant = {name: plain(value) for name, value in given.arguments.items() if name not in ignored}
            expected = _arrays(entry.reference(**meant))
        except Exception as error:
            raise Failure(f"taken, but senseless ({type(error).__name__}: {error}): {describe(given)}") from error
    if len(expected) != len(results):
        raise Failure(f"{len(results)} results instead of {len(expected)}: {describe(given)}")
    sizes = [1.0, *(_largest(value) for value in meant.values())]
    for i, (got, want) in enumerate(zip(results, expected, strict=True)):
        if got.shape != want.shape:
            raise Failure(f"result {i} has shape {got.shape} instead of {want.shape}: {describe(given)}")
        if given.rough and (max(sizes) > 1e6 or not np.isfinite(want).all()):
            continue
        dtypes = [
            str(getattr(value, "dtype", "")) for value in given.arguments.values()
        ]  # also tensors' and byte-swapped ones
        single = got.dtype == np.float32 or any(name.endswith(("float32", "float16", "f4", "f2")) for name in dtypes)
        scale = max(sizes) * max(1.0, _largest(want))
        tolerance = (3e-4 if single else 1e-8) * scale
        if not np.allclose(got.astype(np.float64), want.astype(np.float64), rtol=0, atol=tolerance, equal_nan=True):
            worst = np.abs(got.astype(np.float64) - want).max()
            raise Failure(f"result {i} differs by {worst:g}: {describe(given)}")


def _largest(value: Any) -> float:
    if isinstance(value, list):
        return max((_largest(part) for part in value), default=0.0)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu" or not value.size:
        return 0.0
    finite = np.abs(value[np.isfinite(value)].astype(np.float64))
    return float(finite.max()) if finite.size else 0.0


def describe(given: Given, error: Exception | None = None) -> str:
    """:return: what was given and what came of it, on one line"""
    arguments = {name: _short(value) for name, value in given.arguments.items()}
    text = f"{'; '.join(given.notes) or 'nothing done'} | {arguments}"
    return text if error is None else f"{text} | {type(error).__name__}: {str(error)[:300]}"


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{type(value).__name__}({value.dtype}, {value.shape}, strides {value.strides})"
    return repr(value)[:60]
