"""The front page, the page for contributors and the pages of the manual, and their fenced blocks."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FRONT = ("README.md", "CONTRIBUTING.md")
PATHS = (*(ROOT / page for page in FRONT), *sorted((ROOT / "docs").rglob("*.md")))
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in PATHS}
BLOCKS = [
    (page, kind, text)
    for page, content in PAGES.items()
    for kind, text in re.findall(r"^```([^\n]*)\n(.*?)^```$", content, re.S | re.M)
]


def shortened(text: str) -> str:
    """Make training short: numbers with a thousands separator are amounts of training."""
    return re.sub(r"\b\d{1,3}(_\d{3})+\b", "4", text)
