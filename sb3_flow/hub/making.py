"""How a model was made, as far as the model and its file tell."""

import inspect
import json
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch as th
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.type_aliases import TrainFreq, TrainFrequencyUnit
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from sb3_flow.common.checks import arguments_of
from sb3_flow.common.saved_by import SAVED_VERSION, saved_data

UNTOLD = {"policy", "env", "offline_dataset", "tensorboard_log", "verbose", "device", "_init_setup_model"}
"""Arguments that are told elsewhere, or concern the machine that trained."""

ABSOLUTE = r"[/\\~]|\.{1,2}[/\\]|[A-Za-z]:[/\\]"
"""How paths begin that are no mere names."""
PREFIX = re.compile(rf"((?:npz|d4rl|robomimic):|ogbench:[^@]*@|[\w.-]{{2,}}[:=](?!//)(?={ABSOLUTE}))?(.*)", re.S)
"""What may be before a path: the prefix of a dataset's location, or a key."""
NUMBERS = re.compile(r"(.*?)((?: \(sparse rewards\))*(?: \(\d+ rows.*\))?)", re.S)
"""What ``trained_on`` has behind the location of a dataset."""

BUFFERS = re.compile(r"(stable_baselines3\.common|sb3_contrib\.common|sb3_flow)\.")
"""Buffers that algorithms take by themselves."""


def how_it_was_made(model: BaseAlgorithm, file: Path, trained_in: str | None) -> dict[str, Any]:
    """
    Collect how a model was made.

    :param model: the model
    :param file: its saved file, which tells the versions of its saver
    :param trained_in: id of the environment that it was trained in, None if unknown
    :return: plain values that JSON can hold, without folders of this machine
    """
    algorithm = importable(type(model))
    given = {
        name: readable(vars(model)[name]) for name in arguments_of(algorithm) if name in vars(model) and name not in UNTOLD
    }
    return {
        "algorithm": algorithm.__name__,
        "import": f"from {_public_module(algorithm)} import {algorithm.__name__}",
        "policy": type(model.policy).__name__,
        "phases": _phases(model, trained_in),
        "offline_gradient_steps": getattr(model, "offline_updates", 0),
        "environment_steps": model.num_timesteps,
        "dataset": _dataset(model),
        "seed": model.seed,
        "arguments": given,
        "changed": _changed(algorithm, given),
        "versions": _versions(file),
    }


def env_id_of(env: VecEnv) -> str:
    """Name an environment by its id, or by its class where it has none."""
    try:
        found = getattr(env.get_attr("spec", 0)[0], "id", None)
    except AttributeError:  # environments that are one object
        found = None
    if found is None:
        found = type(env.unwrapped.envs[0].unwrapped if isinstance(env.unwrapped, DummyVecEnv) else env.unwrapped).__name__
    return str(found)


def without_folders(text: str) -> str:
    """
    Leave of a path its last part alone, since folders may name a person or a machine, and of a URL no password.

    :param text: a path, perhaps with the prefix of a dataset's location before it and the dataset's numbers behind it; of any
        other text absolute paths are cut up to a space, and names such as ``ALE/Pong-v5`` stay
    """
    told, numbers = NUMBERS.fullmatch(text).groups()  # type: ignore[union-attr]
    prefix, path = PREFIX.fullmatch(told).groups("")  # type: ignore[union-attr]
    if re.match(r"[\w+.-]{2,}://", path):
        return f"{prefix}{re.sub('://[^/]*@', '://', path, count=1)}{numbers}"
    if prefix or re.match(ABSOLUTE, path) or re.fullmatch(r"(?!.*://).*[/\\][^/\\:]*\.[A-Za-z]\w{0,5}", path):
        return prefix + re.split(r"[/\\]", path.rstrip("/\\"))[-1] + numbers
    text = re.sub(r"://[^/\s]*@", "://", text)
    return re.sub(r"(^|[\s:@'\"=(\[,])(?!//)(?:~|[A-Za-z]:)?[/\\][^\s'\":@,)\]]*[/\\]", r"\1", text)


def cut(value: Any) -> Any:
    """Cut paths in a value that a program would read again: see :func:`without_folders`."""
    if isinstance(value, dict):
        return {key: cut(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(cut(entry) for entry in value)
    return without_folders(value) if isinstance(value, str) else value


def readable(value: Any) -> Any:
    """Turn an argument into plain values that JSON can hold: schedules of one value into it, classes into their names."""
    constant = getattr(getattr(value, "value_schedule", value), "val", value)  # SB3's ConstantSchedule in a FloatSchedule
    if constant is not value:
        return readable(constant)
    if isinstance(value, TrainFreq):
        return value.frequency if value.unit is TrainFrequencyUnit.STEP else [value.frequency, value.unit.value]
    if isinstance(value, dict):
        return {str(key): readable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [readable(entry) for entry in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, th.nn.Module | BaseAlgorithm):
        value = type(value)
    if isinstance(value, type) or inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:
        return value.item()
    return without_folders(re.sub(r" at 0x[0-9a-f]+", "", str(value)))


def _changed(algorithm: type, given: dict[str, Any]) -> dict[str, Any]:
    """Of the arguments those that are neither the default nor what a constructor makes of None."""
    known = {name: readable(argument.default) for name, argument in arguments_of(algorithm).items()}

    def filled_in(name: str, value: Any) -> bool:
        return known[name] is None and (value == {} or (name.endswith("_buffer_class") and BUFFERS.match(value) is not None))

    return {name: value for name, value in given.items() if value != known[name] and not filled_in(name, value)}


def _phases(model: Any, trained_in: str | None) -> list[str]:
    """Say in a sentence each what the phases of training were."""
    offline, online, dataset = getattr(model, "offline_updates", 0), model.num_timesteps, _dataset(model)
    found = []
    if offline:
        found.append(f"Offline: {offline:,} gradient steps on {dataset or 'a dataset that the file does not name'}.")
    if online:
        where = f" in {trained_in}" if trained_in else ""
        beside = f", with {dataset} beside the online steps" if dataset and not offline else ""
        found.append(f"Online: {online:,} environment steps{where}{beside}.")
    return found or ["Not trained."]


def _dataset(model: Any) -> str | None:
    location = getattr(model, "offline_dataset", None)  # files from before version 0.1 have only this
    told = getattr(model, "trained_on", None) or (location if isinstance(location, str) else None)
    return None if told is None else without_folders(str(told))


def importable(algorithm: type) -> type:
    """Find what others can import: a class, or the nearest of its bases if it was made in a script or in a function."""
    return next(base for base in algorithm.__mro__ if not base.__name__.startswith("_") and _modules(base))


def _public_module(algorithm: type) -> str:
    """Find the shortest module that a class can be imported from."""
    return _modules(algorithm)[0]


def _modules(algorithm: type) -> list[str]:
    """List the modules that a class can be imported from, the shortest first."""
    parts = algorithm.__module__.split(".")
    modules = [".".join(parts[:length]) for length in range(1, len(parts) + 1) if parts != ["__main__"]]
    return [name for name in modules if getattr(sys.modules.get(name), algorithm.__name__, None) is algorithm]


def _versions(file: Path) -> dict[str, str]:
    """Read from a file the versions of what saved it. The operating system, which names a machine's kernel, is left out."""
    with zipfile.ZipFile(file) as archive:
        text = archive.read("system_info.txt").decode() if "system_info.txt" in archive.namelist() else ""
    found = dict(re.findall(r"^- ([^:\n]+): (.*)$", text, re.M))
    found.pop("OS", None)
    own = saved_data(file).get(SAVED_VERSION)
    return {**({"sb3_flow": own} if own else {}), **found}


def as_json(facts: dict[str, Any]) -> str:
    """Write facts as JSON; infinite numbers, which JSON does not know, become text."""
    return json.dumps(json.loads(json.dumps(facts), parse_constant=str), indent=2) + "\n"
