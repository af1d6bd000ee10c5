"""
Train algorithms on tasks with several seeds, and with every combination of a small grid, as `train` does: a sweep.

    python -m sb3_flow.zoo sweep --algo ppo flow_ppo --env CartPole-v1 Acrobot-v1 --seeds 5 --workers 2
    python -m sb3_flow.zoo sweep --algo flow_ppo --env CartPole-v1 --seeds 3 7 --grid gamma=0.98,0.99 n_epochs=10,20
    python -m sb3_flow.zoo sweep --algo sac --env Hopper-v5 --seeds 8 --per-device 4
    python -m sb3_flow.zoo sweep --algo sac --env Hopper-v5 --seeds 8 --ray-address auto --gpus-per-run 0.25
    python -m sb3_flow.zoo sweep --algo rql --env Pendulum-v1 --seeds 2 -n 5000 --eval-freq 1000 -- --device cpu

--seeds with one number N takes the seeds 0 to N-1, with several numbers these seeds. Flags after -- are those of `train`, for
all runs. Each run is a process or a Ray task that trains with the zoo's hyperparameters and evaluates the policy on the way;
its files are in runs/<env>/<algo>/<seed> of the folder --out. The folder also has results.csv (a row for each finished run),
table.md, curves.png and profile_online.png, as `bench` writes them. A score is the share of episodes that succeed, or the mean
return, at the last evaluation. Where returns of several tasks are put together, 0 is the worst and 1 the best run of a task.

The same command goes on with a sweep that was stopped or killed: finished runs are not made again, unfinished runs begin anew.
Nodes of a Ray cluster that do not share the folder --out send a run's files back when the run ends, but for replay buffers.
"""

import argparse
import ast
import contextlib
import difflib
import importlib
import io
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium as gym
import rl_zoo3

from sb3_flow.common.checks import check_known, check_whole
from sb3_flow.zoo.bench.runner import add_runner_flags, place_of, run_all, run_folder
from sb3_flow.zoo.bench.suites import Settings, label, variants
from sb3_flow.zoo.manager import ZOO_KEYS, ExperimentManager
from sb3_flow.zoo.sweep.zoo_run import ZooRun, run_zoo

TAKEN = ("--algo", "--env", "--seed", "-f", "--log-folder", "-n", "--n-timesteps", "--eval-freq", "--eval-episodes")
NO_TRAINING = ("-i", "--trained-agent", "-optimize", "--optimize-hyperparameters", "-uuid", "--uuid")


def sweep(arguments: Sequence[str] | None = None) -> None:
    """
    Run the command ``sweep``.

    :param arguments: used instead of ``sys.argv[1:]``
    :raises SystemExit: if runs failed
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    split = words.index("--") if "--" in words else len(words)
    given = _parser().parse_args(words[:split])
    place = place_of(given, own_processes=True)
    out = given.out.absolute()
    todo = sweep_runs(given, words[split + 1 :])
    run_all(run_zoo, todo, lambda left: [(plan, run_folder(out, plan)) for plan in left], out, place, given.only_table)


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m sb3_flow.zoo sweep", description=__doc__, formatter_class=form)
    parser.add_argument("--algo", nargs="+", required=True, help="algorithms of the zoo")
    parser.add_argument("--env", nargs="+", required=True, help="environment ids")
    parser.add_argument("--seeds", nargs="+", type=int, required=True, help="one number: how many; several: the seeds")
    parser.add_argument("--grid", nargs="+", default=[], metavar="NAME=A,B", help="hyperparameters, in every combination")
    parser.add_argument("-n", "--n-timesteps", type=int, help="environment steps (default: of the zoo's configuration)")
    parser.add_argument("--eval-freq", type=int, default=25_000, help="steps between two evaluations (default: 25000)")
    parser.add_argument("--eval-episodes", type=int, default=5, help="episodes of an evaluation (default: 5)")
    parser.add_argument("--out", type=Path, default=Path("sweep"), help="folder of results and runs (default: sweep)")
    add_runner_flags(parser)
    return parser


def sweep_runs(given: argparse.Namespace, flags: Sequence[str]) -> list[ZooRun]:
    """
    List the runs of a sweep: all tasks, algorithms and variants with the first seed, then with the next.

    :param given: the parsed command
    :param flags: of ``train``
    :raises ValueError: if something is unknown, given twice, or decided by the sweep
    :raises TypeError: if an algorithm does not have a hyperparameter
    """
    counts = {"--eval-freq": given.eval_freq, "--eval-episodes": given.eval_episodes}
    check_whole(1, **counts, **({} if given.n_timesteps is None else {"--n-timesteps": given.n_timesteps}))
    own = argparse.ArgumentParser("flags after --", add_help=False, allow_abbrev=False)
    own.add_argument("-params", "--hyperparams", nargs="+", default=[])
    own.add_argument("-conf", "--conf-file")
    own.add_argument("--gym-packages", nargs="+", default=[])
    known, rest = own.parse_known_args(list(flags))
    for flag in (word.partition("=")[0] for word in rest):
        if flag in TAKEN:
            raise ValueError(f"{flag} after --: the sweep gives it to each run; give the sweep's own arguments before --.")
        if flag in NO_TRAINING:
            raise ValueError(f"{flag} after --: a sweep trains each run from its beginning in a folder of its own.")
    for package in known.gym_packages:
        importlib.import_module(package)
    _check_once("--algo", given.algo)
    _check_once("--env", given.env)
    if unknown := [name for name in given.algo if name not in rl_zoo3.ALGOS]:
        raise ValueError(f"--algo {' '.join(unknown)}: unknown; choose from {', '.join(rl_zoo3.ALGOS)}.")
    for name in given.env:
        if name not in gym.registry:
            near = difflib.get_close_matches(name, gym.registry, n=1)
            raise ValueError(f"--env {name}: no such environment{f'; did you mean {near[0]}?' if near else '.'}")
    if known.conf_file is not None and Path(known.conf_file).exists():  # else a Python package
        known.conf_file = str(Path(known.conf_file).absolute())
    every, seeds = list(variants(given.grid)), seeds_of(given.seeds)
    return [
        _plan(given, known, rest, algo, env, seed, variant)
        for seed in seeds
        for env in given.env
        for algo in given.algo
        for variant in every
    ]


def seeds_of(numbers: Sequence[int]) -> list[int]:
    """
    List the seeds.

    :param numbers: one number for how many seeds there are from 0 on, or the seeds themselves
    """
    if len(numbers) == 1:
        if numbers[0] < 1:
            raise ValueError(f"--seeds {numbers[0]}: one number says how many seeds there are, which is 1 or more.")
        return list(range(numbers[0]))
    if min(numbers) < 0:
        raise ValueError(f"--seeds {' '.join(map(str, numbers))}: seeds are 0 or more.")
    _check_once("--seeds", numbers)
    return list(numbers)


def _check_once(argument: str, values: Sequence[Any]) -> None:
    if len(set(values)) < len(values):
        raise ValueError(f"{argument} {' '.join(map(str, values))}: one is given twice.")


def _plan(
    given: argparse.Namespace,
    known: argparse.Namespace,
    rest: Sequence[str],
    algo: str,
    env: str,
    seed: int,
    variant: Settings,
) -> ZooRun:
    own = {name: text for name, _, text in (word.partition(":") for word in known.hyperparams)}
    own.update({name: repr(value) for name, value in variant.items()})
    check_known(rl_zoo3.ALGOS[algo], own, ZOO_KEYS)
    configured = _configured(algo, env, known.conf_file)
    hyperparams = {**configured, **{name: _value(text) for name, text in own.items()}}
    flags = ["--eval-freq", str(given.eval_freq), "--eval-episodes", str(given.eval_episodes), *rest]
    flags += [] if given.n_timesteps is None else ["-n", str(given.n_timesteps)]
    flags += [] if known.conf_file is None else ["--conf-file", known.conf_file]
    flags += ["--gym-packages", *known.gym_packages] if known.gym_packages else []
    offline_steps, n_envs = int(hyperparams.get("offline_steps", 0)), int(hyperparams.get("n_envs", 1))
    online_steps = given.n_timesteps or int(hyperparams["n_timesteps"])
    eval_every = max(1, given.eval_freq // n_envs)  # the zoo's rule
    if eval_every > offline_steps + online_steps // n_envs:
        raise ValueError(
            f"--eval-freq {given.eval_freq}: {algo} on {env} ends before its first evaluation, after "
            f"{offline_steps + online_steps} steps; give a smaller number."
        )
    return ZooRun(
        task=env,
        algorithm=label(algo, variant),
        seed=seed,
        algo=algo,
        flags=tuple(flags),
        given=own,
        hyperparams=hyperparams,
        offline=offline_steps > 0,
        offline_steps=offline_steps,
        eval_every=eval_every,
    )


@cache
def _configured(algo: str, env: str, config: str | None) -> Settings:
    """Read the zoo's hyperparameters of an algorithm and a task once, and not for each run."""
    with contextlib.redirect_stdout(io.StringIO()):
        manager = ExperimentManager(None, algo, env, "", config=config)
        found: Settings = manager.read_hyperparameters()[0]
    return found


def _value(text: str) -> Any:
    """Take a value of Python that is written as such; calls stay as they were written."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
