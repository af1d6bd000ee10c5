"""Weights that a process publishes and another process reads."""

import hashlib
import mmap

import numpy as np
import torch as th

from sb3_flow.collect.memory import ALIGNMENT, Layout


def named_tensors(module: th.nn.Module) -> dict[str, th.Tensor]:
    """List parameters and buffers by name, in the order of their names; a shared tensor is listed once."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensors[name].detach() for name in sorted(tensors)}


def _digest(tensors: dict[str, th.Tensor]) -> bytes:
    described = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
    return hashlib.sha256(repr(described).encode()).digest()


def _length(tensor: th.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


class PublishedWeights:
    """
    Hold the weights of a module as a flat vector, ordered by name, in two buffers: the writer fills the buffer that readers do
    not read, and then turns the readers to it. A digest of all names, shapes and types comes with the vector, and both sides
    refuse a module of another digest.

    :param module: module whose weights are published or received
    :param layout: layout of the block, see :meth:`reserve`
    :param block: the shared memory
    """

    def __init__(self, module: th.nn.Module, layout: Layout, block: mmap.mmap):
        # the parity of the number of publications names the current buffer
        self._publications, self._versions = layout.view(block, "weights/publications"), layout.view(block, "weights/versions")
        self._stored = layout.view(block, "weights/digest")
        self.module = module
        self._buffers: list[dict[str, th.Tensor]] = []
        self._flat = layout.view(block, "weights/buffers")
        tensors, buffers = named_tensors(module), th.from_numpy(self._flat)
        needed = sum(map(_length, tensors.values()))
        if needed != buffers.shape[1]:
            raise ValueError(f"The published weights take {buffers.shape[1]} bytes, but this module's weights take {needed}.")
        for flat in buffers:
            views, start = {}, 0
            for name, tensor in tensors.items():
                part = flat[start : start + tensor.numel() * tensor.element_size()]
                views[name] = part.view(tensor.dtype).view(tensor.shape)
                start += _length(tensor)
            self._buffers.append(views)
        self._seen = 0

    @staticmethod
    def reserve(module: th.nn.Module, layout: Layout) -> None:
        """Add the arrays for the weights of a module to the layout of a block."""
        size = sum(map(_length, named_tensors(module).values()))
        layout.add("weights/publications", (1,), np.int64)
        layout.add("weights/versions", (2,), np.int64)
        layout.add("weights/digest", (32,), np.uint8)
        layout.add("weights/buffers", (2, size), np.uint8)

    def _checked(self) -> dict[str, th.Tensor]:
        """Return the module's tensors, if their digest is the published digest."""
        tensors = named_tensors(self.module)
        if _digest(tensors) != self._stored.tobytes():
            raise ValueError(
                "This module's weights have other names, shapes or types than the published weights, so that they cannot be "
                f"copied. This module has {[(name, tuple(tensor.shape)) for name, tensor in tensors.items()]}."
            )
        return tensors

    @property
    def changed(self) -> bool:
        """Say whether there are weights that :meth:`read` has not read."""
        return bool(self._publications[0] != self._seen)

    def write(self, version: int) -> None:
        """
        Publish the module's weights.

        :param version: number of the weights
        :raises ValueError: if the module has other weights than at the first publication
        """
        number = int(self._publications[0]) + 1
        if number == 1:
            self._stored[:] = np.frombuffer(_digest(named_tensors(self.module)), dtype=np.uint8)
        tensors = self._checked()
        for name, stored in self._buffers[number % 2].items():
            stored.copy_(tensors[name])
        self._versions[number % 2] = version
        self._publications[0] = number

    def written(self) -> tuple[int, bytes, np.ndarray]:
        """Copy what :meth:`write` published, for :meth:`take` in another place."""
        current = int(self._publications[0]) % 2
        return int(self._versions[current]), self._stored.tobytes(), self._flat[current].copy()

    def take(self, version: int, digest: bytes, weights: np.ndarray) -> None:
        """Publish what :meth:`written` copied in another place."""
        number = int(self._publications[0]) + 1
        self._stored[:] = np.frombuffer(digest, dtype=np.uint8)
        self._flat[number % 2], self._versions[number % 2] = weights, version
        self._publications[0] = number

    def read(self) -> int:
        """
        Copy the published weights into the module.

        :return: version of the weights
        :raises ValueError: if the published weights are of another module
        """
        tensors = self._checked()
        while True:
            number = int(self._publications[0])
            with th.no_grad():
                for name, stored in self._buffers[number % 2].items():
                    tensors[name].copy_(stored)
            version = int(self._versions[number % 2])
            # the writer returns to this buffer with the publication after the next one
            if int(self._publications[0]) == number:
                self._seen = number
                return version
