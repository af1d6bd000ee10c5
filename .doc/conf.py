"""
Sphinx builds the documentation from this file, README.md, docs/ and the docstrings: `make doc`.

Each package has a page: what its `__all__` names, each thing under its shortest public name, and then what its modules define
besides. Modules that come later are found by themselves.
"""

import importlib
import inspect
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from sphinx.application import Sphinx

import sb3_flow

project = "sb3_flow"
version = release = sb3_flow.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"sb3_flow {version}"
myst_heading_anchors = 3  # README.md links to its own headings
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # those of Gymnasium are not in Sphinx's language
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

documented: set[int] = set()  # what has its place, by identity


def described(module: ModuleType, names: list[str]) -> Iterator[str]:
    """:return: lines that document what has no place yet"""
    for name in names:
        value, full = getattr(module, name), f"{module.__name__}.{name}"
        named = callable(value) and not hasattr(value, "__origin__")  # not the alias of a type
        if name.startswith("_") or (named and id(value) in documented):
            continue
        if getattr(value, "__name__", name) == name:  # an alias is no place
            documented.add(id(value))
        if isinstance(value, (int, tuple)):  # autodoc would quote the docstring of `int`
            yield from (f".. py:data:: {full}", f"   :value: {value!r}", "")
            continue
        kind = "class" if inspect.isclass(value) else "function" if named else "data"
        # of a dictionary autodoc would show the docstring of `dict`
        yield f".. py:data:: {full}" if isinstance(value, dict) else f".. auto{kind}:: {full}"
        yield from ("   :members:", "   :show-inheritance:", "") if kind == "class" else ("",)


def heading(module: ModuleType, line: str, index: bool = True) -> list[str]:
    """:return: lines with the module's name and docstring"""
    name = module.__name__
    return ["", name, line * len(name), "", f".. automodule:: {name}", *([] if index else ["   :no-index:"]), ""]


def write_pages(app: Sphinx) -> None:
    """The front page and a page for each package, into the source folder."""
    source = Path(app.srcdir)
    packages = [sb3_flow]
    packages += [
        importlib.import_module(f"sb3_flow.{one.name}") for one in pkgutil.iter_modules(sb3_flow.__path__) if one.ispkg
    ]
    public = {one.__name__: list(described(one, list(getattr(one, "__all__", ())))) for one in packages}
    for package in packages:
        lines = [*heading(package, "="), *public[package.__name__]]
        for one in pkgutil.iter_modules(package.__path__):
            if one.ispkg or one.name.startswith("_"):
                continue
            module = importlib.import_module(f"{package.__name__}.{one.name}")
            own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
            # a module may be hidden behind a function of its name
            lines += [*heading(module, "-", getattr(package, one.name) is module), *described(module, own)]
        (source / f"{package.__name__}.rst").write_text("\n".join(lines))
    root = Path(app.confdir).parent
    pages = sorted((root / "docs").glob("*.md"))
    (source / "docs").mkdir(exist_ok=True)  # where README.md links to
    for page in pages:
        (source / "docs" / page.name).write_text(f"```{{include}} {os.path.relpath(page, source / 'docs')}\n```\n")
    readme = os.path.relpath(root / "README.md", source)
    guides = "\n".join(f"docs/{page.stem}" for page in pages)
    contents = "\n".join(package.__name__ for package in packages)
    front = f"```{{include}} {readme}\n:relative-images:\n```\n"
    front += f"\n```{{toctree}}\n:hidden:\n\n{guides}\n```\n"
    reference = f"```{{toctree}}\n:hidden:\n:caption: Reference\n\n{contents}\n```\n"
    (source / "index.md").write_text(f"{front}\n{reference}")


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", write_pages)
