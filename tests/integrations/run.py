"""
Run the manual's page about integrations from top to bottom, and compare what its scripts print with the page.

    python -m tests.integrations.run [--python PATH] [--only TITLE ...]

Without `--python` the command makes an environment in `.cache/integrations`, with the versions of constraints.txt and of
requirements.txt beside this file, and with imitation, whose requirements contradict ours, without its requirements.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.integrations.sections import PAGE, ROOT, sections

HERE = ROOT / ".cache" / "integrations"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
IMITATION = "imitation==1.0.1"
PRIVATE = ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR")


def variables(folder: Path) -> dict[str, str]:
    """Make the variables of the scripts: whatever they write goes into the folder."""
    given = {name: str(folder / name.lower()) for name in (*PRIVATE, "HF_HOME", "MINARI_DATASETS_PATH")}
    return {**os.environ, **given, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def environment() -> str:
    """Make or complete the environment; return its interpreter."""
    python = HERE / "bin" / "python"
    if not python.exists():
        venv.create(HERE, with_pip=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", "constraints.txt"]
    for requirements in (
        ["torch"],
        ["--editable", ".[minari,plots,zoo]", "--requirement", str(REQUIREMENTS)],
        ["--no-deps", IMITATION],
    ):
        subprocess.run([*install, *requirements], cwd=ROOT, check=True)
    return str(python)


def main() -> int:
    """Run the sections; return 1 if something is not as on the page."""
    titles = [section.title for section in sections()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="an interpreter that has the packages")
    parser.add_argument("--only", nargs="*", choices=titles, default=titles, help="sections; the first makes the others' data")
    given = parser.parse_args()
    python = os.path.abspath(given.python) if given.python else environment()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for section in sections():
            if section.title not in given.only and section.title != titles[0]:
                continue
            wrong = section.run(python, Path(folder), variables(Path(folder)))
            failed += wrong is not None
            print(f"{section.title}: {wrong or f'as in {PAGE.name}'}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
