"""Gradient steps with less around them: Adam on flat vectors, distributions that do not look at their arguments."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch as th
from stable_baselines3.common.torch_layers import MlpExtractor
from torch.distributions import Distribution

from sb3_flow.common.flat import own_tensors

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
IN_PLACE: dict[type[th.nn.Module], Any] = {th.nn.Tanh: th.tanh_, th.nn.ReLU: th.relu_}


@contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Within it distributions do not check their arguments, which would wait for the device at every one that is made."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextmanager
def in_place_activations(policy: Any) -> Iterator[None]:
    """
    Within it the activations of SB3's networks overwrite the linear layers' outputs, which nothing else needs: the same
    numbers, and less memory to go through.

    :param policy: only tanh and ReLU that follow a linear layer of an ``MlpExtractor`` change, and no module with hooks
    """
    extractor = getattr(policy, "mlp_extractor", None)
    networks = (extractor.policy_net, extractor.value_net) if type(extractor) is MlpExtractor else ()
    changed = []
    for network in networks:
        for layer, activation in pairwise(network):
            hooks = (getattr(one, name) for one in (layer, activation) for name in HOOKS)
            plain = type(layer) is th.nn.Linear and not any(hooks) and "forward" not in vars(activation)
            if plain and type(activation) in IN_PLACE:
                activation.forward = IN_PLACE[type(activation)]
                changed.append(activation)
    try:
        yield
    finally:
        for activation in changed:
            del activation.forward


def has_plain_steps(optimizer: th.optim.Optimizer) -> bool:
    """
    :param optimizer: of any kind
    :return: whether it is Adam without options or hooks, of contiguous float32 parameters on the CPU
    """
    if type(optimizer) is not th.optim.Adam or len(optimizer.param_groups) != 1 or "step" in vars(optimizer):
        return False
    group = optimizer.param_groups[0]
    options = ("amsgrad", "maximize", "weight_decay", "fused", "capturable", "differentiable")
    if any(group[name] for name in options) or any(isinstance(one, th.Tensor) for one in (group["lr"], *group["betas"])):
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    return all(one.dtype == th.float32 and one.device.type == "cpu" and one.is_contiguous() for one in group["params"])


LARGE = 2**17
"""Numbers of a parameter from which on Adam's work on it takes longer than the calls, and copies do not pay."""

_spare: WeakKeyDictionary[th.optim.Optimizer, dict[int, list[th.Tensor]]] = WeakKeyDictionary()
"""Of each optimizer, by the number of a large parameter: memory for its next moments and its weights, kept from one update to
the next, because the system hands out fresh memory slowly."""


class FlatAdam:
    """
    Clipped steps of an optimizer, in passes: each is a context, and one that ends with an error (Ctrl-C is none) is undone.

    Steps of a plain ``th.optim.Adam`` (see :func:`has_plain_steps`) that has begun are taken on flat vectors of all but the
    large parameters: same numbers to the last bit, in a handful of operations instead of as many for each parameter, without
    new memory at each, and what the pass began with stays where it was. All other steps are the optimizer's own.

    :param optimizer: its state, and the gradients as they were clipped last, are up to date when a pass ends
    :param parameters: what gradients are clipped of; usually the optimizer's
    :param max_grad_norm: largest norm of all gradients together
    :param buffers: what else a pass that is undone puts back
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
        self.sizes: list[int] = []
        self.flat = False

    def __enter__(self) -> "FlatAdam":
        self.states = [state for one in self.parameters if (state := self.optimizer.state.get(one))]
        steps = {float(state["step"]) for state in self.states} if has_plain_steps(self.optimizer) else set()
        mine = list(map(id, self.parameters)) == list(map(id, self.group["params"]))
        self.flat = mine and len(steps) == 1 and len(self.states) == len(self.parameters)
        moments = (state[name] for state in self.states for name in ("exp_avg", "exp_avg_sq")) if self.flat else ()
        self.flat = self.flat and all(one.is_contiguous() for one in moments)
        self.buffers_before = [one.clone() for one in self.buffers]
        self.before = None if self.flat else self._copies()
        self.taken, self.begun = 0, set[int]()  # steps, and large parameters whose moments are in the spare memory
        if self.flat:
            self.steps = steps.pop()
            if not self.sizes:
                self._allocate()
            self.theirs = [
                [self.states[i][name].view(-1) for i in self.small] if name else self.rows
                for name in ("exp_avg", "exp_avg_sq", "")
            ]
            if self.small:
                for views, vector in zip(self.theirs, (self.exp_avg, self.exp_avg_sq, self.weights), strict=True):
                    th.cat(views, out=vector)
        return self

    def _allocate(self) -> None:
        self.sizes = [one.numel() for one in self.parameters]
        self.small = [i for i, size in enumerate(self.sizes) if size < LARGE]
        parts = [self.sizes[i] for i in self.small]
        self.rows = [self.parameters[i].detach().view(-1) for i in self.small]
        self.exp_avg, self.exp_avg_sq, self.weights, self.gradient = (th.empty(sum(parts)) for _ in range(4))
        self.scratch = th.empty(max(sum(parts), *self.sizes))
        vectors = self.exp_avg, self.exp_avg_sq, self.weights, self.gradient, self.scratch[: sum(parts)]
        self.exp_avgs, self.exp_avg_sqs, self.kept, self.clipped, self.scales = (one.split(parts) for one in vectors)
        self.spare = _spare.setdefault(self.optimizer, {})
        for i, parameter in enumerate(self.parameters):
            if self.sizes[i] >= LARGE and i not in self.spare:
                self.spare[i] = [th.empty_like(parameter, requires_grad=False) for _ in range(3)]
        self.large = [i for i, size in enumerate(self.sizes) if size >= LARGE]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, Exception):
            self._undo()
        elif self.flat and self.taken:
            for i, clipped in zip(self.small, self.clipped, strict=True):
                gradient = self.parameters[i].grad
                if gradient is not None:
                    gradient.copy_(clipped.view_as(gradient))
        self.finish()

    def _copies(self) -> tuple[list[th.Tensor], Any]:
        return [one.detach().clone() for one in self.parameters], own_tensors(self.optimizer.state_dict())

    @th.no_grad()
    def _undo(self) -> None:
        for buffer, before in zip(self.buffers, self.buffers_before, strict=True):
            buffer.copy_(before)
        if self.before is not None:
            for parameter, weights in zip(self.parameters, self.before[0], strict=True):
                parameter.copy_(weights)
            self.optimizer.load_state_dict(self.before[1])
        elif self.taken:
            for row, weights in zip(self.rows, self.kept, strict=True):
                row.copy_(weights)
            for i in self.begun:
                self.parameters[i].copy_(self.spare[i][2])
        self.flat = False

    def zero_grad(self) -> None:
        """Forget the gradients."""
        if self.flat:
            for parameter in self.parameters:
                parameter.grad = None
        else:
            self.optimizer.zero_grad()

    def step(self) -> None:
        """Clip and go along the present gradients. Once one leaves parameters out, this and all later are the optimizer's."""
        gradients = [one.grad for one in self.parameters if one.grad is not None]
        if self.flat and len(gradients) == len(self.parameters):
            self._step(gradients)
            return
        if self.flat:
            self._leave()
        th.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.optimizer.step()

    @th.no_grad()
    def _step(self, gradients: list[th.Tensor]) -> None:
        # the operations of torch's `clip_grad_norm_` and `_single_tensor_adam`
        norm = th.linalg.vector_norm(th.stack(th._foreach_norm(gradients, 2.0)), 2.0)
        factor = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        self.steps, self.taken = self.steps + 1, self.taken + 1
        step_size = self.group["lr"] / (1 - self.group["betas"][0] ** self.steps)
        if self.small:
            th.cat([gradients[i].flatten() for i in self.small], out=self.gradient)
            own = self.exp_avg, self.exp_avg_sq
            self._moments(self.gradient, factor, own, own)
            th._foreach_addcdiv_(self.rows, self.exp_avgs, self.scales, -step_size)
        for i in self.large:
            exp_avg, exp_avg_sq, weights = self.spare[i]
            present = exp_avg, exp_avg_sq
            if i not in self.begun:
                present = self.states[i]["exp_avg"], self.states[i]["exp_avg_sq"]
                weights.copy_(self.parameters[i])
            scale = self._moments(gradients[i], factor, present, (exp_avg, exp_avg_sq))
            self.parameters[i].addcdiv_(exp_avg, scale, value=-step_size)
            self.begun.add(i)

    def _moments(
        self, gradient: th.Tensor, factor: th.Tensor, present: tuple[th.Tensor, th.Tensor], new: tuple[th.Tensor, th.Tensor]
    ) -> th.Tensor:
        """
        Clip a gradient and take it into Adam's moments.

        :param gradient: changed in place
        :param factor: that clips it
        :param present: both moments
        :param new: both moments after the step; may be the same
        :return: what the step is divided by, in the scratch memory
        """
        beta1, beta2 = self.group["betas"]
        gradient.mul_(factor)
        th.lerp(present[0], gradient, 1 - beta1, out=new[0])
        th.mul(present[1], beta2, out=new[1]).addcmul_(gradient, gradient, value=1 - beta2)
        scale = self.scratch[: gradient.numel()].view_as(gradient)
        th.sqrt(new[1], out=scale)
        return scale.div_((1 - beta2**self.steps) ** 0.5).add_(self.group["eps"])

    def _leave(self) -> None:
        """Go on with the optimizer's own steps, in a pass that was begun without them."""
        present = [one.detach().clone() for one in self.parameters]
        buffers = [one.clone() for one in self.buffers]
        self._undo()
        self.before, self.flat = self._copies(), True
        for one, now in zip([*self.parameters, *self.buffers], [*present, *buffers], strict=True):
            one.data.copy_(now)
        self.finish()

    def finish(self) -> None:
        """Give the optimizer its state back, from which on steps are its own."""
        if self.flat and self.taken:
            moments = [*self.exp_avgs, *self.exp_avg_sqs]
            if moments:
                th._foreach_copy_([*self.theirs[0], *self.theirs[1]], moments)
            for i in self.begun:
                state, spare = self.states[i], self.spare[i]
                state["exp_avg"], spare[0] = spare[0], state["exp_avg"]
                state["exp_avg_sq"], spare[1] = spare[1], state["exp_avg_sq"]
            th._foreach_add_([state["step"] for state in self.states], float(self.taken))
        self.flat = False
