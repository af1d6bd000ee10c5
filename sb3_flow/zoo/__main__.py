"""
rl-zoo3's commands with our algorithms (rql, fmq, fql, rlpd, dsrl, qam, flow_ppo, recurrent_ppo, maskable_ppo,
maskable_recurrent_ppo, grpo, gspo, async_ppo) beside its own.

    python -m sb3_flow.zoo train --algo rql --env pointmaze-medium-navigate-singletask-v0 --seed 1
    python -m sb3_flow.zoo enjoy --algo rql --env pointmaze-medium-navigate-singletask-v0 -f logs
    python -m sb3_flow.zoo record_video --algo flow_ppo --env CartPole-v1 -f logs
    python -m sb3_flow.zoo optimize --algo flow_ppo --env CartPole-v1 --n-trials 50     (train -optimize)
    python -m sb3_flow.zoo plot -a flow_ppo -e CartPole-v1 -f logs                      (the zoo's plot_train)
    python -m sb3_flow.zoo push_to_hub --algo flow_ppo --env CartPole-v1 -f logs -orga <you>
    python -m sb3_flow.zoo load_from_hub --algo flow_ppo --env CartPole-v1 -f logs -orga <whom>
    python -m sb3_flow.zoo bench --suite cpu --seeds 0 1 --workers 2                    (a table of our algorithms)
    python -m sb3_flow.zoo sweep --algo ppo flow_ppo --env CartPole-v1 --seeds 5        (train, for every seed and setting)

    torchrun --nproc-per-node=2 -m sb3_flow.zoo train --algo flow_ppo --env ...         (or rql etc., offline, on several GPUs)

Also plot_train, all_plots and plot_from_file. All flags are the zoo's: `python -m sb3_flow.zoo train --help`. `record_video`
takes `--gym-packages`, too. `bench` and `sweep` are ours: `python -m sb3_flow.zoo sweep --help`.
"""

import argparse
import importlib
import runpy
import sys
from types import ModuleType
from typing import Any

import gymnasium as gym

from sb3_flow.zoo import ALGORITHMS, register
from sb3_flow.zoo.torchrun import as_rank

# Errors that a mistake in a command or configuration raises, here, in SB3 and in the zoo
MISTAKES = (AssertionError, ImportError, OSError, TypeError, ValueError, gym.error.Error)


def train() -> None:
    """Run rl-zoo3's ``train``."""
    importlib.import_module("rl_zoo3.train").train()


def optimize() -> None:
    """Run rl-zoo3's ``train -optimize``."""
    sys.argv.append("-optimize")
    train()


def enjoy() -> None:
    """Run rl-zoo3's ``enjoy``."""
    from sb3_flow.zoo.hub_commands import download_from_hub
    from sb3_flow.zoo.viewing import for_viewing, latest_with_model, refuse_missing_model

    sys.argv += latest_with_model(sys.argv[1:])
    module: Any = importlib.import_module("rl_zoo3.enjoy")
    module.download_from_hub = lambda algo, **kwargs: (refuse_missing_model if algo in ALGORITHMS else download_from_hub)(
        algo=algo, **kwargs
    )
    with for_viewing():
        module.enjoy()


def record_video() -> None:
    """Run rl-zoo3's ``record_video``, a script without a function."""
    from sb3_flow.zoo.viewing import for_viewing, latest_with_model

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--gym-packages", nargs="+", default=[])
    given, rest = parser.parse_known_args(sys.argv[1:])
    for package in given.gym_packages:  # as `train` and `enjoy` do, so that the packages register environments
        importlib.import_module(package)
    sys.argv[1:] = [*rest, *latest_with_model(rest)]
    with for_viewing():
        runpy.run_module("rl_zoo3.record_video", run_name="__main__", alter_sys=True)


def _plots() -> ModuleType:
    try:
        importlib.import_module("rliable.library")
    except Exception:
        # The zoo does without rliable if it is missing, but not if its import fails (rliable 1.2's arch 7 fails with pandas 3)
        sys.modules["rliable"] = None  # type: ignore[assignment]
    return importlib.import_module("rl_zoo3.plots")


def plot_train() -> None:
    """Run rl-zoo3's ``plot_train``. Where no window can be opened, the picture goes into a file named after its contents."""
    from matplotlib import pyplot as plt

    parser = argparse.ArgumentParser(add_help=False)
    for flags, options in ((("-a", "--algo"), {}), (("-e", "--env"), {"nargs": "+"}), (("-y", "--y-axis"), {})):
        parser.add_argument(*flags, **options)  # type: ignore[arg-type]
    given, _ = parser.parse_known_args(sys.argv[1:])
    _plots().plot_train()
    if plt.get_backend().lower() == "agg":
        parts = ("plot_train", given.algo, *given.env, given.y_axis or "reward")
        picture = f"{'_'.join(parts).replace('/', '-')[:200]}.png"
        plt.savefig(picture)
        print(f"No window can be opened here: saved as {picture}")


def all_plots() -> None:
    """Run rl-zoo3's ``all_plots``."""
    _plots().all_plots()


def plot_from_file() -> None:
    """Run rl-zoo3's ``plot_from_file``."""
    _plots().plot_from_file()


def push_to_hub() -> None:
    """Push a trained run to the Hugging Face Hub, as rl-zoo3's ``push_to_hub`` does."""
    importlib.import_module("sb3_flow.zoo.hub_commands").push_to_hub()


def load_from_hub() -> None:
    """Download a run from the Hugging Face Hub, as rl-zoo3's ``load_from_hub`` does."""
    importlib.import_module("sb3_flow.zoo.hub_commands").load_from_hub()


def bench() -> None:
    """Run our bench."""
    importlib.import_module("sb3_flow.zoo.bench.command").bench()


def sweep() -> None:
    """Run our sweep."""
    importlib.import_module("sb3_flow.zoo.sweep.sweep_command").sweep()


_ZOO = (train, enjoy, record_video, optimize, plot_train, all_plots, plot_from_file, push_to_hub, load_from_hub)
COMMANDS = {run.__name__: run for run in (*_ZOO, bench, sweep)}
COMMANDS["plot"] = plot_train


def main() -> None:
    """
    Run the command that ``sys.argv`` names.

    :raises SystemExit: with a sentence about a mistake in command or configuration. Errors of training keep their traceback
    """
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help"):
        print((__doc__ or "").strip())
        return
    if command not in COMMANDS:
        sys.exit(f"error: there is no command {command!r}; choose from {', '.join(COMMANDS)}")
    sys.argv = [f"sb3_flow.zoo {command}", *sys.argv[2:]]
    try:
        register()
        importlib.import_module("sb3_flow.zoo.manager").ExperimentManager.training = False
        with as_rank(command):
            COMMANDS[command]()
    except MISTAKES as error:
        manager = sys.modules.get("sb3_flow.zoo.manager")
        if manager is not None and manager.ExperimentManager.training:
            raise
        unexplained = isinstance(error, ImportError) and "pip install" not in str(error) and error.name not in sys.argv
        hint = ": pip install 'sb3-flow[zoo]'" if unexplained else ""
        sys.exit(f"error: {error}{hint}")


if __name__ == "__main__":
    main()
