"""Gradient steps with less around them: Adam on flat vectors, distributions that do not look at their arguments."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch as th
from stable_baselines3.common.torch_layers import MlpExtractor
from torch.distributions import Distribution

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


class FlatAdam:
    """
    Clipped steps of an optimizer. Those of a plain ``th.optim.Adam`` (see :func:`has_plain_steps`) that has begun are taken
    on flat vectors of all but the large parameters: same numbers to the last bit, in a handful of operations instead of as
    many for each parameter, and without new memory at each. All other steps are the optimizer's own.

    :param optimizer: its state, and the gradients as they were clipped last, are up to date when the context ends
    :param parameters: what gradients are clipped of; usually the optimizer's
    :param max_grad_norm: largest norm of all gradients together
    """

    def __init__(self, optimizer: th.optim.Optimizer, parameters: Iterable[th.Tensor], max_grad_norm: float):
        self.optimizer, self.group = optimizer, optimizer.param_groups[0]
        self.parameters, self.max_grad_norm = list(parameters), max_grad_norm
        self.states = [state for one in self.parameters if (state := optimizer.state.get(one))]
        steps = {float(state["step"]) for state in self.states} if has_plain_steps(optimizer) else set()
        mine = list(map(id, self.parameters)) == list(map(id, self.group["params"]))
        self.flat = mine and len(steps) == 1 and len(self.states) == len(self.parameters)
        moments = (state[name] for state in self.states for name in ("exp_avg", "exp_avg_sq")) if self.flat else ()
        self.flat = self.flat and all(one.is_contiguous() for one in moments)
        if self.flat:
            self.steps, self.taken = steps.pop(), 0
            sizes = [one.numel() for one in self.parameters]
            self.large = [i for i, size in enumerate(sizes) if size >= LARGE]
            self.small = [i for i, size in enumerate(sizes) if size < LARGE]
            self.sizes = [sizes[i] for i in self.small]
            self.rows = [self.parameters[i].detach().view(-1) for i in self.small]
            views = [[self.states[i][name].view(-1) for i in self.small] for name in ("exp_avg", "exp_avg_sq")]
            self.theirs = views[0] + views[1]
            self.exp_avg, self.exp_avg_sq = (th.cat(of) if of else th.empty(0) for of in views)
            self.gradient = th.empty_like(self.exp_avg)
            self.scratch = th.empty(max(len(self.gradient), *sizes))
            self.exp_avgs = self.exp_avg.split(self.sizes)
            self.scales = self.scratch[: len(self.gradient)].split(self.sizes)

    def __enter__(self) -> "FlatAdam":
        return self

    def __exit__(self, *_: object) -> None:
        if self.flat and self.taken:
            clipped = zip(self.small, self.gradient.split(self.sizes), strict=True)
            for i, part in clipped:
                gradient = self.parameters[i].grad
                if gradient is not None:
                    gradient.copy_(part.view_as(gradient))
        self.finish()

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
        self.finish()
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
            self._moments(self.gradient, factor, self.exp_avg, self.exp_avg_sq)
            th._foreach_addcdiv_(self.rows, self.exp_avgs, self.scales, -step_size)
        for i in self.large:
            exp_avg = self.states[i]["exp_avg"]
            scale = self._moments(gradients[i], factor, exp_avg, self.states[i]["exp_avg_sq"])
            self.parameters[i].addcdiv_(exp_avg, scale, value=-step_size)

    def _moments(self, gradient: th.Tensor, factor: th.Tensor, exp_avg: th.Tensor, exp_avg_sq: th.Tensor) -> th.Tensor:
        """Clip a gradient and take it into Adam's moments; :return: what steps are divided by, in the scratch memory"""
        beta1, beta2 = self.group["betas"]
        gradient.mul_(factor)
        exp_avg.lerp_(gradient, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = self.scratch[: gradient.numel()].view_as(gradient)
        th.sqrt(exp_avg_sq, out=scale)
        return scale.div_((1 - beta2**self.steps) ** 0.5).add_(self.group["eps"])

    def finish(self) -> None:
        """Give the optimizer its state back, from which on steps are its own."""
        if not self.flat:
            return
        self.flat = False
        if self.small:
            th._foreach_copy_(self.theirs, [*self.exp_avgs, *self.exp_avg_sq.split(self.sizes)])
        th._foreach_add_([state["step"] for state in self.states], float(self.taken))
