"""Files around the package agree with each other: versions, workflows, changelog, citation."""

import re
from importlib.metadata import version

import pytest
import yaml
from manual import ROOT

import sb3_flow
from sb3_flow.version import MINIMUM
from tests.release.lowest import PROJECT, bounds, by_number

WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
SECTIONS = ["Breaking Changes", "New Features", "Bug Fixes", "Deprecations", "Others", "Documentation"]


def test_the_version_stands_in_one_place():
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    written = [path for path in ROOT.glob("*.*") if path.is_file() and f'"{sb3_flow.__version__}"' in path.read_text()]
    assert written == []


def test_the_lowest_stable_baselines3_is_that_of_the_check():
    lowest = bounds(PROJECT["dependencies"])
    assert lowest["stable-baselines3"] == lowest["sb3-contrib"] == MINIMUM


def test_installed_versions_are_not_below_the_lowest():
    for package, lowest in bounds(PROJECT["dependencies"]).items():
        assert by_number(version(package)) >= by_number(lowest), package


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflows_call_targets_of_the_makefile(name):
    jobs = WORKFLOWS[name]["jobs"].values()
    matrices = [job.get("strategy", {}).get("matrix", {}) for job in jobs]
    given = [target for matrix in matrices for target in matrix.get("target", [])]
    given += [row["target"] for matrix in matrices for row in matrix.get("include", [])]
    commands = [step["run"] for job in jobs for step in job["steps"] if step.get("run", "").startswith("make ")]
    called = [command.split()[1] for command in commands if "${{" not in command] + [target.split()[0] for target in given]
    assert called and set(called) <= set(TARGETS)


def test_the_workflow_tests_every_python_of_the_package():
    pythons = [line.split(" :: ")[-1] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", line)]
    assert WORKFLOWS["ci.yml"]["jobs"]["test"]["strategy"]["matrix"]["python"] == pythons
    assert PROJECT["requires-python"] == f">={pythons[0]}"


def test_the_changelog_has_the_sections_of_sb3():
    for release in (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]:
        assert re.findall(r"^### (.*)$", release, re.M) == SECTIONS, release.splitlines()[0]


def test_the_citation_names_license_and_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["license"] == PROJECT["license"] and citation["title"].startswith("sb3_flow")
