"""The installed package is the one that is imported, and it is complete. `tests.release.wheel` runs this file."""

import sys
from importlib.metadata import version
from pathlib import Path

import sb3_flow

ROOT = Path(__file__).parents[2]
PACKAGE = Path(sb3_flow.__file__).parent


def test_the_installed_package_is_imported():
    assert PACKAGE.is_relative_to(sys.prefix) and not PACKAGE.is_relative_to(ROOT)
    assert not (ROOT / "sb3_flow").exists()
    assert version("sb3-flow") == sb3_flow.__version__


def test_files_that_are_no_modules_are_installed():
    configs = [path.relative_to(ROOT / "zoo_configs") for path in (ROOT / "zoo_configs").rglob("*.*")]
    assert len(configs) > 10
    for path in configs:
        assert (PACKAGE / "zoo" / "configs" / path).read_bytes() == (ROOT / "zoo_configs" / path).read_bytes()
    assert (PACKAGE / "py.typed").is_file()
