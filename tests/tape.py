"""
A recorder for the CPU that is as strict as CUDA's graphs: it records torch's operators with their tensors and numbers,
and a replay runs them on the same memory, without the Python code around them. Nobody keeps that memory for a graph, and
graphs share the memory of what they make: both are checked.
"""

from collections import Counter

import torch as th
from torch.utils._python_dispatch import TorchDispatchMode

aten = th.ops.aten
WAITS = {aten._local_scalar_dense, aten.equal, aten.lift_fresh, aten.is_nonzero}
"""Operators that bring a number from the device to the host, or from the host to the device."""
SIZED_BY_DATA = {aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.bincount, aten.repeat_interleave}


class NotRecordable(RuntimeError):
    """An operator that a CUDA graph cannot hold."""


def tensors_in(values):
    if isinstance(values, th.Tensor):
        return [values]
    if isinstance(values, dict):
        values = list(values.values())
    return [tensor for value in values for tensor in tensors_in(value)] if isinstance(values, list | tuple) else []


def storage_of(tensor):
    return tensor.untyped_storage()._cdata


def aliased(values):
    """:return: the same values with tensors of their own on the same memory"""
    if isinstance(values, th.Tensor):
        return values.detach()
    if isinstance(values, dict):
        return {key: aliased(value) for key, value in values.items()}
    return type(values)(map(aliased, values)) if isinstance(values, list | tuple) else values


def check(function, args, kwargs):
    """:raises NotRecordable: if the operator waits for the device or has a result whose size depends on data"""
    packet = function.overloadpacket
    if packet in WAITS:
        raise NotRecordable(f"{function} waits for the device")
    masks = [part for part in args[1] if part is not None] if packet in (aten.index, aten.index_put_, aten.index_put) else ()
    if packet in SIZED_BY_DATA or any(mask.dtype == th.bool for mask in masks):
        raise NotRecordable(f"{function} has a result whose size depends on data")


class _Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.steps, self.made, self.before = [], {}, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        check(function, args, kwargs)
        inputs = tensors_in((args, kwargs))
        if function._schema.is_mutable or function.overloadpacket == aten.native_batch_norm:  # whose schema does not say so
            for tensor in inputs:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.made and storage._cdata not in self.before:
                    self.before[storage._cdata] = storage, storage.clone()
        result = function(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        new = [part for part in tensors_in(result) if part.untyped_storage()._cdata not in known and not part._is_zerotensor()]
        for part in new:
            self.made[part.untyped_storage()._cdata] = part
        if new or function._schema.is_mutable:
            self.steps.append((function, *aliased((args, kwargs)), result if new else None))
        return result

    def outside(self):
        """:return: a tensor for each piece of memory that was there before, with the number of its tensors in the recording"""
        used = [each for _, *given, _ in self.steps for each in tensors_in(given) if not each._is_zerotensor()]
        counts = Counter(map(storage_of, used))
        return [
            (tensor, counts[at]) for at, tensor in {storage_of(each): each for each in used}.items() if at not in self.made
        ]


class Tape:
    """Recorder with a log of its calls."""

    def __init__(self):
        self.log, self.modes = [], []

    def __reduce__(self):
        return Tape, ()

    def warm_up(self, function):
        self.log.append("warm up")
        return function()

    def record(self, function, generators):
        self.log.append("record")
        states = [(generator, generator.get_state()) for generator in (th.default_generator, *generators)]
        mode = _Recording()
        try:
            with mode:
                result = function()
        finally:
            for storage, before in mode.before.values():
                storage.copy_(before)
            for generator, state in states:
                generator.set_state(state)
        mode.before.clear()
        spoil(mode)  # no number is there before the replay
        self.modes.append(mode)
        outside = mode.outside()

        def replay():
            self.log.append("replay")
            for other in self.modes:
                if other is not mode:
                    spoil(other)
            for tensor, known in outside:
                # besides the recording's tensors and the object that counts
                alive = th._C._storage_Use_Count(storage_of(tensor)) > known + 1
                assert alive, f"a graph would read memory that is free, of the shape {tuple(tensor.shape)}"
            with th._C._AutoDispatchBelowAutograd(), th.no_grad():
                for operator, args, kwargs, recorded in mode.steps:
                    found = operator(*args, **kwargs)
                    if recorded is not None:
                        for own, part in zip(tensors_in(recorded), tensors_in(found), strict=True):
                            own.copy_(part)

        return replay, result


def spoil(mode):
    """Overwrite what a recording has made, as another graph may do that has the same pool of memory."""
    for tensor in mode.made.values():
        if tensor.is_floating_point():
            tensor.detach().fill_(float("nan"))


class OneDevice(TorchDispatchMode):
    """Refuse tensors on other devices than the model's, and what a graph cannot hold."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        check(function, args, kwargs)
        result = function(*args, **kwargs)
        for tensor in tensors_in((args, kwargs, result)):
            if tensor.device.type != "meta":
                raise NotRecordable(f"{function} has a tensor on {tensor.device}, of the shape {tuple(tensor.shape)}")
        return result
