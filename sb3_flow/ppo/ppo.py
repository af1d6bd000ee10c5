"""Proximal Policy Optimization with a choice of advantages and losses."""

from typing import Any

import torch as th
from stable_baselines3 import PPO as SB3PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import GymEnv, Schedule

from sb3_flow.common.backends import Backend
from sb3_flow.common.checks import arguments_in
from sb3_flow.compiled.policy_losses import PolicyLoss
from sb3_flow.execution import Execution
from sb3_flow.on_policy.arguments import Recomputation
from sb3_flow.on_policy.estimators import Advantage
from sb3_flow.on_policy.policy_gradient import PolicyGradient
from sb3_flow.on_policy.reference import ReferencePolicy


class PPO(PolicyGradient, SB3PPO):
    """
    Train by SB3's PPO (arXiv 1707.06347), several times faster on the CPU, with a choice of advantage estimators and policy
    losses. With ``backend="torch"`` and otherwise default arguments the numbers are SB3's to the last bit. All arguments up to
    ``target_kl`` and from ``stats_window_size`` on are SB3's.

    ============== ========================================================================================================
    policy_loss    minimised loss; w = pi(a|s) / mu(a|s), where mu is the policy that acted; advantage A; e = clip_range
    ============== ========================================================================================================
    "clip"         -min(w A, clip(w, 1 - e, 1 + e_high) A); "clip-higher" of DAPO (arXiv 2503.14476) if e_high is given
    "dual_clip"    as "clip", for A < 0 at most -dual_clip A (arXiv 1912.09729), since w is unbounded there
    "gspo"         as "clip", with an episode's ratio, exp(mean_t log w_t), and mean advantage (arXiv 2507.18071)
    "gspo_token"   the episode's ratio with each step's own gradient and advantage (same paper, Eq. 14)
    "decoupled"    min(pi_0 / mu, rho_bar) times the clipped surrogate in u = pi / pi_0, with pi_0 the policy at the start of
                   the update (arXiv 2110.00641); differs from "clip" only if an older policy than pi_0 acted
    ============== ========================================================================================================

    In several processes of ``torch.distributed`` each steps environments of its own, and ``batch_size`` and time steps are
    those of all together; see the manual, "Scaling out".

    :param advantage: "gae" (arXiv 1506.02438), "vtrace" (arXiv 1802.01561; corrects returns and advantages for the policy's
        change since it acted; equal to GAE as long as the ratios are 1), or "group": without a critic, each step's return is
        compared with the other environments' returns from the same step of their episodes. Rollouts are then whole episodes
        of at most ``n_steps`` steps; see :class:`sb3_flow.GRPO`, which also drops the critic
    :param policy_loss: "clip", "dual_clip", "gspo", "gspo_token" or "decoupled"
    :param clip_range_high: epsilon of the upper side of the surrogate, a float or a schedule; None: ``clip_range``
    :param dual_clip: the bound of "dual_clip", above 1
    :param rho_bar: cap of the ratio of V-trace's TD errors, and of the weight of "decoupled"
    :param c_bar: cap of the ratio in V-trace's traces, at most ``rho_bar``
    :param kl_coef: weight of the exact KL(pi || reference) in the loss
    :param reference_policy: "initial" (the policy as it is built or loaded), the path of a saved model, a model, or a policy,
        with the networks of the trained policy. The reference's weights are saved with the model
    :param recompute_advantages: estimate advantages and returns again with the present networks: before each epoch but the
        first ("epoch"), after each gradient step ("minibatch", which passes over the rollout each time), or "never"; "auto" is
        "epoch" for V-trace, which would have nothing to correct otherwise, and "never" for the others
    :param backend: "native": acting and learning in compiled loops, several times faster, for ``MlpPolicy`` with tanh or ReLU
        on the CPU (no gSDE, no images); "torch": SB3's arithmetic to the last bit; "auto": "native", unless networks and
        minibatches are so large that torch is faster. This choice follows a fixed rule when the model is built, is saved with
        the model, and is printed with ``verbose=1``. Both backends take the same minibatches and agree to rounding; native
        actions come from a generator of their own
    :param execution: "graph": gradient steps on a CUDA device are recorded as a CUDA graph and replayed; "eager": torch
        executes operator by operator; "auto": graph on a CUDA device. Steps that cannot be recorded (minibatches of whole
        episodes, ``target_kl``, gSDE) are executed eagerly, and ``verbose=1`` prints why
    """

    def __init__(
        self,
        policy: str | type[ActorCriticPolicy],
        env: GymEnv | str,
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
        advantage: Advantage = "gae",
        policy_loss: PolicyLoss = "clip",
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
        super().__init__(**arguments_in(locals()))
