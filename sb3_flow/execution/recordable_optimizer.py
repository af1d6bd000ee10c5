"""Optimizers whose steps can be recorded: learning rates and counts of steps are tensors on the parameters' device."""

from typing import Any

import torch as th

PLAIN = (bool, int, float, str, type(None))


class RecordableOptimizer:
    """
    Hold the learning rates of an optimizer in tensors, which recorded steps read, while ``param_groups`` may be given numbers.

    :param optimizer: of parameters on one device
    """

    def __init__(self, optimizer: th.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._rates: list[tuple[float, th.Tensor]] = []
        self._flags: list[dict[str, Any]] = [{} for _ in optimizer.param_groups]

    @property
    def hindrance(self) -> str | None:
        """Say why steps cannot be recorded, a sentence without its full stop; None if they can."""
        if "capturable" not in self.optimizer.defaults:
            return f"steps of {type(self.optimizer).__name__} cannot be recorded (it has no option `capturable`)"
        if self.optimizer._optimizer_step_pre_hooks or self.optimizer._optimizer_step_post_hooks:
            return f"{type(self.optimizer).__name__} has hooks, which a recording leaves out"
        return None

    def prepare(self) -> None:
        """
        Bring the learning rates of ``param_groups`` into the tensors, and the optimizer into the state in which its steps can
        be recorded. Nothing happens where that is so already.
        """
        groups = self.optimizer.param_groups
        for i, group in enumerate(groups):
            if i == len(self._rates):
                device = group["params"][0].device
                self._rates.append((float("nan"), th.zeros((), device=device)))
            known, rate = self._rates[i]
            if group["lr"] is not rate:
                if float(group["lr"]) != known:
                    known = float(group["lr"])
                    rate.fill_(known)
                self._rates[i], group["lr"] = (known, rate), rate
            if rate.device.type == "cuda" and not group["capturable"]:
                self._flags[i] = {name: group[name] for name in ("capturable", "foreach") if name in group}
                group["capturable"] = True
                self._move_counts(group)

    def _move_counts(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            state = self.optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), th.Tensor):
                state["step"] = state["step"].to(parameter.device, th.float32)

    def fixed(self) -> tuple[Any, ...]:
        """Give what a recording takes for granted: the addresses of parameters, the object of the state, the options."""
        options = tuple(
            value if isinstance(value, PLAIN) else repr(value)
            for group in self.optimizer.param_groups
            for name, value in group.items()
            if name not in ("params", "lr", "initial_lr")
        )
        addresses = tuple(p.data_ptr() for group in self.optimizer.param_groups for p in group["params"])
        return Same(self.optimizer), Same(self.optimizer.state), options, addresses

    def plain_state(self) -> dict[str, Any]:
        """Give ``state_dict`` as if steps had never been recorded, for files."""
        state = self.optimizer.state_dict()
        for group, (known, rate), flags in zip(state["param_groups"], self._rates, self._flags, strict=False):
            if group["lr"] is rate:
                group.update(flags, lr=known)
        return state


class Same:
    """Equal to itself alone, and alive, so that no other object gets its address."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]
