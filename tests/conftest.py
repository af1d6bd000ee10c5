"""What holds for every test file."""

from collections.abc import Iterator

import pytest
import torch as th


@pytest.fixture(autouse=True, scope="module")
def threads_are_left_alone() -> Iterator[None]:
    """Whoever changes torch's number of threads, numba's own pool included, slows down all that comes after."""
    before = th.get_num_threads()
    yield
    assert th.get_num_threads() == before
