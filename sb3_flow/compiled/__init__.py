"""The only door to numba: decorators of compiled loops, their cache on disk, and the test whether numba works here."""

import sb3_flow.compiled.source_stamps  # noqa: F401  reads the files' state before their import
from sb3_flow.compiled.availability import unavailable
from sb3_flow.compiled.loops import Loop, c_function, compiled, inlined

__all__ = ["Loop", "c_function", "compiled", "inlined", "unavailable"]
