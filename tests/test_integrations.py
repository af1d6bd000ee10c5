"""The sections of the page about integrations that need no further package; ``tests.integrations.run`` runs all of them."""

import sys

import pytest

from tests.integrations.run import variables
from tests.integrations.sections import matches, sections

FIRST, *OTHERS = sections()
HERE = [section for section in OTHERS if section.needs is None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("integrations")
    assert FIRST.run(sys.executable, folder, variables(folder)) is None  # makes the data of the others
    return folder


@pytest.mark.parametrize("section", HERE, ids=lambda section: section.title)
def test_section(section, folder):
    assert section.run(sys.executable, folder, variables(folder)) is None


def test_sections_that_need_more_are_known():
    assert FIRST.title == "Minari" and len(HERE) == 3
    further = {"imitation", "ipywidgets", "mlflow", "optuna-dashboard", "wandb"}
    assert {section.needs for section in OTHERS} == {None, *further}


def test_dots_stand_for_anything():
    assert matches("a ... c\n", "a b\nb c") and not matches("a ... c", "a c d") and not matches("a.c", "abc")
