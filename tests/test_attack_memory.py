"""The helper of tests and of tests/attack: memory beyond an array cannot be touched."""

import signal
import subprocess
import sys

import numpy as np
import pytest
import torch as th

from tests.attack import memory as guard


@pytest.mark.parametrize("at_end", [True, False])
def test_copies_equal_what_they_copy(at_end):
    grid = np.arange(24.0).reshape(4, 6)
    for array in (
        grid,
        grid[::-1, ::2],
        grid.T,
        np.broadcast_to(grid[0], (3, 6)),
        grid[:0],
        np.array(1.5),
        grid.astype(">f4"),
    ):
        copy = guard.guarded_array(array, at_end)
        assert (copy.shape, copy.strides, copy.dtype) == (array.shape, array.strides, array.dtype)
        np.testing.assert_array_equal(copy, array)
    tensor = th.arange(24.0).view(4, 6)
    for given in (tensor, tensor.t(), tensor[:, ::2], tensor[:1].expand(3, 6), tensor[:0], tensor.long(), tensor.bfloat16()):
        copy = guard.guarded_tensor(given, at_end)
        assert (copy.shape, copy.stride(), copy.dtype) == (given.shape, given.stride(), given.dtype)
        assert th.equal(copy, given)


@pytest.mark.parametrize("at_end,offset", [(True, 0), (False, -1)])
@pytest.mark.parametrize("action", ["ctypes.memset(address, 1, 1)", "ctypes.string_at(address, 1)"])
def test_a_touch_beyond_ends_the_process(at_end, offset, action):
    lines = (
        "import ctypes, numpy as np",
        "from tests.attack.memory import guarded_array",
        f"array = guarded_array(np.zeros(5, np.float32), {at_end})",
        f"address = array.ctypes.data + ({offset} if {offset} else array.nbytes)",
        "array[:] = 1",
        f"{action}",
    )
    result = subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False)
    assert result.returncode in (-signal.SIGSEGV, -signal.SIGBUS)


def test_allocations_are_guarded_meanwhile():
    with guard.guarded_allocations():
        arrays = np.empty((2, 3), np.float32), np.zeros(3), np.empty_like(np.ones(5, np.int32)), th.empty(3, 2).numpy()
    for array in arrays:
        assert (array.ctypes.data + array.nbytes) % guard.PAGE == 0
    assert arrays[2].dtype == np.int32 and not arrays[1].any()


def test_modules_move_between_the_pages():
    network = th.nn.Linear(3, 2)
    before = [parameter.clone() for parameter in network.parameters()]
    guard.guard_module(network)
    for old, new in zip(before, network.parameters(), strict=True):
        assert th.equal(old, new) and new.requires_grad
        assert (new.data_ptr() + 4 * new.numel()) % guard.PAGE == 0
