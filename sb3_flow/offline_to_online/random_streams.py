"""Random streams of an algorithm: seeded together, saved with the model, independent of each other."""

from typing import Any

import numpy as np
import torch as th


class RandomStreams:
    """
    Named torch generators. With separate streams an evaluation in between does not change the windows of the next update.

    The streams are pickled as plain state tensors. A stream that is restored on another kind of device starts from its seed
    again, since the states of CPU and CUDA generators cannot be exchanged.

    :param seed: seed of all streams
    :param devices: device of each stream by the stream's name
    :param given_seed: the ``seed`` argument of the model that owns the streams
    """

    def __init__(self, seed: int, devices: dict[str, th.device], given_seed: int | None = None) -> None:
        self.given_seed = given_seed
        self._generators = {name: th.Generator(device=device) for name, device in devices.items()}
        self.reseed(seed)

    def __getitem__(self, name: str) -> th.Generator:
        return self._generators[name]

    def reseed(self, seed: int) -> None:
        """Seed all streams."""
        self.seed = seed
        self._waiting: dict[str, tuple[str, th.Tensor]] = {}  # states of streams that are on another kind of device
        seeds = np.random.SeedSequence(seed).generate_state(len(self._generators))
        self._seeds = dict(zip(self._generators, map(int, seeds), strict=True))
        for name, generator in self._generators.items():
            generator.manual_seed(self._seeds[name])

    def move(self, name: str, device: th.device) -> None:
        """
        Have a stream on a device. On another kind of device the stream starts from its seed, or goes on from the last state
        that :meth:`set_state` was given for that kind.

        :param name: of the stream
        :param device: where numbers are drawn from now on
        """
        if self._generators[name].device.type == device.type:
            return
        self._generators[name] = th.Generator(device=device).manual_seed(self._seeds[name])
        if name in self._waiting:
            self.set_state({name: self._waiting.pop(name)})

    def renew(self, state: dict[str, tuple[str, th.Tensor]]) -> None:
        """Make every generator anew, in an earlier state; the present generators may be unusable."""
        self._generators = {name: th.Generator(device=each.device) for name, each in self._generators.items()}
        self.set_state(state)

    def get_state(self) -> dict[str, tuple[str, th.Tensor]]:
        """Give the kind of device and the state of every stream."""
        return {name: (generator.device.type, generator.get_state()) for name, generator in self._generators.items()}

    def set_state(self, state: dict[str, tuple[str, th.Tensor]]) -> None:
        """Go on from an earlier state, the result of :meth:`get_state`."""
        for name, (device_type, value) in state.items():
            if name in self._generators and self._generators[name].device.type == device_type:
                self._generators[name].set_state(value)
            elif name in self._generators:
                self._waiting[name] = device_type, value

    def __getstate__(self) -> dict[str, Any]:
        devices = {name: str(generator.device) for name, generator in self._generators.items()}
        return {"seed": self.seed, "given_seed": self.given_seed, "devices": devices, "state": self.get_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        def available(name: str) -> th.device:
            device = th.device(name)
            return device if device.type != "cuda" or th.cuda.is_available() else th.device("cpu")

        devices = {name: available(device) for name, device in state["devices"].items()}
        self.__init__(state["seed"], devices, state["given_seed"])  # type: ignore[misc]
        self.set_state(state["state"])
