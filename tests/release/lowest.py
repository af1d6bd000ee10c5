"""
Print the lowest versions that pyproject.toml allows, as constraints for pip.

    python -m tests.release.lowest [--torch]

Tools for contributors have the versions of constraints.txt. So has torch, unless `--torch` is given: not every package index
has the lowest torch in a build for machines without a GPU.
"""

import argparse
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]
FOR_CONTRIBUTORS = {"dev", "doc"}
"""Extras whose packages no user needs."""


def bounds(requirements: list[str]) -> dict[str, str]:
    """
    Read the lowest version of each requirement.

    :param requirements: such as ``numpy>=2.1,<3``; those of this project itself, for its extras, are passed over
    :return: versions by package, "" where a requirement has none
    """
    found = [re.match(r"([\w.-]+)(?:\[[^]]*\])?(?:>=([\w.]+))?", requirement).groups("") for requirement in requirements]
    return {name: version for name, version in found if name != PROJECT["name"]}


def by_number(version: str) -> list[int]:
    """:return: the numbers of a version, which can be compared"""
    return [int(number) for number in re.findall(r"\d+", version)]


def lowest() -> dict[str, str]:
    """
    Collect the lowest version of every package that users need.

    :return: versions by package; of a package that is required several times, the highest of its lowest versions
    """
    versions: dict[str, str] = {}
    for requirements in (PROJECT["dependencies"], *(OPTIONAL[extra] for extra in OPTIONAL.keys() - FOR_CONTRIBUTORS)):
        for name, version in bounds(requirements).items():
            versions[name] = max(versions.get(name, ""), version, key=by_number)
    return versions


def pinned() -> dict[str, str]:
    """:return: versions by package, as constraints.txt has them"""
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="store_true", help="the lowest torch, too")
    versions, tools = lowest(), bounds(OPTIONAL["dev"]).keys()
    if not parser.parse_args().torch:
        del versions["torch"]
    kept = {name: version for name, version in pinned().items() if name in {*tools, "torch"} - versions.keys()}
    for name, version in sorted({**versions, **kept}.items()):
        print(f"{name}=={version}")
