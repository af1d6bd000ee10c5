"""The front page and the manual: links lead somewhere, named functions and commands exist, and SAC's page is complete."""

import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from fnmatch import fnmatch

import pytest
from manual import BLOCKS, PAGES, ROOT
from stable_baselines3 import SAC
from stable_baselines3.sac.policies import SACPolicy

from sb3_flow import DSRL, FMQ, FQL, QAM, RLPD, RQL
from sb3_flow.common.checks import arguments_of
from sb3_flow.dsrl import MlpPolicy as DSRLPolicy
from sb3_flow.fmq import MlpPolicy as FMQPolicy
from sb3_flow.fql import MlpPolicy as FQLPolicy
from sb3_flow.qam import MlpPolicy as QAMPolicy
from sb3_flow.rlpd import MlpPolicy as RLPDPolicy
from sb3_flow.rql import MlpPolicy as RQLPolicy


def without_blocks(page):
    return re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.S | re.M)


def anchors(path):
    """:return: the anchors of a page's headings, as GitHub and MyST make them"""
    headings = re.findall(r"^#+ (.*)$", without_blocks(path), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page)):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(str(path.resolve().relative_to(ROOT))), target


def test_every_page_is_in_the_table_of_contents():
    lines = [line for page, kind, text in BLOCKS if kind == "{toctree}" for line in text.splitlines()]
    listed = [line for line in lines if line and not line.startswith(":")]
    front = {"README", "CONTRIBUTING", "index"}
    pages = {page.removeprefix("docs/").removesuffix(".md") for page in PAGES} - front | {"reference/index"}
    assert all(any(fnmatch(page, entry) for entry in listed) for page in pages)
    assert all(any(fnmatch(page, entry) for page in pages) for entry in listed)


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_text_exist(page):
    for command in re.findall(r"`([^`\n]*python (?:-m tests\.|tests/)[^`]*)`", without_blocks(page)):
        words = shlex.split(command.partition("python ")[2])
        path = ROOT / (words[0] if words[0] != "-m" else words[1].replace(".", "/"))
        if path.is_dir():
            sources = "".join(file.read_text() for file in path.glob("*.py"))
        else:
            sources = path.with_suffix(".py").read_text()
        for option in (word for word in words if word.startswith("--")):
            assert f'"{option}"' in sources, command


@pytest.mark.parametrize("page", PAGES)
def test_imports_in_the_text_exist(page):
    for name in re.findall(r"`(sb3_flow(?:\.\w+)+)`", without_blocks(page)):
        module, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), attribute), name


@pytest.mark.parametrize(
    ("module", "page", "mark"),
    [("tests.import_map", "how_it_is_built", "sb3_flow/"), ("tests.release.lowest", "releases", "numpy==")],
)
def test_what_a_command_prints_is_on_its_page(module, page, mark):
    printed = subprocess.run([sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True, check=True)
    (shown,) = [text for where, kind, text in BLOCKS if kind == "text" and mark in text and page in where]
    assert shown == printed.stdout, f"paste the output of `python -m {module}` into {page}.md"


def test_names_for_users_of_other_packages_exist():
    rlx, other = PAGES["docs/guide/porting.md"].split("## rlox")
    for package, name in re.findall(r"`(data|flow|losses)\.(\w+)", rlx):
        assert hasattr(importlib.import_module(f"sb3_flow.{package}"), name), name
    homes = [importlib.import_module(f"sb3_flow.{package}") for package in ("kernels", "losses")]
    for row in re.findall(r"^\|[^|]*\|(.*)\|$", other, re.M)[1:]:
        for name in set(re.findall(r"`(\w+)`", row)) - {"episode_starts"}:
            assert any(hasattr(home, name) for home in homes), name


def test_the_host_builds_the_manual_with_extras_that_exist():
    settings = (ROOT / ".readthedocs.yaml").read_text()
    extras = re.findall(r"^        - (\w+)$", settings, re.M)
    assert extras and set(extras) <= set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    )
    (configuration,) = re.findall(r"configuration: (\S+)", settings)
    assert (ROOT / configuration).is_file()


PAIRS = [(SAC, ours) for ours in (RQL, FMQ, FQL, DSRL, QAM, RLPD)]
PAIRS += [(SACPolicy, ours) for ours in (RQLPolicy, FMQPolicy, FQLPolicy, DSRLPolicy, QAMPolicy, RLPDPolicy)]


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_what_sac_has_and_we_have_not_is_on_its_page(theirs, ours):
    first_column = "".join(re.findall(r"^\|([^|]*)\|", PAGES["docs/guide/coming_from_sac.md"], re.M))
    gone = set(arguments_of(theirs)) - set(arguments_of(ours))
    assert {"use_sde", "log_std_init"} & gone
    for name in gone:
        assert f"`{name}`" in first_column
