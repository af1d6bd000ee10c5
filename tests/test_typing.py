"""A type checker accepts code as users write it, and finds their mistakes."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from sb3_flow.version import numbers

HERE = Path(__file__).resolve().parent
FILES = ("accepted.py", "rejected.py")
# Large packages that this package's signatures hardly name are left out: mypy takes a minute for torch alone
SETTINGS = """
[mypy]
strict = true
ignore_missing_imports = true
[mypy-torch.*,numba.*,llvmlite.*,tensorboard.*,pandas.*,scipy.*]
follow_imports = skip
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """Messages of mypy by file and line."""
    pytest.importorskip("mypy")
    settings = tmp_path_factory.mktemp("mypy") / "mypy.ini"
    settings.write_text(SETTINGS)
    cache = Path(tempfile.gettempdir()) / "sb3_flow_mypy_cache"
    options = ["--follow-imports", "silent", "--config-file", str(settings), "--cache-dir", str(cache)]
    command = [sys.executable, "-m", "mypy", *options, *(str(HERE / "typing" / file) for file in FILES)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent)
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    found = {file: {} for file in FILES}
    for path, line, message in re.findall(r"^(.*?):(\d+): error: (.*)$", ended.stdout, re.MULTILINE):
        found[Path(path).name].setdefault(int(line), message)
    return found


@pytest.mark.skipif(numbers(np.__version__) < (2, 3), reason="NumPy's type ndarray has default arguments since NumPy 2.3")
def test_users_code_is_accepted(errors):
    assert errors["accepted.py"] == {}


def test_mistakes_are_found(errors):
    lines = (HERE / "typing" / "rejected.py").read_text().splitlines()
    marked = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert len(marked) > 20 and set(errors["rejected.py"]) == marked
