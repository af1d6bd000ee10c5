"""PPO whose environments run in other processes while this process learns."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch as th
from gymnasium import Env
from stable_baselines3.common.base_class import maybe_make_env
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.vec_env import VecEnv

from sb3_flow.collect.collectors import Collectors
from sb3_flow.collect.environment_transfer import factory_of, made_by, pack, unpack
from sb3_flow.collect.fork_server import fork_server
from sb3_flow.collect.shares import Shares
from sb3_flow.common.backends import Backend
from sb3_flow.common.checks import arguments_in, check_choice, check_number, check_whole, warn_without_effect
from sb3_flow.common.normalisers import normalisers, set_normalisers
from sb3_flow.common.ray_runtime import checked_actor_options, connected
from sb3_flow.common.wrapper_chain import chain
from sb3_flow.compiled.policy_losses import PolicyLoss
from sb3_flow.execution import Execution
from sb3_flow.on_policy.arguments import Recomputation
from sb3_flow.on_policy.reference import ReferencePolicy
from sb3_flow.ppo.collected import CollectedPPO, Mode, Place
from sb3_flow.ppo.ppo import PPO

OF_COLLECTORS = ("n_collectors", "collectors", "min_collectors", "ray_options", "collector_timeout")
OWN = ("mode", *OF_COLLECTORS, "max_policy_lag", "n_slots", "learner_threads")
SelfAsyncPPO = TypeVar("SelfAsyncPPO", bound="AsyncPPO")


class AsyncPPO(CollectedPPO):
    """
    Train by :class:`sb3_flow.PPO`, while other processes, the collectors, step the environments with copies of the policy.
    Rollouts come with the version of the policy that acted. If the policy has moved since, the learner evaluates values and
    log-probabilities again, V-trace (arXiv 1802.01561) corrects the estimates for the difference, and the loss "decoupled"
    (arXiv 2110.00641) keeps the difference out of the clipping. Where a step of the environments costs little, as on CartPole
    and Pendulum, PPO is sooner done.

    =========== ===========================================================================================================
    mode
    =========== ===========================================================================================================
    "lockstep"  the next rollout is collected with the weights from before the present update. The lag is one update, and zero
                for the first rollout of a ``learn``. The same seed repeats training to the last bit
    "free"      collectors take the freshest weights at each step and run ahead as far as there are slots. Rollouts
                with a step that is older than ``max_policy_lag`` updates are dropped
    "sync"      learning and collecting take turns, without lag: with one collector PPO to the last bit on the CPU
    =========== ===========================================================================================================

    **Several collectors.** With ``n_collectors=k``, ``env`` is a function (or an id), and each collector calls it for its
    share: ``env=lambda: make_vec_env("HalfCheetah-v5", n_envs=4)`` and two collectors are 8 environments. A rollout has
    ``n_steps`` steps of all. Seeds count on from share to share. In mode "sync" all act with the same weights, and the same
    seed repeats training to the last bit, as in "lockstep"; only random numbers of the actions differ from PPO's with the same
    environments. What comes to the statistics of ``VecNormalize`` is added up once a rollout, exactly; within a rollout a
    collector knows its own part alone.

    **The environments.** The first ``learn`` moves a copy of the environments into the collector, where the copy stays for the
    next ``learn``, as in an SB3 model. The given environments, ``get_env()``, serve for spaces and evaluation; ``learn``
    resets them (of several shares the first; the others are made when ``get_env()`` is stepped), but never steps them.
    Statistics of ``VecNormalize`` come back with each rollout. These statistics, and seeds, go to the collectors at the
    beginning of each ``learn``. Environments that cannot be copied (``SubprocVecEnv``, open files) are given as a function:
    ``env=lambda: SubprocVecEnv([make_env] * 8)`` is called once here and once in the collector. A copy of the model
    (``copy.deepcopy``, ``pickle``) starts collectors of its own.

    **Callbacks** see a rollout after its arrival: ``on_step`` is called for each of its steps in turn, with SB3's ``locals``,
    but "env" cannot be stepped or asked, and the rollout buffer is filled after the last step. ``num_timesteps`` counts the
    steps that were learned from.

    **Several machines.** With ``collectors="ray"`` (``pip install 'sb3-flow[ray]'``) collectors are actors of a Ray cluster:
    of the one that ``ray.init`` connected to, or ``RAY_ADDRESS`` names, or else of a local one. Weights go out once a rollout,
    rollouts come back as arrays, and with the same seed training is that of processes to the last bit in the modes "sync" and
    "lockstep". An actor that dies or hangs, with its machine or alone, is counted (``async/lost``) and made anew elsewhere;
    until then others collect its share beside theirs. An error is raised if fewer than ``min_collectors`` are left for two
    minutes, if a collector's place loses three in turn without a rollout between, and if the cluster's head does not answer
    for 20 seconds; then this program leaves the cluster, since Ray ends programs after 60.

    **Errors** in a collector make ``learn`` raise :class:`sb3_flow.collect.CollectorError`. After any error and after Ctrl-C
    all collectors are ended, the model stays as it is, and the next ``learn`` starts others. Idle collectors end with
    :meth:`close`, with the model and with the program.

    :param env: environment as for PPO, or a function without arguments that makes it, or makes the share of a collector
    :param mode: "lockstep", "free" or "sync"
    :param n_collectors: number of collectors, each of which keeps a core busy
    :param collectors: "process" for processes of this machine, "ray" for actors of a Ray cluster
    :param min_collectors: least number of Ray's collectors to go on with
    :param ray_options: options of each collector's actor, e.g. ``{"num_cpus": 2, "resources": {"simulator": 1}}``, see
        ``ray.actor``; the default is one CPU, and ``scheduling_strategy="SPREAD"``
    :param max_policy_lag: largest lag in mode "free", in updates
    :param n_slots: number of rollouts in shared memory, at least 2: the learner reads a slot, and collectors fill the
        other slots in mode "free", at most one slot in the other modes
    :param collector_timeout: seconds without a step or a reset of the environments after which a collector is killed; then a
        process is missing, which is an error, and an actor is lost
    :param learner_threads: torch's threads in this process during ``learn``, None to leave them; a collector has one thread.
        More threads than idle cores make small networks many times slower
    :param advantage: "vtrace"; "gae", which does not correct for lag; or "auto": "gae" in mode "sync", where there is no lag,
        and else "vtrace"
    :param policy_loss: one of PPO's, or "auto": "clip" in mode "sync", and else "decoupled", which learns more from a lag of
        one or two updates in some tasks, and less in others
    :param recompute_advantages: as for PPO, but "auto" is "never" where there may be lag: when a rollout arrives, advantages
        are estimated with the present networks. Models keep what was chosen, also models that were saved when "auto" was PPO's
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
        n_collectors: int = 1,
        collectors: Place = "process",
        min_collectors: int = 1,
        ray_options: dict[str, Any] | None = None,
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
        execution: Execution = "auto",
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: th.device | str = "auto",
        _init_setup_model: bool = True,
    ):
        given = arguments_in(locals(), *OWN)
        check_choice(get_args(Mode), mode=mode)
        check_choice(get_args(Place), collectors=collectors)
        check_choice(("auto", "vtrace", "gae"), advantage=advantage)
        check_choice(("auto", *get_args(PolicyLoss)), policy_loss=policy_loss)
        lag = mode != "sync"
        if advantage == "auto":
            given["advantage"] = "vtrace" if lag else "gae"
        if policy_loss == "auto":
            given["policy_loss"] = "decoupled" if lag else "clip"
        if recompute_advantages == "auto" and lag:
            given["recompute_advantages"] = "never"  # a rollout is estimated with the present networks when it arrives
        check_whole(1, n_collectors=n_collectors, min_collectors=min_collectors)
        if min_collectors > n_collectors:
            raise ValueError(f"`min_collectors` must be at most `n_collectors` ({n_collectors}), but it is {min_collectors}.")
        checked_actor_options(ray_options=ray_options)
        check_whole(0, max_policy_lag=max_policy_lag)
        check_whole(2, n_slots=n_slots)
        check_whole(1, learner_threads=1 if learner_threads is None else learner_threads)
        check_number(collector_timeout=collector_timeout)
        if not collector_timeout > 0:
            raise ValueError(f"`collector_timeout` must be above 0, but {collector_timeout} was given.")
        self.mode, self.n_collectors, self.max_policy_lag, self.n_slots = mode, n_collectors, max_policy_lag, n_slots
        self.collectors, self.min_collectors, self.ray_options = collectors, min_collectors, ray_options
        self.collector_timeout, self.learner_threads = collector_timeout, learner_threads
        self.policy_version = 0  # updates so far
        self.dropped_rollouts = 0
        self.rollout_versions = np.empty(0, dtype=np.int64)  # versions that acted at the steps of the present rollout
        ahead = None if mode == "free" else f'`mode` is "{mode}", which does not run ahead; "free" does'
        here = None if collectors == "ray" else '`collectors` is "process", which ends with any of them; "ray" makes them anew'
        warn_without_effect(self, max_policy_lag=ahead, n_slots=ahead, min_collectors=here, ray_options=here)
        self._collectors: Collectors | None = None
        self._collector_settings: tuple[Any, ...] = ()
        if env is not None and _init_setup_model:
            if collectors == "ray":
                connected('`collectors="ray"`')
            else:
                fork_server()  # imports while this process builds the model
        if env is not None and n_collectors > 1:
            given["env"] = self._split(partial(maybe_make_env, env, verbose) if isinstance(env, str) else env, verbose)
        super().__init__(**given)
        if self.env is not None and _init_setup_model:
            pack(self.env)  # raises if the environments cannot be moved

    @staticmethod
    def _wrap_env(env: Any, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        if callable(env) and not isinstance(env, (Env, VecEnv)):
            return made_by(env, verbose)
        return PPO._wrap_env(env, verbose, monitor_wrapper)

    def _split(self, env: GymEnv | Callable[[], Any], verbose: int) -> VecEnv:
        """Wrap an environment; put the environments of several collectors together."""
        wrapped = self._wrap_env(env, verbose)
        return wrapped if self.n_collectors == 1 or isinstance(wrapped, Shares) else Shares(wrapped, self.n_collectors)

    def _setup_model(self) -> None:
        if self.env is not None:  # `load` knows nothing of shares
            self.env = self._split(self.env, self.verbose)
            self.n_envs = self.env.num_envs
        super()._setup_model()

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        """
        Set the environments, as in SB3, and end the collectors, which have the old environments.

        :param env: the environment, or the function that makes the environments of one collector
        :param force_reset: as in SB3; collectors always begin with a reset
        """
        super().set_env(self._split(env, self.verbose), force_reset)
        self.close()

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
            if self._collectors is not None:
                self._collectors.cancel()  # a callback may have ended training
        except BaseException:
            self.close()
            raise
        finally:
            th.set_num_threads(threads)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.env is not None and factory_of(self.env) is not None:
            made = self._split(unpack(pack(self.env)), self.verbose)
            set_normalisers(made, deepcopy(normalisers(self.env, settings=True)))
            memo.update({id(link): other for link, other in zip(chain(self.env), chain(made), strict=True)})
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[str, Any]:
        # a copied or unpickled model starts a collector of its own
        return super().__getstate__() | {"_collectors": None}

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_collectors", "rollout_versions"]
