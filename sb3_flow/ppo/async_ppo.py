"""PPO whose environments run in a second process while the first process learns."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch as th
from gymnasium import Env, spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.vec_env import VecEnv

from sb3_flow.collect.collector import CollectedRollout, Collector
from sb3_flow.collect.collector_process import RandomState, random_state, set_random_state
from sb3_flow.collect.environment_transfer import (
    chain,
    comes_from_function,
    coming_reset,
    made_by,
    normalisers,
    pack,
    set_normalisers,
    unpack,
)
from sb3_flow.collect.fork_server import fork_server
from sb3_flow.collect.slots import Rollout, RolloutSpec
from sb3_flow.common.backends import Backend
from sb3_flow.common.checks import arguments_in, check_choice, check_number, check_whole, warn_without_effect
from sb3_flow.compiled.policy_losses import PolicyLoss
from sb3_flow.on_policy.arguments import Recomputation
from sb3_flow.on_policy.collection import bounded_actions
from sb3_flow.on_policy.reference import ReferencePolicy
from sb3_flow.on_policy.rollout_buffer import EstimatedRollouts
from sb3_flow.ppo.ppo import PPO

SelfAsyncPPO = TypeVar("SelfAsyncPPO", bound="AsyncPPO")
Mode = Literal["lockstep", "free", "sync"]


class AsyncPPO(PPO):
    """
    Train by :class:`sb3_flow.PPO`, while a second process, the collector, steps the environments with a copy of the policy.
    Rollouts come with the version of the policy that acted. If the policy has moved since, the learner evaluates values and
    log-probabilities again, V-trace (arXiv 1802.01561) corrects the estimates for the difference, and the loss "decoupled"
    (arXiv 2110.00641) keeps the difference out of the clipping.

    =========== ===========================================================================================================
    mode
    =========== ===========================================================================================================
    "lockstep"  the next rollout is collected with the weights from before the present update. The lag is one update, and zero
                for the first rollout of a ``learn``. The same seed repeats training to the last bit
    "free"      the collector takes the freshest weights at each step and runs ahead as far as there are slots. Rollouts
                with a step that is older than ``max_policy_lag`` updates are dropped
    "sync"      learning and collecting take turns, without lag: PPO to the last bit on the CPU
    =========== ===========================================================================================================

    **The environments.** The first ``learn`` moves a copy of the environments into the collector, where the copy stays for the
    next ``learn``, as in an SB3 model. The given environments, ``get_env()``, serve for spaces and evaluation; ``learn``
    resets them, but never steps them. Statistics of ``VecNormalize`` come back with each rollout. These statistics, and seeds,
    go to the collector at the beginning of each ``learn``. Environments that cannot be copied (``SubprocVecEnv``, open files)
    are given as a function: ``env=lambda: SubprocVecEnv([make_env] * 8)`` is called once here and once in the collector. A
    copy of the model (``copy.deepcopy``, ``pickle``) starts a collector of its own.

    **Callbacks** see a rollout after its arrival: ``on_step`` is called for each of its steps in turn, with SB3's ``locals``,
    but "env" cannot be stepped or asked, and the rollout buffer is filled after the last step. ``num_timesteps`` counts the
    steps that were learned from.

    **Errors** in the collector make ``learn`` raise :class:`sb3_flow.collect.CollectorError`. After any error and after Ctrl-C
    the collector is ended, the model stays as it is, and the next ``learn`` starts another collector. An idle collector ends
    with :meth:`close`, with the model and with the program.

    :param env: environment as for PPO, or a function without arguments that makes it
    :param mode: "lockstep", "free" or "sync"
    :param max_policy_lag: largest lag in mode "free", in updates
    :param n_slots: number of rollouts in shared memory, at least 2: the learner reads a slot, and the collector fills the
        other slots in mode "free", at most one slot in the other modes
    :param collector_timeout: seconds without a step or a reset of the environments after which the collector is killed and an
        error is raised
    :param learner_threads: torch's threads in this process during ``learn``, None to leave them; the collector has one thread.
        More threads than idle cores make small networks many times slower
    :param advantage: "vtrace"; "gae", which does not correct for lag; or "auto": "gae" in mode "sync", where there is no lag,
        and else "vtrace"
    :param policy_loss: one of PPO's, or "auto": "clip" in mode "sync", and else "decoupled"
    :param recompute_advantages: as for PPO, but "auto" is "never" where there may be lag: when a rollout arrives, advantages
        are estimated with the present networks
    """

    def __init__(
        self,
        policy: str | type[ActorCriticPolicy],
        env: GymEnv | str | Callable[[], Any],
        learning_rate: float | Schedule = 3e-4,
        n_steps: int = 2048,
        batch_size: int = 64,
        n_epochs: int = 10,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        clip_range: float | Schedule = 0.2,
        clip_range_vf: float | Schedule | None = None,
        normalize_advantage: bool = True,
        ent_coef: float = 0.0,
        vf_coef: float = 0.5,
        max_grad_norm: float = 0.5,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        rollout_buffer_class: type[RolloutBuffer] | None = None,
        rollout_buffer_kwargs: dict[str, Any] | None = None,
        target_kl: float | None = None,
        mode: Mode = "lockstep",
        max_policy_lag: int = 2,
        n_slots: int = 2,
        collector_timeout: float = 60.0,
        learner_threads: int | None = 1,
        advantage: Literal["auto", "vtrace", "gae"] = "auto",
        policy_loss: Literal["auto"] | PolicyLoss = "auto",
        clip_range_high: float | Schedule | None = None,
        dual_clip: float = 3.0,
        rho_bar: float = 1.0,
        c_bar: float = 1.0,
        kl_coef: float = 0.0,
        reference_policy: ReferencePolicy = None,
        recompute_advantages: Recomputation = "auto",
        backend: Backend = "auto",
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
    ):
        given = arguments_in(locals(), "mode", "max_policy_lag", "n_slots", "collector_timeout", "learner_threads")
        check_choice(get_args(Mode), mode=mode)
        check_choice(("auto", "vtrace", "gae"), advantage=advantage)
        check_choice(("auto", *get_args(PolicyLoss)), policy_loss=policy_loss)
        lag = mode != "sync"
        if advantage == "auto":
            given["advantage"] = "vtrace" if lag else "gae"
        if policy_loss == "auto":
            given["policy_loss"] = "decoupled" if lag else "clip"
        check_whole(0, max_policy_lag=max_policy_lag)
        check_whole(2, n_slots=n_slots)
        check_whole(1, learner_threads=1 if learner_threads is None else learner_threads)
        check_number(collector_timeout=collector_timeout)
        if not collector_timeout > 0:
            raise ValueError(f"`collector_timeout` must be above 0, but {collector_timeout} was given.")
        self.mode, self.max_policy_lag, self.n_slots = mode, max_policy_lag, n_slots
        self.collector_timeout, self.learner_threads = collector_timeout, learner_threads
        self.policy_version = 0  # updates so far
        self.dropped_rollouts = 0
        self.rollout_versions = np.empty(0, dtype=np.int64)  # versions that acted at the steps of the present rollout
        ahead = None if mode == "free" else f'`mode` is "{mode}", which does not run ahead; "free" does'
        warn_without_effect(self, max_policy_lag=ahead, n_slots=ahead)
        self._collector: Collector | None = None
        self._collector_settings: tuple[Any, ...] = ()
        super().__init__(**given)
        if self.env is not None and _init_setup_model:
            pack(self.env)  # raises if the environments cannot be moved

    @staticmethod
    def _wrap_env(env: Any, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        if callable(env) and not isinstance(env, (Env, VecEnv)):
            return made_by(env, verbose)
        return PPO._wrap_env(env, verbose, monitor_wrapper)

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        """
        Set the environments, as in SB3, and end the collector, which has the old environments.

        :param env: the environment
        :param force_reset: as in SB3; the collector always begins with a reset
        """
        super().set_env(env, force_reset)
        self.close()

    def close(self) -> None:
        """End the collector process, if it runs. The next ``learn`` starts another, with fresh environments."""
        collector, self._collector = self._collector, None
        if collector is not None:
            collector.stop()

    def learn(
        self: SelfAsyncPPO,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "AsyncPPO",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> SelfAsyncPPO:
        """
        Learn for a number of environment steps, as SB3's PPO does.

        :raises CollectorError: if the collector fails, dies or hangs
        """
        threads = th.get_num_threads()
        if self.learner_threads is not None:
            th.set_num_threads(self.learner_threads)
        try:
            super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)
            if self._collector is not None:
                self._collector.cancel()  # a callback may have ended training
        except BaseException:
            self.close()
            raise
        finally:
            th.set_num_threads(threads)
        return self

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        assert self.env is not None
        if self._collector is not None and self._collector_settings != self._settings:
            self.close()
        if self._collector is None:
            fork_server()  # imports while this process goes on
        # packed before SB3 resets this process's environments
        packed = pack(self.env) if self._collector is None else b""
        begin: dict[str, Any] = {
            "reset": reset_num_timesteps or self._last_obs is None,
            "coming_reset": coming_reset(self.env),
            "statistics": deepcopy(normalisers(self.env, settings=True)),
            "random": self._random_state() if self.mode == "sync" else int(th.randint(2**31, (1,)).item()),
        }
        found = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)
        if self._collector is None:
            self._collector, self._collector_settings = self._start(packed), self._settings
        set_normalisers(self.env, self._collector.begin(**begin))
        return found

    @property
    def _settings(self) -> tuple[Any, ...]:
        """List the settings that cannot change while the collector runs."""
        native = self.native is not None
        return self.mode, self.n_slots, self.n_steps, self.sde_sample_freq, self.collector_timeout, native

    def _random_state(self) -> RandomState:
        return random_state(None if self.native is None else self._generator_of_actions())

    def _start(self, packed: bytes) -> Collector:
        # the dtype of an observation may differ from the space's
        parts = RolloutSpec.parts(self._last_obs)  # type: ignore[arg-type]
        real = next((str(weight.dtype) for weight in self.policy.parameters()), "torch.float32").removeprefix("torch.")
        indices = isinstance(self.action_space, (spaces.Discrete, spaces.MultiDiscrete))
        spec = RolloutSpec(
            n_steps=self.n_steps,
            n_envs=self.n_envs,
            observations={key: (part.shape[1:], part.dtype.str) for key, part in parts.items()},
            action=(self.action_space.shape or (), "int64" if indices else real),
            real=real,
        )
        policy_kwargs = {"use_sde": self.use_sde, **self.policy_kwargs}
        return Collector(
            policy=self.policy,
            policy_arguments=(self.policy_class, (self.observation_space, self.action_space), policy_kwargs),
            env=packed,
            spec=spec,
            n_slots=self.n_slots,
            native=self.native is not None,
            fresh=self.mode == "free",
            sde_sample_freq=self.sde_sample_freq,
            timeout=self.collector_timeout,
        )

    def _request(self, consuming: int) -> None:
        """
        Request as many rollouts as are needed and the mode allows.

        :param consuming: number of rollouts that have arrived and are not counted yet
        """
        collector = self._collector
        assert collector is not None
        ahead = {"sync": 1 - consuming, "lockstep": 1, "free": self.n_slots - consuming}[self.mode]
        needed = -(-(self._total_timesteps - self.num_timesteps) // (self.n_steps * self.n_envs)) - consuming
        needed = max(needed, 1 - consuming)  # the awaited rollout is needed even if a callback has changed the counters
        while len(collector.outstanding) - consuming < min(ahead, needed):
            collector.weights.write(self.policy_version)
            collector.request(self._random_state() if self.mode == "sync" else None)

    def _next_rollout(self) -> CollectedRollout:
        """Wait for the next rollout that is not too old."""
        collector = self._collector
        assert collector is not None, "rollouts are collected within `learn`"
        while True:
            self._request(consuming=0)
            arrived = collector.receive()
            if self.mode != "free" or self.policy_version - arrived.rollout.versions.min() <= self.max_policy_lag:
                return arrived
            self.dropped_rollouts += 1
            collector.release()

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
        rollout, news, waited = self._next_rollout()
        self._request(consuming=1)
        assert self.env is not None and self._collector is not None
        set_normalisers(self.env, news["normalisers"])
        self.rollout_versions = rollout.versions.copy()
        lag = self.policy_version - self.rollout_versions
        self._last_obs = rollout.observation(0)
        self._last_episode_starts = rollout.episode_starts[0].copy()
        self._begin_rollout(self.env, rollout_buffer, use_masking=False)
        continue_training = self._replay(rollout, news, callback, rollout_buffer)
        self._collector.release()
        if not continue_training:
            return False
        if news["random_state"] is not None:
            set_random_state(news["random_state"], self._actions_generator)
        self.logger.record("async/lag_mean", float(lag.mean()))
        self.logger.record("async/lag_max", int(lag.max()))
        self.logger.record("async/wait_collector", waited)
        self.logger.record("async/wait_learner", news["waited"])
        self.logger.record("async/dropped", self.dropped_rollouts)
        return True

    def _replay(
        self, rollout: Rollout, news: dict[str, Any], callback: BaseCallback, rollout_buffer: EstimatedRollouts
    ) -> bool:
        """Show the steps of a rollout to the callback, and fill the buffer; return False if the callback ended training."""
        env, n_rollout_steps, final = self.env, rollout.spec.n_steps, rollout.finals()
        all_rewards, ends = rollout.rewards.astype(news["reward_dtype"]), rollout.terminated | rollout.truncated
        all_actions, all_values, all_log_probs = rollout.actions.copy(), rollout.values.copy(), rollout.log_probs.copy()
        bounded = bounded_actions(self.policy, self.action_space, all_actions)
        callback.on_rollout_start()
        for n_steps in range(n_rollout_steps):
            self._draw_noise(n_steps)
            actions, clipped_actions, rewards = all_actions[n_steps], bounded[n_steps], all_rewards[n_steps]
            values, log_probs = th.from_numpy(all_values[n_steps])[:, None], th.from_numpy(all_log_probs[n_steps])
            new_obs, dones, infos = rollout.observation(n_steps + 1), ends[n_steps], news["infos"][n_steps]
            for number, observation in final.get(n_steps, {}).items():
                infos[number]["terminal_observation"] = observation
            self.num_timesteps += self.n_envs
            callback.update_locals(locals())
            if not callback.on_step():
                return False
            self._update_info_buffer(infos, dones)
            rollout_buffer.raw_rewards[n_steps], rollout_buffer.terminated[n_steps] = rewards, dones
            self._add_final_values(rollout_buffer, rewards, dones, infos, n_steps)
            self._last_obs, self._last_episode_starts = new_obs, dones
        seen = rollout.spec.whole({key: part[:-1] for key, part in rollout.observations.items()})
        rollout_buffer.fill(seen, all_actions, all_rewards, rollout.episode_starts, all_values, all_log_probs)
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

    def _recomputation(self) -> str:
        once = self.recompute_advantages == "auto" and self.mode != "sync"
        return "never" if once else super()._recomputation()  # `_estimate` has taken account of the lag

    def train(self) -> None:
        """Update the policy with the rollout buffer."""
        super().train()
        self.policy_version += 1
        if self.mode == "free" and self._collector is not None:
            self._collector.weights.write(self.policy_version)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.env is not None and comes_from_function(self.env):
            made = unpack(pack(self.env))
            set_normalisers(made, deepcopy(normalisers(self.env, settings=True)))
            memo.update({id(link): other for link, other in zip(chain(self.env), chain(made), strict=True)})
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        # a copied or unpickled model starts a collector of its own
        return vars(self) | {"_collector": None}

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_collector", "rollout_versions"]
