"""The pages in docs/: they are linked, their scripts run, and they name what they are about."""

import re

import pytest
from stable_baselines3 import SAC
from stable_baselines3.sac.policies import SACPolicy
from test_readme import README, ROOT, shortened

from sb3_flow import FMQ, RQL
from sb3_flow.common.checks import arguments_of
from sb3_flow.fmq import MlpPolicy as FMQPolicy
from sb3_flow.rql import MlpPolicy as RQLPolicy

PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_linked_and_its_scripts_run(page, tmp_path, monkeypatch):
    assert f"(docs/{page})" in README
    monkeypatch.chdir(tmp_path)
    for script in re.findall(r"^```python\n(.*?)^```$", PAGES[page], re.S | re.M):
        exec(compile(shortened(script), page, "exec"), {})


@pytest.mark.parametrize(("theirs", "ours"), [(SAC, RQL), (SAC, FMQ), (SACPolicy, RQLPolicy), (SACPolicy, FMQPolicy)])
def test_what_sac_has_and_we_have_not_is_on_its_page(theirs, ours):
    first_column = "".join(re.findall(r"^\|([^|]*)\|", PAGES["coming_from_sac.md"], re.M))
    gone = set(arguments_of(theirs)) - set(arguments_of(ours))
    assert {"ent_coef"} & gone or {"log_std_init"} & gone
    for name in gone:
        assert f"`{name}`" in first_column
