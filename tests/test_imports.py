"""Imports lead downwards, close no circle, and cost little; files have names of their own."""

import ast
import shutil
import subprocess
import sys
from collections import Counter

import pytest
from import_map import FLOOR, PACKAGE, circles, climbs, modules, room_of

OF_EACH_ALGORITHM = ("policies",)
"""Names that several folders share because their files are the same thing of another algorithm."""
KNOWN = {
    "compiled": {"numpy", "numba", "llvmlite"},
    "kernels": {"numpy", "numba", "llvmlite"},
    "native": {"numpy", "numba", "llvmlite"},
    "fused": {"numpy", "numba", "llvmlite", "torch"},
    "losses": {"torch"},
    "flow": {"torch", "numpy"},
}


def test_every_folder_has_a_floor():
    assert {room_of(name) for name in modules()} - {"", "version"} == set(FLOOR)


def test_no_import_climbs():
    assert climbs(modules()) == []


def test_no_circle():
    assert circles(modules()) == []


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("kernels/ratios.py", "from sb3_flow.common.checks import check_choice", "must not import `common`"),
        ("data/columns.py", "def later():\n    from sb3_flow.rql import RQL", "must not import `rql`"),
        ("losses/kl.py", "from sb3_flow.flow import jump", "must not import `flow`"),
        ("common/checks.py", "import sb3_flow", "imports the whole package"),
    ],
)
def test_a_climb_is_found(tmp_path, file, line, found):
    planted = tmp_path / "sb3_flow"
    shutil.copytree(PACKAGE, planted, ignore=shutil.ignore_patterns("__pycache__"))
    path = planted / file
    path.write_text(f"{path.read_text()}\n{line}\n")
    sentences = climbs(modules(planted))
    assert sentences and all(found in sentence for sentence in sentences)


def test_a_circle_is_found(tmp_path):
    planted = tmp_path / "sb3_flow"
    shutil.copytree(PACKAGE, planted, ignore=shutil.ignore_patterns("__pycache__"))
    path = planted / "data" / "columns.py"
    path.write_text(f"{path.read_text()}\nif TYPE_CHECKING:\n    from sb3_flow.data.files import pick\n")
    assert any({"data.columns", "data.files"} <= set(circle) for circle in circles(modules(planted)))


def test_ground_floors_know_few_packages():
    for name, path in modules().items():
        known = KNOWN.get(room_of(name))
        if known is None:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            outside = {one.split(".")[0] for one in names} - sys.stdlib_module_names - {"sb3_flow"}
            assert outside <= known, name


def test_no_two_files_of_the_same_name():
    names = Counter(path.stem for path in modules().values() if path.stem not in ("__init__", "__main__", *OF_EACH_ALGORITHM))
    assert [name for name, count in names.items() if count > 1] == []


def test_importing_the_package_brings_no_extras_and_registers_nothing():
    code = """
import sys, gymnasium
before = set(gymnasium.registry)
import sb3_flow
extras = {"matplotlib", "ogbench", "minari", "h5py", "envpool", "rl_zoo3", "optuna", "sb3_flow.envs", "sb3_flow.plotting"}
extras |= {"numba", "llvmlite", "scipy", "pandas", "ray"}
print(sorted(extras & set(sys.modules)), sorted(set(gymnasium.registry) - before))
gymnasium.make("sb3_flow.envs:CartPole-v1")  # the prefix imports the module
print(len(set(gymnasium.registry) - before), "ogbench" in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = ended.stdout.splitlines()
    assert first == "[] []"
    assert int(second.split()[0]) > 100 and second.endswith("False")


def test_the_zoo_registers_the_environments():
    code = "import gymnasium, sb3_flow.zoo; print('pointmaze-medium-navigate-singletask-v0' in gymnasium.registry)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True\n"
