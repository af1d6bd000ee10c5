"""Looking at trained models: rl-zoo3's ``enjoy`` and ``record_video`` know by name which algorithms have replay buffers."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import rl_zoo3
from huggingface_sb3 import EnvironmentName
from rl_zoo3.utils import get_latest_run_id, get_saved_hyperparams
from stable_baselines3.common.base_class import BaseAlgorithm

from sb3_flow.common import OfflineToOnlineAlgorithm
from sb3_flow.zoo.registry import ALGORITHMS, check_device


@contextmanager
def for_viewing() -> Iterator[None]:
    """While it lasts, our algorithms are loaded without room for a million steps, and for any number of environments."""
    shown = {name: SimpleNamespace(load=_loader(algorithm)) for name, algorithm in ALGORITHMS.items()}
    rl_zoo3.ALGOS.update(shown)  # type: ignore[arg-type]
    try:
        yield
    finally:
        rl_zoo3.ALGOS.update(ALGORITHMS)


def _loader(algorithm: type[BaseAlgorithm]) -> Any:
    def load(path: str, env: Any = None, device: str = "auto", **kwargs: Any) -> BaseAlgorithm:
        check_device(device)
        if issubclass(algorithm, OfflineToOnlineAlgorithm):
            # a HerReplayBuffer is all that needs the environment
            return algorithm.load(path, env=env, device=device, **{"buffer_size": 1, "optimize_memory_usage": False, **kwargs})
        return algorithm.load(path, device=device, **kwargs)  # GRPO's groups need not fit the number of environments

    return load


def as_in_training(arguments: list[str]) -> list[str]:
    """
    Act as in the evaluations of training. The zoo acts deterministically, which for ``evaluation_mode: sample`` is one and
    the same noise all the time.

    :param arguments: of ``enjoy`` or ``record_video``
    :return: ``["--stochastic"]`` if the model's configuration has ``deterministic_eval: false``, unless they decide
    """
    parser = argparse.ArgumentParser(add_help=False)
    for flags, default in ((("--algo",), "ppo"), (("--env",), ""), (("-f", "--folder"), ""), (("--exp-id",), "0")):
        parser.add_argument(*flags, default=default)
    for flag in ("--deterministic", "--stochastic"):
        parser.add_argument(flag, action="store_true")
    given, _ = parser.parse_known_args(arguments)
    env_name, folder = EnvironmentName(given.env), Path(given.folder, given.algo)
    number = int(given.exp_id) or get_latest_run_id(str(folder), env_name)
    folder = folder / f"{env_name}_{number}" if number > 0 else folder
    hyperparams, _ = get_saved_hyperparams(str(folder / env_name))
    if given.deterministic or given.stochastic or hyperparams.get("deterministic_eval", True):
        return []
    print("Acting with fresh noise, as in the evaluations of training (deterministic_eval: false); or give --deterministic")
    return ["--stochastic"]


def no_model(algo: str, env_name: Any, folder: str, **_: Any) -> None:
    """
    In place of the zoo's download of a model that is not found: the hub of SB3 has none of ours.

    :raises FileNotFoundError: saying what to do
    """
    raise FileNotFoundError(
        f"there is no model of {algo} for {env_name} in the folder {folder}: name the folder that it was trained into, "
        "`-f logs` by default."
    )
