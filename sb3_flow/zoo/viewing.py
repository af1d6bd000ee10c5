"""Loading models to look at them: rl-zoo3's commands know by name which algorithms have replay buffers, and know no masks."""

import argparse
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import rl_zoo3
from huggingface_sb3 import EnvironmentName
from rl_zoo3.utils import get_latest_run_id
from sb3_contrib.common.maskable.utils import get_action_masks
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from sb3_flow.common.episodes import takes_masks
from sb3_flow.zoo.registry import ALGORITHMS, check_device


@contextmanager
def for_viewing() -> Iterator[None]:
    """
    Load our algorithms meanwhile without room for a million steps, for any number of environments, and with the masks of the
    environments.
    """
    modules: list[Any] = [importlib.import_module(f"rl_zoo3.{name}") for name in ("utils", "enjoy")]
    create, environments = modules[0].create_test_env, list[VecEnv]()

    def create_test_env(*args: Any, **kwargs: Any) -> VecEnv:
        env: VecEnv = create(*args, **kwargs)
        environments.append(env)
        return env

    def shown(algorithm: type[BaseAlgorithm]) -> Any:
        load = loader(algorithm)
        return SimpleNamespace(load=lambda *args, **kwargs: masked(load(*args, **kwargs), environments))

    rl_zoo3.ALGOS.update({name: shown(algorithm) for name, algorithm in ALGORITHMS.items()})
    for module in modules:
        module.create_test_env = create_test_env
    try:
        yield
    finally:
        rl_zoo3.ALGOS.update(ALGORITHMS)
        for module in modules:
            module.create_test_env = create


def masked(model: Any, environments: list[VecEnv]) -> Any:
    """
    Have ``predict`` ask the environment for masks, if the model takes masks; rl-zoo3's loops give none.

    :param model: an algorithm, whose ``predict`` is exchanged
    :param environments: those that were made; the last is looked at
    """
    if takes_masks(model):
        predict = model.predict
        model.predict = lambda *args, **kwargs: predict(*args, action_masks=get_action_masks(environments[-1]), **kwargs)
    return model


def loader(algorithm: type[BaseAlgorithm]) -> Any:
    """
    Give an algorithm's ``load`` without room for a million steps, and for any number of environments.

    :param algorithm: of sb3_flow, or of the zoo
    """

    def load(path: str, env: Any = None, device: str = "auto", **kwargs: Any) -> BaseAlgorithm:
        check_device(device)
        if issubclass(algorithm, OffPolicyAlgorithm):
            # only a HerReplayBuffer needs the environment
            return algorithm.load(path, env=env, device=device, **{"buffer_size": 1, "optimize_memory_usage": False, **kwargs})
        return algorithm.load(path, device=device, **kwargs)  # GRPO's groups need not fit the number of environments

    return load


def latest_with_model(arguments: list[str]) -> list[str]:
    """
    Choose the latest run that has a model. The zoo takes the latest folder, whose run may have been killed or may go on.

    :param arguments: of ``enjoy`` or ``record_video``
    :return: ``--exp-id`` and its number where the latest folder has no model, unless the arguments choose a run
    """
    parser = argparse.ArgumentParser(add_help=False)
    for flags, default in ((("--algo",), "ppo"), (("--env",), ""), (("-f", "--folder"), ""), (("--exp-id",), "0")):
        parser.add_argument(*flags, default=default)
    for flag in ("--load-best", "--load-last-checkpoint"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--load-checkpoint")
    given, _ = parser.parse_known_args(arguments)
    env_name, folder = EnvironmentName(given.env), Path(given.folder, given.algo)
    checkpoint = "*" if given.load_last_checkpoint else given.load_checkpoint
    model = f"rl_model_{checkpoint}_steps.zip" if checkpoint else f"{env_name}.zip"
    model = "best_model.zip" if given.load_best else model
    latest = get_latest_run_id(str(folder), env_name)
    with_model = (number for number in range(latest, 0, -1) if any((folder / f"{env_name}_{number}").glob(model)))
    number = int(given.exp_id) or next(with_model, latest)
    if int(given.exp_id) or number == latest:
        return []
    print(f"Passing over {folder / f'{env_name}_{latest}'}, which has no {model}")
    return ["--exp-id", str(number)]


def refuse_missing_model(algo: str, env_name: Any, folder: str, **_: Any) -> None:
    """Raise FileNotFoundError instead of the zoo's download of a missing model: SB3's hub has no model of sb3_flow."""
    raise FileNotFoundError(
        f"there is no model of {algo} for {env_name} in the folder {folder}: name the folder that it was trained into, "
        "`-f logs` by default."
    )
