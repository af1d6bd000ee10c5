"""
Pytest plugin: SB3's own test suite with one of our classes in the seat of one of theirs.

Loaded with ``-p`` before collection, it replaces ``stable_baselines3.SAC`` so that every test of SB3 that is written
for SAC runs on our class, with its test files unedited. Tests listed in ``waivers.txt`` are expected to fail: each with
its reason, and a waived test that passes is a failure, so that the list cannot outlive its reasons.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import stable_baselines3
from stable_baselines3.common.base_class import BaseAlgorithm

import sb3_flow

SEATS = {"RQL": ("SAC", sb3_flow.RQL), "FMQ": ("SAC", sb3_flow.FMQ)}
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


# Settings that change the time of a test and nothing that it looks at
QUICKER = {"FMQ": {"n_candidates": 8}}

ALGORITHM = os.environ.get("SB3_FLOW_SEAT", "RQL")
SEAT, OURS = SEATS[ALGORITHM]


def _init(self: BaseAlgorithm, *args: Any, **kwargs: Any) -> None:
    OURS.__init__(self, *args, **{**QUICKER.get(ALGORITHM, {}), **kwargs})


# Named like the class whose seat it takes: some tests look for log folders with that name
REPLACEMENT = type(SEAT, (OURS,), {"__module__": __name__, "__doc__": OURS.__doc__, "__init__": _init})
setattr(stable_baselines3, SEAT, REPLACEMENT)


def is_seated(item: pytest.Function) -> bool:
    """Whether a test runs the class in the seat: as a parameter, by a parameter's name, or in its body."""
    parameters = list(item.callspec.params.values()) if hasattr(item, "callspec") else []
    classes = [p for p in parameters if isinstance(p, type) and issubclass(p, BaseAlgorithm)]
    if classes:
        return REPLACEMENT in classes
    named = [p for p in parameters if isinstance(p, str) and p in ("sac", "td3", "ppo", "a2c", "dqn", "ddpg")]
    if named:
        return SEAT.lower() in named
    return SEAT in item.function.__code__.co_names


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    waivers = read_waivers(ALGORITHM)
    seated = [item for item in items if is_seated(item)]
    unused = dict(waivers)
    for item in seated:
        name = item.nodeid.split("/")[-1]
        for pattern, reason in waivers.items():
            # a trailing * or no brackets at all: every parametrisation that begins like this
            if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])) or name.split("[")[0] == pattern:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
                unused.pop(pattern, None)
    if unused and not config.option.keyword and all(Path(argument).is_dir() for argument in config.args):
        raise pytest.UsageError(f"waivers.txt names tests that do not exist: {sorted(unused)}")
    config.hook.pytest_deselected(items=[item for item in items if item not in seated])
    items[:] = seated
