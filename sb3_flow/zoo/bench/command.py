"""
Train algorithms on the tasks of a suite, with the same data, networks and number of updates for all, and compare them.

    python -m sb3_flow.zoo bench --suite cpu --seeds 0 1 --workers 2
    python -m sb3_flow.zoo bench --suite cpu --algos rql --grid alpha=1,3,10 --tasks cube-single-play-singletask-task1-v0
    python -m sb3_flow.zoo bench --suite cpu --dataset minari:D4RL/door/human-v2 --env gymnasium_robotics:AdroitHandDoor-v1
    python -m sb3_flow.zoo bench --suite cpu --only-table
    python -m sb3_flow.zoo bench --suite paper --per-device 4
    python -m sb3_flow.zoo bench --suite paper --ray-address auto --gpus-per-run 0.25

Results are in the folder --out: results.csv (a row for each finished run), table.md, curves.png, profile_offline.png and
profile_online.png. A bench that was stopped or killed goes on when the same command is given again: finished runs are not
made again, and others go on from their last evaluation. Datasets of OGBench that can be made here are made on demand: they
are the published data statistically, not bitwise.

With --ray-address runs are Ray tasks on a machine or a cluster, several on a GPU if need be. Nodes that do not share the
folder --out send a run's files back when the run ends; the data must be where --data says on every node.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from sb3_flow.data.generate import generate
from sb3_flow.data.ogbench import single_task
from sb3_flow.zoo.bench.runner import Job, add_runner_flags, place_of, run_all, run_folder
from sb3_flow.zoo.bench.suites import Plan, Task, load_suite, plans, variants
from sb3_flow.zoo.bench.training import run


def bench(arguments: Sequence[str] | None = None) -> None:
    """
    Run the command ``bench``.

    :param arguments: used instead of ``sys.argv[1:]``
    :raises SystemExit: if runs failed
    """
    given = _parser().parse_args(arguments)
    place = place_of(given)
    suite = load_suite(given.suite)
    if (given.dataset is None) != (given.env is None):
        raise ValueError("--dataset and --env belong together: give both, or none of them.")
    if given.env is not None:
        suite = dataclasses.replace(suite, tasks={given.env: Task(dataset=given.dataset)})
    own = "" if given.env is None else "-" + given.env.replace("/", "_").replace(":", "_")
    out: Path = (given.out or Path("bench") / f"{Path(given.suite).stem}{own}").absolute()
    todo = plans(suite, given.tasks, given.algos, given.seeds, list(variants(given.grid)))
    data = (given.data or Path("bench") / "data").absolute()

    def jobs(left: list[Plan]) -> list[Job]:
        locations = {plan.task: locate_data(plan, data, place.workers) for plan in left}
        return [(plan, run_folder(out, plan), locations[plan.task]) for plan in left]

    run_all(run, todo, jobs, out, place, given.only_table)


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m sb3_flow.zoo bench", description=__doc__, formatter_class=form)
    parser.add_argument("--suite", default="cpu", help="cpu, paper, or a YAML file (default: cpu)")
    parser.add_argument("--tasks", nargs="+", help="tasks of the suite (default: all)")
    parser.add_argument("--algos", nargs="+", help="algorithms of the suite (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="(default: 0 1)")
    parser.add_argument("--grid", nargs="+", default=[], metavar="NAME=A,B", help="arguments to vary, in every combination")
    parser.add_argument("--dataset", help="instead of the suite's tasks: location of a dataset (OfflineDataset.load)")
    parser.add_argument("--env", help="the environment of --dataset")
    parser.add_argument("--out", type=Path, help="folder of results and checkpoints (default: bench/<suite>[-<env>])")
    parser.add_argument("--data", type=Path, help="folder of generated datasets (default: bench/data)")
    add_runner_flags(parser)
    return parser


def locate_data(plan: Plan, data: Path, workers: int = 1) -> str:
    """
    Find the dataset of a run. If the suite says how many episodes to make, make the dataset if it is not there.

    :param plan: the run
    :param data: folder of datasets that are made here, with a folder for each number of episodes
    :param workers: processes that make it
    :return: location, see ``OfflineDataset.load``
    :raises ValueError: if the dataset cannot be made here
    """
    prefix, _, name = plan.dataset.partition(":")
    if prefix != "ogbench" or "@" in name or plan.episodes is None:
        return plan.dataset
    dataset, folder = single_task(name).dataset, data / f"{plan.episodes}_episodes"
    file = folder / f"{dataset}.npz"
    if not file.exists():
        generate(dataset, plan.episodes, workers=workers, val_episodes=1, out=folder)
    return f"{plan.dataset}@{file}"
