"""Machine code on disk is that of the sources that are there, and never stands in the way of a run."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba.core.caching import CompileResultCacheImpl, _Cache
from numba.core.ccallback import CFunc
from numba.core.dispatcher import Dispatcher

import sb3_flow
from sb3_flow.compiled import unavailable
from sb3_flow.compiled.cache import SourceCache, keep_on_disk
from sb3_flow.compiled.source_stamps import SOURCES
from sb3_flow.kernels import recurrence

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="nothing is compiled")

HELPER = """
from sb3_flow.compiled import compiled, inlined
FACTOR = 2.0

@compiled()
def factor():
    return FACTOR

@inlined()
def shift():
    return FACTOR
"""
LOOP = """
import sys
import warnings
import numpy as np
warnings.simplefilter("always")
from sb3_flow.compiled import c_function, compiled
from sb3_flow.kernels.helper import factor, shift

@compiled()
def scale(x):
    for i in range(x.size):
        x[i] *= factor()

@c_function
def add(numbers):
    numbers[0] += int(shift())

if __name__ == "__main__":
    exec(sys.argv[1] if len(sys.argv) > 1 else "")
    x, numbers = np.ones(2), np.ones(1, np.int64)
    scale(x)
    add.call(numbers.ctypes.data)
    print(x[0], numbers[0], sum(scale.stats.cache_hits.values()))
"""


@pytest.fixture
def package(tmp_path):
    """A copy of the folders with compiled loops, and a loop that calls another file's."""
    source, copy = Path(sb3_flow.__file__).parent, tmp_path / "sb3_flow"
    for folder in ("compiled", "kernels"):
        shutil.copytree(source / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "__init__.py").touch()
    (copy / "kernels" / "__init__.py").write_text("")
    (copy / "kernels" / "helper.py").write_text(HELPER)
    (copy / "kernels" / "loop.py").write_text(LOOP)
    return copy


def start(package, code="", **environment):
    home = {"XDG_CACHE_HOME": str(package.parent / "home"), "NUMBA_CACHE_DIR": ""}
    # Python's own cache compares seconds, in which these files change twice
    variables = {**os.environ, **home, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.Popen(
        [sys.executable, "-m", "sb3_flow.kernels.loop", code],
        cwd=package.parent,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.split(), err


def run(package, code="", **environment):
    return finish(start(package, code, **environment))[0]


def folders(package):
    return list((package / "compiled" / "__pycache__").glob("numba-*/*"))


def test_a_change_in_another_file_is_noticed(package):
    assert run(package) == ["2.0", "3", "0"]
    assert run(package) == ["2.0", "3", "1"]  # from the cache
    (first,) = folders(package)
    helper = package / "kernels" / "helper.py"
    helper.write_text(HELPER.replace("2.0", "5.0"))
    others = first.parent.with_name("numba-of-another-machine") / "digest"
    others.mkdir(parents=True)
    assert run(package) == ["5.0", "6", "0"]
    # old code of this environment is gone, that of others is not
    assert others in folders(package) and first not in folders(package) and len(folders(package)) == 2
    helper.write_text(HELPER)
    assert run(package) == ["2.0", "3", "0"]


def test_a_change_after_the_import_is_not_kept(package):
    change = "from pathlib import Path; import sb3_flow.kernels.helper as h; f = Path(h.__file__); "
    assert run(package, change + "f.write_text(f.read_text().replace('2.0', '5.0'))")[:2] == ["2.0", "3"]
    assert run(package) == ["5.0", "6", "0"]


def test_a_change_before_the_first_loop_is_not_kept(package):
    """Constants are imported with the package, loops when they are first used."""
    (package / "kernels" / "constants.py").write_text("FACTOR = 2.0")
    helper = package / "kernels" / "helper.py"
    helper.write_text(HELPER.replace("FACTOR = 2.0", "from sb3_flow.kernels.constants import FACTOR"))
    later = "import sb3_flow.compiled, sb3_flow.kernels.constants as c; open(c.__file__, 'w').write('FACTOR = 5.0'); "
    command = [sys.executable, "-c", later + "import runpy; runpy.run_module('sb3_flow.kernels.loop', run_name='__main__')"]
    home = {"XDG_CACHE_HOME": str(package.parent / "home"), "NUMBA_CACHE_DIR": "", "PYTHONPATH": str(package.parent)}
    environment = {**os.environ, **home, "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(command, cwd=package.parent, env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.split()[:2] == ["2.0", "3"]
    assert run(package) == ["5.0", "6", "0"]


def test_processes_that_compile_at_once(package):
    processes = [start(package) for _ in range(3)]
    assert all(finish(process)[0][:2] == ["2.0", "3"] for process in processes)
    assert run(package) == ["2.0", "3", "1"]
    names = sorted(file.name.split("-")[0] for file in folders(package)[0].iterdir())
    assert names == ["_doubled", "add", "factor", "scale"]


def test_broken_entries_are_compiled_again(package):
    run(package)
    for entry in folders(package)[0].iterdir():
        entry.write_bytes(entry.read_bytes()[:-100])
    assert run(package) == ["2.0", "3", "0"]
    assert run(package) == ["2.0", "3", "1"]


def test_an_installation_that_cannot_be_written(package):
    (package / "compiled" / "__pycache__").write_text("a file, in which nothing can be put")
    assert run(package) == ["2.0", "3", "0"]
    assert run(package) == ["2.0", "3", "1"]  # in the user's folder
    nowhere = {"XDG_CACHE_HOME": str(package / "compiled" / "__pycache__")}
    out, err = finish(start(package, **nowhere))
    assert out == ["2.0", "3", "0"]
    assert err.count("cannot be kept on disk") == 1 and "NUMBA_CACHE_DIR" in err
    assert run(package, NUMBA_CACHE_DIR=str(package.parent / "given")) == ["2.0", "3", "0"]
    assert run(package, NUMBA_CACHE_DIR=str(package.parent / "given"), **nowhere) == ["2.0", "3", "1"]


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        ("sys.modules['numba'] = None", "import of numba halted"),
        ("sys.modules['llvmlite'] = None", "import of llvmlite halted"),
        ("import llvmlite.binding as b; b.parse_assembly = None", "NoneType"),
    ],
)
def test_without_numba_loops_run_in_python(package, block, reason):
    code = f"""
import sys
{block}
from sb3_flow.compiled import unavailable
import sb3_flow.kernels.advantages as a
import numpy as np
print(unavailable())
ones = np.ones((3, 2), np.float32)
print(a.compute_gae(ones, ones, last_values=ones[0], terminated=ones == 0)[0].tolist())
"""
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "XDG_CACHE_HOME": str(package.parent / "home")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=package.parent, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    why, numbers = done.stdout.splitlines()
    assert reason in why
    ones = np.ones((3, 2), np.float32)
    from sb3_flow.kernels import compute_gae

    expected = compute_gae(ones, ones, last_values=ones[0], terminated=ones == 0)[0]
    np.testing.assert_allclose(np.array(eval(numbers)), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("size", "lag"), [(1, 1), (7, 1), (64, 2), (30, 3), (64, 8), (40, 20), (0, 4), (2, 4)])
def test_the_recurrence_without_numba(dtype, size, lag):
    rng = np.random.default_rng(size)
    d, c = rng.standard_normal((2, size)).astype(dtype)
    c[max(size - lag, 0) :] = 0
    ours, theirs = d.copy(), d.copy()
    recurrence.solve_stepwise(ours, c, lag)
    if size >= lag:
        recurrence.solve(theirs, c, lag)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5 if dtype == np.float32 else 1e-13, atol=1e-6)


def test_all_that_is_compiled_stands_in_the_folders_that_are_digested():
    root = Path(sb3_flow.__file__).parent
    for file in root.rglob("*.py"):
        inside = file.relative_to(root).parts[0] in SOURCES
        nodes = list(ast.walk(ast.parse(file.read_text())))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
        for name in names:
            top, *rest = name.split(".")
            assert top not in ("numba", "llvmlite") or inside, f"{file} imports {name}"
            assert top != "sb3_flow" or not inside or rest[0] in SOURCES, f"{file} imports {name}"


def test_numbas_private_names():
    """Those that ``compiled/cache.py`` uses."""
    assert {"load_overload", "save_overload", "cache_path", "enable", "disable", "flush"} <= set(_Cache.__abstractmethods__)
    assert {"reduce", "rebuild"} <= set(vars(CompileResultCacheImpl))
    for owner in (Dispatcher, CFunc):
        assert "_cache" in owner.__init__.__code__.co_names
    import numba

    assert isinstance(keep_on_disk(numba.njit(lambda x: x))._cache, SourceCache)
