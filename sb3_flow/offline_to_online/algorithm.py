"""
Base class of the algorithms that learn from a dataset first and from an environment afterwards.

This module, ``offline_phase.py``, ``online_phase.py`` and ``persistence.py`` override or call SB3's protected methods (checked
with stable-baselines3 2.9.2): ``_setup_model, _setup_learn, _sample_action, _store_transition, _init_callback, _wrap_env,
_update_learning_rate, _update_current_progress_remaining, _excluded_save_params, _get_torch_save_params``.
``tests/test_sb3_private_api.py`` names each of them.
"""

import inspect
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule

from sb3_flow.common.backends import Backend
from sb3_flow.common.checks import (
    arguments_in,
    check_fraction,
    check_given_once,
    check_learning,
    check_minimum,
    check_number,
    check_scheduled,
    check_whole,
    naming_policy_arguments,
)
from sb3_flow.common.ranks import backward, n_ranks
from sb3_flow.data import ChunkSamples, OfflineDataset, TrajectoryReplayBuffer
from sb3_flow.data.residence import Storage
from sb3_flow.data.table import Sampling
from sb3_flow.data.trajectories import WindowRule
from sb3_flow.execution import Execution, UpdateRunner
from sb3_flow.offline_to_online.acting import ActingMode
from sb3_flow.offline_to_online.generative_policy import GenerativePolicy
from sb3_flow.offline_to_online.metrics import MetricSums
from sb3_flow.offline_to_online.moving_average import MovingAverage
from sb3_flow.offline_to_online.online_phase import OnlinePhase
from sb3_flow.offline_to_online.options import check_buffer_arguments, check_buffer_class, check_options, check_own
from sb3_flow.offline_to_online.persistence import BUFFER_ARGUMENTS
from sb3_flow.offline_to_online.recorded_updates import RecordedUpdates

POLICY_ARGUMENTS = ("horizon_length", "acting_mode", "search", "backend")
"""Arguments that the constructor shares with the constructors of the policy and of the replay buffer."""


class OfflineToOnlineAlgorithm(RecordedUpdates, OnlinePhase):
    """
    SB3's off-policy algorithm with an offline phase before the online phase, action chunks, and one gradient update for both.

    A subclass has ``policy_aliases`` with its policy class, ``update`` (one gradient step, tensors in and out) and
    ``policy_arguments``. Networks of the policy are attributes of the model, too (``model.actor``, ``model.critic``).
    ``docs/development/add_an_algorithm.md`` says how to add an algorithm.

    :param policy: The policy model to use (MlpPolicy, CnnPolicy, MultiInputPolicy, ...)
    :param env: The environment to learn from; may be ``None`` if ``offline_dataset`` is given (the spaces come from it)
    :param learning_rate: learning rate, a float or a function of the remaining progress (from 1 to 0)
    :param buffer_size: online steps to keep; the dataset does not count
    :param learning_starts: environment steps before the first online update; without an offline phase they are random
    :param batch_size: Minibatch size for each gradient update
    :param tau: rate of the Polyak update of the target networks
    :param gamma: the discount factor, per environment step
    :param train_freq: Update the model every ``train_freq`` steps, see SB3
    :param gradient_steps: gradient steps after each rollout, -1 for as many as steps done
    :param action_noise: added to the actions of the online phase (default: none)
    :param replay_buffer_class: default ``TrajectoryReplayBuffer``; or ``HerReplayBuffer`` for hindsight, or
        ``PrioritizedReplayBuffer``, whose priorities follow the errors of the values. Others work for ``horizon_length=1`` and
        online only
    :param replay_buffer_kwargs: Keyword arguments to pass to the replay buffer on creation
    :param optimize_memory_usage: do not store next observations, see ``TrajectoryReplayBuffer``; RQL alone can do without
    :param n_steps: n-step returns through SB3's ``NStepReplayBuffer``, for ``horizon_length=1`` and online only
    :param horizon_length: actions decided at once and executed open loop (chunk length h)
    :param offline_dataset: an ``OfflineDataset`` or its location (``"minari:..."``, see ``OfflineDataset.load``)
    :param offline_steps: gradient steps on the dataset that ``learn`` makes before its first environment step
    :param offline_fraction: share of offline rows in the batches of the online phase; ``None`` samples from both
        together as ``sampling`` says (with ``"trajectory"`` many short online episodes soon outnumber long offline ones)
    :param sampling: ``"trajectory"`` or ``"transition"``, see ``TrajectoryReplayBuffer``
    :param storage: ``"cpu"`` or ``"device"``: where dataset and online steps reside, and batches are gathered; ``"auto"``: on
        the device if that is a GPU of whose free memory they take no more than half. ``verbose=1`` prints it for a GPU
    :param acting_mode: ``"sample"``, ``"zero"``, ``"best_of_n"``, ``"qgbs"`` or ``"guided"``: how ``predict`` finds actions,
        see ``ActingPolicy``; saved with the model
    :param search: settings of ``"qgbs"``, see ``ActingPolicy``
    :param backend: "native": networks in compiled kernels, on the CPU and with ``TanhGELU``; "torch": in torch's operators;
        "auto": native where it can be, else torch. Both agree to rounding. The choice is saved, and kept when the model is
        loaded; ``verbose=1`` prints it
    :param execution: "graph": gradient updates are recorded as a CUDA graph and replayed, which spares a GPU the wait for
        Python; "eager": torch executes operator by operator; "auto": graph on a CUDA device. Both agree to rounding. An update
        that cannot be recorded is executed eagerly, and ``verbose=1`` prints why
    :param stats_window_size: Window size for the rollout logging
    :param tensorboard_log: the log location for tensorboard (if None, no logging)
    :param policy_kwargs: additional arguments to be passed to the policy on creation
    :param verbose: 0 for no output, 1 for info messages, 2 for debug messages
    :param seed: Seed for the pseudo random generators
    :param device: Device (cpu, cuda, ...) on which the code should be run
    :param _init_setup_model: Whether or not to build the network at the creation of the instance
    :param own: further arguments of a subclass, which become attributes
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {}
    policy_arguments: ClassVar[tuple[str, ...]] = ()
    """Further arguments of the algorithm that its policy takes, too; the user gives each of them to one of both."""
    window_rule: ClassVar[WindowRule] = "rql"
    """The rule of the replay buffer, see ``TrajectoryReplayBuffer``."""

    def __init__(
        self,
        policy: str | type[BasePolicy],
        env: GymEnv | str | None,
        learning_rate: float | Schedule = 3e-4,
        buffer_size: int = 1_000_000,
        learning_starts: int = 100,
        batch_size: int = 256,
        tau: float = 0.005,
        gamma: float = 0.99,
        train_freq: int | tuple[int, str] = 1,
        gradient_steps: int = 1,
        action_noise: ActionNoise | None = None,
        replay_buffer_class: type[ReplayBuffer] | None = None,
        replay_buffer_kwargs: dict[str, Any] | None = None,
        optimize_memory_usage: bool = False,
        n_steps: int = 1,
        horizon_length: int = 1,
        offline_dataset: OfflineDataset | str | None = None,
        offline_steps: int = 0,
        offline_fraction: float | None = None,
        sampling: Sampling = "trajectory",
        storage: Storage = "auto",
        acting_mode: ActingMode = "sample",
        search: dict[str, Any] | None = None,
        backend: Backend = "auto",
        execution: Execution = "auto",
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
        **own: Any,
    ) -> None:
        given = arguments_in(locals())
        check_own(type(self), given.pop("own"))
        given.pop("_init_setup_model")
        of_sb3 = {name: given.pop(name) for name in inspect.signature(OffPolicyAlgorithm).parameters if name in given}
        vars(self).update(own, **given)
        super().__init__(**of_sb3, sde_support=False, support_multi_env=True)
        self.noise_seed = None
        self.chosen_backend: str | None = None
        self.offline_updates = 0  # gradient steps made in offline phases
        self.random_streams = None
        self._loaded = None
        self._metrics = MetricSums()
        self._chunk_state = None
        self._stopped_offline = False
        self._had_dataset = False  # also without an offline phase; a file says so, though it has no dataset
        self.trained_on: str | None = None  # the dataset in words, which a file keeps, too

        if offline_steps > 0 and offline_dataset is None:
            raise ValueError(f"`offline_steps={offline_steps}` needs `offline_dataset`.")
        if env is None and _init_setup_model:
            self._take_spaces_from_dataset(policy)
        if env is not None or _init_setup_model:
            self._check_action_space()
        if _init_setup_model:
            self._setup_model()

    def update(self, batch: ChunkSamples, generator: th.Generator) -> dict[str, th.Tensor]:
        """
        Make one gradient step: a function of tensors, without synchronisation with the host and without branches on data.

        Several ranks are given the same batch and draw the same numbers, of which ``own_rows`` cuts each rank's share.

        :param batch: windows of ``horizon_length`` steps
        :param generator: source of the update's random numbers, on the model's device
        :return: metrics as scalar tensors, means over rows, logged under ``train/``
        """
        raise NotImplementedError  # pragma: no cover

    def descend(self, loss: th.Tensor, *averages: tuple[MovingAverage, float], max_grad_norm: float | None = None) -> None:
        """
        Make one step of the optimisers. The target of the critic, with the rate ``tau``, and the given averages follow the
        weights before this step, as in the reference implementations.

        :param loss: scalar, a mean over the rows of the batch (or over this rank's rows, see ``own_rows``)
        :param averages: moving averages with their rates
        :param max_grad_norm: largest norm of the gradient of all networks together; a longer gradient is scaled to it
        """
        optimizers = self.optimizers
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        backward(loss, _parameters(optimizers))
        if max_grad_norm is not None:
            th.nn.utils.clip_grad_norm_(list(_parameters(optimizers)), max_grad_norm, foreach=True)
        for average, rate in averages:
            average.step(rate)
        if self._critic_average is not None:
            self._critic_average.step(self.tau)
        for optimizer in optimizers:
            optimizer.step()

    def set_acting_mode(self, mode: ActingMode, **search: Any) -> None:
        """
        Choose how ``predict`` finds actions from now on; saved with the model.

        :param mode: ``"sample"``, ``"zero"``, ``"best_of_n"``, ``"qgbs"`` or ``"guided"``, see ``ActingPolicy``
        :param search: settings of ``"qgbs"`` to change
        """
        policy: Any = self.policy
        policy.set_acting_mode(mode, **search)
        self.acting_mode, self.search = mode, policy.search

    def _check_action_space(self) -> None:
        # SB3 raises an AssertionError, too, for action spaces that an algorithm does not support
        if not isinstance(self.action_space, spaces.Box):
            raise AssertionError(
                f"{type(self).__name__} only supports {spaces.Box} as action space, but {self.action_space} was given: its "
                "policy is a flow over continuous actions. For Discrete actions use DQN (or QR-DQN of sb3-contrib), for "
                "MultiDiscrete and MultiBinary ones PPO."
            )

    def _setup_model(self) -> None:
        self._translate_old_names()
        restored, noise_seed = self.random_streams, self.noise_seed
        policy_names = (*POLICY_ARGUMENTS, *self.policy_arguments)
        check_given_once(self, "policy_kwargs", policy_names, loaded=restored is not None)
        self._check_arguments()
        if self.replay_buffer_class is None and self.n_steps == 1:
            self.replay_buffer_class = TrajectoryReplayBuffer
        has_own_buffer = self.replay_buffer_class is not None and issubclass(self.replay_buffer_class, TrajectoryReplayBuffer)
        if has_own_buffer:
            check_given_once(self, "replay_buffer_kwargs", BUFFER_ARGUMENTS, loaded=restored is not None)
        of_policy, of_buffer = self.policy_kwargs, self.replay_buffer_kwargs
        self.policy_kwargs = {"noise_seed": self.noise_seed or 0, **self._arguments(policy_names), **of_policy}
        if has_own_buffer:
            assert self.replay_buffer_class is not None
            check_buffer_arguments(self.replay_buffer_class, of_buffer)
            self.replay_buffer_kwargs = self._arguments_of_buffer()
        try:
            with naming_policy_arguments(self):
                super()._setup_model()
        finally:
            # a saved model holds the user's dictionaries
            self.policy_kwargs = of_policy
            if has_own_buffer or self.replay_buffer_class is None:
                self.replay_buffer_kwargs = of_buffer
        if restored is not None:
            assert self.random_streams is not None
            if restored.given_seed == self.seed:
                # a loaded model goes on with the numbers that were due, unless the user gives another seed
                self.random_streams.set_state(restored.get_state())
            # the saved policy keeps its noise, also with another seed
            self.noise_seed = restored.seed if noise_seed is None else noise_seed
        self._connect_buffer_and_policy()
        if isinstance(self.policy, GenerativePolicy):  # the networks have moved to the model's device
            self.policy.set_backend(self.policy.backend, self.chosen_backend, self.verbose)
            self.chosen_backend = self.policy.chosen_backend
        self._runner = UpdateRunner(self.execution, self.device, self.verbose, loaded=restored is not None)
        networks = self.networks
        vars(self).update(networks)
        has_target = "critic_target" in networks
        self._critic_average = MovingAverage(networks["critic"], networks["critic_target"]) if has_target else None

    def _arguments(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    def _check_arguments(self) -> None:
        check_options(self)
        name = type(self).__name__
        check_buffer_class(self.replay_buffer_class)
        check_whole(1, horizon_length=self.horizon_length, batch_size=self.batch_size)
        check_whole(1, buffer_size=self.buffer_size, n_steps=self.n_steps)
        check_whole(0, offline_steps=self.offline_steps, learning_starts=self.learning_starts)
        check_whole(-1, gradient_steps=self.gradient_steps)
        if not callable(self.learning_rate):
            check_number(learning_rate=self.learning_rate)
            check_minimum(0.0, learning_rate=self.learning_rate)
        check_fraction(tau=self.tau, gamma=self.gamma)
        if "noise_seed" in self.policy_kwargs:
            raise ValueError("`noise_seed` is not for `policy_kwargs`: it follows from the model's `seed`.")
        foreign = self.replay_buffer_class is not None and not issubclass(self.replay_buffer_class, TrajectoryReplayBuffer)
        if self.n_steps > 1 and self.replay_buffer_class is not None and not foreign:
            raise ValueError(f"`n_steps={self.n_steps}` does not go with a TrajectoryReplayBuffer: use `horizon_length`.")
        if self.horizon_length > 1 and (foreign or (self.n_steps > 1 and self.replay_buffer_class is None)):
            raise ValueError(
                f"`horizon_length={self.horizon_length}` needs {name}'s own TrajectoryReplayBuffer, which sums the rewards of "
                f"a chunk itself: leave `replay_buffer_class` (given: {self.replay_buffer_class}) and `n_steps` (given: "
                f"{self.n_steps}) at their defaults. For hindsight give `sb3_flow.HerReplayBuffer`."
            )

    def learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 4,
        tb_log_name: str | None = None,
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Self:
        """
        Train online, after the gradient steps that are left of ``offline_steps`` on ``offline_dataset`` if both were given.

        :param total_timesteps: environment steps to train on
        :param callback: callback(s) called at every step of either phase
        :param log_interval: episodes between two log lines
        :param tb_log_name: the name of the run for TensorBoard logging (default: the class name); the offline phase, which
            counts gradient steps, is another run, with "_offline" appended
        :param reset_num_timesteps: whether or not to reset the current timestep number
        :param progress_bar: Display a progress bar using tqdm and rich.
        :return: the trained model
        """
        check_learning(total_timesteps, log_interval)
        if total_timesteps > 0 and n_ranks() > 1:
            raise ValueError(
                f"The online phase runs in one process, but {n_ranks()} ranks train: here `total_timesteps` must be 0, which "
                f"makes the `offline_steps` alone, but {total_timesteps} was given. Save the model after the offline phase, "
                "and go on in one process."
            )
        remaining = max(0, self.offline_steps - self.offline_updates)
        if remaining > 0:
            if self.offline_dataset is None:
                raise ValueError(
                    f"{remaining} of `offline_steps={self.offline_steps}` are still to be made, but the dataset is not saved "
                    "with the model: give it again (`load(..., offline_dataset=...)`) or set `offline_steps=0`."
                )
            name = f"{tb_log_name or type(self).__name__}_offline"
            self.learn_offline(self.offline_dataset, remaining, callback, tb_log_name=name, progress_bar=progress_bar)
            if self._stopped_offline:
                return self
        elif self.offline_dataset is not None:
            self.set_offline_dataset(self.offline_dataset)
        elif (self.offline_updates or self._had_dataset) and getattr(self.replay_buffer, "n_offline", None) == 0:
            warnings.warn(
                "This model was trained on a dataset, which is not saved with it: `learn` goes on with online steps alone. "
                "Call `set_offline_dataset(dataset)` first, or load with `offline_dataset=...`, to keep sampling from it."
            )
        if self.env is None:
            raise AssertionError("You must set the environment (`model.set_env(env)`) before calling learn()")
        name, callback = tb_log_name or type(self).__name__, self._of_first_rank(callback)
        return super().learn(total_timesteps, callback, log_interval, name, reset_num_timesteps, progress_bar)

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        """
        Make gradient steps on windows of the replay buffer.

        :param gradient_steps: number of gradient steps
        :param batch_size: windows per step
        """
        assert self.random_streams is not None
        check_whole(1, batch_size=batch_size)
        self._connect_buffer_and_policy()
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.optimizers)
        check_scheduled(self._current_progress_remaining, learning_rate=self.optimizers[0].param_groups[0]["lr"])
        if isinstance(self.replay_buffer, TrajectoryReplayBuffer) and not self.replay_buffer.can_sample():
            return  # `learning_starts` steps are made, but not yet a whole chunk
        self._anneal_weights()
        for _ in range(gradient_steps):
            if isinstance(self.replay_buffer, TrajectoryReplayBuffer) and self.replay_buffer.follow_rotation(self._n_updates):
                self._connect_buffer_and_policy()  # the new rows may reside elsewhere
            metrics = self._make_update(batch_size)
            self._n_updates += 1
            self._metrics.add(metrics, self._n_updates)
        if gradient_steps > 0:
            self._check_told()

    def dump_logs(self) -> None:
        """Write log data; only here the metrics of the gradient updates leave the device."""
        self._metrics.flush(self.logger)
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.logger.record("train/online_phase", int(not self.is_offline))
        super().dump_logs()


def _parameters(optimizers: list[th.optim.Optimizer]) -> Iterator[th.Tensor]:
    return (parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"])
