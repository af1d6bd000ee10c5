"""rl-zoo3's experiment manager with additions for our algorithms: offline phases, collectors, default configurations."""

import copy
import importlib
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import optuna
import rl_zoo3.exp_manager
import rl_zoo3.train
from sb3_contrib.common.maskable.utils import is_masking_supported
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.utils import configure_logger
from stable_baselines3.common.vec_env import VecEnv

from sb3_flow import AsyncPPO, OfflineDataset
from sb3_flow.collect.environment_transfer import FACTORY
from sb3_flow.common.checks import check_known
from sb3_flow.common.episodes import takes_masks
from sb3_flow.common.ranks import is_first, n_ranks
from sb3_flow.envs import TorchVecEnv
from sb3_flow.offline_to_online import OfflineToOnlineAlgorithm
from sb3_flow.on_policy.policy_gradient import PolicyGradient
from sb3_flow.zoo import evaluation, registry
from sb3_flow.zoo.tensor_envs import make_together, take_vec_env_class
from sb3_flow.zoo.torchrun import check_trainable

ZooManager = rl_zoo3.exp_manager.ExperimentManager
# Keys of a configuration that are the zoo's, and no arguments of an algorithm; all but the first two it has taken out by then
ZOO_KEYS = (
    *("noise_type", "noise_std", "n_timesteps", "n_envs", "normalize", "env_wrapper", "vec_env_wrapper", "callback"),
    *("frame_stack", "env_kwargs", "monitor_kwargs", "vec_env_class"),
)


class ExperimentManager(ZooManager):
    """rl-zoo3's manager, with the same arguments, for the algorithms of sb3_flow."""

    training: ClassVar[bool] = False
    """Whether preparations are over, so that an error is no mistake in the command."""

    def __init__(self, args: Any, algo: str, *rest: Any, config: str | None = None, **kwargs: Any) -> None:
        if algo in registry.ALGORITHMS:
            registry.check_device(kwargs.get("device", "auto"))
            config = config or str(registry.config_file(algo))
        super().__init__(args, algo, *rest, config=config, **kwargs)  # type: ignore[misc]
        self.offline_steps = 0
        self.tensor_envs: type[TorchVecEnv] | None = None
        self._made_folder: Path | None = None
        self._not_from_configuration: list[str] = []

    def _preprocess_hyperparams(self, hyperparams: dict[str, Any]) -> Any:
        self.offline_steps = int(hyperparams.get("offline_steps", 0))
        self.tensor_envs = take_vec_env_class(self.algo, hyperparams)
        if self.offline_steps and self.optimize_hyperparameters and self.n_evaluations is None:
            online = self.n_timesteps if self.n_timesteps > 0 else int(hyperparams["n_timesteps"])
            # the zoo's rule, which counts online steps alone
            self.n_evaluations = max(1, (self.offline_steps + online) // int(1e5))
        buffer = registry.REPLAY_BUFFERS.get(hyperparams.get("replay_buffer_class", ""))
        if self.algo in registry.ALGORITHMS and buffer is not None:
            hyperparams["replay_buffer_class"] = buffer
        result = super()._preprocess_hyperparams(hyperparams)
        check_trainable(rl_zoo3.ALGOS[self.algo], self.optimize_hyperparameters, self.n_timesteps)
        if self.algo in registry.ALGORITHMS:
            check_known(rl_zoo3.ALGOS[self.algo], result[0], ZOO_KEYS)
        return result

    def create_envs(self, n_envs: int, eval_env: bool = False, no_log: bool = False) -> VecEnv:
        if self.tensor_envs is not None:
            options = self.eval_env_kwargs if eval_env else self.env_kwargs
            self.vec_env_class = partial(make_together, self.tensor_envs, self.env_name.gym_id, eval_env, options)  # type: ignore[assignment]
        env = super().create_envs(n_envs, eval_env=eval_env, no_log=no_log)
        if takes_masks(rl_zoo3.ALGOS[self.algo]) and not is_masking_supported(env):
            env.close()
            raise ValueError(
                f"--algo {self.algo} needs action masks, but --env {self.env_name.gym_id} has no method `action_masks`. Give "
                "a wrapper that has the method (-params \"env_wrapper:'...'\"): sb3_flow.envs.ActionMasksFromInfo where "
                "info['action_mask'] has the mask."
            )
        if not eval_env and issubclass(rl_zoo3.ALGOS[self.algo], AsyncPPO):
            # These environments write monitor files and cannot be moved: the collector makes its own, these are never stepped.
            manager = copy.copy(self)
            manager.callbacks, manager.specified_callbacks = [], []  # callbacks hold evaluation environments and the model
            setattr(env, FACTORY, partial(_create_envs, manager, n_envs, no_log))
        return env

    def create_callbacks(self) -> None:
        if issubclass(rl_zoo3.ALGOS[self.algo], PolicyGradient):
            # the zoo divides by the number of environments; those of all ranks take a step between two calls
            self.save_freq, self.eval_freq = (
                max(1, freq // n_ranks()) if freq > 0 else freq for freq in (self.save_freq, self.eval_freq)
            )
        super().create_callbacks()  # type: ignore[no-untyped-call]

    def create_log_folder(self) -> None:
        folder = Path(self.save_path)
        self._made_folder = None if folder.exists() else folder
        super().create_log_folder()  # type: ignore[no-untyped-call]

    @contextmanager
    def _removing_an_empty_folder(self) -> Iterator[None]:
        """Remove the folder of a run that fails unless there is something to look at in it."""
        try:
            yield
        except BaseException:
            _remove_if_empty(self._made_folder)
            raise

    def setup_experiment(self) -> tuple[BaseAlgorithm, dict[str, Any]] | None:
        with self._removing_an_empty_folder():
            return self._setup_experiment()

    def _setup_experiment(self) -> tuple[BaseAlgorithm, dict[str, Any]] | None:
        result = super().setup_experiment()
        # a dataset that is missing or does not fit is noticed before training begins
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
                    f"offline_dataset {str(location)!r} does not go with --env {self.env_name.gym_id}: {error}; give a "
                    "dataset of that environment (-params \"offline_dataset:'...'\")."
                ) from error
        if result is not None and self.continue_training:
            self._print_continuation(result[0])
        return result

    def _load_pretrained_agent(self, hyperparams: dict[str, Any], env: VecEnv) -> BaseAlgorithm:
        self._not_from_configuration = [name for name in ("policy", "policy_kwargs") if name in hyperparams]
        return super()._load_pretrained_agent(hyperparams, env)

    def _print_continuation(self, model: Any) -> None:
        """Print the files and settings that ``-i`` attached to the model, and the others, which it skipped."""
        folder, attached, skipped = Path(self.trained_agent).parent, [], []
        if self._hyperparams:
            attached.append(f"of the configuration: {', '.join(sorted(self._hyperparams))}")
        if self._not_from_configuration:
            skipped.append(f"of the configuration: {', '.join(self._not_from_configuration)}, which the model brings along")
        statistics = folder / self.env_name / "vecnormalize.pkl"
        if statistics.is_file():
            attached.append(f"the VecNormalize statistics {statistics}")
        elif self.normalize:
            skipped.append(f"VecNormalize statistics, which begin anew: there is no {statistics}")
        buffer = folder / "replay_buffer.pkl"
        if buffer.is_file():
            attached.append(f"the replay buffer {buffer}, {model.replay_buffer.size() * model.n_envs} environment steps")
        elif hasattr(model, "load_replay_buffer"):
            skipped.append(f"the replay buffer: there is no {buffer}, which --save-replay-buffer writes")
        if isinstance(model, OfflineToOnlineAlgorithm):
            dataset, left = model.offline_dataset, model.offline_steps - model.offline_updates
            if dataset is not None:
                attached.append(f"the dataset {dataset}")
            elif model.offline_updates:
                skipped.append("the dataset: the configuration names none (`offline_dataset`)")
            if left > 0:
                attached.append(f"{left} of {model.offline_steps} offline gradient steps, which are still to be made")
            elif model.offline_updates:
                skipped.append(f"the offline phase, which is over: {model.offline_updates} gradient steps were made")
        for name, parts in (("Attached", attached), ("Skipped", skipped)):
            print(f"{name}: {'; '.join(parts) or 'nothing'}")

    def learn(self, model: BaseAlgorithm) -> None:
        ExperimentManager.training = True
        names = [algorithm.__name__ for algorithm in rl_zoo3.ALGOS.values()]
        if self.tensorboard_log and self.algo in registry.ALGORITHMS and names.count(type(model).__name__) > 1:
            # `flow_ppo`: in a folder shared with the zoo's `ppo` nobody could tell whose run PPO_1 is
            model.set_logger(configure_logger(self.verbose, self.tensorboard_log, self.algo))
        if not is_first():
            self.callbacks = []  # the zoo ends the first one, which has not begun here
        with self._removing_an_empty_folder():
            super().learn(model)

    def save_trained_model(self, model: BaseAlgorithm) -> None:
        if is_first():
            super().save_trained_model(model)

    def objective(self, trial: optuna.Trial) -> float:
        if not self.offline_steps:
            return super().objective(trial)
        # The zoo spreads the evaluations of a trial over its environment steps. Callbacks count gradient steps of the offline
        # phase too: n_timesteps / n_evaluations becomes the distance between two evaluations over both.
        manager = copy.copy(self)
        manager.n_timesteps = max(1, self.n_timesteps)
        distance = max(1, (self.offline_steps + manager.n_timesteps) // self.n_evaluations)
        manager.n_evaluations = manager.n_timesteps / distance  # type: ignore[assignment]
        return ZooManager.objective(manager, trial)

    def hyperparameters_optimization(self) -> None:
        ExperimentManager.training = True
        if self.storage is not None and not self.storage.endswith(".log"):  # the zoo takes the latter as a journal
            _make_tables(self.storage)
        try:
            super().hyperparameters_optimization()
        finally:
            _remove_if_empty(self._made_folder)  # trials do not write to it


def _make_tables(database: str, tries: int = 20) -> None:
    """
    Make the tables of a study's database, unless they are there. Of several processes that do so at the same time Optuna lets
    all but one fail.

    :param database: its URL
    :param tries: how often the tables are looked for, a fifth of a second apart
    """
    from sqlalchemy.exc import SQLAlchemyError

    for left in reversed(range(tries)):
        try:
            optuna.storages.get_storage(database)
            return
        except (SQLAlchemyError, optuna.exceptions.StorageInternalError):
            if left == 0:
                raise
            time.sleep(0.2)


def _create_envs(manager: ExperimentManager, n_envs: int, no_log: bool) -> VecEnv:
    """Make the environments in the collector process, which is new and has registered nothing."""
    register()
    for package in manager.args.gym_packages:
        importlib.import_module(package)
    return ZooManager.create_envs(manager, n_envs, no_log=no_log)


def _remove_if_empty(folder: Path | None) -> None:
    """Remove a run's folder if it has neither a model nor an episode, since viewers would take it for the latest run."""
    if folder is None or any(folder.glob("*.zip")):
        return
    # each file of Monitor begins with two lines
    if not any(len(file.read_text().splitlines()) > 2 for file in folder.glob("*monitor.csv")):
        shutil.rmtree(folder, ignore_errors=True)


def register() -> None:
    """Make the algorithms known to rl-zoo3, and have it use this manager and our evaluation."""
    rl_zoo3.ALGOS.update(registry.ALGORITHMS)
    evaluation.register()
    rl_zoo3.exp_manager.ExperimentManager = rl_zoo3.train.ExperimentManager = ExperimentManager  # type: ignore[misc]
