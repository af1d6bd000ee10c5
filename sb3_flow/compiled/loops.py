"""The decorators of this package's compiled loops."""

import ctypes
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from sb3_flow.compiled.availability import unavailable

Function = Callable[..., Any]


def compiled(**options: Any) -> Callable[[Function], Function]:
    """
    Make the decorator of this package's loops, which release the GIL, may use fused multiply-add, and are kept on disk. Where
    numba cannot be used, the loops stay Python functions: slow, and right.

    Loops that Python calls fill given arrays. For an array that a loop returns, numba would ask Python for the dtype, and a
    KeyboardInterrupt at that moment would become a SystemError.

    :param options: options of ``numba.njit`` instead of these
    """
    if unavailable() is not None:
        return _in_python
    import numba

    from sb3_flow.compiled.cache import keep_on_disk

    settings: dict[str, Any] = {"fastmath": {"contract"}, "error_model": "numpy", "nogil": True, **options}
    return lambda function: keep_on_disk(numba.njit(**settings)(function))


def inlined(**options: Any) -> Callable[[Function], Function]:
    """
    Make the decorator of functions that only compiled loops call, and that are kept with these.

    :param options: options of ``numba.njit``
    """
    if unavailable() is not None:
        return _in_python
    import numba

    # Python's check for division by zero would keep loops from vectorising
    return numba.njit(**{"error_model": "numpy", **options})


def _in_python(function: Function) -> Function:
    return np.errstate(all="ignore")(function)


class Loop:
    """
    A loop that only :meth:`checked` compiles. ``call`` raises TypeError if arguments are not of exactly a kind that was
    checked once (dtype, dimensions, C-contiguous, writable), which saves these checks in Python: they would cost more time
    than the loop.

    :param function: the Python function
    """

    def __init__(self, function: Function) -> None:
        self._function = compiled()(function)
        self.call: Function = self._refuse

    def checked(self, *arguments: Any) -> Any:
        """Run the loop, after compiling it if necessary, on arguments that were checked, and return its result."""
        function: Any = self._function
        if not hasattr(function, "disable_compile"):  # a Python function takes any kind: ``call`` goes on refusing
            return function(*arguments)
        try:
            return self.call(*arguments)
        except TypeError:
            pass
        function.disable_compile(False)
        try:
            return function(*arguments)
        finally:
            function.disable_compile()
            self.call = function

    @staticmethod
    def _refuse(*arguments: Any) -> Any:
        raise TypeError("not compiled yet")


class c_function:
    """
    Decorator of a kernel ``void kernel(int64_t *arguments)``, compiled when it is first used and kept on disk.

    :param function: the Python function
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    @cached_property
    def address(self) -> int:
        """Address of the machine code, which is compiled or read at the first use."""
        from sb3_flow.compiled.cache import compile_c_function

        self._code = compile_c_function(self._function)  # machine code lives as long as this object
        return int(self._code.address)

    @cached_property
    def call(self) -> Callable[[int], None]:
        """The kernel as a function of its arguments' address."""
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)
