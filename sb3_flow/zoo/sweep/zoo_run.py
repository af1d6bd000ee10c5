"""A run of a sweep: rl-zoo3's training of an algorithm on a task with a seed, and the row that its evaluations give."""

import contextlib
import importlib
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sb3_flow.version import __version__
from sb3_flow.zoo import register
from sb3_flow.zoo.bench.results import Run

LOG = "train.log"


@dataclass(frozen=True)
class ZooRun(Run):
    """
    A run of a sweep.

    :param algo: key of the zoo's algorithms
    :param flags: of ``train`` besides algorithm, task, seed, folder and hyperparameters
    :param given: hyperparameters that the command gives, by name, as Python
    :param hyperparams: all hyperparameters
    :param offline: whether there is an offline phase
    :param offline_steps: its gradient steps
    :param eval_every: calls of the evaluation's callback, one a step of all environments, between two evaluations
    """

    algo: str
    flags: tuple[str, ...]
    given: dict[str, str]
    hyperparams: dict[str, Any]
    offline: bool
    offline_steps: int
    eval_every: int

    def command(self, folder: Path) -> list[str]:
        """Give the arguments of ``train``."""
        own = ("--algo", self.algo, "--env", self.task, "--seed", str(self.seed), "-f", str(folder))
        given = [f"{name}:{value}" for name, value in self.given.items()]
        return [*own, *self.flags, *(["-params", *given] if given else [])]


def run_zoo(plan: ZooRun, folder: Path) -> dict[str, Any]:
    """
    Make a run, which begins anew if its folder has an unfinished run: the zoo's checkpoints have neither the progress of
    schedules nor the state of evaluations, so that a run that went on from a checkpoint would be another run.

    :param plan: the run
    :param folder: of the zoo's files and ``train.log``, what the zoo printed
    :return: the row, see ``sb3_flow.zoo.bench.results.COLUMNS``
    :raises RuntimeError: if the training fails
    """
    began = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    register()
    before, sys.argv = sys.argv, ["sb3_flow.zoo train", *plan.command(folder)]
    try:
        with (
            open(folder / LOG, "w", buffering=1) as log,
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
        ):
            importlib.import_module("rl_zoo3.train").train()
    except (Exception, SystemExit) as error:
        printed = (folder / LOG).read_text().strip().splitlines()
        said = printed[-1] if isinstance(error, SystemExit) and printed else f"{type(error).__name__}: {error}"
        raise RuntimeError(f"training ended with {said} (see {folder / LOG})") from error
    finally:
        sys.argv = before
    return row_of(plan, folder, (time.monotonic() - began) / 60)


def row_of(plan: ZooRun, folder: Path, minutes: float) -> dict[str, Any]:
    """
    Make the row of a finished run: as in ``bench``, the score of an evaluation is the share of episodes that succeeded, or the
    mean return where the environment does not report ``is_success``.

    :param plan: the run
    :param folder: of the zoo's files
    :param minutes: that the run took
    """
    (file,) = folder.glob("*/*/evaluations.npz")
    with np.load(file) as found:
        episodes = found["successes"] if "successes" in found else found["results"]
        steps = [int(step) for step in found["timesteps"]]
    scores = [float(np.mean(evaluation)) for evaluation in episodes]
    offline = plan.offline_steps // plan.eval_every
    return {
        "task": plan.task,
        "algorithm": plan.algorithm,
        "seed": plan.seed,
        "offline": scores[:offline][-1] if scores[:offline] else "",
        "online": scores[offline:][-1] if scores[offline:] else "",
        "steps": " ".join(str(step + (plan.offline_steps if i >= offline else 0)) for i, step in enumerate(steps)),
        "scores": " ".join(f"{score:g}" for score in scores),
        "rows": "",
        "minutes": round(minutes, 2),
        "version": __version__,
        "plan": plan.decided,
    }
