"""
Sphinx builds the manual from this folder, README.md and the docstrings. `make doc` runs Sphinx, and a documentation host runs
Sphinx by .readthedocs.yaml.

Sphinx writes the reference into docs/reference/, which is not in the repository: a page for each package with the names in its
`__all__`, each under its shortest public name, and then the names that its modules define besides. New modules need no entry.
A class that a page of the manual documents (`autoclass`) has its place there, and the reference links to that place.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import ModuleType

from sphinx.application import Sphinx
from stable_baselines3.common.base_class import BaseAlgorithm

import sb3_flow

project = "sb3_flow"
version = release = sb3_flow.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.viewcode"]
html_theme = "furo"
html_show_copyright = False
html_title = f"sb3_flow {version}"
html_static_path = ["_static"]
html_css_files = ["wide_tables.css"]
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3  # pages link to headings of other pages
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # Gymnasium's docstrings are not in Sphinx's language
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

documented: dict[int, str] = {}
"""The name under which an object has its place, by the object's identity."""
in_manual: set[str] = set()
"""The names of the objects whose place is a page of the manual."""


def find_manual(source: Path) -> None:
    """
    Note the classes that pages of the manual document.

    :param source: the folder of the pages
    """
    for page in source.rglob("*.md"):
        for name in re.findall(r"^\.\. autoclass:: ([\w.]+)$", page.read_text(), re.M):
            module, _, attribute = name.rpartition(".")
            in_manual.add(name)
            documented[id(getattr(importlib.import_module(module), attribute))] = name


def algorithms_first(module: ModuleType, names: list[str]) -> list[str]:
    """:return: the names in the given order, but algorithms before everything else"""
    values = {name: getattr(module, name) for name in names}
    return sorted(names, key=lambda name: not (inspect.isclass(values[name]) and issubclass(values[name], BaseAlgorithm)))


def described(module: ModuleType, names: list[str]) -> Iterator[str]:
    """:return: lines that document the objects without a place yet"""
    for name in names:
        value, full = getattr(module, name), f"{module.__name__}.{name}"
        named = callable(value) and not hasattr(value, "__origin__")  # not the alias of a type
        if name.startswith("_") or (named and id(value) in documented):
            continue
        if getattr(value, "__name__", name) == name:  # an alias is no place
            documented[id(value)] = full
        if isinstance(value, (int, tuple)):  # autodoc would quote the docstring of `int`
            yield from (f".. py:data:: {full}", f"   :value: {value!r}", "")
            continue
        kind = "class" if inspect.isclass(value) else "function" if named else "data"
        # autodoc would show the docstring of `dict` for a dictionary
        yield f".. py:data:: {full}" if isinstance(value, dict) else f".. auto{kind}:: {full}"
        yield from ("   :members:", "   :show-inheritance:", "") if kind == "class" else ("",)


def links(module: ModuleType, names: list[str]) -> Iterator[str]:
    """:return: lines that link to the objects that have their places on other pages"""
    for name in names:
        value = getattr(module, name)
        place = documented.get(id(value)) if inspect.isclass(value) or inspect.isfunction(value) else None
        elsewhere = place in in_manual or place != f"{module.__name__}.{name}"
        if place and elsewhere and getattr(value, "__name__", name) == name:
            yield f"- :py:{'class' if inspect.isclass(value) else 'func'}:`{place}`"
    yield ""


def heading(module: ModuleType, line: str, index: bool = True) -> list[str]:
    """:return: lines with the module's name and docstring"""
    name = module.__name__
    return ["", name, line * len(name), "", f".. automodule:: {name}", *([] if index else ["   :no-index:"]), ""]


def write_reference(app: Sphinx) -> None:
    """Write a page for each package into docs/reference/."""
    source = Path(app.srcdir)
    reference = source / "reference"
    reference.mkdir(exist_ok=True)
    find_manual(source)
    found = sorted(pkgutil.iter_modules(sb3_flow.__path__), key=attrgetter("name"))
    packages = [sb3_flow, *(importlib.import_module(f"sb3_flow.{found.name}") for found in found if found.ispkg)]
    listed = {package: algorithms_first(package, list(getattr(package, "__all__", ()))) for package in packages}
    public = {package: list(described(package, names)) for package, names in listed.items()}
    for package in packages:
        lines = [*heading(package, "="), *links(package, listed[package]), *public[package]]
        for found in pkgutil.iter_modules(package.__path__):
            if found.ispkg or found.name.startswith("_"):
                continue
            module = importlib.import_module(f"{package.__name__}.{found.name}")
            own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
            lines_of_module = list(described(module, algorithms_first(module, own)))
            # a function of the same name may hide a module
            lines += [*heading(module, "-", getattr(package, found.name) is module), *lines_of_module]
        (reference / f"{package.__name__}.rst").write_text("\n".join(lines))
    contents = "\n".join(f"   {package.__name__}" for package in packages)
    (reference / "index.rst").write_text(f"Reference\n=========\n\n.. toctree::\n   :maxdepth: 1\n\n{contents}\n")


def setup(app: Sphinx) -> None:
    """Let Sphinx write the reference before the pages are read."""
    app.connect("builder-inited", write_reference)
