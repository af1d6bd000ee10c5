"""Worker processes."""

import multiprocessing
import os
import signal
import threading


def start_worker() -> None:
    """Prepare a worker process: it draws nothing, leaves Ctrl-C to its parent, and ends with its parent."""
    os.environ.setdefault("MUJOCO_GL", "disable")  # nothing is drawn, and machines without a display warn or fail
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()  # a killed parent must not leave workers behind


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
