"""Optimizers whose steps can be recorded: learning rates and counts of steps are tensors on the parameters' device."""

from typing import Any, NamedTuple

import torch as th

from sb3_flow.execution.settings import PLAIN


class Rate(NamedTuple):
    """A learning rate that recorded steps read: the number, and the tensor's version when it held this number."""

    number: float
    version: int
    tensor: th.Tensor


class RecordableOptimizer:
    """
    Hold the learning rates of an optimizer in tensors, which recorded steps read, while ``param_groups`` may be given numbers.

    :param optimizer: of parameters on one device
    """

    def __init__(self, optimizer: th.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._rates: list[Rate] = []
        self._flags: list[dict[str, Any]] = []

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
        for i, group in enumerate(self.optimizer.param_groups):
            if i == len(self._rates):
                device = group["params"][0].device
                self._rates.append(Rate(float("nan"), 0, th.zeros((), dtype=th.float32, device=device)))
                self._flags.append({})
            number, version, rate = self._rates[i]
            if group["lr"] is not rate:
                given = float(group["lr"])
                if (given, rate._version) != (number, version):  # torch's schedulers write into the tensor
                    rate.fill_(given)
                self._rates[i], group["lr"] = Rate(given, rate._version, rate), rate
            if rate.device.type == "cuda" and not group["capturable"]:
                self._flags[i] = {"capturable": group["capturable"]}
                group["capturable"] = True
                self._move_state(group)
                # torch would warn of the steps before the recording
                self.optimizer._warned_capturable_if_run_uncaptured = True  # type: ignore[attr-defined]

    def _move_state(self, group: dict[str, Any]) -> None:
        """Bring counts of steps, and other numbers that torch keeps on the host, to the parameters' device."""
        for parameter in group["params"]:
            state = self.optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, th.Tensor) and value.device != parameter.device:
                    state[name] = value.to(parameter.device, th.float32 if name == "step" else None)

    def fixed(self) -> tuple[Any, ...]:
        """Give what a recording takes for granted: the addresses of parameters, the object of the state, the options."""
        options = tuple(
            value if type(value) in PLAIN else repr(value)
            for group in self.optimizer.param_groups
            for name, value in group.items()
            if name not in ("params", "lr", "initial_lr")
        )
        addresses = tuple(p.data_ptr() for group in self.optimizer.param_groups for p in group["params"])
        return Same(self.optimizer), Same(self.optimizer.state), options, addresses

    def plain_options(self) -> list[dict[str, Any]]:
        """Give, for each group, the options that :meth:`prepare` changes as they would be without it."""
        found = []
        for group, rate, flags in zip(self.optimizer.param_groups, self._rates, self._flags, strict=False):
            present = group["lr"]
            if present is rate.tensor:
                present = rate.number if rate.tensor._version == rate.version else float(rate.tensor)
            found.append({**flags, "lr": present})
        return found

    def plain_state(self) -> dict[str, Any]:
        """Give ``state_dict`` as if steps had never been recorded, for files."""
        state = self.optimizer.state_dict()
        set_options(state["param_groups"], self.plain_options())
        return state


def set_options(groups: list[dict[str, Any]], options: list[dict[str, Any]]) -> None:
    """Set options of parameter groups."""
    for group, given in zip(groups, options, strict=False):
        group.update(given)


class Same:
    """Equal to itself alone, and alive, so that no other object gets its address."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]
