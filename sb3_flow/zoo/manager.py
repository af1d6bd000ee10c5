"""rl-zoo3's experiment manager with what our algorithms need besides: offline phases, collectors, default configurations."""

import copy
import importlib
from functools import partial
from typing import Any, ClassVar

import optuna
import rl_zoo3.exp_manager
import rl_zoo3.train
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from sb3_flow import AsyncPPO, OfflineDataset
from sb3_flow.collect.environments import FACTORY
from sb3_flow.common import OfflineToOnlineAlgorithm
from sb3_flow.zoo import registry

ZooManager = rl_zoo3.exp_manager.ExperimentManager


class ExperimentManager(ZooManager):
    """
    Besides rl-zoo3's, a configuration may have the key ``deterministic_eval``: whether evaluations during training are
    deterministic (the zoo's default is true). Published results of flow policies are for fresh noise in each decision.

    The arguments are those of rl-zoo3.
    """

    training: ClassVar[bool] = False
    """Whether preparations are over, so that an error is no mistake in the command."""

    def __init__(self, args: Any, algo: str, *rest: Any, config: str | None = None, **kwargs: Any) -> None:
        if algo in registry.ALGORITHMS:
            registry.check_device(kwargs.get("device", "auto"))
            config = config or str(registry.config_file(algo))
        super().__init__(args, algo, *rest, config=config, **kwargs)  # type: ignore[misc]
        self.offline_steps = 0

    def _preprocess_hyperparams(self, hyperparams: dict[str, Any]) -> Any:
        self.deterministic_eval = hyperparams.pop("deterministic_eval", self.deterministic_eval)
        self.offline_steps = int(hyperparams.get("offline_steps", 0))
        if self.offline_steps and self.optimize_hyperparameters and self.n_evaluations is None:
            online = self.n_timesteps if self.n_timesteps > 0 else int(hyperparams["n_timesteps"])
            # as the zoo, which counts online steps alone
            self.n_evaluations = max(1, (self.offline_steps + online) // int(1e5))
        return super()._preprocess_hyperparams(hyperparams)

    def create_envs(self, n_envs: int, eval_env: bool = False, no_log: bool = False) -> VecEnv:
        env = super().create_envs(n_envs, eval_env=eval_env, no_log=no_log)
        if not eval_env and issubclass(rl_zoo3.ALGOS[self.algo], AsyncPPO):
            # These write their monitor files and cannot be moved: the collector makes its own. Those here are never stepped.
            manager = copy.copy(self)
            manager.callbacks, manager.specified_callbacks = [], []  # they hold evaluation environments and the model
            setattr(env, FACTORY, partial(_create_envs, manager, n_envs, no_log))
        return env

    def setup_experiment(self) -> tuple[BaseAlgorithm, dict[str, Any]] | None:
        result = super().setup_experiment()
        # whether the dataset is there and fits is known before training begins
        location = self._hyperparams.get("offline_dataset")
        if result is None and isinstance(location, str):
            self._hyperparams["offline_dataset"] = OfflineDataset.load(location)  # once for all trials
        elif result is not None and location is not None:
            model = result[0]
            assert isinstance(model, OfflineToOnlineAlgorithm)
            try:
                model.set_offline_dataset(location)
            except ValueError as error:
                raise ValueError(
                    f"offline_dataset {str(location)!r} does not go with --env {self.env_name.gym_id}: {error}; give one of "
                    "that environment (-params \"offline_dataset:'...'\")."
                ) from error
        return result

    def learn(self, model: BaseAlgorithm) -> None:
        ExperimentManager.training = True
        super().learn(model)

    def objective(self, trial: optuna.Trial) -> float:
        if not self.offline_steps:
            return super().objective(trial)
        # The zoo spreads the evaluations of a trial over its environment steps. Callbacks count gradient steps of the offline
        # phase too: n_timesteps / n_evaluations is made to be the distance between two evaluations over both.
        manager = copy.copy(self)
        manager.n_timesteps = max(1, self.n_timesteps)
        distance = max(1, (self.offline_steps + manager.n_timesteps) // self.n_evaluations)
        manager.n_evaluations = manager.n_timesteps / distance  # type: ignore[assignment]
        return ZooManager.objective(manager, trial)

    def hyperparameters_optimization(self) -> None:
        ExperimentManager.training = True
        super().hyperparameters_optimization()


def _create_envs(manager: ExperimentManager, n_envs: int, no_log: bool) -> VecEnv:
    """In the collector process, which is new: it has registered nothing."""
    registry.register()
    for package in manager.args.gym_packages:
        importlib.import_module(package)
    return ZooManager.create_envs(manager, n_envs, no_log=no_log)


def register() -> None:
    """Have rl-zoo3 use this manager."""
    rl_zoo3.exp_manager.ExperimentManager = rl_zoo3.train.ExperimentManager = ExperimentManager  # type: ignore[misc]
