"""Random streams, and saving and loading that lose nothing."""

import io
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, Self

import torch as th
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.type_aliases import GymEnv

from sb3_flow.common.checkpoints import AtomicSaves, write_atomically
from sb3_flow.common.clear_errors import ClearErrors
from sb3_flow.common.copies import DeepCopies
from sb3_flow.common.older_files import finding_moved_modules
from sb3_flow.common.wrapper_chain import unwrapped
from sb3_flow.data import HerReplayBuffer, OfflineDataset, PrioritizedReplayBuffer, TrajectoryReplayBuffer
from sb3_flow.data.residence import Storage
from sb3_flow.data.sources import naming_damaged_pickles
from sb3_flow.data.table import Sampling
from sb3_flow.data.trajectories import WindowRule
from sb3_flow.offline_to_online.actors import draw_seed
from sb3_flow.offline_to_online.chunking import ChunkedPolicy
from sb3_flow.offline_to_online.generative_policy import GenerativePolicy
from sb3_flow.offline_to_online.moving_average import MovingAverage
from sb3_flow.offline_to_online.offline_env import SpacesOnlyVecEnv
from sb3_flow.offline_to_online.older_names import OLD_NAMES, translate
from sb3_flow.offline_to_online.phase import ONLINE
from sb3_flow.offline_to_online.random_streams import RandomStreams

BUFFER_ARGUMENTS = ("horizon_length", "gamma", "sampling", "storage", "offline_fraction")
"""Arguments of an algorithm that its replay buffer takes, too."""


class PersistentAlgorithm(AtomicSaves, DeepCopies, ClearErrors, OffPolicyAlgorithm):
    """
    Off-policy algorithm that saves its own random streams, writes a file completely or not at all, and is unchanged by a load
    that fails.
    """

    horizon_length: int
    window_rule: ClassVar[WindowRule]
    offline_dataset: OfflineDataset | str | None
    offline_fraction: float | None
    sampling: Sampling
    storage: Storage
    random_streams: RandomStreams | None
    noise_seed: int | None
    """Seed of the noise of deterministic decisions, which depends on this seed and the observation alone."""
    phase = ONLINE

    @property
    def networks(self) -> dict[str, th.nn.Module]:
        """The policy's networks by name, also of a policy inside the wrapper that ``torch.compile`` returns."""
        return dict(unwrapped(self.policy).named_children())

    def set_random_seed(self, seed: int | None = None) -> None:
        """
        Set the seed of the pseudo-random generators (python, numpy, pytorch, gym, action space, and this model's own).

        :param seed: None seeds the model's own generators from torch's global generator
        """
        super().set_random_seed(seed)
        own_seed = draw_seed() if seed is None else seed
        devices = {"windows": th.device("cpu"), "update": self.device, "act": self.device, "explore": self.device}
        self.random_streams = RandomStreams(own_seed, devices, given_seed=self.seed)
        self.noise_seed = own_seed
        self._connect_buffer_and_policy()

    def _arguments_of_buffer(self) -> dict[str, Any]:
        """Collect the arguments of the model's own replay buffer beside those that SB3 gives."""
        derived = {name: getattr(self, name) for name in ("window_rule", *BUFFER_ARGUMENTS)}
        return {**derived, **self.replay_buffer_kwargs}

    def _connect_buffer_and_policy(self) -> None:
        """Give generators and seeds to buffer and policy, which may be copies, loaded or exchanged."""
        assert self.random_streams is not None
        buffer, policy = getattr(self, "replay_buffer", None), unwrapped(getattr(self, "policy", None))
        if isinstance(buffer, TrajectoryReplayBuffer):
            self.random_streams.move("windows", buffer.storage_device)
            buffer.generator, buffer.gamma = self.random_streams["windows"], self.gamma
        if isinstance(buffer, HerReplayBuffer):
            buffer.connect(None if isinstance(self.env, SpacesOnlyVecEnv) else self.env, self.replay_buffer_kwargs)
        if isinstance(policy, ChunkedPolicy):
            policy.generator = self.random_streams["act"]
            policy.exploration_generator = self.random_streams["explore"]
        if isinstance(policy, GenerativePolicy):
            assert self.noise_seed is not None
            policy.set_noise_seed(self.noise_seed)

    @classmethod
    def load(
        cls,
        path: str | Path | io.BufferedIOBase,
        env: GymEnv | None = None,
        device: th.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        **kwargs: Any,
    ) -> Self:
        """
        Load the model from a zip-file, see ``BaseAlgorithm.load``.

        :param path: path to the file (or a file-like) where to load the agent from
        :param env: the new environment to run the loaded model on
        :param device: Device on which the code should run.
        :param custom_objects: Dictionary of objects to replace upon loading.
        :param print_system_info: Whether to print system info from the saved model and the current system info
        :param force_reset: Force call to ``reset()`` before training
        :param kwargs: extra arguments to change the model when loading
        :return: new model instance with loaded parameters
        """
        for name in OLD_NAMES:
            if name in kwargs:
                raise ValueError(f"`{name}` is called `acting_mode` now.")
        settings = (env, device, custom_objects, print_system_info, force_reset)
        return super().load(path, *settings, **kwargs, _given_at_load=tuple(kwargs))

    def _translate_old_names(self) -> None:
        """Read older names of arguments from a file, unless ``load`` was given these arguments."""
        state = vars(self)
        given = {name: state[name] for name in state.pop("_given_at_load", ())}
        translate(self.policy_kwargs, translate(state))
        state.update(given)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.phase.environment_steps is not None:  # copied during an offline phase, which only the original goes on with
            self.num_timesteps, self.phase = self.phase.environment_steps, ONLINE
        if isinstance(self.env, SpacesOnlyVecEnv):
            self.env = None
        if self.random_streams is not None:
            self._connect_buffer_and_policy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        buffer = getattr(self, "replay_buffer", None)
        if isinstance(buffer, TrajectoryReplayBuffer):  # the copy of a buffer has no functions and no dataset
            copied.replay_buffer.take_settings(buffer)
            if buffer.offline_dataset is not None:
                copied.replay_buffer.set_offline(buffer.offline_dataset)
        if copied.random_streams is not None:
            copied._connect_buffer_and_policy()
        return copied

    def _excluded_save_params(self) -> list[str]:
        # the policy has the networks
        averages = [name for name, value in vars(self).items() if isinstance(value, MovingAverage)]
        excluded = [*super()._excluded_save_params(), "_loaded", "_metrics", "phase", *self.networks, *averages]
        if not isinstance(self.offline_dataset, str):
            excluded.append("offline_dataset")  # the data is the user's
        return excluded

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        optimizers = [f"{name}.optimizer" for name, part in self.networks.items() if "optimizer" in vars(part)]
        return ["policy", *optimizers], []

    def save(self, path: str | Path | io.BufferedIOBase, exclude: Any = None, include: Any = None) -> None:
        """
        Save the model, completely or not at all, see :meth:`AtomicSaves.save`. This works during an offline phase, too.

        :param path: path to the file where the model should be saved
        :param exclude: name of parameters that should be excluded in addition to the default ones
        :param include: name of parameters that might be excluded but should be included anyway
        """
        clock = self.num_timesteps
        if self.phase.environment_steps is not None:
            self.num_timesteps = self.phase.environment_steps
        try:
            super().save(path, exclude, include)
        finally:
            self.num_timesteps = clock

    def save_replay_buffer(self, path: str | Path | io.BufferedIOBase) -> None:
        """
        Save the online steps, without the offline dataset, as a pickle file, completely or not at all.

        :param path: Path to the file where the replay buffer should be saved
        """
        save: Callable[[Any], None] = super().save_replay_buffer
        write_atomically(path, "pkl", save)

    def load_replay_buffer(self, path: str | Path | io.BufferedIOBase, truncate_last_traj: bool = True) -> None:
        """
        Load online steps from a pickle file. The offline dataset of the model stays, and so does what the model decides about
        sampling.

        :param path: Path to the pickled replay buffer.
        :param truncate_last_traj: True if the environments start anew, so that trajectories that were running when the
            buffer was saved are not continued; False if the same episodes go on
        :raises ValueError: if the buffer does not fit the model, or the file is damaged; the old buffer stays then
        """
        previous = getattr(self, "replay_buffer", None)
        try:
            with finding_moved_modules(), naming_damaged_pickles(path):
                super().load_replay_buffer(path, truncate_last_traj)
            loaded = self.replay_buffer
            assert loaded is not None
            names = ["n_envs", "observation_space", "action_space"]
            if isinstance(loaded, TrajectoryReplayBuffer):
                names.append("horizon_length")
            elif self.horizon_length > 1:
                raise ValueError(f"`horizon_length={self.horizon_length}` needs a TrajectoryReplayBuffer, not {type(loaded)}.")
            wanted = self.replay_buffer_class or TrajectoryReplayBuffer
            if not isinstance(loaded, TrajectoryReplayBuffer) and getattr(previous, "offline_dataset", None) is not None:
                raise ValueError(
                    f"The replay buffer is a {type(loaded).__name__}, which cannot hold the model's dataset: make it a "
                    "dataset, too, by `OfflineDataset.from_replay_buffer`."
                )
            own = HerReplayBuffer, PrioritizedReplayBuffer
            if any(isinstance(loaded, kind) != issubclass(wanted, kind) for kind in own):
                raise ValueError(
                    f"The replay buffer is a {type(loaded).__name__}, but the model has "
                    f"`replay_buffer_class={wanted.__name__}`: load the model with the class of the file."
                )
            compared: list[tuple[str, Any]] = [(name, self) for name in names]
            own_buffer = previous
            if not isinstance(previous, TrajectoryReplayBuffer) and issubclass(wanted, TrajectoryReplayBuffer):
                # it was deleted, or exchanged
                own_buffer = wanted(1, self.observation_space, self.action_space, "cpu", **self._arguments_of_buffer())
            if isinstance(loaded, TrajectoryReplayBuffer) and isinstance(own_buffer, TrajectoryReplayBuffer):
                compared += [(name, own_buffer) for name in loaded.fixed_settings]
            for name, model in compared:
                theirs, ours = getattr(loaded, name), getattr(model, name)
                if theirs != ours:
                    raise ValueError(f"The replay buffer has `{name}={theirs}`, but the model has `{name}={ours}`.")
            if isinstance(loaded, TrajectoryReplayBuffer):
                if isinstance(own_buffer, TrajectoryReplayBuffer):
                    loaded.take_settings(own_buffer)
                if truncate_last_traj and isinstance(loaded, HerReplayBuffer):
                    loaded.truncate_last_trajectory()  # which warns, as SB3 does
                elif truncate_last_traj:
                    loaded.cut_trajectories()
                if isinstance(previous, TrajectoryReplayBuffer) and previous.offline_dataset is not None:
                    loaded.set_offline(previous.offline_dataset)
        except BaseException:
            self.replay_buffer = previous
            raise
        self._connect_buffer_and_policy()

    def set_parameters(
        self, load_path_or_dict: str | dict[str, Any], exact_match: bool = True, device: th.device | str = "auto"
    ) -> None:
        """
        Load parameters from a given zip-file or a nested dictionary; if that fails the model is as it was.

        :param load_path_or_dict: see ``BaseAlgorithm.set_parameters``
        :param exact_match: whether all parameters must be given
        :param device: Device on which the code should run.
        """
        before: dict[str, Any] = deepcopy(self.get_parameters())
        try:
            super().set_parameters(load_path_or_dict, exact_match, device)
        except BaseException:
            super().set_parameters(before, exact_match=True, device=device)
            raise
