"""Hindsight experience replay for windows of steps, from a dataset and from the environment."""

import copy
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from stable_baselines3.her import GoalSelectionStrategy

from sb3_flow.common.checks import arguments_of, check_choice, check_known, check_whole
from sb3_flow.common.observations import map_arrays
from sb3_flow.common.torch_vec_env import TorchVecEnv, to_numpy
from sb3_flow.common.wrapper_chain import chain
from sb3_flow.data.dataset import OfflineDataset
from sb3_flow.data.replay import TrajectoryReplayBuffer
from sb3_flow.data.rows import WindowSteps
from sb3_flow.data.windows import Windows

GOAL_KEYS = {"observation", "achieved_goal", "desired_goal"}
STRATEGIES = {strategy.name.lower(): strategy for strategy in GoalSelectionStrategy}
FUNCTIONS = ("compute_reward", "compute_terminated")
GoalFunction = Callable[[np.ndarray, np.ndarray, list[dict[str, Any]]], Any]
"""Takes achieved goals, desired goals and infos of n steps, and returns n values."""


class HerReplayBuffer(TrajectoryReplayBuffer):
    """
    Replay buffer that gives a part of the windows goals that their trajectories reached (arXiv 1707.01495), from a dataset and
    from online steps alike. With ``horizon_length=1`` its samples are those of SB3's ``HerReplayBuffer``.

    In ``1 - 1 / (n_sampled_goal + 1)`` of a batch's windows the ``desired_goal`` of all observations becomes the
    ``achieved_goal`` after one step of the same trajectory. The reward of each of the window's steps is computed anew, from
    the ``achieved_goal`` after that step, before rewards are normalised and summed.

    As in SB3 the flags ``terminated`` of the stored steps stay, so that a window goes on after its new goal was reached. That
    is right where episodes do not end at the goal. Where they do, ``compute_terminated`` says which steps would have been the
    last: steps after these pay nothing, and nothing is bootstrapped from then on, under both window rules. The function
    must then say of any other end of the task, too (a robot that fell), that it is an end.

    The last step of a trajectory that goes on, or that was cut by a reset, is the last step that is stored; SB3's buffer
    passes over such trajectories. Steps that the ring has overwritten are no goals.

    :param buffer_size: online steps to keep, over all environments
    :param observation_space: a Dict space with ``observation``, ``achieved_goal`` and ``desired_goal``
    :param action_space: Action space (Box)
    :param env: has ``compute_reward``; a model gives its own environment
    :param device: where samples are delivered
    :param n_envs: Number of parallel environments
    :param optimize_memory_usage: not supported, since goals are taken from ``next_observations``
    :param handle_timeout_termination: bootstrap after time limits (``info["TimeLimit.truncated"]``)
    :param n_sampled_goal: number of windows with new goals for each window that keeps its own
    :param goal_selection_strategy: the step that gives the goal: ``"future"``: uniformly from the window's first step to the
        trajectory's last, both inclusive; ``"final"``: the trajectory's last; ``"episode"``: any of the trajectory
    :param copy_info_dict: store the infos of online steps and pass copies of them to ``compute_reward``, which else is given
        empty dictionaries, as it is for all steps of a dataset
    :param compute_reward: ``compute_reward(achieved_goal, desired_goal, infos)``, of n steps at once; default: the method of
        the environment. A model without environment needs this function
    :param compute_terminated: likewise, says which steps end the task; True takes the environment's method, which must
        work on n steps at once. By default the stored flags stay
    :param options: arguments of ``TrajectoryReplayBuffer``; a model gives these, too
    """

    settings = (*TrajectoryReplayBuffer.settings, "n_sampled_goal", "her_ratio", "goal_selection_strategy", *FUNCTIONS)
    fixed_settings = (*TrajectoryReplayBuffer.fixed_settings, "copy_info_dict")
    infos: np.ndarray

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        env: VecEnv | None = None,
        device: th.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: GoalSelectionStrategy | str = "future",
        copy_info_dict: bool = False,
        compute_reward: GoalFunction | None = None,
        compute_terminated: GoalFunction | bool = False,
        **options: Any,
    ) -> None:
        check_known(type(self), options, arguments_of(TrajectoryReplayBuffer))
        _check_goals(observation_space)
        check_whole(0, n_sampled_goal=n_sampled_goal)
        if optimize_memory_usage:
            raise ValueError(
                "`optimize_memory_usage=True` drops the next observations, from which HerReplayBuffer takes goals: leave it "
                "out."
            )
        if not isinstance(goal_selection_strategy, GoalSelectionStrategy):
            name = goal_selection_strategy.lower() if isinstance(goal_selection_strategy, str) else goal_selection_strategy
            check_choice(tuple(STRATEGIES), goal_selection_strategy=name)
            goal_selection_strategy = STRATEGIES[name]
        if not (compute_reward is None or callable(compute_reward)):
            raise TypeError(f"`compute_reward` must be a function or None, but {compute_reward!r} was given.")
        if not (isinstance(compute_terminated, bool) or callable(compute_terminated)):
            raise TypeError(f"`compute_terminated` must be a function, True or False, but {compute_terminated!r} was given.")
        if not isinstance(copy_info_dict, bool):
            raise TypeError(f"`copy_info_dict` must be True or False, but {copy_info_dict!r} was given.")
        self.env = env
        self.n_sampled_goal, self.her_ratio = n_sampled_goal, 1 - 1.0 / (n_sampled_goal + 1)
        self.goal_selection_strategy, self.copy_info_dict = goal_selection_strategy, copy_info_dict
        self.compute_reward, self.compute_terminated = compute_reward, compute_terminated
        options["handle_timeout_termination"] = handle_timeout_termination
        super().__init__(buffer_size, observation_space, action_space, device, n_envs, **options)
        if copy_info_dict:
            self.infos = np.empty((self.buffer_size, n_envs), dtype=object)

    def __getstate__(self) -> dict[str, Any]:
        # as in SB3, environments need not be picklable; nor do the user's functions
        functions = {name: None for name in FUNCTIONS if callable(getattr(self, name))}
        return super().__getstate__() | functions | {"env": None}

    def set_env(self, env: VecEnv) -> None:
        """
        Set the environment that computes rewards; a model sets its own.

        :param env: has ``compute_reward``
        """
        self.env = env

    def connect(self, env: VecEnv | None, functions: dict[str, Any]) -> None:
        """
        Take the environment of a model, and the functions that a copy or a file of this buffer lacks.

        :param env: None leaves the present environment
        :param functions: the model's ``replay_buffer_kwargs``
        """
        self.env = self.env if env is None else env
        for name, default in zip(FUNCTIONS, (None, False), strict=True):
            if getattr(self, name) is None:
                setattr(self, name, functions.get(name, default))

    def truncate_last_trajectory(self) -> None:
        """Take the trajectories that are running for ended, with SB3's warning; they can be sampled as before."""
        if (self.trajectories.running_since < self.trajectories.clock).any():
            warnings.warn(
                "The last trajectory in the replay buffer will be truncated.\n"
                "If you are in the same episode as when the replay buffer was saved,\n"
                "you should use `truncate_last_traj=False` to avoid that issue."
            )
        self.cut_trajectories()

    def set_offline(self, dataset: OfflineDataset | None) -> None:
        if dataset is not None:
            _warn_of_last_goals(dataset)
        super().set_offline(dataset)

    def add(self, obs, next_obs, action, reward, done, infos) -> None:  # type: ignore[no-untyped-def]
        """Store one step of every environment; see ``ReplayBuffer.add``."""
        if self.copy_info_dict:
            self.infos[self.pos] = infos
        super().add(obs, next_obs, action, reward, done, infos)

    def sampling_key(self, env: VecNormalize | None = None) -> Hashable | None:
        """Give None: rewards are computed in Python, which no recording of updates holds."""
        return None

    def _relabel(self, parts: WindowSteps) -> None:
        n_windows, h = parts.steps.shape
        n_virtual = int(self.her_ratio * n_windows)
        if n_virtual == 0:
            return
        # the windows are not in random order: a share of them may come from the dataset
        chosen = th.randperm(n_windows, generator=self.generator, device=self.storage_device)[:n_virtual]
        windows, steps = Windows(*(column[chosen] for column in parts.windows)), parts.steps[chosen]
        assert isinstance(parts.observations, dict)
        goals = self._goals(windows).to(parts.observations["desired_goal"].dtype)
        for observations in (parts.observations, parts.next_observations):
            assert isinstance(observations, dict)
            observations["desired_goal"][chosen] = goals
        achieved = self._stored.after("achieved_goal", windows, steps, self.trajectories.clock).flatten(0, 1)
        of_steps = achieved.cpu().numpy(), goals.repeat_interleave(h, dim=0).cpu().numpy(), self._infos(windows, steps)
        rewards = self._ask("compute_reward", self.compute_reward, *of_steps).view(n_virtual, h)
        if self.compute_terminated is not False:
            goes_on = (1.0 - self._ends(*of_steps).view(n_virtual, h)).cumprod(dim=1)
            rewards[:, 1:] *= goes_on[:, :-1]
            parts.continues[chosen] = goes_on
        parts.rewards[chosen] = rewards

    @property
    def _reads_true_successors(self) -> bool:
        # a step that ended the task may go on under its new goal
        return super()._reads_true_successors or self.compute_terminated is not False

    def _ends(self, *of_steps: Any) -> th.Tensor:
        if self.compute_terminated is None:
            raise ValueError("`compute_terminated` is not part of the file that this buffer comes from: set it once more.")
        function = None if self.compute_terminated is True else self.compute_terminated
        ends = self._ask("compute_terminated", function, *of_steps)  # type: ignore[arg-type]
        if not ((ends == 0) | (ends == 1)).all():
            raise ValueError(f"`compute_terminated` must return True or False for each step, but returned {ends.unique()}.")
        return ends

    def _goals(self, windows: Windows) -> th.Tensor:
        """Draw a goal for each window, as they are stored."""
        strategy, last = self.goal_selection_strategy, windows.last
        if strategy is GoalSelectionStrategy.FINAL:
            step = last
        else:
            begin = windows.start if strategy is GoalSelectionStrategy.FUTURE else windows.first
            uniform = th.rand(len(last), generator=self.generator, device=self.storage_device, dtype=th.float64)
            step = begin + th.minimum((uniform * (last - begin + 1)).long(), last - begin)
        return self._stored.after("achieved_goal", windows, step[:, None], self.trajectories.clock).squeeze(1)

    def _infos(self, windows: Windows, steps: th.Tensor) -> list[dict[str, Any]]:
        if not self.copy_info_dict:
            return [{} for _ in range(steps.numel())]
        column = windows.column[:, None].expand_as(steps).flatten().cpu().numpy()
        stored = self.infos[steps.flatten().cpu().numpy() % self.buffer_size, column]
        return [copy.deepcopy(info) if number >= 0 else {} for info, number in zip(stored, column, strict=True)]

    def _ask(self, name: str, function: GoalFunction | None, *of_steps: Any) -> th.Tensor:
        """Compute a number for each of n steps, by a function or by the environment's method of that name."""
        achieved, desired, infos = of_steps
        of_steps = achieved.copy(), desired.copy(), infos  # a function may write into them
        if function is not None:
            values = function(*of_steps)
        elif self.env is not None:
            # as in SB3 the first environment answers, since all environments are alike
            if isinstance(chain(self.env)[-1], TorchVecEnv):  # which are one object
                values = self.env.get_attr(name, [0])[0](*of_steps)
                values = to_numpy(values) if isinstance(values, th.Tensor) else values
            else:
                (values,) = _ask_environment(self.env, name, *of_steps)
        else:
            raise ValueError(
                f"HerReplayBuffer needs `{name}`, but the model has no environment that has it: give the model an environment "
                f"(`env`, `set_env`), or the function itself: `replay_buffer_kwargs=dict({name}=...)`. SB3's own algorithms "
                "cannot use this buffer; RLPD of sb3_flow is SAC with an ensemble."
            )
        if np.iscomplexobj(values):
            raise ValueError(f"`{name}` must return real numbers, but returned complex numbers.")
        values, n = np.asarray(values, dtype=np.float32), len(of_steps[0])
        if values.shape not in ((n,), (n, 1)):
            raise ValueError(
                f"`{name}` was given the goals of {n} steps at once and must return {n} values, but returned "
                f"{f'an array of shape {values.shape}' if values.shape else 'a single value'}: a distance, for example, is "
                "computed over the last axis alone, `np.linalg.norm(achieved - desired, axis=-1)`."
            )
        return th.tensor(values.reshape(n), device=self.storage_device)


def _ask_environment(env: VecEnv, name: str, *of_steps: Any) -> list[Any]:
    try:
        return list(env.env_method(name, *of_steps, indices=[0]))
    except AttributeError as error:
        if env.has_attr(name):  # the method's own error
            raise
        raise ValueError(
            f"HerReplayBuffer needs `{name}`, but the environment has no such method: give the function itself, "
            f"`replay_buffer_kwargs=dict({name}=...)`."
        ) from error


def _check_goals(space: spaces.Space[Any]) -> None:
    if not isinstance(space, spaces.Dict) or not set(space.spaces) >= GOAL_KEYS:
        raise ValueError(
            f"`observation_space` must be a Dict space with the keys {sorted(GOAL_KEYS)} of a goal environment, but {space} "
            "was given."
        )
    achieved, desired = space["achieved_goal"], space["desired_goal"]
    if achieved.shape != desired.shape:
        raise ValueError(
            f"`achieved_goal` and `desired_goal` must have the same shape, but {achieved.shape} and {desired.shape} were "
            "given."
        )


def _warn_of_last_goals(dataset: OfflineDataset) -> None:
    """Warn of a dataset that seems made without the observations after terminated rows, where each row stands in for them."""
    last = dataset.trajectories[:, 1]
    ended = dataset.terminated[last]
    unchanged: list[bool] = []
    map_arrays(
        lambda rows, finals: unchanged.append(np.array_equal(rows[last[ended]], finals[ended])),
        *(dataset.observations, dataset.final_observations),
    )
    if ended.any() and all(unchanged):
        warnings.warn(
            f"In {dataset.source} nothing changes in the steps that end a trajectory with `terminated`: if the observations "
            "after these steps were not recorded, give `next_observations`: these steps achieved the goals in them."
        )
