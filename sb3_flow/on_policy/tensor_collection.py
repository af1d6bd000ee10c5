"""The collection loop over environments that take and return tensors: what a step returns stays on the device."""

import time
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticPolicy

from sb3_flow.common.observations import joined, map_arrays
from sb3_flow.common.torch_vec_env import Infos, TensorStep, to_numpy
from sb3_flow.on_policy.finite import decide
from sb3_flow.on_policy.rollout_buffer import EstimatedRollouts, FinalObservation
from sb3_flow.on_policy.tensor_views import TensorEnv, TensorView


class TensorRollout:
    """
    Hold a rollout on the device, time-major, ``(n_steps, n_envs, ...)``. The memory is made in the first rollout, and stays.

    :param n_steps: steps of each environment
    """

    def __init__(self, n_steps: int):
        self.n_steps = n_steps
        self.columns: dict[str, th.Tensor] = {}
        self.observations: Any = None
        self.final: list[tuple[int, Any]] = []
        """Number and last observations of the episodes that a time limit cut, by step, if the environments tell them."""

    def put(self, step: int, **columns: Any) -> None:
        """Write columns of a step, shape ``(n_envs, ...)`` each."""
        for name, column in columns.items():
            self.columns[name] = self._written(self.columns.get(name), step, column, name)

    def put_observations(self, step: int, observations: Any) -> None:
        """Write the observations that a step follows."""
        if isinstance(observations, dict):
            places = self.observations if isinstance(self.observations, dict) else {}
            self.observations = {
                key: self._written(places.get(key), step, part, f"observations[{key!r}]") for key, part in observations.items()
            }
        else:
            self.observations = self._written(self.observations, step, observations, "observations")

    def _written(self, place: Any, step: int, values: th.Tensor, name: str) -> th.Tensor:
        fits = isinstance(place, th.Tensor) and place.shape[1:] == values.shape and place.dtype == values.dtype
        if step == 0 and not (fits and place.device == values.device):
            place = values.new_zeros((self.n_steps, *values.shape))
        elif not fits:
            raise ValueError(
                f"`{name}` must keep shape and type: {tuple(place.shape[1:])}, {place.dtype} at first, but "
                f"{tuple(values.shape)}, {values.dtype} later."
            )
        place[step] = values
        made: th.Tensor = place
        return made

    def put_final(self, found: TensorStep) -> bool:
        """
        Keep the last observations of episodes that a time limit cut, if the environments tell them at this step.

        :return: whether they did
        """
        if found.final_observations is None:
            return False
        places = (found.truncated & ~found.terminated).nonzero().flatten()
        if len(places):
            self.final.append((len(places), to_numpy(map_arrays(lambda part: part[places], found.final_observations))))
        return True


def seen_as_arrays(device: th.device) -> bool:
    """Say whether tensors of a device can be seen as arrays at no cost."""
    return device.type == "cpu"


def collect_tensors(
    model: Any, env: TensorEnv, callback: BaseCallback, rollout_buffer: EstimatedRollouts, n_rollout_steps: int
) -> bool:
    """
    Collect a rollout from environments of tensors, for ``RolloutCollection.collect_rollouts``. On the CPU callbacks see arrays
    in ``locals``, and else tensors; statistics of episodes are written at the end.

    :return: False if the callback ended training
    """
    try:
        return _collect(model, env, callback, rollout_buffer, n_rollout_steps)
    finally:
        model.tensors_seen = None
        if isinstance(env, TensorView):
            env.write()


def _collect(
    model: Any, env: TensorEnv, callback: BaseCallback, rollout_buffer: EstimatedRollouts, n_rollout_steps: int
) -> bool:
    arrays = seen_as_arrays(model.device)
    if model.tensor_rollout is None or model.tensor_rollout.n_steps != n_rollout_steps:
        model.tensor_rollout = TensorRollout(n_rollout_steps)
    record: TensorRollout = model.tensor_rollout
    record.final = []

    def here(tensors: Any) -> Any:
        """Bring tensors to the policy's device; on the CPU they are seen as arrays."""
        return to_numpy(tensors) if arrays else map_arrays(lambda part: part.to(model.device), tensors)

    def seen(observations: Any) -> None:
        """Show observations to the policy; tensors stay out of SB3's attribute, which files hold."""
        if arrays:
            model._last_obs = to_numpy(observations)
        else:
            model.tensors_seen = observations

    model._begin_rollout(env, rollout_buffer, use_masking=False)
    alive = th.ones(env.num_envs, dtype=th.bool, device=env.device) if model.whole_episodes else None
    callback.on_rollout_start()
    model.make_way_for_hooks()
    n_steps = 0
    while n_steps < n_rollout_steps and (alive is None or bool(alive.any())):
        model._draw_noise(n_steps)
        observations = map_arrays(lambda part: part.to(model.device), env.observations)
        record.put_observations(n_steps, observations)
        seen(observations)
        with th.no_grad():
            act = partial(model._act, env, False)
            if arrays:
                actions, values, log_probs, _ = decide(act, model.policy, model._last_obs)
                actions = th.from_numpy(actions)
            else:  # a look at each step would wait for the device: `check_actions` looks at the rollout
                actions, values, log_probs, _ = act()
        record.put(n_steps, actions=actions, values=values.flatten(), log_probs=log_probs)
        record.put(n_steps, episode_starts=env.episode_starts)
        clipped_actions = bounded_tensors(model.policy, model.action_space, actions).to(env.device)
        found = env.step_tensors(clipped_actions)
        model._count_step(model.env)
        env.tells_last = record.put_final(found) or env.tells_last
        nobody = th.zeros_like(found.terminated)
        resets, successes = (nobody if flags is None else flags for flags in (found.resets, found.successes))
        columns = {"rewards": found.rewards, "terminated": found.terminated, "truncated": found.truncated}
        columns |= {"returns": found.episode_returns, "lengths": found.episode_lengths, "successes": successes}
        record.put(n_steps, alive=~resets if alive is None else alive & ~resets, **columns)
        n_steps += 1
        shown = {"actions": actions, "clipped_actions": clipped_actions, "values": values, "log_probs": log_probs}
        shown |= {"new_obs": found.observations, "rewards": found.rewards, "dones": found.dones}
        for name in ("actions", "clipped_actions", "new_obs", "rewards", "dones"):
            shown[name] = here(shown[name])
        if arrays and isinstance(env, TensorView):
            env.write()  # a callback may evaluate with them
        shown |= {"infos": Infos(found, env.started, observations), "self": model, "env": model.env, "n_steps": n_steps}
        callback.update_locals(shown | {"rollout_buffer": rollout_buffer, "n_rollout_steps": n_rollout_steps})
        if not callback.on_step():
            note_episodes(model, env, record, n_steps, tells_successes=found.successes is not None)
            return end_together(model, env, False)
        if alive is not None:
            alive = alive & ~found.dones
    if alive is not None and bool(alive.all()):
        model._warn_of_cut_episodes(n_rollout_steps)
    fill_rollout(model, env, record, rollout_buffer, n_steps)
    note_episodes(model, env, record, n_steps, tells_successes=found.successes is not None)
    if not end_together(model, env, True):
        return False
    seen(map_arrays(lambda part: part.to(model.device), env.observations))
    with th.no_grad():
        values = model._last_values()
    model._estimate(rollout_buffer, values, to_numpy(found.dones))
    model._last_obs, model._last_episode_starts = to_numpy(env.observations), to_numpy(env.episode_starts)
    callback.update_locals({"values": values})
    callback.on_rollout_end()
    return True


def end_together(model: Any, env: TensorEnv, going_on: bool) -> bool:
    """Count what came to all ranks, whose statistics this rank's must be a part of; see ``LearnsTogether._end_together``."""
    if isinstance(env, TensorView):
        env.write()
    ended: bool = model._end_together(going_on)
    return ended


def note_episodes(model: Any, env: TensorEnv, record: TensorRollout, n_steps: int, tells_successes: bool) -> None:
    """Add the episodes that ended in a rollout's steps to SB3's statistics."""
    names = ("terminated", "truncated", "alive", "returns", "lengths", "successes")
    columns = {name: to_numpy(record.columns[name][:n_steps]) for name in names}
    ended = (columns["terminated"] | columns["truncated"]) & columns["alive"]
    seconds = round(time.time() - env.started, 6)
    numbers = (columns[name][ended].tolist() for name in ("returns", "lengths", "successes"))
    infos = [
        {"episode": {"r": total, "l": length, "t": seconds}} | ({"is_success": success} if tells_successes else {})
        for total, length, success in zip(*numbers, strict=True)
    ]
    model._update_info_buffer(infos, np.ones(len(infos), dtype=bool))


def fill_rollout(model: Any, env: TensorEnv, record: TensorRollout, rollout_buffer: EstimatedRollouts, n_steps: int) -> None:
    """Fill the buffer: the columns leave the device together, and the observations stay there."""
    if n_steps < rollout_buffer.buffer_size:
        rollout_buffer.pos = n_steps
        rollout_buffer.shorten()
    columns = {name: to_numpy(column[:n_steps]) for name, column in record.columns.items()}
    observations = map_arrays(lambda part: part[:n_steps], record.observations)
    check_actions(model.policy, columns, observations)
    terminated, cut = columns["terminated"], columns["truncated"] & ~columns["terminated"]
    rollout_buffer.raw_rewards[:], rollout_buffer.alive[:] = columns["rewards"], columns["alive"]
    rollout_buffer.terminated[:] = terminated
    rewards = columns["rewards"].copy()
    if cut.any():
        steps, envs = (place.tolist() for place in np.nonzero(cut))
        last = last_observations(env, record, observations, steps, envs)
        rows = [map_arrays(itemgetter(row), last) for row in range(len(steps))]
        final = [FinalObservation(*place) for place in zip(steps, envs, rows, strict=True)]
        with th.no_grad():
            values = model._values_of(final).cpu().numpy()
        rewards[steps, envs] += model.gamma * values
        rollout_buffer.record_final(final, values)
    if seen_as_arrays(model.device):
        observations = to_numpy(observations)
    judged = columns["values"], columns["log_probs"]
    rollout_buffer.fill(observations, columns["actions"], rewards, columns["episode_starts"], *judged)


def bounded_tensors(policy: ActorCriticPolicy, space: spaces.Space[Any], actions: th.Tensor) -> th.Tensor:
    """Bring actions that a policy sampled into the bounds of the action space, as ``bounded_actions`` does with arrays."""
    if not isinstance(space, spaces.Box):
        return actions
    low, high = (th.as_tensor(bound, dtype=actions.dtype, device=actions.device) for bound in (space.low, space.high))
    return low + 0.5 * (actions + 1.0) * (high - low) if policy.squash_output else actions.clamp(low, high)


def check_actions(policy: ActorCriticPolicy, columns: dict[str, np.ndarray], observations: Any) -> None:
    """
    Refuse a rollout with actions that are not finite.

    :raises FloatingPointError: if an action, or its log-probability, is not finite
    """
    broken = [name for name in ("actions", "log_probs") if not np.isfinite(columns[name]).all()]
    if broken:
        parts = observations.values() if isinstance(observations, dict) else [observations]
        finite = all(bool(th.isfinite(part).all()) for part in parts)
        raise FloatingPointError(
            f"{type(policy).__name__} decided on actions that are not finite ({', '.join(broken)}). The rollout's "
            f"observations are {'finite' if finite else 'not finite, either'}. Nothing was learned from this rollout."
        )


def last_observations(env: TensorEnv, record: TensorRollout, observations: Any, steps: list[int], envs: list[int]) -> Any:
    """
    Find the last observations of episodes that a time limit cut.

    :param observations: those of the rollout, as ``record`` has them
    :param steps: steps at which the episodes were cut
    :param envs: environments of these episodes
    :return: arrays, with a row for each episode
    """
    if record.final:
        found = [rows for _, rows in record.final]
        if sum(number for number, _ in record.final) != len(steps):
            raise ValueError("`env` told the last observations of some episodes only; all or none were expected.")
        return joined(found)
    if not env.resets_late:  # nobody tells them: those before stand for them
        if env.tells_last:
            raise ValueError("`env` told the last observations of some episodes only; all or none were expected.")
        return to_numpy(map_arrays(lambda part: part[steps, envs], observations))

    def after(part: th.Tensor, present: th.Tensor) -> th.Tensor:
        """Pick what follows the steps: in the rollout, or after it."""
        following = [min(step + 1, len(part) - 1) for step in steps]
        picked = part[following, envs]
        for row, (step, number) in enumerate(zip(steps, envs, strict=True)):
            if step + 1 == len(part):
                picked[row] = present[number]
        return picked

    return to_numpy(map_arrays(after, observations, env.observations))
