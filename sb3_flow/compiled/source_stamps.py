"""The files that machine code is made of, and their state before the first of them was imported."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
SOURCES = ("compiled", "kernels", "native", "fused")
"""Folders whose files take part in the machine code; they import nothing else of this package."""
Stamps = tuple[tuple[str, int, int], ...]


def stamps() -> Stamps:
    """
    Read when the sources were written and how large they are.

    :return: path, time and size of each file; nothing where there are no files (in a zip file, or while they are replaced)
    """
    files = sorted(file for folder in SOURCES for file in (PACKAGE / folder).rglob("*.py"))
    try:
        stats = [(file, file.stat()) for file in files]
    except OSError:
        return ()
    return tuple((str(file), stat.st_mtime_ns, stat.st_size) for file, stat in stats)


IMPORTED = stamps()
"""State at the first import: loops are imported at their first use, long after the constants that they are compiled with."""
