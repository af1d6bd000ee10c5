"""
The map of the package, read from its imports: ``python -m tests.import_map`` prints the rooms (folders), the highest floor
first, and ``python -m tests.import_map --files`` every file with the first line of its docstring.

A room may import from lower floors only. Imports inside functions and for type checkers count like any others.
"""

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "sb3_flow"
FLOORS = (
    ("zoo",),
    ("grpo",),
    ("ppo", "rql", "fmq", "fql", "rlpd", "dsrl", "qam"),
    ("collect", "deployment", "hub"),
    ("offline_to_online", "on_policy", "plotting", "envs"),
    ("data", "execution"),
    ("common", "flow", "losses"),
    ("native", "fused"),
    ("kernels",),
    ("compiled",),
)
"""Rooms, the highest floor first."""
FLOOR = {room: len(FLOORS) - i for i, floor in enumerate(FLOORS) for room in floor}
FOUNDATION = ("", "version")
"""The package itself, which every import of a part runs first, hands on public names alone; any file may read the version."""


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """:return: the file of each module, by its name below the package"""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, files: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """
    Read what a file imports from this package.

    :param name: of the module
    :param files: by module
    :return: line numbers, and names of modules
    """
    for node in ast.walk(ast.parse(files[name].read_text())):
        if isinstance(node, ast.Import):
            named = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"{files[name]}, line {node.lineno}: a relative import")
            named = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, attribute in named:
            if module.split(".")[0] != PACKAGE.name:
                continue
            inner = module[len(PACKAGE.name) + 1 :]
            below = f"{inner}.{attribute}".lstrip(".")
            target = below if attribute and below in files else inner
            yield node.lineno, target
            room = target.split(".")[0]
            if room not in (target, name.split(".")[0]):
                yield node.lineno, room  # a room's __init__ runs before what is in it


def room_of(module: str) -> str:
    """:return: the folder that a module is in"""
    return module.split(".")[0]


def climbs(files: dict[str, Path]) -> list[str]:
    """:return: every import that does not lead downwards, as a sentence"""
    found = []
    for name in files:
        room = room_of(name)
        for line, target in imports(name, files):
            to = room_of(target)
            if room in FOUNDATION or to == "version" or to == room:
                continue
            if to == "" and FLOOR[room] < len(FLOORS):
                found.append(f"{name}, line {line}: imports the whole package")
            elif to != "" and FLOOR[to] >= FLOOR[room]:
                found.append(f"{name}, line {line}: `{room}` must not import `{to}` ({target})")
    return found


def circles(files: dict[str, Path]) -> list[list[str]]:
    """:return: modules that import each other in a circle"""
    graph = {name: {target for _, target in imports(name, files) if target in files} - {name, ""} for name in files if name}
    found, done = [], set()

    def walk(name: str, path: list[str]) -> None:
        if name in path:
            found.append([*path[path.index(name) :], name])
        elif name not in done:
            for target in sorted(graph[name]):
                walk(target, [*path, name])
            done.add(name)

    for name in graph:
        walk(name, [])
    return found


def first_line(path: Path) -> str:
    """:return: the first sentence of a file's docstring"""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def shorten(text: str, width: int) -> list[str]:
    """:return: lines of at most so many characters"""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


def describe(files: dict[str, Path], with_files: bool = False) -> str:
    """:return: the map as text"""
    lines = [f"{PACKAGE.name}/"]
    used = defaultdict(set)
    for name in files:
        used[room_of(name)] |= {room_of(target) for _, target in imports(name, files)} - {room_of(name), *FOUNDATION}
    for floor in FLOORS:
        for room in floor:
            texts = shorten(first_line(files[room]), 96)
            lines.append(f"  {room + '/':<19}{texts[0]}")
            lines += [f"{'':<21}{text}" for text in texts[1:]]
            below = sorted(used[room], key=lambda other: (-FLOOR[other], other))
            lines += [f"{'':<21}{text}" for text in shorten(f"imports {', '.join(below)}" if below else "imports nothing", 96)]
            if with_files:
                inside = [name for name in files if room_of(name) == room and name != room]
                lines += [f"    {name.split('.', 1)[1] + '.py':<27}{first_line(files[name])}" for name in inside]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true")
    print(describe(modules(), parser.parse_args().files))
