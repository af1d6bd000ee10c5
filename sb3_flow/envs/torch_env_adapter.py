"""Simulators that step many environments at once on a device, as a :class:`TorchVecEnv`."""

from typing import Any, Literal

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices

from sb3_flow.common.checks import check_choice
from sb3_flow.common.observations import map_arrays
from sb3_flow.common.torch_vec_env import Tensors, TensorStep, TorchVecEnv

Autoreset = Literal["same_step", "next_step"]
MODES = {"SameStep": "same_step", "NextStep": "next_step"}
"""Gymnasium's ``AutoresetMode`` by value."""
FINAL = ("final_obs", "final_observation")
"""Names of final observations in infos: Gymnasium's, ManiSkill's."""
SUCCESS = ("is_success", "success")
"""Names of successes in infos: SB3's, ManiSkill's."""
NOTHING = object()


def _found(envs: Any, name: str) -> Any:
    """Look an attribute up in an environment, and in what it wraps."""
    for place in (envs, getattr(envs, "unwrapped", envs)):
        if (value := getattr(place, name, None)) is not None:
            return value
    return NOTHING


def _bounded(space: spaces.Box, bounds: tuple[float, float] | None) -> spaces.Box:
    """Give an action space other bounds, or look whether its own are finite."""
    low, high = (space.low, space.high) if bounds is None else bounds
    if not (np.isfinite(low).all() and np.isfinite(high).all() and np.all(np.less(low, high))):
        given = f"None was given, and actions are {space}" if bounds is None else f"{bounds} was given"
        raise ValueError(
            f"`action_bounds` must be two finite numbers, the lower one first, but {given}. Simulators without bounds of "
            "their own usually expect actions in the order of 1: `action_bounds=(-1.0, 1.0)` clips them there."
        )
    return space if bounds is None else spaces.Box(*bounds, space.shape, space.dtype.type)


class TorchEnvAdapter(TorchVecEnv):
    """
    A :class:`TorchVecEnv` of any object that steps many environments at once with the methods of Gymnasium's ``VectorEnv``,
    ``reset(seed=, options=)`` and ``step(actions)``, and with tensors::

        env = TorchEnvAdapter(ManiSkillVectorEnv("PickCube-v1", num_envs=1024))  # ManiSkill
        env = TorchEnvAdapter(  # Isaac Lab
            gymnasium.make(task, cfg=cfg), autoreset="same_step", observation_key="policy", action_bounds=(-1.0, 1.0)
        )

        model = PPO("MlpPolicy", env, n_steps=32, batch_size=8192)

    :class:`JaxVecEnv` makes Gymnasium's environments on JAX.

    Isaac Lab does not tell the last observation of an episode: where a time limit cut it, the value of the observation before
    is taken instead, as its own trainers do.

    :param envs: the environments
    :param autoreset: "same_step" if the step that ends an episode returns the first observation of the next one, "next_step"
        if the step after it does. None: as ``envs.metadata["autoreset_mode"]`` says (Gymnasium), or ``envs.auto_reset``
        (ManiSkill)
    :param observation_key: part of Dict observations that is the observation; None for all of them
    :param action_bounds: lower and upper bound of each component of an action, finite, as SB3 needs it; None: those of the
        environments
    :raises ValueError: if the environments do not tell what is needed
    """

    def __init__(
        self,
        envs: Any,
        autoreset: Autoreset | None = None,
        observation_key: str | None = None,
        action_bounds: tuple[float, float] | None = None,
    ):
        self.envs, self.observation_key = envs, observation_key
        needed = {name: _found(envs, name) for name in ("num_envs", "single_observation_space", "single_action_space")}
        missing = [name for name, value in needed.items() if value is NOTHING]
        if missing or not hasattr(envs, "step") or not hasattr(envs, "reset"):
            raise ValueError(
                "`envs` must step many environments at once, with `reset`, `step`, `num_envs`, `single_observation_space` and "
                f"`single_action_space`, but {type(envs).__name__} has no {', '.join(missing) or 'reset and step'}."
            )
        observation_space = needed["single_observation_space"]
        if observation_key is not None:
            parts = list(observation_space) if isinstance(observation_space, spaces.Dict) else []
            if observation_key not in parts:
                raise ValueError(
                    f"`observation_key` must be a part of the observations, {parts or 'which have no parts'}, but "
                    f"{observation_key!r} was given."
                )
            observation_space = observation_space[observation_key]
        action_space = needed["single_action_space"]
        if isinstance(action_space, spaces.Box):
            action_space = _bounded(action_space, action_bounds)
        elif action_bounds is not None:
            raise ValueError(f"`action_bounds` must be None, since actions are {action_space}, but {action_bounds} was given.")
        device = _found(envs, "device")
        super().__init__(
            needed["num_envs"],
            observation_space,
            action_space,
            "cpu" if device is NOTHING else device,
            self._mode(autoreset) == "next_step",
        )

    def _mode(self, autoreset: Autoreset | None) -> str:
        told = (getattr(self.envs, "metadata", None) or {}).get("autoreset_mode")
        mode = MODES.get(str(getattr(told, "value", told)))
        if told is None and getattr(self.envs, "auto_reset", None) is True:
            mode = "same_step"
        if told is None and _found(self.envs, "func_env") is not NOTHING:  # Gymnasium's on JAX, of which some do not say so
            mode = "next_step"
        if autoreset is not None:
            check_choice(("same_step", "next_step"), autoreset=autoreset)
            if mode not in (None, autoreset):
                raise ValueError(f'`autoreset` is "{autoreset}", but {type(self.envs).__name__} says "{mode}".')
            return autoreset
        if mode is not None:
            return mode
        given = "None was given" if told is None else f"{told} was found"
        raise ValueError(
            f'`autoreset` must be "same_step" or "next_step", but {given}: {type(self.envs).__name__} does not say when it '
            "resets environments, or does not reset them by itself."
        )

    def _reset(self, seed: int | None, options: dict[str, Any] | None) -> Tensors:
        observations, _ = self.envs.reset(**{"seed": seed, **({} if options is None else {"options": options})})
        inner = getattr(self.envs, "unwrapped", self.envs)
        if _found(inner, "func_env") is not NOTHING:
            # Gymnasium's environments on JAX (1.4) would else reset once more those whose episodes had ended before
            inner.prev_done = inner.prev_done & False
        return self._observations(observations)

    def _step(self, actions: th.Tensor) -> TensorStep:
        observations, rewards, terminated, truncated, infos = self.envs.step(actions)
        final = None
        if not self.resets_late:
            final = next((infos[name] for name in FINAL if infos.get(name) is not None), None)
        told = infos.get("final_info", infos)
        successes = next((told[name] for name in SUCCESS if isinstance(told.get(name), th.Tensor)), None)
        rewards, terminated, truncated = (column.reshape(self.num_envs) for column in (rewards, terminated, truncated))
        return TensorStep(
            self._observations(observations),
            rewards,
            terminated,
            truncated,
            final_observations=None if final is None else self._observations(final),
            successes=None if successes is None else successes.reshape(self.num_envs),
        )

    def _observations(self, observations: Any) -> Tensors:
        if self.observation_key is not None:
            observations = observations[self.observation_key]

        def checked(part: Any) -> th.Tensor:
            if not isinstance(part, th.Tensor) or len(part) != self.num_envs:
                shown = f"a tensor of shape {tuple(part.shape)}" if isinstance(part, th.Tensor) else type(part).__name__
                raise ValueError(f"`envs` must return tensors with {self.num_envs} rows, but observations are {shown}.")
            return part

        found: Tensors = map_arrays(checked, observations)
        return found

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Get an attribute of the environments, or of what they wrap."""
        value = _found(self.envs, attr_name)
        if value is NOTHING and attr_name != "render_mode":
            raise AttributeError(f"{type(self.envs).__name__} has no attribute {attr_name!r}.")
        return [None if value is NOTHING else value] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute of the object that is not wrapped any more."""
        self._need_all(indices)
        setattr(getattr(self.envs, "unwrapped", self.envs), attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of the environments together, see :class:`TorchVecEnv`."""
        self._need_all(indices)
        return self._each(self.get_attr(method_name, [0])[0](*method_args, **method_kwargs))

    def close(self) -> None:
        """Close the environments."""
        self.envs.close()
