"""Gradient steps with little overhead: Adam on flat vectors, distributions that do not check their arguments."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch as th
from stable_baselines3.common.torch_layers import MlpExtractor
from torch.distributions import Distribution

from sb3_flow.execution.watched_networks import HOOKS
from sb3_flow.on_policy.flat_parameters import own_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")
IN_PLACE: dict[type[th.nn.Module], Any] = {th.nn.Tanh: th.tanh_, th.nn.ReLU: th.relu_}


@contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Switch off, within the context, the checks of distributions' arguments, each of which waits for the device."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextmanager
def in_place_activations(policy: Any) -> Iterator[None]:
    """
    Let the activations of a policy's networks, within the context, overwrite the linear layers' outputs, which nothing else
    needs: the numbers are the same, and less memory is touched. Only tanh and ReLU that follow a linear layer of an
    ``MlpExtractor``, neither of which has hooks, change.
    """
    extractor = getattr(policy, "mlp_extractor", None)
    networks = (extractor.policy_net, extractor.value_net) if type(extractor) is MlpExtractor else ()
    changed = []
    for network in networks:
        for layer, activation in pairwise(network):
            hooks = (getattr(module, name) for module in (layer, activation) for name in HOOKS)
            plain = type(layer) is th.nn.Linear and not any(hooks) and "forward" not in vars(activation)
            if plain and type(activation) in IN_PLACE:
                activation.forward = IN_PLACE[type(activation)]
                changed.append(activation)
    try:
        yield
    finally:
        for activation in changed:
            del activation.forward


OPTIONS = ("amsgrad", "maximize", "weight_decay", "fused", "capturable", "differentiable")
"""Adam's options that change its steps."""


def has_plain_steps(optimizer: th.optim.Optimizer) -> bool:
    """Say whether an optimizer is Adam without options or hooks, of contiguous float32 parameters on the CPU."""
    if type(optimizer) is not th.optim.Adam or len(optimizer.param_groups) != 1 or "step" in vars(optimizer):
        return False
    group = optimizer.param_groups[0]
    if any(group[name] for name in OPTIONS) or any(isinstance(rate, th.Tensor) for rate in (group["lr"], *group["betas"])):
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    return all(p.dtype == th.float32 and p.device.type == "cpu" and p.is_contiguous() for p in group["params"])


LARGE = 2**17
"""Size from which on Adam's work on a parameter takes longer than the calls of its operations, and copies do not pay."""

LARGEST_RATE = 1e30
"""Learning rate up to which a step along finite gradients leads to finite weights."""

_memory: WeakKeyDictionary[th.optim.Optimizer, list[list[th.Tensor]]] = WeakKeyDictionary()
"""Spare moments and weights of each optimizer, kept from update to update, because the system gives new memory slowly."""


class FlatAdam:
    """
    Take clipped steps of an optimizer in an update, which is a context, and in its passes, see :meth:`one_pass`.

    Steps of a plain ``th.optim.Adam`` (see :func:`has_plain_steps`) that has taken a step before are taken on flat vectors of
    all but the large parameters: the same numbers to the last bit, by a few operations for all parameters instead of a few for
    each, and without new memory. The first step of a pass does not overwrite the moments from before the pass. All other steps
    are the optimizer's own.

    :param optimizer: the optimizer, whose state is up to date, like the clipped gradients, when the context ends
    :param parameters: parameters whose gradients are clipped; usually the optimizer's
    :param max_grad_norm: largest norm of all gradients together
    :param buffers: tensors that an undone pass puts back, like the parameters
    """

    def __init__(
        self,
        optimizer: th.optim.Optimizer,
        parameters: Iterable[th.Tensor],
        max_grad_norm: float,
        buffers: Iterable[th.Tensor] = (),
    ):
        self.optimizer, self.group = optimizer, optimizer.param_groups[0]
        self.parameters, self.max_grad_norm, self.buffers = list(parameters), max_grad_norm, list(buffers)
        self.flat = False

    def __enter__(self) -> "FlatAdam":
        return self

    def __exit__(self, *_: object) -> None:
        if self.flat and self.small and self.taken:
            for i, clipped in zip(self.small, self.gradient.split(self.sizes), strict=True):
                gradient = self.parameters[i].grad
                if gradient is not None:
                    gradient.copy_(clipped.view_as(gradient))
        self._give_back()

    @contextmanager
    def one_pass(self, single: bool = False) -> Iterator[None]:
        """
        Undo the steps within the context, in weights, buffers and the optimizer's state, after an error, but not after Ctrl-C.

        :param single: the pass has a single step, which is not taken if its loss or gradients are not finite
        """
        if not self.flat:
            self._take()
        # of other steps everything is kept, and their rate may be a tensor on a device, for which a comparison would wait
        self.keep, self.broken = not (single and self.flat and self.group["lr"] < LARGEST_RATE), False
        self.buffers_before = [buffer.clone() for buffer in self.buffers]
        self.before = None if self.flat else self._copies()
        self.begun: list[int] = []  # pieces whose present moments are in the spare memory
        self.steps_before = self.steps if self.flat else 0.0
        try:
            yield
        except Exception:
            self._undo()
            raise
        finally:
            self._exchange(self.begun)

    def _take(self) -> None:
        """Put the small parameters' moments into flat vectors, if the optimizer's steps can be taken on these."""
        states = [state for parameter in self.parameters if (state := self.optimizer.state.get(parameter))]
        steps = {float(state["step"]) for state in states} if has_plain_steps(self.optimizer) else set()
        mine = list(map(id, self.parameters)) == list(map(id, self.group["params"]))
        if not mine or len(steps) != 1 or len(states) != len(self.parameters):
            return
        if not all(state[name].is_contiguous() for state in states for name in MOMENTS):
            return
        self.flat, self.states, self.steps, self.taken = True, states, steps.pop(), 0
        large = [i for i, parameter in enumerate(self.parameters) if parameter.numel() >= LARGE]
        self.small = [i for i, parameter in enumerate(self.parameters) if parameter.numel() < LARGE]
        self.sizes = [self.parameters[i].numel() for i in self.small]
        self.rows = [self.parameters[i].detach().view(-1) for i in self.small]
        # a piece is a large parameter; the last piece is all small parameters; each piece has two moments
        self.large, self.present = large, [[states[i][name] for name in MOMENTS] for i in large]
        if self.small:
            self.present.append([th.cat([states[i][name].view(-1) for i in self.small]) for name in MOMENTS])
        spare = _memory.get(self.optimizer, [])
        if [piece[0].shape for piece in spare] != [piece[0].shape for piece in self.present]:
            spare = [[th.empty_like(piece[0]) for _ in range(3)] for piece in self.present]
        self.spare = _memory[self.optimizer] = spare
        self.gradient = th.empty(sum(self.sizes))
        self.scratch = th.empty(max(piece[0].numel() for piece in self.present))
        self.scales = self.scratch[: sum(self.sizes)].split(self.sizes)

    def _copies(self) -> tuple[list[th.Tensor], Any]:
        return [parameter.detach().clone() for parameter in self.parameters], own_tensors(self.optimizer.state_dict())

    def _exchange(self, pieces: list[int]) -> None:
        """Make the spare moments of these pieces the present ones."""
        for piece in pieces:
            spare, present = self.spare[piece], self.present[piece]
            self.present[piece], spare[:2] = spare[:2], present
        self.begun = []

    @th.no_grad()
    def _undo(self) -> None:
        for buffer, before in zip(self.buffers, self.buffers_before, strict=True):
            buffer.copy_(before)
        if self.before is not None:
            for parameter, weights in zip(self.parameters, self.before[0], strict=True):
                parameter.copy_(weights)
            self.optimizer.load_state_dict(self.before[1])
            return
        for piece in self.begun:
            if piece < len(self.large):
                self.parameters[self.large[piece]].copy_(self.spare[piece][2])
            else:
                th._foreach_copy_(self.rows, self.spare[piece][2].split(self.sizes))
        if self.keep:
            self.begun, self.steps = [], self.steps_before

    def zero_grad(self) -> None:
        """Forget the gradients."""
        if self.flat:
            for parameter in self.parameters:
                parameter.grad = None
        else:
            self.optimizer.zero_grad()

    def step(self, loss: th.Tensor) -> None:
        """
        Clip the present gradients, which are the gradients of ``loss``, and take a step. From the first step on that leaves
        parameters out, all steps are the optimizer's own.
        """
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if self.flat and len(gradients) == len(self.parameters):
            self._step(gradients, loss)
            return
        if self.flat:
            self._leave()
        th.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.optimizer.step()

    @th.no_grad()
    def _step(self, gradients: list[th.Tensor], loss: th.Tensor) -> None:
        # the operations of torch's `clip_grad_norm_` and `_single_tensor_adam`
        norm = th.linalg.vector_norm(th.stack(th._foreach_norm(gradients, 2.0)), 2.0)
        if not self.keep and not (math.isfinite(norm.item()) and math.isfinite(loss.item())):
            self.broken = True
            return
        factor = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        self.steps, self.taken = self.steps + 1, self.taken + 1
        step_size = self.group["lr"] / (1 - self.group["betas"][0] ** self.steps)
        for piece, i in enumerate(self.large):
            if self.keep and piece not in self.begun:
                self.spare[piece][2].copy_(self.parameters[i])
            exp_avg, scale = self._moments(piece, gradients[i], factor)
            self.parameters[i].addcdiv_(exp_avg, scale, value=-step_size)
        if self.small:
            piece = len(self.large)
            if self.keep and piece not in self.begun:
                th.cat(self.rows, out=self.spare[piece][2])
            th.cat([gradients[i].flatten() for i in self.small], out=self.gradient)
            exp_avg, _ = self._moments(piece, self.gradient, factor)
            th._foreach_addcdiv_(self.rows, exp_avg.split(self.sizes), self.scales, -step_size)

    def _moments(self, piece: int, gradient: th.Tensor, factor: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """
        Clip the gradient of a piece in place by a factor, and add the gradient to Adam's moments.

        :return: the step's direction and, in the scratch memory, its divisor
        """
        beta1, beta2 = self.group["betas"]
        exp_avg, exp_avg_sq = self.spare[piece][:2] if self.keep else self.present[piece]
        before = (exp_avg, exp_avg_sq) if piece in self.begun else self.present[piece]
        gradient.mul_(factor)
        th.lerp(before[0], gradient, 1 - beta1, out=exp_avg)
        th.mul(before[1], beta2, out=exp_avg_sq).addcmul_(gradient, gradient, value=1 - beta2)
        if self.keep and piece not in self.begun:
            self.begun.append(piece)
        scale = self.scratch[: gradient.numel()].view_as(gradient)
        th.sqrt(exp_avg_sq, out=scale)
        return exp_avg, scale.div_((1 - beta2**self.steps) ** 0.5).add_(self.group["eps"])

    @th.no_grad()
    def weights_are_finite(self) -> bool:
        """Say whether all parameters are finite, and would be if no step had been left out."""
        if self.broken:
            return False
        if self.flat:
            parts = [self.parameters[i] for i in self.large]
            if self.small:
                parts.append(th.cat(self.rows, out=self.scratch[: sum(self.sizes)]))
            if all(math.isfinite(part.sum()) for part in parts):
                return True
        # a sum may overflow; one answer for all parameters, since a GPU is waited for with each
        return bool(th.stack([parameter.isfinite().all() for parameter in self.parameters]).all())

    @th.no_grad()
    def _leave(self) -> None:
        """Go on with the optimizer's own steps in a pass that was begun on flat vectors."""
        everything = [*self.parameters, *self.buffers]
        now, begun, steps = [tensor.detach().clone() for tensor in everything], self.begun, self.steps
        self._undo()
        self._give_back()
        self.before = self._copies()
        for tensor, value in zip(everything, now, strict=True):
            tensor.copy_(value)
        self.flat, self.steps = True, steps
        self._exchange(begun)
        self._give_back()

    def _give_back(self) -> None:
        """Give the optimizer its state, so that it can take the next steps itself."""
        if not self.flat:
            return
        self.flat = False
        for piece, i in enumerate(self.large):
            self.states[i] |= dict(zip(MOMENTS, self.present[piece], strict=True))
        if self.small:
            theirs = [self.states[i][name].view(-1) for name in MOMENTS for i in self.small]
            th._foreach_copy_(theirs, [part for moment in self.present[-1] for part in moment.split(self.sizes)])
        for state in self.states:
            state["step"].fill_(self.steps)
