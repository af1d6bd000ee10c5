"""The sections of the manual's page about integrations: scripts, and what they print."""

import json
import re
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "integrations.md"
PACKAGES = re.compile(r"^(?:import|from) (wandb|mlflow|datasets|imitation)\b", re.M)
SECONDS = 300

# of the commands on the page: what makes them small
SMALLER = {"--n-trials 20": "--n-trials 3 -n 600 --n-startup-trials 1 --n-evaluations 1 --no-optim-plots"}


@dataclass(frozen=True)
class Section:
    """
    A section of the page.

    :param title: its heading
    :param blocks: kind (``python``, ``sh`` or ``text``) and text of each block
    """

    title: str
    blocks: list[tuple[str, str]]

    @property
    def needs(self) -> str | None:
        """Name something that is needed beside the package and its extras; None if nothing is."""
        found = PACKAGES.search("\n".join(text for _, text in self.blocks))
        others = {"Notebooks": "ipywidgets", "Optuna's dashboard": "optuna-dashboard"}
        return found[1] if found else others.get(self.title)

    def run(self, python: str, folder: Path, environment: dict[str, str]) -> str | None:
        """
        Run the section's scripts and commands, each as a program of its own.

        :param python: the interpreter
        :param folder: where they run
        :param environment: its variables
        :return: what is wrong, None if all ran and printed what the page says
        """
        printed = ""
        for number, (kind, text) in enumerate(self.blocks):
            if kind == "text":
                if not matches(text, printed):
                    return f"the page says\n{text}but this was printed:\n{printed}"
                continue
            if kind == "sh":
                printed = _run_commands(text, python, folder, environment)
                continue
            script = folder / f"{re.sub(r'[^a-z]', '_', self.title.lower())}_{number}.py"
            script.write_text(text)
            module = ["-m", "tests.integrations.notebook"] if self.title == "Notebooks" else []
            done = _run([python, *module, str(script)], folder, environment)
            if done.returncode:
                return f"{script.name} failed:\n{done.stdout}{done.stderr}"
            printed = done.stdout
        return None


def matches(expected: str, printed: str) -> bool:
    """Compare what was printed with a text in which ``...`` stands for anything."""
    pattern = re.escape(expected.strip()).replace(re.escape("..."), ".*")
    return re.fullmatch(pattern, printed.strip(), re.S) is not None


def sections() -> list[Section]:
    """Read the sections of the page that have a script or a command."""
    found = []
    for part in PAGE.read_text().split("\n## ")[1:]:
        blocks = re.findall(r"^```(\w+)\n(.*?)^```$", part, re.S | re.M)
        if blocks:
            found.append(Section(part.partition("\n")[0], blocks))
    return found


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)


def _run_commands(text: str, python: str, folder: Path, environment: dict[str, str]) -> str:
    """Run commands, and look at the studies that a dashboard shows; return what the last command printed."""
    printed = ""
    for command in text.strip().splitlines():
        for words, small in SMALLER.items():
            command = command.replace(words, small)
        program, *arguments = command.split()
        if program == "python":
            done = _run([python, *arguments], folder, environment)
            assert done.returncode == 0, done.stdout + done.stderr
            printed = done.stdout
        else:
            printed = _open_dashboard([str(Path(python).parent / program), *arguments], folder, environment)
    return printed


def _open_dashboard(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shown = command[command.index("--port") + 1]
    log = folder / "dashboard.txt"
    with log.open("w") as target:
        server = subprocess.Popen(
            [port if word == shown else word for word in command], cwd=folder, env=environment, stdout=target, stderr=target
        )
    try:
        studies = _asked(f"http://127.0.0.1:{port}/api/studies", server)["study_summaries"]
        assert [study["study_name"] for study in studies] == ["cartpole"], studies
        trials = _asked(f"http://127.0.0.1:{port}/api/studies/{studies[0]['study_id']}", server)["trials"]
        names = {parameter["name"] for trial in trials for parameter in trial["params"]}
        assert len(trials) == 3 and {"learning_rate", "advantage"} <= names, (len(trials), names)
    finally:
        server.terminate()
        server.wait()
    return "\n".join(log.read_text().replace(port, shown).splitlines()[:2])


def _asked(url: str, server: "subprocess.Popen[bytes]") -> dict:
    """Ask the dashboard, which may still be starting."""
    for _ in range(120):
        assert server.poll() is None, "the dashboard ended"
        try:
            with urlopen(url, timeout=30) as answer:
                return json.load(answer)
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(url)
