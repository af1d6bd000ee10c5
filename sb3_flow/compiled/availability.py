"""The test whether numba works here. Where numba does not work, loops run in plain Python and networks in torch."""

import os
from functools import cache


@cache
def unavailable() -> str | None:
    """
    Say why machine code cannot be made in this process. numba is imported, and a small loop is compiled or read from the
    cache, at the first call.

    :return: the reason, a part of a sentence; None if compiled code can be used
    """
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "the environment variable NUMBA_DISABLE_JIT is set"
    try:
        from sb3_flow.compiled.probe import probe

        probe()
    except Exception as error:  # a broken installation of numba or llvmlite may raise any error
        return f"numba cannot be used ({type(error).__name__}: {error})".replace("\n", " ")
    return None
