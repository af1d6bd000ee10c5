"""PPO whose rollouts come from collectors: what is asked of them, and how an old rollout becomes the present one."""

import warnings
from copy import deepcopy
from typing import Any, Literal

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import MaybeCallback
from stable_baselines3.common.vec_env import VecEnv

from sb3_flow.collect.collector_process import random_state, set_random_state
from sb3_flow.collect.collectors import CollectedRollout, Collection, Collectors
from sb3_flow.collect.environment_transfer import coming_reset, pack
from sb3_flow.collect.fork_server import fork_server
from sb3_flow.collect.process_collectors import ProcessCollectors
from sb3_flow.collect.ray_collectors import RayCollectors
from sb3_flow.collect.shares import Shares
from sb3_flow.collect.slots import RolloutSpec
from sb3_flow.common.normalisers import merge_normalisers, normalisers, set_normalisers
from sb3_flow.common.ranks import n_ranks
from sb3_flow.common.ray_runtime import checked_actor_options
from sb3_flow.common.workers import available_cores
from sb3_flow.on_policy.collection import bounded_actions
from sb3_flow.on_policy.rollout_buffer import EstimatedRollouts
from sb3_flow.on_policy.tensor_normalising import check_wrappers
from sb3_flow.ppo.ppo import PPO

Mode = Literal["lockstep", "free", "sync"]
Place = Literal["process", "ray"]


class CollectedPPO(PPO):
    """Learn from rollouts that collectors bring; :class:`sb3_flow.AsyncPPO` has the constructor and its documentation."""

    mode: Mode
    n_collectors: int
    collectors: Place
    min_collectors: int
    ray_options: dict[str, Any] | None
    max_policy_lag: int
    n_slots: int
    collector_timeout: float
    policy_version: int
    dropped_rollouts: int
    rollout_versions: np.ndarray
    _collectors: Collectors | None
    _collector_settings: tuple[Any, ...]

    def close(self) -> None:
        """End the collector processes, if they run. The next ``learn`` starts others, with fresh environments."""
        collectors, self._collectors = self._collectors, None
        if collectors is not None:
            collectors.stop()

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        if n_ranks() > 1:
            raise ValueError(
                f"{n_ranks()} ranks train, but {type(self).__name__} learns in one process: take more collectors instead "
                '(`n_collectors`, or `collectors="ray"` on several machines), or PPO, which trains on several ranks.'
            )
        assert self.env is not None
        check_wrappers(self, self.env)
        if self._collectors is not None and self._collector_settings != self._settings:
            self.close()
        if self._collectors is None and self.collectors == "process":
            fork_server()  # imports while this process goes on
        # packed before SB3 resets this process's environments
        packed = pack(self.env) if self._collectors is None else b""
        statistics = deepcopy(normalisers(self.env, settings=True))
        begin: dict[str, Any] = {
            "reset": reset_num_timesteps or self._last_obs is None,
            "coming_reset": coming_reset(self.env),
            "statistics": statistics,
            "random": self._random_states(),
        }
        if isinstance(self.env, Shares):
            self.env.only_first = True
        try:
            found = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)
        finally:
            if isinstance(self.env, Shares):
                self.env.only_first = False
        if self._collectors is None:
            self._collectors, self._collector_settings = self._start(packed), self._settings
        after = self._collectors.begin(**begin)
        set_normalisers(self.env, statistics)
        self._add_statistics(after)
        return found

    @property
    def _recording(self) -> bool:
        """Say whether collectors tell what came to the statistics of normalisers, because the learner's are the whole."""
        return self.n_collectors > 1 or self.collectors == "ray"

    def _add_statistics(self, news: list[Any]) -> None:
        """Take the statistics of the only collector's normalisers, or what came to those of each of several."""
        assert self.env is not None
        if not self._recording:
            set_normalisers(self.env, news[0])
            return
        for added in news:
            merge_normalisers(self.env, added)

    @property
    def _settings(self) -> tuple[Any, ...]:
        """List the settings that cannot change while the collector runs."""
        native = self.native is not None
        sizes = self.n_collectors, self.n_slots, self.n_steps
        place = self.collectors, self.min_collectors, self.ray_options
        return self.mode, *sizes, *place, self.sde_sample_freq, self.collector_timeout, native

    def _random_states(self) -> list[Any]:
        """Give the state of this process's random generators to the only collector, or a seed to each of several."""
        if self.mode == "sync" and self.n_collectors == 1:
            return [random_state(None if self.native is None else self._generator_of_actions())]
        seed = int(th.randint(2**31, (1,)).item())
        return [seed + number for number in range(self.n_collectors)]

    def _start(self, packed: bytes) -> Collectors:
        # the dtype of an observation may differ from the space's
        parts = RolloutSpec.parts(self._last_obs)  # type: ignore[arg-type]
        real = next((str(weight.dtype) for weight in self.policy.parameters()), "torch.float32").removeprefix("torch.")
        indices = isinstance(self.action_space, (spaces.Discrete, spaces.MultiDiscrete))
        spec = RolloutSpec(
            n_steps=self.n_steps,
            n_envs=self.n_envs,
            n_collectors=self.n_collectors,
            observations={key: (part.shape[1:], part.dtype.str) for key, part in parts.items()},
            action=(self.action_space.shape or (), "int64" if indices else real),
            real=real,
        )
        policy_kwargs = {"use_sde": self.use_sde, **self.policy_kwargs}
        collection = Collection(
            policy=self.policy,
            policy_arguments=(self.policy_class, (self.observation_space, self.action_space), policy_kwargs),
            env=packed,
            spec=spec,
            n_slots=self.n_slots,
            native=self.native is not None,
            fresh=self.mode == "free",
            recording=self._recording,
            sde_sample_freq=self.sde_sample_freq,
            timeout=self.collector_timeout,
        )
        if self.verbose >= 1:
            where = "actors of Ray" if self.collectors == "ray" else "processes"
            print(f"Collecting in {self.n_collectors} {where}, {spec.share} environments each")
        if self.collectors == "ray":
            return RayCollectors(collection, self.min_collectors, checked_actor_options(ray_options=self.ray_options))
        if self.n_collectors > (cores := available_cores()):
            warnings.warn(
                f"`n_collectors` is {self.n_collectors}, but this process may use {cores} cores: each collector keeps a core "
                f"busy, and more than {cores} take turns.",
                stacklevel=2,
            )
        return ProcessCollectors(collection)

    def _request(self, consuming: int) -> None:
        """
        Request as many rollouts as are needed and the mode allows.

        :param consuming: number of rollouts that have arrived and are not counted yet
        """
        collectors = self._collectors
        assert collectors is not None
        ahead = self._ahead(consuming)
        needed = -(-(self._total_timesteps - self.num_timesteps) // (self.n_steps * self.n_envs)) - consuming
        needed = max(needed, 1 - consuming)  # the awaited rollout is needed even if a callback has changed the counters
        assert self.env is not None
        statistics = normalisers(self.env) if self._recording else None
        while len(collectors.outstanding) - consuming < min(ahead, needed):
            collectors.publish(self.policy_version)
            only = self.mode == "sync" and self.n_collectors == 1
            collectors.request(self._random_states()[0] if only else None, statistics)

    def _ahead(self, consuming: int) -> int:
        """Return the number of rollouts that may be asked for, beside those that have arrived and are not counted yet."""
        return {"sync": 1 - consuming, "lockstep": 1, "free": self.n_slots - consuming}[self.mode]

    def _next_rollout(self) -> CollectedRollout:
        """Wait for the next rollout that is not too old."""
        collectors = self._collectors
        assert collectors is not None, "rollouts are collected within `learn`"
        while True:
            self._request(consuming=0)
            arrived = collectors.receive()
            if self.mode != "free" or self.policy_version - arrived.rollout.versions.min() <= self.max_policy_lag:
                return arrived
            self.dropped_rollouts += 1
            self._add_statistics([news["normalisers"] for news in arrived.news])
            collectors.release()

    def collect_rollouts(  # type: ignore[override]
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: EstimatedRollouts, n_rollout_steps: int
    ) -> bool:
        """
        Wait for a rollout, and fill the buffer as if the rollout were collected now.

        :param env: not used
        :param callback: called at each step, and at the beginning and end of the rollout
        :param rollout_buffer: the buffer that is filled
        :param n_rollout_steps: steps of the rollout
        :return: False if the callback ended training
        """
        arrived = self._next_rollout()
        assert self.env is not None and self._collectors is not None
        self._add_statistics([news["normalisers"] for news in arrived.news])
        self._request(consuming=1)
        rollout = arrived.rollout
        self.rollout_versions = rollout.versions.copy()
        lag = self.policy_version - self.rollout_versions
        self._last_obs = rollout.first()
        self._last_episode_starts = rollout.episode_starts[0].copy()
        self._begin_rollout(self.env, rollout_buffer, use_masking=False)
        continue_training = self._replay(arrived, callback, rollout_buffer, n_rollout_steps)
        self._collectors.release()
        if not continue_training:
            return False
        if arrived.news[0]["random_state"] is not None:
            set_random_state(arrived.news[0]["random_state"], self._actions_generator)
        self.logger.record("async/lag_mean", float(lag.mean()))
        self.logger.record("async/lag_max", int(lag.max()))
        self.logger.record("async/wait_collector", arrived.waited)
        self.logger.record("async/wait_learner", max(news["waited"] for news in arrived.news))
        self.logger.record("async/dropped", self.dropped_rollouts)
        if self.collectors == "ray":
            self.logger.record("async/lost", self._collectors.lost)
        return True

    def _replay(
        self, arrived: CollectedRollout, callback: BaseCallback, rollout_buffer: EstimatedRollouts, n_rollout_steps: int
    ) -> bool:
        """Show the steps of a rollout to the callback, and fill the buffer; return False if the callback ended training."""
        env, final, seen = self.env, arrived.rollout.finals(), arrived.rollout.observed()
        all_rewards = arrived.rollout.rewards.astype(arrived.news[0]["reward_dtype"])
        ends, starts = arrived.rollout.terminated | arrived.rollout.truncated, arrived.rollout.episode_starts.copy()
        judged = arrived.rollout.actions, arrived.rollout.values, arrived.rollout.log_probs
        all_actions, all_values, all_log_probs = (column.copy() for column in judged)
        all_infos = arrived.infos()
        del arrived, judged  # a callback keeps `locals`, and with the rollout it would keep the shared memory
        values_by_step, log_probs_by_step = (
            th.from_numpy(all_values)[..., None].unbind(),
            th.from_numpy(all_log_probs).unbind(),
        )
        bounded, ending = bounded_actions(self.policy, self.action_space, all_actions), ends.any(axis=1).tolist()
        rollout_buffer.terminated[:] = ends
        callback.on_rollout_start()
        self.make_way_for_hooks()
        for n_steps in range(n_rollout_steps):
            self._draw_noise(n_steps)
            actions, clipped_actions, rewards = all_actions[n_steps], bounded[n_steps], all_rewards[n_steps]
            values, log_probs = values_by_step[n_steps], log_probs_by_step[n_steps]
            new_obs, dones, infos = seen.at(n_steps + 1), ends[n_steps], all_infos[n_steps]
            for number, observation in final.get(n_steps, {}).items():
                infos[number]["terminal_observation"] = observation
            self.num_timesteps += self.n_envs
            callback.update_locals(locals())
            if not callback.on_step():
                return False
            if ending[n_steps] or any("episode" in info for info in infos):
                self._update_info_buffer(infos, dones)
            rollout_buffer.raw_rewards[n_steps] = rewards
            if ending[n_steps]:
                self._add_final_values(rollout_buffer, rewards, dones, infos, n_steps)
            self._last_obs, self._last_episode_starts = new_obs, dones
        rollout_buffer.fill(seen.before_steps(), all_actions, all_rewards, starts, all_values, all_log_probs)
        n_steps = n_rollout_steps
        with th.no_grad():
            values = self._last_values()
        self._estimate(rollout_buffer, values, dones)
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    def _estimate(self, rollout_buffer: EstimatedRollouts, last_values: th.Tensor, dones: np.ndarray) -> None:
        if (self.rollout_versions == self.policy_version).all():
            super()._estimate(rollout_buffer, last_values, dones)
            return
        rollout_buffer.last_dones = dones
        self._estimate_again()
        for key, value in rollout_buffer.statistics.items():
            self.logger.record(key, value)

    def train(self) -> None:
        """Update the policy with the rollout buffer."""
        super().train()
        self.policy_version += 1
        if self.mode == "free" and self._collectors is not None:
            self._collectors.publish(self.policy_version)
