"""A network whose parameters, gradients and Adam moments are views of flat vectors."""

import copy
from typing import Any

import torch as th
from torch import nn


def own_tensors(state: Any) -> Any:
    """
    Copy a state dict, or several state dicts in a dict, with their tensors: torch's optimizers keep and change the tensors
    that they are given, and torch saves a view with all of its vector.
    """
    if isinstance(state, th.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        copied = copy.copy(state)  # keeps torch's metadata
        copied.update({key: own_tensors(value) for key, value in state.items()})
        return copied
    return [own_tensors(part) for part in state] if isinstance(state, list) else state


class FlatParameters:
    """
    Hold parameters, gradients and both moments of Adam in four flat vectors, on which compiled loops work; the tensors of
    torch's module and optimizer are views of these vectors. :meth:`link` finds tensors that were exchanged (by the optimizer's
    ``load_state_dict`` or by a callback), copies their numbers and puts the views back.

    :param module: network whose parameters are float32 on the CPU
    :param optimizer: optimizer of these parameters, with Adam's state
    """

    def __init__(self, module: nn.Module, optimizer: th.optim.Optimizer):
        self.parameters, self.optimizer = list(module.parameters()), optimizer
        size = sum(parameter.numel() for parameter in self.parameters)
        # not a tensor of four rows: torch saves all of the memory of which a view is a part
        self.values, self.gradients, self.exp_avg, self.exp_avg_sq = (th.zeros(size) for _ in range(4))
        self.offsets: dict[th.Tensor, int] = {}
        offset = 0
        for parameter in self.parameters:
            self.offsets[parameter] = offset
            offset += parameter.numel()

    @th.no_grad()
    def link(self) -> int:
        """Make every tensor a view again, without changing its numbers; return the number of the optimizer's steps."""
        steps = 0
        for parameter, offset in self.offsets.items():
            part = slice(offset, offset + parameter.numel())
            state = self.optimizer.state[parameter]
            values = self.values[part].view_as(parameter)
            if parameter.data_ptr() != values.data_ptr():
                values.copy_(parameter)
                parameter.data = values
            parameter.grad = self.gradients[part].view_as(parameter)
            for name, flat in (("exp_avg", self.exp_avg), ("exp_avg_sq", self.exp_avg_sq)):
                view = flat[part].view_as(parameter)
                if name not in state:
                    view.zero_()
                elif state[name].data_ptr() != view.data_ptr():
                    view.copy_(state[name])
                state[name] = view
            state["step"] = state.get("step", th.tensor(0.0))
            steps = int(state["step"])
        return steps

    def stepped(self, steps: int) -> None:
        """Set the number of steps in the optimizer's state."""
        for parameter in self.parameters:
            self.optimizer.state[parameter]["step"].fill_(float(steps))
