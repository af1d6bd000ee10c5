"""Prints the digests of all cases."""

import argparse
import hashlib
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th

from tests import digests
from tests.digests import functions, offline_to_online, on_policy

CASES = {**on_policy.CASES, **offline_to_online.CASES, **functions.CASES}


def parts(value: Any) -> Iterator[bytes]:
    """What is digested, in an order that depends on names alone."""
    if hasattr(value, "get_parameters"):
        yield from parts([value.get_parameters(), list(value.policy.named_buffers())])
        normaliser = value.get_vec_normalize_env()
        if normaliser is not None:
            yield from parts([normaliser.obs_rms, normaliser.ret_rms])
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield str(key).encode()
            yield from parts(value[key])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from parts(part)
    elif isinstance(value, th.Tensor):
        yield from parts(value.detach().cpu().numpy())
    elif isinstance(value, np.ndarray | np.generic):
        yield str((value.dtype.str, value.shape)).encode()
        yield np.ascontiguousarray(value).tobytes()
    elif hasattr(value, "mean") and hasattr(value, "var"):
        yield from parts([value.mean, value.var, value.count])
    else:
        assert isinstance(value, str | int | float | bool | None), type(value)
        yield repr(value).encode()


def digest(value: Any) -> str:
    found = hashlib.sha256()
    for part in parts(value):
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=digests.__doc__)
    parser.add_argument("--out", type=Path, help="write the lines to this file, too")
    parser.add_argument("--only", default="", help="cases whose names begin so")
    parser.add_argument("--times", action="store_true", help="print seconds, too")
    arguments = parser.parse_args()
    th.set_num_threads(1)
    warnings.simplefilter("ignore")
    gym.logger.min_level = gym.logger.ERROR
    lines = []
    for name, run in CASES.items():
        if name.startswith(arguments.only):
            begin = time.perf_counter()
            th.manual_seed(0)
            np.random.seed(0)
            lines.append(f"{name.replace(' ', '/')} {digest(run())}")
            print(lines[-1], *([f"{time.perf_counter() - begin:.1f}"] if arguments.times else []), flush=True)
    if arguments.out is not None:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
