"""The update of PPO and its variants with masks and memory, with a choice of advantages and of policy losses."""

import warnings
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import Schedule
from stable_baselines3.common.utils import FloatSchedule

from sb3_flow.common.backends import Backend, choose_backend, requested_backend
from sb3_flow.common.checks import check_scheduled, naming_policy_arguments
from sb3_flow.common.ranks import backward, is_first, mean_over_ranks, n_ranks
from sb3_flow.compiled.policy_losses import PolicyLoss
from sb3_flow.execution import Execution
from sb3_flow.execution.watched_networks import WatchedNetworks
from sb3_flow.losses import clipped_surrogate, decoupled_surrogate, gspo_loss, gspo_token_loss, segment_mean, value_loss
from sb3_flow.on_policy.arguments import (
    Recomputation,
    check_choices,
    check_numbers,
    check_sizes,
    warn_of_idle_arguments,
)
from sb3_flow.on_policy.backend_choice import linear_layers, not_covered, torch_is_faster
from sb3_flow.on_policy.estimators import Advantage, Estimator
from sb3_flow.on_policy.finite import check_pass
from sb3_flow.on_policy.flat_parameters import own_tensors
from sb3_flow.on_policy.gradient_steps import FlatAdam, in_place_activations, unchecked_distributions
from sb3_flow.on_policy.grouping import Groups
from sb3_flow.on_policy.minibatches import AT_ONCE, Minibatch
from sb3_flow.on_policy.recorded_steps import RecordedSteps
from sb3_flow.on_policy.reference import ReferencePolicy
from sb3_flow.on_policy.rollout_buffer import with_estimates
from sb3_flow.on_policy.rollout_evaluation import EvaluatesRollouts
from sb3_flow.on_policy.whole_batch import WholeBatch, explained_of_ranks, metrics_of_ranks

if TYPE_CHECKING:
    from sb3_flow.on_policy.native_learner import NativeLearner


class PolicyGradient(EvaluatesRollouts):
    """
    Update the policies of the PPO family. With default arguments the update is SB3's (sb3-contrib's) ``train``, operation by
    operation; metrics stay on the device until the end of a pass.
    """

    clip_range: Any
    clip_range_vf: Any
    clip_range_high: Any
    batch_size: Any
    n_epochs: int
    normalize_advantage: bool
    target_kl: float | None
    length_scaled_clip: bool = False  # GSPO's
    _watched: WatchedNetworks | None = None  # found by one walk when learning begins, because a walk takes long
    buffer_classes: ClassVar[tuple[type[RolloutBuffer], type[RolloutBuffer]]] = (RolloutBuffer, DictRolloutBuffer)
    """Default of ``rollout_buffer_class``, and the same for Dict observations."""

    def __init__(
        self,
        policy: Any,
        env: Any,
        *,
        n_steps: int,
        batch_size: int | None,
        advantage: Advantage,
        policy_loss: PolicyLoss,
        clip_range_high: float | Schedule | None,
        dual_clip: float,
        rho_bar: float,
        c_bar: float,
        kl_coef: float,
        reference_policy: ReferencePolicy,
        recompute_advantages: Recomputation,
        backend: Backend = "torch",
        execution: Execution = "auto",
        **stock: Any,
    ) -> None:
        """
        Check and store the arguments that SB3's (sb3-contrib's) class does not have, see :class:`sb3_flow.PPO`.

        :param stock: arguments of SB3's (sb3-contrib's) class
        """
        self.advantage, self.policy_loss, self.recompute_advantages = advantage, policy_loss, recompute_advantages
        self.clip_range_high, self.dual_clip, self.rho_bar, self.c_bar = clip_range_high, dual_clip, rho_bar, c_bar
        self.kl_coef, self.reference_policy = kl_coef, reference_policy
        self.reference, self._has_reference, self._reference_of = None, False, None
        self.backend, self.execution, self.groups = backend, execution, Groups()
        self.chosen_backend: str | None = None  # chosen when the model was built, and saved
        self.native = None
        self._actions_generator = None
        self._check_choices()
        check_sizes(n_steps, batch_size)  # before SB3 divides by them
        stock |= {"n_steps": n_steps, "batch_size": batch_size}
        with warnings.catch_warnings():
            if n_ranks() > 1:  # SB3 takes the batch of all ranks for this rank's
                warnings.filterwarnings("ignore", message="You have specified a mini-batch size")
            super().__init__(policy, env, **stock)

    def _check_choices(self) -> None:
        check_choices(self)
        requested_backend(self.backend)

    def _setup_model(self) -> None:
        self._check_choices()  # once more, because `load` sets attributes
        check_numbers(self)
        warn_of_idle_arguments(self)
        if self.whole_episodes and self.env is not None and self.env.num_envs < 2:
            raise ValueError("Peers are needed to compare with: at least 2 environments were expected, but `env` has 1.")
        generator = self._actions_generator  # a loaded model goes on with its own generator
        with naming_policy_arguments(self):
            self._build()
        self._actions_generator = generator or self._actions_generator
        if self.clip_range_high is not None:
            self.clip_range_high = FloatSchedule(self.clip_range_high)
        self.rollout_buffer.estimator = Estimator(self.advantage, self.rho_bar, self.c_bar, self.groups)
        self._set_up_reference()
        loaded = self.chosen_backend is not None
        self._choose_backend()
        self.recorded_steps = RecordedSteps(self.execution, self.device, self.verbose, loaded)

    def _build(self) -> None:
        """Have SB3 build the policy and a rollout buffer with estimates; files name the buffer's class without estimates."""
        buffer_class = self.rollout_buffer_class or self.buffer_classes[isinstance(self.observation_space, spaces.Dict)]
        self.rollout_buffer_class = with_estimates(buffer_class)
        try:
            super()._setup_model()
        finally:
            self.rollout_buffer_class = buffer_class

    def _choose_backend(self) -> None:
        uncovered = self._not_native() or not_covered(self.policy)
        total = self.n_steps * self.n_envs
        size = min(self.batch_size or total, total), self.n_envs, th.get_num_threads()
        slower = None if uncovered else torch_is_faster(linear_layers(self.policy), *size)
        verbose = self.verbose if is_first() else 0
        given = self.backend, self.chosen_backend, uncovered, slower, verbose, self.policy.device.type
        chosen, self.native = choose_backend(*given), None
        if n_ranks() == 1:  # the choice for ranks does not bind one process that goes on
            self.chosen_backend = chosen
        if chosen == "native":
            from sb3_flow.on_policy.native_learner import NativeLoops  # only where numba can be used

            self.native = NativeLoops(self.policy)

    def _setup_learn(self, *arguments: Any, **options: Any) -> tuple[int, BaseCallback]:
        found = super()._setup_learn(*arguments, **options)
        self._watched = WatchedNetworks([self.policy])
        self.make_way_for_hooks()
        return found

    def make_way_for_hooks(self) -> None:
        """Use torch while something hooks into the policy or its optimizer, as a callback may (``wandb.watch``)."""
        if self.native is None and self.chosen_backend != "native":
            return
        optimizer = self.policy.optimizer
        watched = self._watched or WatchedNetworks([self.policy])
        hooked = watched.has_hooks or bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
        if hooked and self.native is not None:
            reason = "hooks look into the policy or its gradients"
            choose_backend(self.backend, None, reason, None, self.verbose if is_first() else 0)
            self.native = None
        elif not hooked and self.native is None and n_ranks() == 1:
            self._choose_backend()

    def _not_native(self) -> str | None:
        """Look for a reason why the compiled loops do not cover this algorithm; None if they do."""
        if n_ranks() > 1:
            return f"{n_ranks()} ranks train it together, and the compiled loops cannot exchange gradients"
        if type(self).loss is not PolicyGradient.loss:
            return f"{type(self).__name__} has a loss of its own"
        if self.recompute_advantages == "minibatch":
            return "advantages are estimated again after each gradient step"
        if self.rollout_buffer_class not in (RolloutBuffer, DictRolloutBuffer):
            return f"{self.rollout_buffer.storage.__name__} may sample in its own way"
        return None

    def _excluded_save_params(self) -> list[str]:
        # `groups` is made anew by the constructor and `_setup_model`; a file without it opens where only SB3 is installed
        return [
            *super()._excluded_save_params(),
            "native",
            "_watched",
            "groups",
            "tensor_rollout",
            "tensors_seen",
            "recorded_steps",
        ]

    def get_parameters(self) -> dict[str, dict[str, Any]]:
        """Copy the parameters of policy and optimizer, see ``BaseAlgorithm``; they do not depend on ``execution``."""
        parameters: dict[str, dict[str, Any]] = super().get_parameters()
        state = self.recorded_steps.runner.state_of(self.policy.optimizer)
        return {**parameters, "policy.optimizer": own_tensors(state)}

    def train(self) -> None:
        """Update the policy with the rollout buffer: ``n_epochs`` passes of minibatches."""
        self.make_way_for_hooks()
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        check_scheduled(self._current_progress_remaining, learning_rate=self.policy.optimizer.param_groups[0]["lr"])
        clip = self._clip_ranges()
        buffer = self.rollout_buffer
        # V-trace is GAE until the policy has moved, so it corrects nothing before the second epoch
        recompute = self.recompute_advantages
        recompute = ("epoch" if self.advantage == "vtrace" else "never") if recompute == "auto" else recompute
        if self.policy_loss == "decoupled":
            buffer.prepare()
            buffer.proximal_log_probs = self._evaluate_rollout()[1]

        learner: NativeLearner | None = None
        policy = self.policy
        steps = FlatAdam(policy.optimizer, policy.parameters(), self.max_grad_norm, policy.buffers())
        passes: list[dict[str, np.ndarray]] = []
        with steps:
            for epoch in range(self.n_epochs):
                if recompute == "epoch" and epoch > 0:
                    self._estimate_again()
                by_episode = self.policy_loss in ("gspo", "gspo_token")
                if self.native is not None:
                    learner = learner or self._native_learner(clip)
                    found, stop = learner.epoch(self.batch_size, by_episode, self._n_updates + 1)
                else:
                    found, stop = self._epoch(steps, clip, by_episode, recompute == "minibatch")
                passes.append(found)
                self._n_updates += 1
                if stop:
                    if self.verbose >= 1 and is_first():
                        print(f"Early stopping at step {epoch} due to reaching max kl: {found['approx_kl'][-1]:.2f}")
                    break
        self._log(passes, clip)

    def _epoch(
        self, steps: FlatAdam, clip: dict[str, Any], by_episode: bool, recompute: bool
    ) -> tuple[dict[str, np.ndarray], bool]:
        """Learn from the rollout once; return each minibatch's metrics, and True if ``target_kl`` ended the pass."""
        metrics: list[dict[str, th.Tensor]] = []
        stop = False
        at_once, buffer = 0 if recompute else AT_ONCE, self.rollout_buffer
        n_rows = buffer.buffer_size * buffer.n_envs
        single = n_ranks() == 1 and not by_episode and n_rows <= (self.batch_size or n_rows)
        with unchecked_distributions(), in_place_activations(self.policy), steps.one_pass(single):
            for minibatch in self.rollout_buffer.minibatches(self.batch_size, by_episode, at_once):
                if not recompute and self.recorded_steps.why_eager(self, by_episode) is None:
                    metrics.append(self.recorded_steps.step(self, steps, minibatch, clip))
                    continue
                loss, found = self.loss(minibatch, **clip)
                metrics.append(found)
                stop = self.target_kl is not None and bool(mean_over_ranks(found["approx_kl"]) > 1.5 * self.target_kl)
                if stop:
                    break
                steps.zero_grad()
                backward(loss, steps.parameters)
                steps.step(loss)
                if recompute:
                    self._estimate_again()
            if not metrics:
                return {}, stop
            table = th.stack([metric for row in metrics for metric in row.values()]).double().cpu().numpy()
            columns = metrics_of_ranks(dict(zip(metrics[0], table.reshape(len(metrics), -1).T, strict=True)))
            losses = columns.get("loss", np.zeros(1))[: len(metrics) - stop]
            check_pass(self._n_updates + 1, losses, steps.weights_are_finite(), self.rollout_buffer)
        return columns, stop

    def _native_learner(self, clip: dict[str, Any]) -> "NativeLearner":
        from sb3_flow.native.objectives import describe_objective  # these two bring numba
        from sb3_flow.on_policy.native_learner import NativeLearner

        assert self.native is not None
        names = ("dual_clip", "rho_bar", "vf_coef", "ent_coef", "kl_coef", "normalize_advantage", "target_kl")
        objective = describe_objective(self.policy_loss, **{name: getattr(self, name) for name in names}, **clip)
        return NativeLearner(self.native, self.rollout_buffer, objective, self.max_grad_norm, self.reference)

    def loss(
        self, minibatch: Minibatch, clip_range: float, clip_range_high: float | None = None, clip_range_vf: float | None = None
    ) -> tuple[th.Tensor, dict[str, th.Tensor]]:
        """
        Compute policy loss + ent_coef * (-entropy) + vf_coef * value loss + kl_coef * KL(pi || reference).

        :param minibatch: a minibatch of the rollout
        :param clip_range: present epsilon of the surrogate, or of its lower side if ``clip_range_high`` is given
        :param clip_range_high: present epsilon of the upper side
        :param clip_range_vf: present clipping range of the values
        :return: scalar loss, and scalar metrics by name; of several ranks this rank's part, the mean of which is the whole
        """
        data, mask = minibatch.data, minibatch.mask

        def rows(column: Any) -> th.Tensor:
            counted: th.Tensor = column if mask is None else column[mask]
            return counted

        values, log_prob, entropy = self._evaluate(data)
        values = values.flatten()
        advantages, log_prob, old_log_prob = rows(data.advantages), rows(log_prob), rows(data.old_log_prob)
        by_episode = self.policy_loss in ("gspo", "gspo_token")
        whole = WholeBatch(advantages, minibatch.n_segments, minibatch.stands_in)
        if self.normalize_advantage:
            advantages = whole.normalised(advantages)
        log_ratio = log_prob - old_log_prob
        ratio = th.exp(log_ratio)
        sequences = None if minibatch.segments is None else (rows(minibatch.segments), minibatch.n_segments)

        if by_episode:
            assert sequences is not None
            sequence_loss = gspo_loss if self.policy_loss == "gspo" else gspo_token_loss
            losses = sequence_loss(log_prob, old_log_prob, advantages, *sequences, clip_range, clip_range_high)
        elif self.policy_loss == "decoupled":
            proximal = rows(minibatch.proximal_log_prob)
            losses = decoupled_surrogate(
                log_prob, proximal, old_log_prob, advantages, clip_range, clip_range_high, self.rho_bar
            )
        elif self.policy_loss in ("clip", "dual_clip"):
            dual_clip = self.dual_clip if self.policy_loss == "dual_clip" else None
            losses = clipped_surrogate(ratio, advantages, clip_range, clip_range_high, dual_clip)
        else:
            raise NotImplementedError(f"`policy_loss={self.policy_loss!r}` has no branch here.")
        policy_loss = whole.part(losses.mean(), by_episode)
        # without an entropy in closed form, the samples estimate it
        entropy_loss = whole.part(-th.mean(-log_prob) if entropy is None else -th.mean(rows(entropy)))
        loss = policy_loss + self.ent_coef * entropy_loss if self.ent_coef else policy_loss
        metrics = {"policy_gradient_loss": policy_loss, "entropy_loss": entropy_loss}
        if self.has_critic:
            value_columns = rows(values), rows(data.returns), rows(data.old_values)
            metrics["value_loss"] = whole.part(value_loss(*value_columns, clip_range_vf))
            loss = loss + self.vf_coef * metrics["value_loss"]
        if self.kl_coef > 0:
            metrics["kl_reference"] = whole.part(rows(self._kl_to_reference(data)).mean())
            loss = loss + self.kl_coef * metrics["kl_reference"]
        metrics["loss"] = loss
        with th.no_grad():
            change = ratio - 1
            metrics["approx_kl"] = whole.part(th.mean(change - log_ratio))
            metrics["ratio_mean"], metrics["ratio_max"] = whole.part(ratio.mean()), whole.largest(ratio)
            if self.policy_loss == "decoupled":
                change = th.exp(log_prob - proximal) - 1
            if sequences is not None:
                sequence_ratio = th.exp(segment_mean(log_ratio, *sequences))
                if by_episode:
                    change = sequence_ratio - 1
                metrics["sequence_ratio_mean"] = whole.part(sequence_ratio.mean(), by_sequence=True)
                metrics["sequence_ratio_max"] = whole.largest(sequence_ratio)
            high = clip_range if clip_range_high is None else clip_range_high
            outside = change.abs() > high if high is clip_range else (change > high) | (change < -clip_range)
            metrics["clip_fraction"] = whole.part(outside.mean(dtype=th.float32), by_episode)
        return loss, {name: metric.detach() for name, metric in metrics.items()}

    @property
    def has_critic(self) -> bool:
        """Say whether the policy has a value function to train."""
        return getattr(self.policy, "has_critic", True)

    def _clip_ranges(self) -> dict[str, Any]:
        ranges = {}
        scale = self.rollout_buffer.mean_episode_length() ** -0.5 if self.length_scaled_clip else 1.0
        for name, factor in (("clip_range", scale), ("clip_range_high", scale), ("clip_range_vf", 1.0)):
            schedule = getattr(self, name)
            ranges[name] = None if schedule is None else factor * schedule(self._current_progress_remaining)
        check_scheduled(self._current_progress_remaining, **ranges)
        return ranges

    def _log(self, passes: list[dict[str, np.ndarray]], clip: dict[str, Any]) -> None:
        """Log means over the update; as in SB3, approx_kl is a mean over the last epoch, and loss is the last loss."""
        buffer = self.rollout_buffer
        for name in passes[0] if passes else ():
            column = np.concatenate([metrics[name] for metrics in passes])
            shown = {"approx_kl": passes[-1]["approx_kl"].mean(), "loss": column[-1]}.get(name, column.mean())
            self.logger.record(f"train/{name}", column.max() if name.endswith("_max") else shown)
        if self.has_critic:
            rows = slice(None) if buffer.rows is None else buffer.rows
            explained = explained_of_ranks(buffer.values.flatten()[rows], buffer.returns.flatten()[rows])
            self.logger.record("train/explained_variance", explained)
        for key, value in buffer.statistics.items():
            self.logger.record(key, mean_over_ranks(th.tensor(value)).item() if n_ranks() > 1 else value)
        if hasattr(self.policy, "log_std"):
            self.logger.record("train/std", th.exp(self.policy.log_std).mean().item())
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        for name, value in clip.items():
            if value is not None:
                self.logger.record(f"train/{name}", value)
