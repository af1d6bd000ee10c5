"""Gradient steps with less around them: Adam on flat vectors, distributions that do not look at their arguments."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch as th
from torch.distributions import Distribution


@contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Within it distributions do not check their arguments, which would wait for the device at every one that is made."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


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


class FlatAdam:
    """
    The steps of an optimizer. Those of a plain ``th.optim.Adam`` (see :func:`has_plain_steps`) that has begun are taken with
    its moments in two flat vectors: same numbers to the last bit, in a handful of operations instead of as many for each
    parameter. All other steps are the optimizer's own.

    :param optimizer: its state is up to date when the context ends
    """

    def __init__(self, optimizer: th.optim.Optimizer):
        self.optimizer, self.group = optimizer, optimizer.param_groups[0]
        self.parameters: list[th.Tensor] = self.group["params"]
        self.states = [optimizer.state[one] for one in self.parameters if optimizer.state.get(one)]
        steps = {float(state["step"]) for state in self.states} if has_plain_steps(optimizer) else set()
        self.flat = len(steps) == 1 and len(self.states) == len(self.parameters)
        if self.flat:
            self.steps = steps.pop()
            self.sizes = [one.numel() for one in self.parameters]
            self.exp_avg, self.exp_avg_sq = (self._joined(name) for name in ("exp_avg", "exp_avg_sq"))
            self.rows = [one.detach().view(-1) for one in self.parameters]
            self.exp_avgs = self.exp_avg.split(self.sizes)

    def __enter__(self) -> "FlatAdam":
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def _joined(self, name: str) -> th.Tensor:
        return th.cat([state[name].flatten() for state in self.states])

    def zero_grad(self) -> None:
        """Forget the gradients."""
        if self.flat:
            for parameter in self.parameters:
                parameter.grad = None
        else:
            self.optimizer.zero_grad()

    @th.no_grad()
    def step(self) -> None:
        """Take a step along the present gradients; one that leaves parameters out is the optimizer's own, as all later."""
        gradients = [one.grad for one in self.parameters]
        if not self.flat or any(one is None for one in gradients):
            self.finish()
            with th.enable_grad():
                self.optimizer.step()
            return
        gradient = th.cat([one.flatten() for one in gradients])  # type: ignore[union-attr]
        beta1, beta2 = self.group["betas"]
        self.steps += 1
        self.exp_avg.lerp_(gradient, 1 - beta1)
        self.exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = (self.exp_avg_sq.sqrt() / (1 - beta2**self.steps) ** 0.5).add_(self.group["eps"])
        step_size = self.group["lr"] / (1 - beta1**self.steps)
        th._foreach_addcdiv_(self.rows, self.exp_avgs, scale.split(self.sizes), -step_size)

    def finish(self) -> None:
        """Give the optimizer its state back. Further steps are its own."""
        if self.flat:
            self.flat = False
            squares = self.exp_avg_sq.split(self.sizes)
            for state, exp_avg, exp_avg_sq in zip(self.states, self.exp_avgs, squares, strict=True):
                state["exp_avg"].copy_(exp_avg.view_as(state["exp_avg"]))
                state["exp_avg_sq"].copy_(exp_avg_sq.view_as(state["exp_avg_sq"]))
                state["step"].fill_(self.steps)
