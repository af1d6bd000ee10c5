"""
Machine code on disk, keyed by its sources, the compiler and the machine.

numba's own cache compares only the file that a loop stands in: after a change of a loop in another file, its callers' old
machine code stays in use. Here an entry lies in a folder that is named by

- the environment: Python, the CPU with its features, and numba's compiler options;
- the code: the sources of all folders with compiled loops, numba's version and llvmlite's.

A new folder replaces the folders of other code in the same environment; folders of other environments (another Python, another
machine on a shared disk) and of other installations stay. Every entry is a file that appears whole or not at all and carries a
checksum, so that any number of processes may compile at once.

numba's private names in use, checked on numba 0.68: ``Dispatcher._cache`` and ``CFunc._cache`` (a ``_Cache`` with
``load_overload`` and ``save_overload``), ``CompileResultCacheImpl``, ``serialize.dumps``; tests/test_compiled_cache.py.
"""

import hashlib
import os
import pickle
import shutil
import sys
import uuid
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from llvmlite import binding
from numba import types
from numba.core import config as _config
from numba.core import sigutils
from numba.core.caching import CompileResultCacheImpl, _Cache
from numba.core.ccallback import CFunc
from numba.core.serialize import dumps

from sb3_flow.compiled.source_stamps import IMPORTED, PACKAGE, Stamps, stamps

config: Any = _config  # numba sets the names of its options when it is imported
OPTIONS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "CPU_NAME", "CPU_FEATURES")


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


@cache
def _digest_of(sources: Stamps) -> str:
    contents = [(Path(name).relative_to(PACKAGE), hashlib.sha256(Path(name).read_bytes()).hexdigest()) for name, *_ in sources]
    return _digest(contents, numba.__version__, llvmlite.__version__)[:32]


def sources_digest() -> str | None:
    """
    Digest the sources as they are on disk now, and the compiler's versions. Files are read only if they changed.

    :return: the digest; None if there are no source files (in a zip file, say), so that no machine code is kept
    """
    try:
        sources = stamps()
        return _digest_of(sources) if sources else None
    except OSError:  # an installation that is being replaced
        return None


@cache
def environment_digest() -> str:
    """Digest the properties in which machines that share a disk may differ."""
    features = sorted(name for name, there in binding.get_host_cpu_features().items() if there)
    options = [getattr(config, name, None) for name in OPTIONS]
    cpu = binding.get_default_triple(), binding.get_host_cpu_name(), features
    return _digest(sys.implementation.cache_tag, getattr(sys, "abiflags", ""), cpu, options)[:16]


def _folders() -> list[Path]:
    """List the folders of this installation's entries, the preferred folder first."""
    if config.CACHE_DIR:
        roots = [Path(config.CACHE_DIR) / "sb3_flow" / _digest(PACKAGE)[:16]]
    else:
        roots = [PACKAGE / "compiled" / "__pycache__"]
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        if os.path.isabs(home):
            roots.append(Path(home) / "sb3_flow" / _digest(PACKAGE)[:16])
    return [root / f"numba-{environment_digest()}" for root in roots]


# Functions are compiled from the imported sources, not from the present files
_IMPORTED = (sources_digest() or "") if stamps() == IMPORTED else ""


def _is_fresh() -> bool:
    return bool(_IMPORTED) and sources_digest() == _IMPORTED


class SourceCache(_Cache):
    """Entries of one Python function, one for each signature."""

    def __init__(self, function: Any) -> None:
        self._function = function
        code = function.__code__
        place = Path(code.co_filename).name
        self._name = f"{function.__qualname__}-{place}-{code.co_firstlineno}".replace("<", "").replace(">", "")

    @property
    def cache_path(self) -> str:
        """Preferred folder, for numba's interface."""
        return str(_folders()[0] / _IMPORTED)

    def enable(self) -> None:
        """Do nothing, for numba's interface: this cache is always on, and an entry is never stale."""

    disable = flush = enable

    def _file(self, signature: Any, codegen: Any) -> str:
        code = self._function.__code__
        key = signature, codegen.magic_tuple(), hashlib.sha256(code.co_code).hexdigest()
        return f"{self._name}-{_digest(key)[:24]}"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Read numba's result of a compilation; return None if there is no entry or the sources changed since the import."""
        target_context.refresh()
        if not _is_fresh():
            return None
        name = self._file(sig, target_context.codegen())
        for folder in _folders():
            try:
                content = (folder / _IMPORTED / name).read_bytes()
            except OSError:
                continue
            if hashlib.sha256(content[32:]).digest() == content[:32]:
                return CompileResultCacheImpl.rebuild(None, target_context, pickle.loads(content[32:]))  # type: ignore[arg-type]
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write numba's result of a compilation to the first folder that can be written; warn if no folder can."""
        if data.library.has_dynamic_globals or not _is_fresh():
            return
        content = dumps(CompileResultCacheImpl.reduce(None, data))  # type: ignore[arg-type]
        name = self._file(sig, data.codegen)
        failures = []
        for folder in _folders():
            try:
                _write(folder, name, hashlib.sha256(content).digest() + content)
                return
            except OSError as error:
                failures.append(f"{folder.parent}: {error.strerror or error}")
        _warn_once("; ".join(failures))


def _write(folder: Path, name: str, content: bytes) -> None:
    mine = folder / _IMPORTED
    if not mine.is_dir():
        mine.mkdir(parents=True, exist_ok=True)
        for other in folder.iterdir():
            if other != mine:
                shutil.rmtree(other, ignore_errors=True)
    temporary = mine / f"{name}.{uuid.uuid4().hex}"
    try:
        temporary.write_bytes(content)
        os.replace(temporary, mine / name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@cache
def _warn_once(failures: str) -> None:
    warnings.warn(
        "sb3_flow's compiled loops cannot be kept on disk, so every process compiles them anew (up to a minute). Set "
        f"NUMBA_CACHE_DIR to a folder that can be written. Tried: {failures}."
    )


def keep_on_disk(dispatcher: Any) -> Any:
    """Give a function of ``numba.njit`` this cache, and return it."""
    dispatcher._cache = SourceCache(dispatcher.py_func)
    return dispatcher


def compile_c_function(function: Any) -> Any:
    """Compile a Python function of a pointer to int64 numbers to numba's C function, or read it from the cache."""
    signature = sigutils.normalize_signature(types.void(types.CPointer(types.int64)))
    kernel: Any = CFunc(function, signature, locals={}, options={"error_model": "numpy"})
    kernel._cache = SourceCache(function)
    kernel.compile()
    return kernel
