"""What the bench runs: the tasks, algorithms, budgets and settings of a suite, which is a YAML file."""

import dataclasses
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from sb3_flow.common.checks import check_whole
from sb3_flow.offline_to_online import OfflineToOnlineAlgorithm
from sb3_flow.zoo.bench.results import Run
from sb3_flow.zoo.registry import ALGORITHMS, CONFIGS, config_file

Settings = dict[str, Any]

SUITES = CONFIGS / "bench"
SHARED = ("offline_steps", "online_steps", "eval_freq", "n_eval_episodes", "n_final_episodes", "normalize")
"""What a plan takes over from its suite."""
NOT_SETTINGS = ("n_timesteps", "policy", "offline_dataset", "offline_steps", "normalize", "monitor_kwargs")
"""What a configuration of the zoo says besides arguments of the algorithm; the suite decides it for all algorithms."""


@dataclass(frozen=True)
class Task:
    """
    A task of a suite.

    :param dataset: location, see ``OfflineDataset.load``; by default OGBench's dataset of the task
    :param episodes: made on this machine of the task's dataset, if it is not there; None for as many as were published
    :param settings: arguments of all algorithms on this task
    """

    dataset: str | None = None
    episodes: int | None = None
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """
    A row of the table.

    :param algo: key of the zoo's algorithms
    :param offline: whether the algorithm trains on the data before the online phase
    :param zoo_settings: start from the zoo's configuration of algorithm and task
    :param settings: its arguments
    :param tasks: its arguments on single tasks
    """

    algo: str
    offline: bool = True
    zoo_settings: bool = False
    settings: Settings = field(default_factory=dict)
    tasks: dict[str, Settings] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """
    Tasks, algorithms, and the budget that all of them share.

    :param tasks: by environment id
    :param algorithms: by name in the table
    :param offline_steps: gradient steps on the data
    :param online_steps: environment steps afterwards
    :param eval_freq: steps of either phase between two evaluations
    :param n_eval_episodes: episodes of an evaluation
    :param n_final_episodes: episodes of the evaluation at the end of a phase, which the table shows
    :param normalize: whether observations are normalised with the statistics of the data
    :param settings: arguments of all algorithms
    """

    tasks: dict[str, Task]
    algorithms: dict[str, Entry]
    offline_steps: int
    online_steps: int
    eval_freq: int
    n_eval_episodes: int = 20
    n_final_episodes: int = 50
    normalize: bool = True
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Plan(Run):
    """A run of the bench, see ``Suite`` and ``Entry``."""

    algo: str
    dataset: str
    episodes: int | None
    offline: bool
    offline_steps: int
    online_steps: int
    eval_freq: int
    n_eval_episodes: int
    n_final_episodes: int
    normalize: bool
    settings: Settings


def load_suite(name: str | Path) -> Suite:
    """
    Read a suite.

    :param name: ``"cpu"``, ``"paper"`` or the path of a YAML file
    :raises ValueError: if there is no such suite, or the file says something that a suite does not have
    """
    known = {path.stem: path for path in sorted(SUITES.glob("*.yml"))}
    path = known.get(str(name), Path(name))
    if not path.is_file():
        raise ValueError(f"--suite {name}: there is no such suite; choose from {', '.join(known)}, or give a YAML file.")
    content = yaml.safe_load(path.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"--suite {name}: {path} must hold a mapping with tasks and algorithms.")
    content.pop("templates", None)  # for YAML's anchors
    for part, kind in (("tasks", Task), ("algorithms", Entry)):
        entries = content.get(part) or {}
        content[part] = {key: _make(kind, value or {}, f"{path}: {part}: {key}") for key, value in entries.items()}
    suite: Suite = _make(Suite, content, str(path))
    if not (suite.tasks and suite.algorithms):
        raise ValueError(f"{path}: `tasks` and `algorithms` must not be empty.")
    for name, entry in suite.algorithms.items():
        _chosen(f"{path}: algorithms: {name}: tasks:", entry.tasks, list(suite.tasks))
    return suite


def _make(kind: Any, values: Mapping[str, Any], where: str) -> Any:
    fields = {part.name: part for part in dataclasses.fields(kind)}
    if unknown := set(values) - set(fields):
        raise ValueError(f"{where}: {', '.join(sorted(unknown))} is unknown; choose from {', '.join(fields)}.")
    needed = {n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING}
    if missing := needed - set(values):
        raise ValueError(f"{where}: {', '.join(sorted(missing))} is missing.")
    return kind(**{name: _checked(fields[name].type, name, value, where) for name, value in values.items()})


def _checked(kind: Any, name: str, value: Any, where: str) -> Any:
    """Check a value of a suite; for YAML 1e6 is no whole number."""
    if kind is int or (kind == int | None and value is not None):
        try:
            check_whole(0 if name in ("offline_steps", "online_steps") else 1, **{name: value})
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        return int(value)
    if kind is bool and not isinstance(value, bool):
        raise ValueError(f"{where}: `{name}` must be true or false, but {value!r} was given.")
    if kind in (Settings, dict[str, Settings]):
        parts = [value, *(value.values() if kind != Settings and isinstance(value, dict) else ())]
        if not all(isinstance(part, dict) for part in parts):
            raise ValueError(f"{where}: `{name}` must be a mapping of arguments, but {value!r} was given.")
    return value


def plans(
    suite: Suite,
    tasks: Iterable[str] | None = None,
    algorithms: Iterable[str] | None = None,
    seeds: Iterable[int] = (0, 1),
    variants: Iterable[Settings] = ({},),
) -> list[Plan]:
    """
    List the runs of a suite: all tasks and algorithms with the first seed, then with the next.

    :param suite: the suite
    :param tasks: environment ids; default all
    :param algorithms: names; default all
    :param seeds: of the runs
    :param variants: arguments that replace those of the algorithms; their names and values stand in the algorithm's name
    :raises ValueError: if the suite lacks a task or an algorithm, an algorithm lacks an argument, or something is given twice
    """
    chosen_tasks = _chosen("--tasks", tasks, list(suite.tasks))
    chosen_algorithms = _chosen("--algos", algorithms, list(suite.algorithms))
    every, chosen_seeds = list(variants), list(seeds)
    if len(set(chosen_seeds)) < len(chosen_seeds):
        raise ValueError(f"--seeds {' '.join(map(str, chosen_seeds))}: one is given twice.")
    return [
        _plan(suite, task, algorithm, seed, variant)
        for seed in chosen_seeds
        for task in chosen_tasks
        for algorithm in chosen_algorithms
        for variant in every
    ]


def _chosen(argument: str, names: Iterable[str] | None, known: list[str]) -> list[str]:
    chosen = known if names is None else list(names)
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"{argument} {' '.join(unknown)}: not in the suite; choose from {', '.join(known)}.")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"{argument} {' '.join(chosen)}: one is given twice.")
    return chosen


def _plan(suite: Suite, name: str, algorithm: str, seed: int, variant: Settings) -> Plan:
    task, entry = suite.tasks[name], suite.algorithms[algorithm]
    known = [key for key, value in ALGORITHMS.items() if issubclass(value, OfflineToOnlineAlgorithm)]
    if entry.algo not in known:
        raise ValueError(f"algorithms: {algorithm}: algo {entry.algo!r} learns from no data; choose from {', '.join(known)}.")
    published = _zoo_settings(entry.algo, name) if entry.zoo_settings else {}
    settings = {**suite.settings, **task.settings, **published, **entry.settings, **entry.tasks.get(name, {}), **variant}
    if unknown := [key for key in settings if key not in inspect.signature(ALGORITHMS[entry.algo]).parameters]:
        raise ValueError(f"{algorithm} on {name}: {ALGORITHMS[entry.algo].__name__} has no argument {', '.join(unknown)}.")
    return Plan(
        task=name,
        algorithm=label(algorithm, variant),
        seed=seed,
        algo=entry.algo,
        dataset=task.dataset or f"ogbench:{name}",
        episodes=task.episodes,
        offline=entry.offline,
        settings=settings,
        **{name: getattr(suite, name) for name in SHARED},
    )


def _zoo_settings(algo: str, task: str) -> Settings:
    """Take the arguments of the algorithm from the zoo's configuration of a task."""
    content = _configurations(algo)
    if task not in content:
        raise ValueError(f"{config_file(algo).name} has no settings for {task}, which the suite wants (zoo_settings).")
    return {name: value for name, value in content[task].items() if name not in NOT_SETTINGS}


@cache
def _configurations(algo: str) -> dict[str, Settings]:
    """Read the zoo's file of an algorithm once, and not for each of its runs."""
    content: dict[str, Settings] = yaml.safe_load(config_file(algo).read_text())
    return content


def variants(grid: Sequence[str]) -> Iterator[Settings]:
    """
    List every combination of ``name=a,b`` arguments.

    :param grid: of ``--grid``, values are YAML
    :raises ValueError: if a text is no such argument, or something is given twice
    """
    found: dict[str, list[Any]] = {}
    for text in grid:
        name, equals, choices = text.partition("=")
        if not (name and equals and choices):
            raise ValueError(f"--grid {text}: give a name and its values, such as alpha=1,3,10.")
        try:
            values = [_number(value) for value in yaml.safe_load(f"[{choices}]")]
        except yaml.YAMLError as error:
            raise ValueError(f"--grid {text}: the values are no YAML, such as alpha=1,3,10 or net_arch=[64,64].") from error
        if name in found or any(values.count(value) > 1 for value in values):
            raise ValueError(f"--grid {' '.join(grid)}: {name} or one of its values is given twice.")
        found[name] = values
    for combination in itertools.product(*found.values()):
        yield dict(zip(found, combination, strict=True))


def label(name: str, variant: Settings) -> str:
    """Name an algorithm with the arguments of a grid."""
    return " ".join([name, *(f"{key}={value}" for key, value in variant.items())])


def _number(value: Any) -> Any:
    """Take 1e-3 as a number, which for YAML is a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
