"""
Pytest plugin: the test suite of SB3 or of sb3-contrib with one of our classes in the seat of one of theirs.

Loaded with ``-p`` before collection, it replaces e.g. ``stable_baselines3.SAC`` so that every test that is written for SAC
runs on our class, with the test files unedited. Tests listed in ``waivers.txt`` are expected to fail: each with its
reason, and a waived test that passes is a failure, so that the list cannot outlive its reasons.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from seats import SEATS
from stable_baselines3.common.base_class import BaseAlgorithm

import sb3_flow

WAIVERS = Path(__file__).with_name("waivers.txt")


def read_waivers(algorithm: str) -> dict[str, str]:
    """:return: test id -> reason, of one algorithm's section"""
    waivers, section = {}, ""
    for line in WAIVERS.read_text().splitlines():
        line = line.strip()
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
        elif line and not line.startswith("#") and section == algorithm:
            test, reason = line.split(" -- ", maxsplit=1)
            waivers[test.strip()] = reason.strip()
    assert len(waivers) <= 12, "at most 12 waivers"
    return waivers


ALGORITHM = os.environ.get("SB3_FLOW_SEAT", "RQL")
PACKAGE, SEAT, _, DEFAULTS, _, _, BESIDE = SEATS[ALGORITHM]
THEIRS = getattr(importlib.import_module(PACKAGE), SEAT)
OURS = getattr(sb3_flow, SEATS[ALGORITHM].ours)
# What the suites call an algorithm where they use a string
NAMES = {name.lower() for name, value in vars(sys.modules[PACKAGE]).items() if inspect.isclass(value)}


def _init(self: BaseAlgorithm, *args: Any, **kwargs: Any) -> None:
    given = inspect.signature(OURS).bind_partial(*args, **kwargs).arguments  # by position too
    policy_kwargs = given.get("policy_kwargs") or {}
    defaults = {name: value for name, value in DEFAULTS.items() if name not in {**given, **policy_kwargs}}
    if "policy_kwargs" in DEFAULTS:
        kwargs = {**kwargs, "policy_kwargs": {**DEFAULTS["policy_kwargs"], **policy_kwargs}}
    OURS.__init__(self, *args, **{**defaults, **kwargs})


# Named like the class whose seat it takes: some tests look for log folders with that name
REPLACEMENT = type(SEAT, (OURS,), {"__module__": __name__, "__doc__": OURS.__doc__, "__init__": _init})
REPLACEMENTS = [(THEIRS, REPLACEMENT)]
REPLACEMENTS += [(getattr(sys.modules[PACKAGE], name), getattr(sb3_flow, name)) for name in BESIDE]
for _module in [module for name, module in sys.modules.items() if name.split(".")[0] == PACKAGE]:
    for _theirs, _ours in REPLACEMENTS:
        for _name in [name for name, value in vars(_module).items() if value is _theirs]:
            setattr(_module, _name, _ours)


def holds_seat(value: Any) -> bool:
    """Whether a parameter or a constant of a test file is the class in the seat, its name, or a collection with it."""
    if isinstance(value, dict):
        return any(map(holds_seat, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(holds_seat, value))
    return value is REPLACEMENT or (isinstance(value, str) and value == SEAT.lower())


def names_algorithm(value: Any) -> bool:
    """Whether a parameter chooses the algorithm of a test."""
    return (isinstance(value, type) and issubclass(value, BaseAlgorithm)) or (isinstance(value, str) and value in NAMES)


def names_in(code: CodeType) -> Iterator[str]:
    """Global and attribute names in a function's code, also of the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def uses_seat(function: Callable, seen: set[Any]) -> bool:
    """Whether a function of a test file uses the class in the seat, itself or through functions and lists of its file."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or function in seen:
        return False
    seen.add(function)
    for name in names_in(function.__code__):
        value = function.__globals__.get(name)
        is_helper = isinstance(value, FunctionType) and value.__module__ == function.__module__
        if name in (SEAT, *BESIDE) or holds_seat(value) or (is_helper and uses_seat(value, seen)):
            return True
    return False


def fixtures_of(item: pytest.Function) -> list[Callable]:
    """:return: the functions of the fixtures that a test file defines itself"""
    definitions = [definition for group in item._fixtureinfo.name2fixturedefs.values() for definition in group]
    return [definition.func for definition in definitions if definition.func.__module__ == item.module.__name__]


def select(items: list[pytest.Function]) -> list[pytest.Function]:
    """
    A test that is parametrised over algorithms mentions several in its body, and runs the one that it is given. Any other
    test runs those that its body, its helpers and its fixtures mention.

    :param items: tests of the suite
    :return: those that run the class in the seat
    """
    parameters = {item: list(item.callspec.params.values()) if hasattr(item, "callspec") else [] for item in items}
    by_parameter = {item.function for item, values in parameters.items() if any(map(names_algorithm, values))}

    def is_seated(item: pytest.Function) -> bool:
        if item.function in by_parameter:
            return any(map(holds_seat, parameters[item]))
        return any(uses_seat(function, set()) for function in (item.function, *fixtures_of(item)))

    return [item for item in items if is_seated(item)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    waivers = read_waivers(ALGORITHM)
    seated = select(items)
    unused = dict(waivers)
    for item in seated:
        name = item.nodeid.split("/")[-1]
        for pattern, reason in waivers.items():
            # a trailing * or no brackets at all: every parametrisation that begins like this
            if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])) or name.split("[")[0] == pattern:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=not reason.startswith("by chance:")))
                unused.pop(pattern, None)
    if unused and not config.option.keyword and all(Path(argument).is_dir() for argument in config.args):
        raise pytest.UsageError(f"waivers.txt names tests that do not exist: {sorted(unused)}")
    config.hook.pytest_deselected(items=[item for item in items if item not in seated])
    items[:] = seated
