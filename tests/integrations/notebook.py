"""
Run a script as the cell of a notebook, and print what a reader sees below it: lines, and widgets as text.

    python -m tests.integrations.notebook SCRIPT
"""

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
WIDGETS = "application/vnd.jupyter.widget-state+json"


def shown(outputs: list[Any], widgets: dict[str, Any]) -> str:
    """Give the text of a cell's outputs, those inside of widgets included."""
    found = ""
    for output in outputs:
        data = output.get("data", {})
        view = data.get("application/vnd.jupyter.widget-view+json")
        if view is not None:
            inside = widgets[view["model_id"]]["state"].get("outputs", [])
            found += shown(inside, widgets)
        else:
            found += output.get("text") or data.get("text/plain", "")
    return found


if __name__ == "__main__":
    cell = nbformat.v4.new_code_cell(Path(sys.argv[1]).read_text())
    notebook = nbformat.v4.new_notebook(cells=[cell])
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    print(COLOURS.sub("", shown(cell.outputs, notebook.metadata.get("widgets", {}).get(WIDGETS, {}).get("state", {}))))
